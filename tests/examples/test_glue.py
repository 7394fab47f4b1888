"""Files, scores and submissions of GLUE's tasks."""

import numpy as np
import pytest
from sklearn import metrics

from examples.gpt2.data import DataError
from examples.gpt2.finetuning import download, glue
from examples.gpt2.finetuning.tasks import load_task
from examples.gpt2.tokens import byte_tokenizer
from tests.examples.task_files import write, write_squad, write_sst2

MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)


def mnli_row(first, second, *labels):
    return "\t".join(
        ["7", "31193", "31193n", "fiction", "", "( x )", "", "", first, second, *labels]
    )


def test_cola_has_no_header_but_in_its_test_file(tmp_path):
    rows = ['gj04\t1\t\tHe said "no .', "gj04\t0\t*\tThey\u2028drank\r the pub\x85 . "]
    write(tmp_path / "train.tsv", rows)
    first, second = glue.read_examples(tmp_path, "cola", "train")
    assert (first.sentences, first.label) == (('He said "no .',), 1)
    assert (second.sentences, second.label) == (("They\u2028drank\r the pub\x85 .",), 0)
    write(tmp_path / "test.tsv", ["index\tsentence", "5\tBill 's mother sang ."])
    [only] = glue.read_examples(tmp_path, "cola", "test")
    assert only == (("Bill 's mother sang .",), None, "5")


def test_mrpc_of_windows_with_a_byte_order_mark(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    text = header + '1\t70\t71\tShe said " it .\tIt , she said .\r\n0\t72\t73\t\tAn empty one .\r\n'
    (tmp_path / "dev.tsv").write_bytes(text.encode())
    first, second = glue.read_examples(tmp_path, "mrpc", "validation")
    assert first.sentences == ('She said " it .', "It , she said .")
    assert (second.sentences, second.label) == (("", "An empty one ."), 0)


def test_mnli_is_matched_and_leaves_out_what_has_no_label(tmp_path):
    votes = ["neutral"] * 4
    rows = [mnli_row("A", "B", *votes, "neutral"), mnli_row("C", "D", *votes, "-")]
    header = f"{MNLI_HEADER}\tlabel1\tlabel2\tlabel3\tlabel4\tgold_label"
    write(tmp_path / "dev_matched.tsv", [header, *rows])
    [only] = glue.read_examples(tmp_path, "mnli", "validation")
    assert only.sentences == ("A", "B")
    assert glue.TASKS["mnli"].labels[only.label] == "neutral"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["sentence\tquality", "a\t1"],
            r"line 1: has no column 'label', only 'sentence\\tquality'$",
        ),
        (["\x1b[31m\rb\r" * 999], r"^[^\n\r\x1b]{99,}\.\.\.$"),
        (["sentence\tlabel", "a\t1", "b"], r"dev\.tsv, line 3: has 1 fields; its columns are 2"),
        (["sentence\tlabel", "a\tb\t1"], r"dev\.tsv, line 2: has 3 fields; its columns are 2"),
        (["sentence\tlabel", "a\t2"], r"dev\.tsv, line 2: label is '2'; allowed: 0, 1"),
        (["sentence\tlabel"], r"dev\.tsv: has no examples"),
        ([], r"dev\.tsv, line 1: has no column 'sentence'"),
    ],
)
def test_bad_files(tmp_path, lines, message):
    write(tmp_path / "dev.tsv", lines)
    with pytest.raises(DataError, match=message):
        glue.read_examples(tmp_path, "sst2", "validation")


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(DataError, match=r"train\.tsv: cannot be read: No such file"):
        glue.read_examples(tmp_path, "sst2", "train")
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\nfine\t1\nb\xff\t0\n")
    with pytest.raises(DataError, match=r"train\.tsv, line 3: not UTF-8 text"):
        glue.read_examples(tmp_path, "sst2", "train")


def test_scores_are_those_of_the_definitions():
    labels, predicted = [1, 1, 1, 0, 0, 1], [1, 0, 1, 0, 1, 1]
    of_cola = glue.score("cola", labels, predicted)
    # 3 true positives, 1 true negative, 1 false positive, 1 false negative
    assert of_cola["accuracy"] == pytest.approx(100 * 4 / 6)
    assert of_cola["matthews"] == pytest.approx(100 * (3 * 1 - 1 * 1) / np.sqrt(4 * 4 * 2 * 2))
    assert glue.score("mrpc", labels, predicted)["f1"] == pytest.approx(100 * 6 / 8)
    assert of_cola["matthews"] == pytest.approx(100 * metrics.matthews_corrcoef(labels, predicted))


def test_submissions(tmp_path):
    examples = [glue.Example(("a", "b"), None, "3"), glue.Example(("c", "d"), None, "9")]
    file = glue.write_submission(tmp_path, "mnli", examples, [2, 0])
    assert file.name == "MNLI-m.tsv"
    assert file.read_text() == "index\tprediction\n3\tneutral\n9\tcontradiction\n"


@pytest.mark.parametrize("task", sorted(glue.TASKS))
def test_downloaded_rows_are_read_as_they_were(tmp_path, task):
    """Rows as Hugging Face's `datasets` has them; of MNLI its classes are numbered otherwise."""
    pair = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}.get(task)
    columns = pair or ("sentence",)
    rows = [
        {"idx": 4, "label": 1, **dict.fromkeys(columns, 'He said "no\tone".')},
        {"idx": 9, "label": 0, **dict.fromkeys(columns, "é")},
    ]
    suffix = "_matched" if task == "mnli" else ""
    names = ("train", f"validation{suffix}", f"test{suffix}")
    config = download.Config(task, tmp_path / "new")
    download.download(config, lambda *_: dict.fromkeys(names, rows))
    classes = ("entailment", "neutral") if task == "mnli" else ("0", "1")
    for split in ("train", "validation"):
        first, second = glue.read_examples(tmp_path / "new", task, split)
        assert first.sentences == ('He said "no one".',) * len(columns)
        labels = glue.TASKS[task].labels
        assert (labels[first.label], labels[second.label]) == classes[::-1]
    assert [e.index for e in glue.read_examples(tmp_path / "new", task, "test")] == ["4", "9"]
    with pytest.raises(DataError, match="not empty; give a new folder"):
        download.download(config, dict)


def test_the_first_examples_alone(tmp_path):
    write_sst2(tmp_path, train=8, validation=4)
    whole, three = (
        load_task("sst2", tmp_path, byte_tokenizer(), 32, examples) for examples in (None, 3)
    )
    assert (whole.contents, three.contents) == ("8 examples", "3 examples")
    for name, array in whole.train.items():
        np.testing.assert_array_equal(three.train[name], array[:3])
    np.testing.assert_array_equal(
        three.validation.batch["tokens"], whole.validation.batch["tokens"]
    )
    write_squad(tmp_path, train=2, validation=1)
    one = load_task("squad", tmp_path, byte_tokenizer(), 64, 1)
    assert one.contents.startswith("1 questions in ")
