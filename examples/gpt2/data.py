"""Text to tokens: files -> split -> tokens in a file.

The text is the Python source of the running interpreter's standard library (real text that is on
every machine), or any UTF-8 text file or folder. Files are split into training and validation by
a hash of their relative path; SentencePiece is trained on the training split; both splits are
encoded once and cached under a hash of the text and of these settings.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import sentencepiece

Tokenizer = Literal["sentencepiece", "bytes"]
Texts = list[tuple[str, str]]  # (relative path, text), sorted by path

VALIDATION_SHARE = 0.05  # of the characters; a file that would bring it above twice this is skipped
SAMPLE_CHARACTERS = 4_000_000  # of the training split, for the tokenizer's training
# SentencePiece leaves out lines that are longer or have its mark for the unknown, and says nothing.
_SENTENCE_BYTES = 2**16
_SENTENCE_CHARACTERS = _SENTENCE_BYTES // 4  # of at most 4 bytes in UTF-8
_RESERVED = "\u2585"
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SPLITS = ("train", "validation")
_CACHE_FORMAT = 2  # raise it when the cached files change in meaning


class DataError(ValueError):
    """The text cannot be used; the message is one line that says why and what is allowed."""


class Tokens:
    """Tokens in a file, read when they are asked for.

    Not mapped into memory: if the file were cut while it is in use, the process would be killed.
    """

    def __init__(self, path: pathlib.Path, dtype: np.dtype, count: int):
        self._path, self._dtype, self._count = path, dtype, count
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (for as long as this lives)

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        """The tokens of a slice without a step.

        Raises:
          DataError: If the file is shorter than it was.
        """
        start, stop, _ = part.indices(self._count)
        size = self._dtype.itemsize
        wanted = max(stop - start, 0) * size
        read = os.pread(self._file.fileno(), wanted, start * size)
        if len(read) != wanted:
            raise DataError(
                f"{self._path}: was cut while it was in use; remove its folder, which the next run"
                " makes anew"
            )
        return np.frombuffer(read, self._dtype)


@dataclasses.dataclass(frozen=True)
class Data:
    """Both splits as tokens in files, and what turns tokens back into text."""

    key: str  # names the text and the settings: equal keys, equal tokens
    train: Tokens
    validation: Tokens
    vocabulary: int
    processor: sentencepiece.SentencePieceProcessor | None  # None for bytes

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of the tokens."""
        if self.processor is None:
            return bytes(int(t) for t in tokens).decode("utf-8", errors="replace")
        return self.processor.decode([int(t) for t in tokens])


def load(
    path: pathlib.Path | None,
    *,
    tokenizer: Tokenizer = "sentencepiece",
    vocabulary: int,
    context: int,
    cache: pathlib.Path,
) -> Data:
    """Reads, splits and encodes a text, or finds all of that in the cache.

    Args:
      path: A text file, or a folder of them; None for the standard library's source.
      tokenizer: "sentencepiece" (byte-pair encoding) or "bytes" (256 tokens, no training).
      vocabulary: The largest number of tokens; a short text may give fewer.
      context: The length that both splits must be able to fill at least once.
      cache: The folder for the tokenizer and the tokens.

    Returns:
      The encoded splits.

    Raises:
      DataError: If the text is missing, empty, undecodable or too short.
    """
    texts = read_standard_library() if path is None else read_path(path)
    key = _key(texts, tokenizer, vocabulary)
    folder = cache / key
    if not folder.exists():
        _write(folder, texts, tokenizer, vocabulary)
    anew = f"remove {folder}, which the next run makes anew"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype = np.dtype(meta["dtype"])
        sizes = {name: (folder / f"{name}.tokens").stat().st_size for name in _SPLITS}
        processor = None
        if tokenizer == "sentencepiece":
            model = str(folder / "tokenizer.model")
            processor = sentencepiece.SentencePieceProcessor(model_file=model)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"{folder}: damaged ({reason}); {anew}") from None
    splits = {}
    for name in _SPLITS:
        count = meta[name]
        if count <= context:
            raise DataError(
                f"{_name(path)}: too short: its {name} split has {count} tokens, and the model's "
                f"context of {context} needs at least {context + 1} (try a longer text, "
                f"a smaller --context or --tokenizer bytes)"
            )
        file = folder / f"{name}.tokens"
        if sizes[name] != count * dtype.itemsize:
            raise DataError(
                f"{file}: has {sizes[name]} bytes, {count * dtype.itemsize} expected; {anew}"
            )
        splits[name] = Tokens(file, dtype, count)
    return Data(key, splits["train"], splits["validation"], meta["vocabulary"], processor)


# ------------------------------------------------------------------------------------ reading


def read_standard_library() -> Texts:
    """The `.py` files of the running interpreter's standard library, without its tests."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if not _NOT_SOURCE.intersection(relative.parts):
            try:
                texts.append((relative.as_posix(), file.read_text(encoding="utf-8")))
            except (UnicodeDecodeError, OSError):
                continue  # a few files are there to be undecodable
    if not texts:
        raise DataError(f"{root}: no standard library source here; give a text by --data PATH")
    return texts


def read_path(path: pathlib.Path) -> Texts:
    """One text file, or every file of a folder whose path has no hidden part, as UTF-8.

    Empty files are left out.

    Raises:
      DataError: If there is nothing, nothing but blanks, or something that is not UTF-8 text.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; --data takes a text file or a folder")
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f, path)]
    else:
        files = [path]
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: not UTF-8 text (byte {error.start}: {error.reason}); "
                f"--data takes UTF-8 text files only"
            ) from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None
        if text.strip():
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            texts.append((name, text))
    if not texts:
        raise DataError(f"{path}: empty; --data takes a text file or a folder with some text")
    return texts


def _hidden(file: pathlib.Path, root: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _name(path: pathlib.Path | None) -> str:
    return "the standard library" if path is None else str(path)


# ---------------------------------------------------------------------------------- splitting


def split(texts: Texts) -> tuple[Texts, Texts]:
    """Splits by file, about 5 percent of the characters to validation, always the same way.

    Files are taken for validation in the order of a hash of their relative path until the share
    is reached, and passed over where they would make it more than twice as large; if none fits,
    the shortest is taken. A single file is split by position: its last 5 percent are validation.

    Returns:
      The training and the validation texts, neither of them empty.
    """
    if len(texts) == 1:
        [(name, text)] = texts
        cut = len(text) - round(len(text) * VALIDATION_SHARE)
        return [(name, text[:cut])], [(name, text[cut:])]
    wanted = VALIDATION_SHARE * sum(len(text) for _, text in texts)
    chosen, size = set(), 0
    for name, text in sorted(texts, key=lambda item: _digest(item[0])):
        if size < wanted and size + len(text) <= 2 * wanted:
            chosen.add(name)
            size += len(text)
    if not chosen:
        chosen = {min(texts, key=lambda item: len(item[1]))[0]}
    train = [item for item in texts if item[0] not in chosen]
    return train, [item for item in texts if item[0] in chosen]


def _digest(*parts: str) -> str:
    sha = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8")
        sha.update(len(encoded).to_bytes(8, "little") + encoded)
    return sha.hexdigest()


# ----------------------------------------------------------------------------------- encoding


def _key(texts: Texts, tokenizer: str, vocabulary: int) -> str:
    settings = f"{_CACHE_FORMAT} {tokenizer} {vocabulary} {VALIDATION_SHARE} {SAMPLE_CHARACTERS}"
    return _digest(settings, *(part for item in texts for part in item))[:16]


def _write(folder: pathlib.Path, texts: Texts, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Fills a cache folder: under a temporary name first, so that it is whole or not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        train, validation = split(texts)
        if tokenizer == "bytes":
            encode, count = encode_bytes, 256
        else:
            model = train_sentencepiece(train, vocabulary)
            (partial / "tokenizer.model").write_bytes(model)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            encode = functools.partial(encode_sentencepiece, processor)
            count = processor.vocab_size()
        dtype = np.dtype(np.uint16 if count <= 2**16 else np.uint32)
        meta = {"vocabulary": count, "dtype": dtype.name}
        for name, part in (("train", train), ("validation", validation)):
            with open(partial / f"{name}.tokens", "wb") as file:
                for _, text in part:
                    file.write(np.asarray(encode(text), dtype).tobytes())
                meta[name] = file.tell() // dtype.itemsize
        (partial / "meta.json").write_text(json.dumps(meta))
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was here first, with the same files
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def train_sentencepiece(texts: Texts, vocabulary: int) -> bytes:
    """Trains a byte-pair encoding that keeps every character, spaces and newlines included.

    Characters that the training text lacks are spelt in bytes, runs of spaces may be one token,
    and a newline is a token of its own. At most `SAMPLE_CHARACTERS` of whole files are used,
    spread evenly over the list.

    Returns:
      The serialised model, of `vocabulary` tokens or as many as the text gives.
    """
    every = -(-sum(len(text) for _, text in texts) // SAMPLE_CHARACTERS)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts[::every]),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            unk_id=0,
            eos_id=1,  # ends each file
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=_SENTENCE_BYTES,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DataError(
            f"SentencePiece cannot make {vocabulary} tokens of this text ({reason}); "
            f"give another --vocabulary or --tokenizer bytes"
        ) from None
    return model.getvalue()


def _sentences(texts: Texts) -> Iterator[str]:
    """Lines without their newlines, long ones in pieces: every character is in one of them.

    Only the reserved character is left out; a text that has it is encoded with its bytes.
    """
    for _, text in texts:
        for line in text.replace(_RESERVED, "\n").split("\n"):
            for start in range(0, len(line), _SENTENCE_CHARACTERS):
                yield line[start : start + _SENTENCE_CHARACTERS]


def encode_sentencepiece(processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    """Tokens of a file, with the end-of-text token after them.

    Long files are cut at newlines, which no token crosses, and encoded in parallel.
    """
    parts = processor.encode(list(_chunks(text)), num_threads=os.cpu_count() or 1)
    return [token for part in parts for token in part] + [processor.eos_id()]


def encode_bytes(text: str) -> np.ndarray:
    """UTF-8 bytes of a file, with a zero byte after them."""
    return np.frombuffer(text.encode("utf-8") + b"\0", np.uint8)


def _chunks(text: str, size: int = 2**16) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
