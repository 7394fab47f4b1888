"""The tokenizer of a checkpoint: text to tokens, and which characters each of them stands for."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import sentencepiece
import tokenizers

from examples.gpt2.command import InputError, one_line

END_OF_TEXT = "<|endoftext|>"  # GPT-2's


class Encoding(NamedTuple):
    """Tokens of a text."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # of each token: where its characters begin and end in the text


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, whoever made it."""

    encode_all: Callable[[Sequence[str]], list[Encoding]]
    size: int  # all tokens are below it
    end: int  # the token that ends a text


def read_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Reads the tokenizer of a GPT-2 of `transformers`.

    Args:
      folder: With `tokenizer.json`, or with `vocab.json` and `merges.txt`.

    Raises:
      InputError: If there is none, or it is damaged, or has no token that ends a text.
    """
    file, pair = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    if not file.exists() and not all(part.exists() for part in pair):
        allowed = "tokenizer.json, or vocab.json and merges.txt"
        raise InputError(f"{folder}: has no tokenizer; allowed: {allowed}")
    try:
        if file.exists():
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            tokenizer = tokenizers.ByteLevelBPETokenizer.from_file(*map(str, pair))
    except Exception as error:  # the library raises plain ones
        raise InputError(f"{folder}: not a tokenizer: {one_line(error)}") from None
    tokenizer.no_truncation()  # a file may ask for both, from its last fine-tuning
    tokenizer.no_padding()
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise InputError(f"{folder}: its tokenizer has no {END_OF_TEXT}, which ends a text")

    def encode_all(texts: Sequence[str]) -> list[Encoding]:
        encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(one.ids, one.offsets) for one in encoded]

    return Tokenizer(encode_all, 1 + max(tokenizer.get_vocab().values()), end)


def read_sentencepiece(file: pathlib.Path) -> Tokenizer:
    """Reads the SentencePiece model of a run of `examples.gpt2.train`.

    Raises:
      InputError: If it is missing or damaged.
    """
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):
        raise InputError(f"{file}: not a SentencePiece model") from None

    def encode_all(texts: Sequence[str]) -> list[Encoding]:
        encoded = (processor.encode_as_offset_mapping(text) for text in texts)
        return [Encoding(one["ids"], one["offsets"]) for one in encoded]

    return Tokenizer(encode_all, processor.vocab_size(), processor.eos_id())


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes as tokens; a zero byte ends a text."""

    def encode(text: str) -> Encoding:
        parts = [character.encode("utf-8", errors="replace") for character in text]
        spans = [(at, at + 1) for at, part in enumerate(parts) for _ in part]
        return Encoding(list(b"".join(parts)), spans)

    return Tokenizer(lambda texts: [encode(text) for text in texts], 256, 0)
