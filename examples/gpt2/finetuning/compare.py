"""Compares optimizers at a task, each at its own best learning rate; a table of all tasks.

Every rate is tried with the first seed, the best with the others too. A finished run is one line
of `results.jsonl`; runs with the same settings are not done again.
"""

import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from examples.gpt2 import records
from examples.gpt2.compare import cell, find, standard_error, versions
from examples.gpt2.config import UsageError
from examples.gpt2.finetuning import plots
from examples.gpt2.finetuning.config import Config, settings
from examples.gpt2.finetuning.run import prepare, run
from examples.gpt2.finetuning.tasks import METRICS
from examples.gpt2.metrics import DivergedError

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
    checkpoint of its own.

    Args:
      config: The settings of all runs; `compare`, `seeds` and `learning_rates` say which.

    Raises:
      UsageError: The folder is that of one run, or what it has is of other data or settings.
    """
    out = config.out or pathlib.Path("runs/finetune/compare")
    if (out / "settings.json").exists():
        raise UsageError(
            f"--out {out}: this is the folder of one run; give another for comparisons"
        )
    rates = config.learning_rates or (config.learning_rate,)
    prepared = prepare(config)
    metric = prepared.task.metric
    shared = {"data": prepared.digests["data"], "epochs": config.epochs, "length": prepared.length}
    before = read_records(out).get(config.task, {"of": shared, "summary": {}})
    if before["of"] != shared:
        raise UsageError(
            f"--out {out}: its {config.task}.json is of {before['of']}, this of {shared};"
            " give another folder"
        )
    out.mkdir(parents=True, exist_ok=True)

    def result(name: str, rate: float, seed: int) -> dict[str, Any]:
        label = f"{config.task}-{name}-{rate:g}-seed{seed}"
        one = dataclasses.replace(
            config, optimizer=name, learning_rate=rate, seed=seed, compare=(), out=out / label
        )
        wanted = settings(one, prepared.digests) | {"length": prepared.length}
        found = find(records.read(out / "results.jsonl"), wanted)
        if found is None:
            print(f"-- {config.task}, {name}, peak rate {rate:g}, seed {seed}", flush=True)
            found = {"settings": wanted, "versions": versions()}
            try:
                done = run(one, prepared, keep=False)
                found |= {"scores": done.scores, "curve": done.curve, "memory": done.memory}
            except DivergedError as error:
                print(f"diverged: {error}")
                found |= {"scores": None, "curve": [], "memory": None}
            jax.clear_caches()  # each run compiles its own functions
            records.append(out / "results.jsonl", found)
        return found

    def score_of(row: dict[str, Any]) -> float:
        return -math.inf if row["scores"] is None else row["scores"][metric]

    summary = {}
    for name in dict.fromkeys(config.compare):
        grid = {rate: result(name, rate, config.seed) for rate in rates}
        best = max(rates, key=lambda rate: score_of(grid[rate]))
        runs = [result(name, best, s) for s in range(config.seed, config.seed + config.seeds)]
        converted = config.from_adam and name.startswith("adapprox")
        summary[f"{name}, AdamW's state" if converted else name] = {
            "checkpoint": prepared.digests["checkpoint"],
            "best_rate": best,
            "grid": {f"{rate:g}": _finite(score_of(one)) for rate, one in grid.items()},
            "means": {m: _mean(runs, m) for m in METRICS[config.task]},
            "standard_error": standard_error([score_of(one) for one in runs]),
            "scores": [one["scores"] for one in runs],
            "at_edge": len(rates) > 1 and best in (min(rates), max(rates)),
            "memory": runs[0]["memory"],
        }
    record = {
        "command": " ".join(["python -m examples.gpt2.finetune", *sys.argv[1:]]),
        "of": shared,
        "summary": before["summary"] | summary,
    }
    _write(out / f"{config.task}.json", json.dumps(record, indent=1) + "\n")
    plots.plot_sensitivity(
        record["summary"], f"{config.task}, {metric}", out / f"{config.task}.png"
    )
    summaries = {task: of["summary"] for task, of in read_records(out).items()}
    table = results_table(summaries)
    _write(out / "table.md", table + "\n")
    print(f"\n{table}\n")
    for name, row in summary.items():
        if row["at_edge"]:
            print(f"warning: {name}: the best rate, {row['best_rate']:g}, is at the grid's edge")
    print(f"figure and records in {out}")


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
                found[task] = {"of": record["of"], "summary": record["summary"]}
            except (ValueError, KeyError, TypeError):
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


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _write(file: pathlib.Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.rename(file)
