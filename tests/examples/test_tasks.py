"""Tasks of GLUE and SQuAD: from files to arrays, scores and submissions."""

import numpy as np
import pytest

from examples.finetune.tasks import load_task
from examples.finetune.tokens import byte_tokenizer
from examples.gpt2.command import InputError
from tests.examples.task_files import write, write_glue, write_squad


def load(task, tmp_path, length=32, **options):
    folders = tmp_path / "data", tmp_path / "cache"
    return load_task(task, *folders, byte_tokenizer(), length, **options)


def rows(*labels, columns=("sentence",)):
    texts = {column: f'{column} "é' for column in columns}
    return [{**texts, "label": label, "idx": 10 + i} for i, label in enumerate(labels)]


def logits_of(*classes, count=2):
    return np.eye(count)[list(classes)]


def test_sentences_end_and_the_longest_is_cut(tmp_path):
    pair = [{"sentence1": "a" * 20, "sentence2": "bc", "label": 1, "idx": 0}]
    write(tmp_path / "data", train=pair, validation=pair)
    task = load("mrpc", tmp_path, length=10)
    assert bytes(task.train["tokens"][0].tolist()) == b"aaaaaa\0bc\0"
    assert task.train["last"].tolist() == [9]
    assert task.train["label"].tolist() == [1]
    assert task.test is None


def test_scores_are_those_of_the_definitions(tmp_path):
    labels, predicted = [1, 1, 1, 0, 0, 1], [1, 0, 1, 0, 1, 1]
    write(tmp_path / "data", train=rows(0, 1), validation=rows(*labels))
    scores = load("cola", tmp_path).validation.score(logits_of(*predicted))
    # 3 true positives, 1 true negative, 1 false positive, 1 false negative
    matthews = 100 * (3 * 1 - 1 * 1) / np.sqrt(4 * 4 * 2 * 2)
    assert scores == pytest.approx({"accuracy": 100 * 4 / 6, "matthews": matthews})
    pairs = ("sentence1", "sentence2")
    both = {"train": rows(0, 1, columns=pairs), "validation": rows(*labels, columns=pairs)}
    write(tmp_path / "data", **both)
    assert load("mrpc", tmp_path).validation.score(logits_of(*predicted))["f1"] == 75


def test_mnli_is_matched_and_submitted_in_words(tmp_path):
    pairs = ("premise", "hypothesis")
    seen, hidden = rows(0, 2, columns=pairs), rows(-1, -1, columns=pairs)
    splits = {"train": seen, "validation_matched": seen, "validation_mismatched": hidden}
    write(tmp_path / "data", **splits, test_matched=hidden)
    task = load("mnli", tmp_path)
    assert task.outputs == 3
    assert task.validation.score(logits_of(0, 1, count=3)) == {"accuracy": 50}
    submission = "index\tprediction\n10\tcontradiction\n11\tentailment\n"
    assert task.test.submission(logits_of(2, 0, count=3)) == submission


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([{"text": "a", "label": 1, "idx": 0}], "train has no column 'sentence', only text, label"),
        (rows(0, 2), "train has the label 2; allowed: 0 to 1"),
        (rows(0, -1), "train has the label -1; allowed: 0 to 1"),
        (rows(-1, -1), "sst2 has no labels to learn from"),
        ([{"sentence": 1, "label": 1, "idx": 0}], "sentence of train has entries that are no text"),
    ],
)
def test_bad_rows(tmp_path, train, message):
    write(tmp_path / "data", train=train, validation=train)
    with pytest.raises(InputError, match=message):
        load("sst2", tmp_path)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="no such folder; --data takes one"):
        load("sst2", tmp_path)
    write(tmp_path / "data", train=rows(0, 1))
    with pytest.raises(InputError, match=r"data: has no file validation\.\*"):
        load("sst2", tmp_path)
    write(tmp_path / "data", validation=rows(0, 1))
    (tmp_path / "data" / "train.jsonl").write_text('{"sentence": ')
    with pytest.raises(InputError, match=r"data: cannot be read: [^\n]+$"):
        load("sst2", tmp_path)


def test_the_first_examples_alone(tmp_path):
    write_glue(tmp_path / "data", train=8, validation=4)
    whole, three = (load("sst2", tmp_path, examples=examples) for examples in (None, 3))
    assert (len(whole.train["tokens"]), len(three.train["tokens"])) == (8, 3)
    for name, array in whole.train.items():
        np.testing.assert_array_equal(three.train[name], array[:3])
    np.testing.assert_array_equal(three.validation.batch["last"], whole.validation.batch["last"])


def test_squad_from_rows_to_answers(tmp_path):
    write_squad(tmp_path / "data", train=2, validation=1)
    whole, one = (load("squad", tmp_path, 128, examples=examples) for examples in (None, 1))
    assert (len(whole.train["tokens"]), len(one.train["tokens"])) == (6, 1)
    targets = whole.validation.batch["target"]
    logits = np.zeros((len(targets), 2, 128))
    for i, ends in enumerate(targets):
        logits[i, [0, 1], ends] = 9
    assert whole.validation.score(logits) == {"f1": 100, "exact_match": 100}
    bad = {"answers": {"text": ["a", "b"], "answer_start": [0]}, "question": "", "context": "a"}
    write(tmp_path / "data", train=[bad | {"id": "q"}])
    with pytest.raises(InputError, match="'q' is no question of SQuAD"):
        load("squad", tmp_path)
