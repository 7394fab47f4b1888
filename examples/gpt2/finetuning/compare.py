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

    Args:
      config: The settings of all runs; `compare`, `seeds` and `learning_rates` say which.
    """
    out = config.out or pathlib.Path("runs/finetune/compare")
    rates = config.learning_rates or (config.learning_rate,)
    prepared = prepare(config)
    metric = prepared.task.metric
    out.mkdir(parents=True, exist_ok=True)

    def result(name: str, rate: float, seed: int) -> dict[str, Any]:
        label = f"{config.task}-{name}-{rate:g}-seed{seed}"
        one = dataclasses.replace(
            config, optimizer=name, learning_rate=rate, seed=seed, compare=(), out=out / label
        )
        wanted = settings(one, prepared.digests) | {"length": prepared.length}
        found = find(out / "results.jsonl", wanted)
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
        scores = [score_of(one) for one in runs]
        summary[name] = {
            "best_rate": best,
            "grid": {f"{rate:g}": _finite(score_of(one)) for rate, one in grid.items()},
            "mean": _finite(float(np.mean(scores))),
            "standard_error": standard_error(scores),
            "scores": [one["scores"] for one in runs],
            "at_edge": len(rates) > 1 and best in (min(rates), max(rates)),
            "memory": runs[0]["memory"],
        }
    record = {
        "command": " ".join(["python -m examples.gpt2.finetune", *sys.argv[1:]]),
        "metric": metric,
        "summary": summary,
    }
    (out / f"{config.task}.json").write_text(json.dumps(record, indent=1) + "\n")
    plots.plot_sensitivity(summary, f"{config.task}, {metric}", out / f"{config.task}.png")
    table = results_table(read_summaries(out))
    (out / "table.md").write_text(table + "\n")
    print(f"\n{table}\n")
    for name, row in summary.items():
        if row["at_edge"]:
            print(f"warning: {name}: the best rate, {row['best_rate']:g}, is at the grid's edge")
    print(f"figure and records in {out}")


def read_summaries(out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The summaries of the tasks that were compared in a folder, by task, in the paper's order."""
    files = {task: out / f"{task}.json" for task in METRICS}
    return {t: json.loads(f.read_text())["summary"] for t, f in files.items() if f.exists()}


def results_table(summaries: dict[str, dict[str, Any]]) -> str:
    """The tasks side by side as a Markdown table, an optimizer a row, below it the paper's.

    Args:
      summaries: By task and optimizer, of which `mean` and `standard_error` are shown.

    Returns:
      The table. An average stands where an optimizer has all tasks of the table.
    """
    tasks = list(summaries)
    header = [f"{task} ({METRICS[task]})" for task in tasks]
    lines = [
        f"| optimizer | {' | '.join(header)} | average |",
        f"| --- |{' ---: |' * (len(tasks) + 1)}",
    ]
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary):
        rows = [summaries[task].get(name, {}) for task in tasks]
        means = [row.get("mean") for row in rows]
        cells = []
        for row, mean in zip(rows, means, strict=True):
            error = row.get("standard_error")
            cells.append(cell(mean, ".2f") + ("" if error is None else f" ± {error:.2f}"))
        lines.append(f"| {' | '.join([name, *cells, _average(means)])} |")
    for name, paper in PAPER.items():
        means = [paper[task] for task in tasks]
        cells = [cell(mean, ".2f") for mean in means]
        lines.append(f"| {' | '.join([f'{name}, in the paper', *cells, _average(means)])} |")
    return "\n".join(lines)


def _average(means: list[float | None]) -> str:
    known = [mean for mean in means if mean is not None]
    return f"{np.mean(known):.2f}" if len(known) == len(means) else ""


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None
