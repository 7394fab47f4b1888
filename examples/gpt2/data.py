"""Text to tokens: files, their split, and tokens in a cache.

The text is the Python source of the running interpreter's standard library (real text that is on
every machine), or any UTF-8 text file or folder. Files are split into training and validation by
a hash of their relative path. SentencePiece is trained on the training split. Both splits are
encoded once and cached under a hash of the text and of these settings.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Literal

import numpy as np
import sentencepiece

from examples.gpt2.command import InputError, one_line

Tokenizer = Literal["sentencepiece", "bytes"]
Texts = list[tuple[str, str]]  # (relative path, text), sorted by path

VALIDATION_SHARE = 0.05  # of the characters; a file that would bring it above twice this is skipped
SAMPLE_CHARACTERS = 4_000_000  # of the training split, for the tokenizer's training
# SentencePiece leaves out lines that are longer or have its mark for the unknown, and says nothing.
_SENTENCE_BYTES = 2**16
_SENTENCE_CHARACTERS = _SENTENCE_BYTES // 4  # of at most 4 bytes in UTF-8
_RESERVED = "\u2585"
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CACHE_FORMAT = 3  # raise it when the cached files change in meaning
TOKENIZER = "tokenizer.model"  # SentencePiece's file


@dataclasses.dataclass(frozen=True)
class Data:
    """Both splits as tokens in files."""

    key: str  # names the text and the settings: equal keys, equal tokens
    train: np.ndarray
    validation: np.ndarray
    tokenizer: pathlib.Path | None  # SentencePiece's model; None for bytes


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
      InputError: If the text is missing, empty, undecodable or too short.
    """
    texts = read_texts(path)
    settings = f"{_CACHE_FORMAT} {tokenizer} {vocabulary} {VALIDATION_SHARE} {SAMPLE_CHARACTERS}"
    key = _digest(settings, *(part for item in texts for part in item))[:16]
    folder = cache / key
    if not folder.exists():
        _write(folder, texts, tokenizer, vocabulary)
    try:
        # The files are mapped, not read: a corpus need not fit into memory.
        files = [folder / "train.npy", folder / "validation.npy"]
        train, validation = (np.load(file, mmap_mode="r") for file in files)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{folder}: damaged ({one_line(error)}); remove it, and the next run makes it anew"
        ) from None
    for name, tokens in (("train", train), ("validation", validation)):
        if len(tokens) <= context:
            raise InputError(
                f"{path or 'the standard library'}: too short: its {name} split has {len(tokens)} "
                f"tokens, and the model's context of {context} needs at least {context + 1} (try a "
                "longer text, a smaller --context or --tokenizer bytes)"
            )
    model = folder / TOKENIZER if tokenizer == "sentencepiece" else None
    return Data(key, train, validation, model)


def read_texts(path: pathlib.Path | None) -> Texts:
    """The texts of a file, of a folder, or of the standard library without its tests.

    Empty files, and those with a hidden part in their path, are left out.

    Raises:
      InputError: If there is nothing, nothing but blanks, or something that is not UTF-8 text.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    if not root.exists():
        raise InputError(f"{root}: no such file or folder; --data takes a text file or a folder")
    texts = []
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        name = file.relative_to(root) if root.is_dir() else pathlib.Path(file.name)
        hidden = any(part.startswith(".") for part in name.parts)
        not_source = file.suffix != ".py" or _NOT_SOURCE.intersection(name.parts)
        if not file.is_file() or hidden or (path is None and not_source):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if path is None:
                continue  # a few of the library's files are there to be undecodable
            raise InputError(
                f"{file}: not UTF-8 text (byte {error.start}: {error.reason}); "
                f"--data takes UTF-8 text files only"
            ) from None
        if text.strip() or path is None:
            texts.append((name.as_posix(), text))
    if not texts:
        raise InputError(f"{root}: empty; --data takes a text file or a folder with some text")
    return texts


def split(texts: Texts) -> tuple[Texts, Texts]:
    """Splits by file, about 5 percent of the characters to validation, always the same way.

    Files are taken for validation in the order of a hash of their relative path until the share
    is reached. A file that would make the share more than twice as large is passed over; if none
    fits, the shortest is taken. A single file is split by position: its last 5 percent are
    validation.

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


def _write(folder: pathlib.Path, texts: Texts, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Fills a cache folder: under a temporary name first, so that it is whole or not there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        train, validation = split(texts)
        encode, count = encode_bytes, 256
        if tokenizer == "sentencepiece":
            model = train_sentencepiece(train, vocabulary)
            (partial / TOKENIZER).write_bytes(model)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            encode, count = lambda text: encode_lines(processor, text), processor.vocab_size()
        dtype = np.uint16 if count <= 2**16 else np.uint32
        for name, part in (("train", train), ("validation", validation)):
            tokens = np.concatenate([np.asarray(encode(text), dtype) for _, text in part])
            np.save(partial / f"{name}.npy", tokens)
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
        raise InputError(
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


def encode_lines(processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    """Tokens of a file, whose lines are encoded in parallel, with the end-of-text token after them.

    No token crosses the end of a line.
    """
    lines = list(io.StringIO(text, newline="\n"))
    encoded = processor.encode(lines, num_threads=os.cpu_count() or 1)
    return [token for line in encoded for token in line] + [processor.eos_id()]


def encode_bytes(text: str) -> np.ndarray:
    """UTF-8 bytes of a file, with a zero byte after them."""
    return np.frombuffer(text.encode("utf-8") + b"\0", np.uint8)
