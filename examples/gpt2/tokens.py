"""The tokenizer of a checkpoint: text to tokens, and which characters each of them stands for."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import sentencepiece
import tokenizers

from examples.gpt2.records import quoted, read_json

END_OF_TEXT = "<|endoftext|>"  # GPT-2's


class TokenizerError(ValueError):
    """A tokenizer cannot be read; the message is one line: which file, why, what may be."""


class Encoding(NamedTuple):
    """Tokens of a text."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # of each token: where its characters begin and end in the text


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, whoever made it."""

    encode_all: Callable[[Sequence[str]], list[Encoding]]  # on all cores, where its library can
    decode: Callable[[list[int]], str]
    size: int  # all tokens are below it
    end: int  # the token that ends a text

    def encode(self, text: str) -> Encoding:
        """Tokens of one text."""
        return self.encode_all([text])[0]


def read_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """Reads the tokenizer that lies in a folder.

    Args:
      folder: With `tokenizer.json`; or with `vocab.json` and `merges.txt`; or with a SentencePiece
        model, `tokenizer.model`. The first of them that is there is read.

    Returns:
      The tokenizer. What ends a text is "<|endoftext|>", of SentencePiece its own end.

    Raises:
      TokenizerError: There is none, it is damaged, or has no token that ends a text.
    """
    folder = pathlib.Path(folder)
    whole, vocabulary, merges, model = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
    )
    if whole.exists():
        return _of_hugging_face(whole, lambda: tokenizers.Tokenizer.from_file(str(whole)))
    if vocabulary.exists() or merges.exists():
        for file, other in ((vocabulary, merges), (merges, vocabulary)):
            if not file.exists():
                raise TokenizerError(f"{file}: no such file, and {other.name} needs it")
        _require_all_merges(vocabulary, merges)
        return _of_hugging_face(
            vocabulary,
            lambda: tokenizers.ByteLevelBPETokenizer.from_file(str(vocabulary), str(merges)),
        )
    if model.exists():
        return read_sentencepiece(model)
    allowed = "tokenizer.json, vocab.json with merges.txt, or tokenizer.model"
    raise TokenizerError(f"{folder}: has no tokenizer; allowed: {allowed}")


def _require_all_merges(vocabulary: pathlib.Path, merges: pathlib.Path) -> None:
    """Raises TokenizerError where tokens of several symbols come from no merge: a cut file."""
    names = read_json(vocabulary, TokenizerError)
    try:
        lines = merges.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise TokenizerError(f"{merges}: not UTF-8 text") from None
    made = {line.replace(" ", "", 1) for line in lines if not line.startswith("#version")}
    special = {name for name in names if name[:1] + name[-1:] in ("<>", "[]")}
    lacking = [name for name in names if len(name) > 1 and name not in made and name not in special]
    if lacking:
        given = f"no merge makes {quoted(lacking[0])}, and {len(lacking) - 1} more of its tokens"
        raise TokenizerError(f"{merges}: {given}, which {vocabulary.name} has; is it whole?")


def read_sentencepiece(file: pathlib.Path) -> Tokenizer:
    """Reads a SentencePiece model.

    Raises:
      TokenizerError: It is damaged, or has no end token.
    """
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):
        raise TokenizerError(f"{file}: not a SentencePiece model") from None
    if processor.eos_id() < 0:
        raise TokenizerError(f"{file}: has no token that ends a text")

    def encode_all(texts: Sequence[str]) -> list[Encoding]:
        encoded = (processor.encode_as_offset_mapping(text) for text in texts)
        return [Encoding(one["ids"], one["offsets"]) for one in encoded]

    return Tokenizer(encode_all, processor.decode, processor.vocab_size(), processor.eos_id())


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes as tokens; a zero byte ends a text."""

    def encode(text: str) -> Encoding:
        tokens: list[int] = []
        spans = []
        for at, character in enumerate(text):
            encoded = character.encode("utf-8", errors="replace")
            tokens += encoded
            spans += [(at, at + 1)] * len(encoded)
        return Encoding(tokens, spans)

    def encode_all(texts: Sequence[str]) -> list[Encoding]:
        return [encode(text) for text in texts]

    return Tokenizer(encode_all, lambda t: bytes(t).decode("utf-8", errors="replace"), 256, 0)


def _of_hugging_face(file: pathlib.Path, read: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    try:
        tokenizer = read()
    except Exception as error:  # the library raises plain ones
        raise TokenizerError(f"{file}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()  # a file may ask for both, from its last fine-tuning
    tokenizer.no_padding()
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise TokenizerError(f"{file}: has no {END_OF_TEXT}, which ends a text")

    def encode_all(texts: Sequence[str]) -> list[Encoding]:
        try:
            encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain ones
            raise TokenizerError(f"{file}: a text cannot be encoded: {quoted(error)}") from None
        for text, one in zip(texts, encoded, strict=True):
            if text.strip() and not one.ids:
                raise TokenizerError(f"{file}: has no tokens for the text {quoted(text)}")
        return [Encoding(one.ids, one.offsets) for one in encoded]

    size = 1 + max(tokenizer.get_vocab().values())
    return Tokenizer(encode_all, lambda t: tokenizer.decode(t), size, end)
