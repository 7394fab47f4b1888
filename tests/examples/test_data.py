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


def test_missing(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file or folder"):
        load(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_empty_file(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(InputError, match=r"a\.txt: empty"):
        load(tmp_path / "a.txt", tmp_path)


def test_empty_folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / ".hidden").write_text("not read")
    with pytest.raises(InputError, match="text: empty"):
        load(tmp_path / "text", tmp_path)


def test_too_short(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(InputError, match=r"its validation split has 6 tokens.* at least 9"):
        load(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize("in_folder", [False, True])
def test_undecodable_names_the_file(tmp_path, in_folder):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("fine")
    bad = tmp_path / "text" / "bad.txt"
    bad.write_bytes(b"abc\xff\xfe")
    with pytest.raises(InputError, match=r"bad\.txt: not UTF-8 text \(byte 3"):
        load(bad.parent if in_folder else bad, tmp_path)


def test_vocabulary_too_small_for_sentencepiece(folder, tmp_path):
    with pytest.raises(InputError, match="SentencePiece cannot make 20 tokens"):
        load(folder, tmp_path, tokenizer="sentencepiece", vocabulary=20)
    assert not list((tmp_path / "cache").iterdir())  # nothing half-made is left


@pytest.mark.parametrize("file", ["train.npy", "validation.npy"])
def test_a_damaged_cache_is_named(folder, tmp_path, file):
    load(folder, tmp_path)
    [path] = (tmp_path / "cache").glob(f"*/{file}")
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"{path.parent}: damaged .*remove it"):
            load(folder, tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="damaged"):
        load(folder, tmp_path)


# ----------------------------------------------------------------------------------- splitting


def test_split_by_file_is_whole_and_disjoint(folder):
    texts = data.read_texts(folder)
    train, validation = data.split(texts)
    assert sorted(train + validation) == texts
    assert not {name for name, _ in train} & {name for name, _ in validation}
    share = sum(len(t) for _, t in validation) / sum(len(t) for _, t in texts)
    assert 0.04 < share < 0.11


def test_split_depends_on_relative_paths_alone(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    for name, text in data.read_texts(folder):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text, encoding="utf-8")
    names = [[name for name, _ in part] for part in data.split(data.read_texts(folder))]
    assert names == [[name for name, _ in part] for part in data.split(data.read_texts(copy))]
    reverse = data.split(data.read_texts(folder)[::-1])[1]
    assert sorted(name for name, _ in reverse) == names[1]


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
    np.testing.assert_array_equal(first.train[:], second.train[:])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_cache_key_follows_text_and_settings(folder, tmp_path):
    keys = {load(folder, tmp_path).key, load(folder, tmp_path, vocabulary=299).key}
    (tmp_path / "other.txt").write_text(LINES * 20)
    keys.add(load(tmp_path / "other.txt", tmp_path).key)
    assert len(keys) == 3
