"""What a task is to the program: arrays to learn from, a loss, and a score of logits.

Hugging Face's `datasets` reads the files, from its hub or from a folder.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import datasets
import jax
import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from examples.finetune import squad
from examples.finetune.heads import Batch, WithHead, class_loss, padded, span_loss
from examples.finetune.tokens import Tokenizer
from examples.gpt2.command import InputError, one_line

Name: TypeAlias = Literal["cola", "sst2", "mrpc", "mnli", "squad"]
Rows: TypeAlias = Iterable[Mapping[str, Any]]
LENGTHS = {"cola": 64, "sst2": 128, "mrpc": 128, "mnli": 128, "squad": 384}  # tokens of an example
_STRIDE = 128  # between windows of SQuAD, as in the scripts of BERT
_METRICS = {"accuracy": accuracy_score, "matthews": matthews_corrcoef, "f1": f1_score}


@dataclasses.dataclass(frozen=True)
class Glue:
    """A task of GLUE, as `datasets` has it."""

    sentences: tuple[str, ...]  # columns
    metrics: tuple[str, ...]  # the first of them chooses the best checkpoint
    labels: tuple[str, ...] = ("0", "1")  # as submissions spell them
    suffix: str = ""  # of the splits to be predicted


GLUE = {
    "cola": Glue(("sentence",), ("accuracy", "matthews")),
    "sst2": Glue(("sentence",), ("accuracy",)),
    "mrpc": Glue(("sentence1", "sentence2"), ("accuracy", "f1")),
    "mnli": Glue(
        ("premise", "hypothesis"),
        ("accuracy",),
        ("entailment", "neutral", "contradiction"),
        suffix="_matched",
    ),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """A split to be predicted, and what is done with a model's logits for it."""

    file: str  # for predictions
    batch: Batch
    score: Callable[[np.ndarray], dict[str, float]] | None  # in percent; None without labels
    submission: Callable[[np.ndarray], str]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its data."""

    outputs: int  # of the head
    metric: str  # by which checkpoints are compared
    train: Batch
    validation: Split
    test: Split | None
    loss: Callable[[WithHead, Batch], jax.Array]
    logits: Callable[[WithHead, Batch], jax.Array]


def load_task(
    name: Name,
    data: pathlib.Path | None,
    cache: pathlib.Path,
    tokenizer: Tokenizer,
    length: int,
    examples: int | None = None,
) -> Task:
    """Reads a task's files into arrays.

    Args:
      name: Which task.
      data: A folder with files that `datasets` reads; None to fetch the task from the hub.
      cache: Where `datasets` keeps what it has read.
      tokenizer: The model's.
      length: Tokens that an example may have. Longer ones are cut, of two sentences the longer
        first, or of SQuAD split into windows.
      examples: Training examples (of SQuAD questions) that are kept, the first ones; None for all.

    Raises:
      InputError: If a file, a split or a column is missing or wrong.
    """
    splits = _read(name, data, cache)
    if name == "squad":
        return _squad(splits, tokenizer, length, examples)
    task = GLUE[name]
    train = _examples(name, "train", splits, tokenizer, length)

    def predicted(split: str) -> Split:
        batch = _examples(name, split + task.suffix, splits, tokenizer, length)
        rows, labels = splits[split + task.suffix], batch.pop("label", None)

        def submission(logits: np.ndarray) -> str:
            pairs = zip(rows["idx"], logits.argmax(-1), strict=True)
            lines = [f"{index}\t{task.labels[found]}\n" for index, found in pairs]
            return "index\tprediction\n" + "".join(lines)

        def score(logits: np.ndarray) -> dict[str, float]:
            found = logits.argmax(-1)
            return {m: 100 * float(_METRICS[m](labels, found)) for m in task.metrics}

        return Split(f"{split}.tsv", batch, None if labels is None else score, submission)

    validation = predicted("validation")
    if "label" not in train or validation.score is None:
        raise InputError(f"--data: {name} has no labels to learn from")
    return Task(
        outputs=len(task.labels),
        metric=task.metrics[0],
        train={k: array[:examples] for k, array in train.items()},
        validation=validation,
        test=predicted("test") if f"test{task.suffix}" in splits else None,
        loss=class_loss,
        logits=WithHead.classes,
    )


def _read(name: Name, data: pathlib.Path | None, cache: pathlib.Path) -> Mapping[str, Any]:
    """The splits of a task, with their columns checked."""
    if data is not None and not data.is_dir():
        raise InputError(f"{data}: no such folder; --data takes one with the task's files")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    suffix = "" if name == "squad" else GLUE[name].suffix
    wanted = ("train", f"validation{suffix}", f"test{suffix}")
    place, files = (("rajpurkar/squad",) if name == "squad" else ("nyu-mll/glue", name)), None
    if data is not None:
        paths = {split: sorted(data.absolute().glob(f"{split}[.-]*")) for split in wanted}
        place, files = (str(data),), {k: [*map(str, found)] for k, found in paths.items() if found}
        for split in wanted[:2]:
            if split not in files:
                raise InputError(f"{data}: has no file {split}.*, whose format datasets reads")
    try:
        found = datasets.load_dataset(*place, data_files=files, cache_dir=str(cache))
    except Exception as error:  # of the network, of the hub, of a file
        reason = one_line(error.__cause__ or error)
        raise InputError(f"{place[0]}: cannot be read: {reason}") from None
    columns = ("id", "question", "context", "answers")
    if name != "squad":
        columns = ("idx", "label", *GLUE[name].sentences)
    for split, rows in found.items():
        for column in columns:
            if column not in rows.column_names:
                there = ", ".join(rows.column_names)
                raise InputError(f"{place[0]}: {split} has no column {column!r}, only {there}")
    return found


def _examples(
    name: Name, split: str, splits: Mapping[str, Any], tokenizer: Tokenizer, length: int
) -> Batch:
    """The tokens of a split, with labels unless they are hidden."""
    task, rows = GLUE[name], splits[split]
    for column in task.sentences:
        if not all(isinstance(text, str) for text in rows[column]):
            raise InputError(f"--data: {column} of {split} has entries that are no text")
    encoded = [tokenizer.encode_all(rows[column]) for column in task.sentences]
    joined = [
        _joined([one.tokens for one in sentences], tokenizer.end, length)
        for sentences in zip(*encoded, strict=True)
    ]
    batch = {
        "tokens": padded(joined, length, tokenizer.end),
        "last": np.array([len(row) - 1 for row in joined], np.int32),
    }
    labels = set(rows["label"])
    if labels == {-1}:
        return batch
    if not labels <= set(range(len(task.labels))):
        wrong = min(labels - set(range(len(task.labels))), key=str)
        allowed = f"0 to {len(task.labels) - 1}"
        raise InputError(f"--data: {split} has the label {wrong!r}; allowed: {allowed}")
    return batch | {"label": np.array(rows["label"], np.int32)}


def _joined(sentences: list[list[int]], end: int, length: int) -> list[int]:
    """Sentences with an end of text after each; the longest is cut until they fit."""
    sentences = [list(sentence) for sentence in sentences]
    while sum(len(s) + 1 for s in sentences) > length:
        max(sentences, key=len).pop()
    return [token for sentence in sentences for token in (*sentence, end)]


def _squad(
    splits: Mapping[str, Rows], tokenizer: Tokenizer, length: int, examples: int | None
) -> Task:
    def made(split: str, count: int | None) -> tuple[list[squad.Question], list[squad.Window]]:
        questions = [squad.question(row) for row in splits[split]][:count]
        return questions, squad.windows(questions, tokenizer, length, min(_STRIDE, length // 3))

    def batch_of(windows: Sequence[squad.Window]) -> Batch:
        return {
            "tokens": padded([w.tokens for w in windows], length, tokenizer.end),
            "first": np.array([w.first - 1 for w in windows], np.int32),
            "last": np.array([len(w.tokens) - 1 for w in windows], np.int32),
            "target": np.array([w.target for w in windows], np.int32),
        }

    _, train = made("train", examples)
    questions, windows = made("validation", None)

    def answers(logits: np.ndarray) -> dict[str, str]:
        return squad.best_answers(questions, windows, logits[:, 0], logits[:, 1])

    validation = Split(
        "validation.json",
        batch_of(windows),
        lambda logits: squad.score(questions, answers(logits)),
        lambda logits: json.dumps(answers(logits), ensure_ascii=False) + "\n",
    )
    return Task(
        outputs=2,
        metric="f1",
        train=batch_of(train),
        validation=validation,
        test=None,
        loss=span_loss,
        logits=WithHead.ends,
    )
