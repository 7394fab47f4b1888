import shutil

import numpy as np
import pytest
import sentencepiece

from examples.gpt2 import data
from examples.gpt2.command import InputError

# 20 files of 600 characters or so, with indentation, tabs and letters beyond ASCII.
LINES = "def f(x):\n    if x:\n\t\treturn  x + 1\n\n# Ünïcödé 漢字 \x0c\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    (root / "sub").mkdir()
    for i in range(20):
        name = f"sub/{i}.txt" if i % 2 else f"{i}.txt"
        (root / name).write_text(f"# file {i}\n" + LINES * 10, encoding="utf-8")
    return root


def load(path, tmp_path, **options):
    keywords = {"tokenizer": "bytes", "vocabulary": 300, "context": 8, "cache": tmp_path / "cache"}
    return data.load(path, **{**keywords, **options})


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "nowhere", "nowhere: no such file or folder"),
        ({"a.txt": b" \n\t\n"}, "a.txt", r"a\.txt: empty"),
        ({".hidden": b"not read"}, ".", "text: empty"),
        ({"a.txt": b"x" * 100}, "a.txt", r"its validation split has 6 tokens.* at least 9"),
        ({"bad.txt": b"abc\xff", "good.txt": b"fine"}, ".", r"bad\.txt: not UTF-8 text \(byte 3"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, files, name, message):
    (tmp_path / "text").mkdir()
    for file, content in files.items():
        (tmp_path / "text" / file).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(tmp_path / "text" / name, tmp_path)


def test_vocabulary_too_small_for_sentencepiece(folder, tmp_path):
    with pytest.raises(InputError, match="SentencePiece cannot make 20 tokens"):
        load(folder, tmp_path, tokenizer="sentencepiece", vocabulary=20)
    assert not list((tmp_path / "cache").iterdir())  # nothing half-made is left


def test_a_damaged_cache_is_named(folder, tmp_path):
    load(folder, tmp_path)
    for path in (tmp_path / "cache").glob("*/*.npy"):
        whole = path.read_bytes()
        for damaged in (whole[:-10], whole[:20], b""):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=rf"{path.parent}: damaged .*remove it"):
                load(folder, tmp_path)
        path.write_bytes(whole)


# ----------------------------------------------------------------------------------- splitting


def test_files_are_split_by_their_relative_paths_alone(folder, tmp_path):
    texts = data.read_texts(folder)
    train, validation = data.split(texts)
    assert sorted(train + validation) == texts
    assert 0.04 < sum(len(t) for _, t in validation) / sum(len(t) for _, t in texts) < 0.11
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert data.split(data.read_texts(copy)) == (train, validation)
    assert sorted(data.split(texts[::-1])[1]) == validation


def test_split_never_gives_a_large_file_to_validation():
    for i in range(20):
        train, validation = data.split([(f"large{i}", "x" * 1000), (f"small{i}", "y" * 10)])
        assert [name for name, _ in train] == [f"large{i}"]
        assert [name for name, _ in validation] == [f"small{i}"]


def test_single_file_is_split_by_position():
    [(_, head)], [(_, tail)] = data.split([("a", "".join(map(str, range(1000))))])
    assert head + tail == "".join(map(str, range(1000)))
    assert abs(len(tail) / len(head + tail) - 0.05) < 0.001


def test_standard_library_is_the_default(monkeypatch, tmp_path):
    root = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "test/c.py", "site-packages/d.py", "json/tests/e.py", "f.c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    (root / "g.py").write_bytes(b"\xff")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    assert [name for name, _ in data.read_texts(None)] == ["a.py", "json/b.py"]


# ------------------------------------------------------------------------------------ encoding


def processor_of(loaded):
    return sentencepiece.SentencePieceProcessor(model_file=str(loaded.tokenizer))


def decode(loaded, tokens):
    return processor_of(loaded).decode(tokens.tolist())


def test_bytes_round_trip(folder, tmp_path):
    loaded = load(folder, tmp_path)
    expected = "\0".join(text for _, text in data.split(data.read_texts(folder))[0]) + "\0"
    assert bytes(loaded.train.tolist()).decode() == expected
    assert loaded.tokenizer is None


def test_sentencepiece_round_trip(folder, tmp_path):
    loaded = load(folder, tmp_path, tokenizer="sentencepiece")
    processor = processor_of(loaded)
    assert 256 < processor.vocab_size() <= 300
    train, validation = data.split(data.read_texts(folder))
    assert decode(loaded, loaded.train) == "".join(text for _, text in train)
    assert decode(loaded, loaded.validation) == "".join(text for _, text in validation)
    strange = "\n\n  \t x\ty  \nnever seen: \u2713 \U0001f600\n    "
    assert processor.decode(data.encode_lines(processor, strange)) == strange
    text = LINES * 40
    assert data.encode_lines(processor, text) == [*processor.encode(text), processor.eos_id()]


@pytest.mark.parametrize("letters", ["abcdefgh", "𝛼𝛽𝛾𝛿𝜀𝜁𝜂𝜃"])
def test_a_long_line_trains_the_tokenizer(tmp_path, letters):
    """Also after a short one, which alone would be enough for a tokenizer, or a reserved mark."""
    words = np.random.default_rng(0).choice(list(letters), (40_000, 3))
    line = " ".join("".join(word) for word in words)
    for text in (line, "short\n" + line, "short\n\u2585" + line[:12_000]):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        loaded = load(tmp_path / "a.txt", tmp_path, tokenizer="sentencepiece")
        assert decode(loaded, loaded.train) + decode(loaded, loaded.validation) == text
        assert len(loaded.train) < 0.75 * len(text)  # tokens of more than a letter were found


def test_tokens_stay_in_files_and_are_cached(folder, tmp_path, monkeypatch):
    first = load(folder, tmp_path, tokenizer="sentencepiece")
    assert isinstance(first.train, np.memmap)
    assert first.train.dtype == np.uint16
    monkeypatch.setattr(data, "train_sentencepiece", None)  # a second training would fail
    second = load(folder, tmp_path, tokenizer="sentencepiece", context=5)
    assert second.key == first.key
    others = load(folder, tmp_path), load(folder, tmp_path, vocabulary=299)
    assert len({first.key, *(one.key for one in others)}) == 3
