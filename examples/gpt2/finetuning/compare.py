"""Compares optimizers at a task, each at its own best learning rate; a table of all tasks."""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.finetuning import plots
from examples.gpt2.finetuning.config import Config, begins_with_adam, settings
from examples.gpt2.finetuning.run import Prepared, prepare, run
from examples.gpt2.finetuning.tasks import METRICS
from examples.gpt2.metrics import DivergedError
from examples.gpt2.rate_grid import cell, new_folder, print_edges, recorded, runs_of, summary_of
from examples.gpt2.records import as_in_json, quoted, write_whole

# Table 3 of the paper, GPT-2 117M: F1 of SQuAD, accuracy of the others.
PAPER = {
    "adamw": {"squad": 70.35, "cola": 74.69, "mrpc": 82.35, "sst2": 89.33, "mnli": 79.57},
    "adafactor": {"squad": 72.57, "cola": 75.55, "mrpc": 79.41, "sst2": 89.33, "mnli": 80.13},
    "came": {"squad": 70.60, "cola": 69.31, "mrpc": 64.95, "sst2": 82.22, "mnli": 76.37},
    "adapprox": {"squad": 72.89, "cola": 75.83, "mrpc": 80.63, "sst2": 90.94, "mnli": 80.15},
}


def compare(config: Config) -> None:
    """Runs what is missing; writes the task's record and figure, prints the table of all tasks.

    What the folder has of other optimizers stays in the record, so that each can begin with a
    checkpoint of its own; rates and seeds that it has of the same are part of the comparison.

    Args:
      config: The settings of all runs; `compare`, `seeds` and `learning_rates` say which.

    Raises:
      UsageError: The folder is that of one run, or what it has is of other data or settings.
    """
    out = config.out or pathlib.Path("runs/finetune/compare")
    prepared = prepare(config)
    metric = prepared.task.metric

    def settings_of(one: Config) -> dict[str, Any]:
        return settings(one, prepared.digests) | {"length": prepared.length}

    shared = {k: v for k, v in settings_of(config).items() if k not in _DIFFERING}
    before = _summary_in(out, config.task, shared)
    new_folder(out)

    def result(of: Config, rate: float, seed: int) -> dict[str, Any]:
        start = "-from-adam" if begins_with_adam(of) else ""
        label = f"{of.task}-{of.optimizer}{start}-{rate:g}-seed{seed}"
        one = dataclasses.replace(of, learning_rate=rate, seed=seed, out=out / label)
        return recorded(
            out / "results.jsonl", settings_of(one), label, lambda: _tuned(one, prepared)
        )

    def score_of(row: dict[str, Any]) -> float:
        return -math.inf if row["scores"] is None else row["scores"][metric]

    summary = {}
    for name in dict.fromkeys(config.compare):
        of = dataclasses.replace(config, optimizer=name, compare=())
        label = f"{name}, AdamW's state" if begins_with_adam(of) else name
        used = {k: v for k, v in settings_of(of).items() if k in _OF_ONE_ROW}
        known = before.get(label, {**as_in_json(used), "grid": {}, "scores": []})
        if any(known.get(k) != as_in_json(v) for k, v in used.items()):
            given = f"has {label} with other settings or of another checkpoint"
            raise UsageError(f"--out {out}: its {config.task}.json {given}; give another folder")
        rates = {*map(float, known["grid"]), *(config.learning_rates or (config.learning_rate,))}
        seeds = max(config.seeds, len(known["scores"]))
        runs = runs_of(
            functools.partial(result, of),
            sorted(rates),
            range(config.seed, config.seed + seeds),
            score_of,
        )
        summary[label] = {
            **summary_of(runs, score_of),
            **used,
            "means": {m: _mean(runs.seeds, m) for m in METRICS[config.task]},
            "scores": [one["scores"] for one in runs.seeds],
        }
    record = {
        "command": " ".join(["python -m examples.gpt2.finetune", *sys.argv[1:]]),
        "of": shared,
        # Read anew: another comparison may have ended in the folder.
        "summary": _summary_in(out, config.task, shared) | summary,
    }
    write_whole(out / f"{config.task}.json", json.dumps(record, indent=1) + "\n")
    plots.plot_sensitivity(
        record["summary"], f"{config.task}, {metric}", out / f"{config.task}.png"
    )
    summaries = {task: of["summary"] for task, of in read_records(out).items()}
    table = results_table(summaries)
    write_whole(out / "table.md", table + "\n")
    print(f"\n{table}\n")
    print_edges(summary)
    print(f"figure and records in {out}")


_OF_ONE_ROW = {"optimizer_settings", "checkpoint"}
_DIFFERING = _OF_ONE_ROW | {"optimizer", "learning_rate", "from_adam"}  # from run to run


def _summary_in(out: pathlib.Path, task: str, shared: dict[str, Any]) -> dict[str, Any]:
    """The rows of a task that are there, by label.

    Raises:
      UsageError: They are of other data or settings, or damaged.
    """
    found = read_records(out).get(task, {"of": shared, "summary": {}})
    differing = [k for k in shared if found["of"].get(k) != as_in_json(shared[k])]
    if differing:
        key = differing[0]
        raise UsageError(
            f"--out {out}: its {task}.json is of {key} {quoted(found['of'].get(key))}, this of"
            f" {quoted(shared[key])}; give another folder"
        )
    return found["summary"]


def _tuned(config: Config, prepared: Prepared) -> dict[str, Any]:
    """Fine-tunes one model, and returns what is recorded of it."""
    try:
        done = run(config, prepared, keep=False)
    except DivergedError as error:
        print(f"diverged: {error}")
        return {"scores": None, "curve": [], "memory": None}
    return {"scores": done.scores, "curve": done.curve, "memory": done.memory}


def read_records(out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The records of the tasks that were compared in a folder, by task, in the paper's order.

    Raises:
      UsageError: One of them is damaged.
    """
    found = {}
    for task in METRICS:
        file = out / f"{task}.json"
        if file.exists():
            try:
                record = json.loads(file.read_text())
                found[task] = {"of": dict(record["of"]), "summary": dict(record["summary"])}
                results_table({task: found[task]["summary"]})
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UsageError(f"{file}: not the record of a comparison") from None
    return found


def results_table(summaries: dict[str, dict[str, Any]]) -> str:
    """The tasks side by side as a Markdown table, an optimizer a row, below it the paper's.

    Args:
      summaries: By task and optimizer, with `means` by metric, the `standard_error` of the first
        and the `checkpoint` that the runs began with.

    Returns:
      The table. Where it has all of the paper's tasks there is an average of their first metrics,
      of optimizers that began all of them with one checkpoint.
    """
    tasks = list(summaries)
    columns = [(task, metric) for task in tasks for metric in METRICS[task]]
    header = [*(f"{task} ({metric})" for task, metric in columns)]
    whole = len(tasks) == len(METRICS)
    lines = [
        f"| optimizer | {' | '.join(header + ['average'] * whole)} |",
        f"| --- |{' ---: |' * (len(columns) + whole)}",
    ]
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary):
        rows = {task: summaries[task].get(name) for task in tasks}
        cells = [_cell(rows[task], task, metric) for task, metric in columns]
        means = [row and row["means"][METRICS[task][0]] for task, row in rows.items()]
        one = len({row["checkpoint"] for row in rows.values() if row}) == 1
        cells += [_average(means) if one else ""] * whole
        lines.append(f"| {' | '.join([name, *cells])} |")
    for name, paper in PAPER.items():
        of = {(task, METRICS[task][0]): score for task, score in paper.items()}
        cells = [cell(of.get(column), ".2f") for column in columns]
        cells += [_average([paper[task] for task in tasks])] * whole
        lines.append(f"| {' | '.join([f'{name}, in the paper', *cells])} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None, task: str, metric: str) -> str:
    if row is None:
        return ""
    words, error = cell(row["means"][metric], ".2f", "diverged"), row["standard_error"]
    return words if error is None or metric != METRICS[task][0] else f"{words} ± {error:.2f}"


def _average(means: list[float | None]) -> str:
    known = [mean for mean in means if mean is not None]
    return f"{np.mean(known):.2f}" if len(known) == len(means) else ""


def _mean(runs: list[dict[str, Any]], metric: str) -> float | None:
    scores = [one["scores"] for one in runs]
    return None if None in scores else float(np.mean([score[metric] for score in scores]))
