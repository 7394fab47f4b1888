"""Fetches a task through Hugging Face's `datasets` and writes its official files.

    python -m examples.gpt2.finetuning.download --task sst2 --out data/sst2

`pip install datasets` first; a network is needed. A folder that has files already is left alone.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tyro

from examples.gpt2.data import DataError
from examples.gpt2.finetuning import glue, tasks

_COLUMNS = {  # of `datasets`, for what a task's files call otherwise
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "mnli": ("premise", "hypothesis"),
}
_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
_OF_MNLI = {**_SPLITS, "validation": "validation_matched", "test": "test_matched"}
# The classes of MNLI are numbered otherwise there than in `glue.TASKS`.
_CLASSES = {"mnli": ("entailment", "neutral", "contradiction")}


@dataclasses.dataclass(frozen=True)
class Config:
    """Fetches a task and writes its official files."""

    task: tasks.Name
    """Which task."""
    out: pathlib.Path
    """Folder for the files; must be empty or new."""


def download(
    config: Config, load: Callable[..., Mapping[str, Iterable[Mapping[str, Any]]]]
) -> None:
    """Writes the files of a task.

    Args:
      config: Which, and where.
      load: `datasets.load_dataset`, or what does the same.

    Raises:
      DataError: The folder is not empty.
    """
    if config.out.exists() and any(config.out.iterdir()):
        raise DataError(f"{config.out}: not empty; give a new folder")
    if config.task == "squad":
        files = {
            tasks.SQUAD_FILES[split]: json.dumps(squad_json(rows), ensure_ascii=False)
            for split, rows in load("rajpurkar/squad").items()
        }
    else:
        splits = _OF_MNLI if config.task == "mnli" else _SPLITS
        data = load("nyu-mll/glue", config.task)
        files = {
            glue.TASKS[config.task].tables[split].file: glue_tsv(config.task, split, data[name])
            for split, name in splits.items()
        }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.out.parent) as partial:
        folder = pathlib.Path(partial) / "files"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        folder.rename(config.out)  # whole or not at all


def glue_tsv(task: str, split: glue.Split, rows: Iterable[Mapping[str, Any]]) -> str:
    """A file of GLUE with the columns that are read; tabs and ends of lines become blanks."""
    table = glue.TASKS[task].tables[split]
    classes = _CLASSES.get(task, glue.TASKS[task].labels)
    lines = []
    if table.header:
        named = [] if table.label is None else [table.label]
        lines.append(["index", *map(str, table.sentences), *map(str, named)])
    for row in rows:
        sentences = [" ".join(row[c].splitlines()).replace("\t", " ") for c in _COLUMNS[task]]
        label = [] if table.label is None else [classes[row["label"]]]
        lines.append(
            [str(row["idx"]), *sentences, *label]
            if table.header
            else [str(row["idx"]), *label, "", *sentences]
        )
    return "".join("\t".join(line) + "\n" for line in lines)


def squad_json(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """SQuAD's JSON, a paragraph a question."""
    paragraphs = []
    for row in rows:
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        answers = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
        asked = {"id": row["id"], "question": row["question"], "answers": answers}
        paragraphs.append({"context": row["context"], "qas": [asked]})
    return {"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 2 bad input."""
    name = "python -m examples.gpt2.finetuning.download"
    config = tyro.cli(Config, prog=name, args=arguments)
    try:
        import datasets
    except ModuleNotFoundError:
        print("error: needs Hugging Face's datasets: pip install datasets", file=sys.stderr)
        return 2
    try:
        download(config, datasets.load_dataset)
    except Exception as error:  # of the network, of the hub, of the disk
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
