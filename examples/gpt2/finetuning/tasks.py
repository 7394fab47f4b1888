"""What a task is to the program: arrays to learn from, a loss, and a score of logits."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax
import numpy as np

from examples.gpt2.data import DataError
from examples.gpt2.finetuning import glue, squad
from examples.gpt2.finetuning.heads import Batch, WithHead, class_loss, padded, span_loss
from examples.gpt2.records import write_whole
from examples.gpt2.tokens import Tokenizer

Name: TypeAlias = Literal["cola", "sst2", "mrpc", "mnli", "squad"]
LENGTHS = {"cola": 64, "sst2": 128, "mrpc": 128, "mnli": 128, "squad": 384}  # tokens of an example
# The metrics of each, the one first by which checkpoints are compared, in the paper's order.
METRICS = {"squad": squad.METRICS, **{name: task.metrics for name, task in glue.TASKS.items()}}
SHORTEST = 8  # tokens of an example, at least
_STRIDE = 128  # between windows of SQuAD, as in the scripts of BERT
SQUAD_FILES = {"train": "train-v1.1.json", "validation": "dev-v1.1.json"}


@dataclasses.dataclass(frozen=True)
class Predictions:
    """A split to be predicted, and what is done with a model's logits for it."""

    batch: Batch
    score: Callable[[np.ndarray], dict[str, float]] | None  # None where labels are not given
    write: Callable[[np.ndarray, pathlib.Path], pathlib.Path]  # into a folder, as is submitted


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its data."""

    outputs: int  # of the head
    contents: str  # how much there is to learn from, in words
    metric: str  # by which checkpoints are compared, in percent
    train: Batch
    validation: Predictions
    test: Predictions | None
    digest: str  # of what is predicted, labels included
    loss: Callable[[WithHead, Batch], jax.Array]
    logits: Callable[[WithHead, Batch], jax.Array]


def load_task(
    name: Name,
    folder: pathlib.Path,
    tokenizer: Tokenizer,
    length: int,
    examples: int | None = None,
) -> Task:
    """Reads a task's files into arrays.

    Args:
      name: Which task.
      folder: With GLUE's files of the task, or SQuAD's `train-v1.1.json` and `dev-v1.1.json`.
      tokenizer: The model's.
      length: Tokens that an example may have; longer ones are cut, of two sentences the longer
        first, or of SQuAD split into windows.
      examples: Training examples (of SQuAD questions) that are kept, the first ones; None for all.

    Returns:
      The task. There is a test split where its file is there.

    Raises:
      DataError: A file is missing or wrong.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --data takes one with the task's files")
    if name == "squad":
        return _load_squad(folder, tokenizer, length, examples)
    task = glue.TASKS[name]

    def batch_of(examples: Sequence[glue.Example]) -> Batch:
        encoded = iter(tokenizer.encode_all([s for e in examples for s in e.sentences]))
        rows = [
            _joined([next(encoded).tokens for _ in e.sentences], tokenizer.end, length)
            for e in examples
        ]
        batch = {
            "tokens": padded(rows, length, tokenizer.end),
            "last": np.array([len(row) - 1 for row in rows], np.int32),
        }
        if all(e.label is not None for e in examples):
            batch["label"] = np.array([e.label for e in examples], np.int32)
        return batch

    def predictions(examples: Sequence[glue.Example]) -> Predictions:
        labels = [e.label for e in examples if e.label is not None]
        return Predictions(
            batch_of(examples),
            (lambda logits: glue.score(name, labels, logits.argmax(-1))) if labels else None,
            lambda logits, out: glue.write_submission(out, name, examples, logits.argmax(-1)),
        )

    train = glue.read_examples(folder, name, "train")[:examples]
    validation = glue.read_examples(folder, name, "validation")
    test = None
    if (folder / task.tables["test"].file).exists():
        test = predictions(glue.read_examples(folder, name, "test"))
    return Task(
        outputs=len(task.labels),
        contents=f"{len(train)} examples",
        metric=METRICS[name][0],
        train=batch_of(train),
        validation=predictions(validation),
        test=test,
        digest=_digest(validation),
        loss=class_loss,
        logits=WithHead.classes,
    )


def _digest(validation: Sequence[glue.Example] | Sequence[squad.Question]) -> str:
    return hashlib.sha256(repr(validation).encode()).hexdigest()


def _joined(sentences: list[list[int]], end: int, length: int) -> list[int]:
    """Sentences with an end of text after each; the longest is cut until they fit."""
    sentences = [list(sentence) for sentence in sentences]
    while sum(len(s) + 1 for s in sentences) > length:
        max(sentences, key=len).pop()
    return [token for sentence in sentences for token in (*sentence, end)]


def _load_squad(
    folder: pathlib.Path, tokenizer: Tokenizer, length: int, examples: int | None
) -> Task:
    def read(
        split: str, count: int | None = None
    ) -> tuple[list[squad.Question], list[squad.Window]]:
        questions = squad.read_questions(folder / SQUAD_FILES[split])[:count]
        return questions, squad.windows(questions, tokenizer, length, min(_STRIDE, length // 3))

    def batch_of(windows: Sequence[squad.Window]) -> Batch:
        return {
            "tokens": padded([w.tokens for w in windows], length, tokenizer.end),
            "first": np.array([w.first - 1 for w in windows], np.int32),
            "last": np.array([len(w.tokens) - 1 for w in windows], np.int32),
            "target": np.array([w.target for w in windows], np.int32),
        }

    questions, windows = read("train", examples)
    train, contents = batch_of(windows), f"{len(questions)} questions in {len(windows)} windows"
    questions, windows = read("validation")

    def answers(logits: np.ndarray) -> dict[str, str]:
        return squad.best_answers(questions, windows, logits[:, 0], logits[:, 1])

    def write(logits: np.ndarray, out: pathlib.Path) -> pathlib.Path:
        file = out / "predictions.json"
        write_whole(file, json.dumps(answers(logits), ensure_ascii=False) + "\n")
        return file

    return Task(
        outputs=2,
        contents=contents,
        metric=METRICS["squad"][0],
        train=train,
        validation=Predictions(
            batch_of(windows), lambda logits: squad.score(questions, answers(logits)), write
        ),
        test=None,
        digest=_digest(questions),
        loss=span_loss,
        logits=WithHead.ends,
    )
