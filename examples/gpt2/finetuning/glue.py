"""The sentence tasks of GLUE that the paper fine-tunes on: their files, metrics, submissions.

CoLA (Warstadt et al., 2018), SST-2 (Socher et al., 2013), MRPC (Dolan and Brockett, 2005), MNLI
(Williams et al., 2018), in the tab-separated files of the benchmark (Wang et al., 2019).
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from examples.gpt2.data import DataError
from examples.gpt2.records import quoted, write_whole

Split: TypeAlias = Literal["train", "validation", "test"]
Column: TypeAlias = str | int  # by its name in the header, or where there is none by its place


class Example(NamedTuple):
    """A sentence, or two, and what is to be said of them."""

    sentences: tuple[str, ...]
    label: int | None  # place in the task's labels; None in a test split
    index: str  # by which a submission refers to it


@dataclasses.dataclass(frozen=True)
class Table:
    """Where things stand in one file."""

    file: str
    sentences: tuple[Column, ...]
    label: Column | None = None  # None in a test split
    header: bool = True


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """One task."""

    labels: tuple[str, ...]  # as its files spell them
    tables: dict[Split, Table]
    metrics: tuple[str, ...]  # the first of them chooses the best checkpoint
    submission: str  # the name of the file


_MNLI = ("sentence1", "sentence2")
_MRPC = ("#1 String", "#2 String")
TASKS = {
    "cola": GlueTask(
        labels=("0", "1"),
        tables={
            "train": Table("train.tsv", (3,), 1, header=False),
            "validation": Table("dev.tsv", (3,), 1, header=False),
            "test": Table("test.tsv", ("sentence",)),
        },
        metrics=("accuracy", "matthews"),
        submission="CoLA.tsv",
    ),
    "mrpc": GlueTask(
        labels=("0", "1"),
        tables={
            "train": Table("train.tsv", _MRPC, "Quality"),
            "validation": Table("dev.tsv", _MRPC, "Quality"),
            "test": Table("test.tsv", _MRPC),
        },
        metrics=("accuracy", "f1"),
        submission="MRPC.tsv",
    ),
    "sst2": GlueTask(
        labels=("0", "1"),
        tables={
            "train": Table("train.tsv", ("sentence",), "label"),
            "validation": Table("dev.tsv", ("sentence",), "label"),
            "test": Table("test.tsv", ("sentence",)),
        },
        metrics=("accuracy",),
        submission="SST-2.tsv",
    ),
    "mnli": GlueTask(
        labels=("contradiction", "entailment", "neutral"),
        tables={
            "train": Table("train.tsv", _MNLI, "gold_label"),
            "validation": Table("dev_matched.tsv", _MNLI, "gold_label"),
            "test": Table("test_matched.tsv", _MNLI),
        },
        metrics=("accuracy",),
        submission="MNLI-m.tsv",
    ),
}


def read_examples(folder: pathlib.Path, name: str, split: Split) -> list[Example]:
    """Reads a split of a task.

    Args:
      folder: Where the task's files lie, under GLUE's names: `train.tsv`, `dev.tsv`, `test.tsv`;
        of MNLI `dev_matched.tsv` and `test_matched.tsv`.
      name: One of `TASKS`.
      split: Which of its files.

    Returns:
      The examples. Those of MNLI whose label is "-", for annotators who did not agree, are left
      out.

    Raises:
      DataError: The file is missing, empty or no UTF-8 text, a column is missing, a row has fewer
        or more fields than there are columns, or a label is none of the task's.
    """
    task = TASKS[name]
    table = task.tables[split]
    file = folder / table.file
    rows = _rows(file)
    if table.header:
        _, names = next(rows, (1, [""]))
        places = {column: i for i, column in enumerate(names)}
        for column in (*table.sentences, *([] if table.label is None else [table.label])):
            if column not in places:
                found = quoted("\t".join(names))
                raise DataError(f"{file}, line 1: has no column {column!r}, only {found}")
    else:
        places, names = {i: i for i in range(4)}, ["", "", "", ""]
    examples = []
    for number, fields in rows:
        if len(fields) != len(names):
            raise DataError(
                f"{file}, line {number}: has {len(fields)} fields; its columns are {len(names)}"
            )
        label = None
        if table.label is not None:
            spelt = fields[places[table.label]]
            if spelt == "-" and name == "mnli":
                continue
            if spelt not in task.labels:
                allowed = ", ".join(task.labels)
                given = quoted(spelt)
                raise DataError(f"{file}, line {number}: label is {given}; allowed: {allowed}")
            label = task.labels.index(spelt)
        # Some of the official files have a blank before the tab, others have not.
        sentences = tuple(fields[places[column]].strip() for column in table.sentences)
        index = fields[places["index"]] if "index" in places else str(len(examples))
        examples.append(Example(sentences, label, index))
    if not examples:
        raise DataError(f"{file}: has no examples")
    return examples


def score(name: str, labels: Sequence[int], predicted: Sequence[int]) -> dict[str, float]:
    """A task's metrics, each in percent.

    Args:
      name: One of `TASKS`.
      labels: The right ones.
      predicted: Those of a model, as many.

    Returns:
      By name: accuracy, of CoLA Matthews' correlation too, of MRPC F1 of the label "1".
    """
    functions = {"accuracy": accuracy_score, "matthews": matthews_corrcoef, "f1": f1_score}
    return {
        metric: 100 * float(functions[metric](labels, predicted)) for metric in TASKS[name].metrics
    }


def write_submission(
    folder: pathlib.Path, name: str, examples: Sequence[Example], predicted: Sequence[int]
) -> pathlib.Path:
    """Writes predictions as GLUE takes them; returns the file, named as it has to be."""
    task = TASKS[name]
    rows = [f"{e.index}\t{task.labels[p]}\n" for e, p in zip(examples, predicted, strict=True)]
    file = folder / task.submission
    write_whole(file, "index\tprediction\n" + "".join(rows))
    return file


def _rows(file: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """The fields of each line with its number. Quotes mean nothing; lines end by newlines alone."""
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise DataError(f"{file}, line {number}: not UTF-8 text") from None
                yield number, text.removesuffix("\n").removesuffix("\r").split("\t")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
