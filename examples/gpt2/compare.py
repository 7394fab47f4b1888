"""Compares optimizers that train from the start, each at its own best learning rate."""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from examples.gpt2 import plots, records
from examples.gpt2.checkpoints import any_saved
from examples.gpt2.config import Config, load_data, resolve, settings
from examples.gpt2.rate_grid import (
    cell,
    finite,
    new_folder,
    print_edges,
    recorded,
    runs_of,
    summary_of,
)


def compare(config: Config, run: Callable[..., Any], diverged: type[Exception]) -> None:
    """Runs what is missing; prints the tables, writes `comparison.png` and `comparison.json`.

    Args:
      config: The settings of all runs; `compare`, `seeds` and `learning_rates` say which.
      run: Trains one model: settings to a `run.Result`.
      diverged: What `run` raises when the loss is not finite; that run counts as an infinite loss.
    """
    resolved = resolve(config)
    out, rates = resolved.out, resolved.learning_rates or (resolved.learning_rate,)
    key = load_data(resolved).key
    new_folder(out)

    def result(name: str, rate: float, seed: int) -> dict[str, Any]:
        label = f"{name}-{rate:g}-seed{seed}"
        one = dataclasses.replace(
            config, optimizer=name, learning_rate=rate, seed=seed, compare=(), out=out / label
        )
        wanted = settings(resolve(one), key)
        words = f"{name}, peak rate {rate:g}, seed {seed}"
        return recorded(out / "results.jsonl", wanted, words, lambda: trained(one, run, diverged))

    seeds = range(config.seed, config.seed + config.seeds)
    summary, curves, used = {}, {}, []
    for name in dict.fromkeys(config.compare):
        runs = runs_of(functools.partial(result, name), rates, seeds, lambda row: -loss_of(row))
        losses = [loss_of(one) for one in runs.seeds]
        summary[name] = {
            **summary_of(runs, loss_of),
            "mean": finite(float(np.mean(losses))),
            "losses": [finite(loss) for loss in losses],
        }
        curves[name] = [one["curve"] for one in runs.seeds if math.isfinite(loss_of(one))]
        used += [*runs.grid.values(), *runs.seeds[1:]]
    command = " ".join(["python -m examples.gpt2.train", *sys.argv[1:]])
    record = {"command": command, "summary": summary, "runs": used}
    plots.plot_comparison(curves, out / "comparison.png")
    records.write_whole(out / "comparison.json", json.dumps(record, indent=1) + "\n")
    table = "\n\n".join([results_table(summary), grid_table(summary)])
    (out / "comparison.md").write_text(table + "\n")
    print(f"\n{table}\n")
    print_edges(summary)
    print(f"figure and records in {out}")


def results_table(summary: dict[str, dict[str, Any]]) -> str:
    """The comparison as a Markdown table, an optimizer a row."""
    lines = [
        "| optimizer | best peak rate | validation loss | standard error | runs | state MiB "
        "| parameters factored | second moment / dense |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in summary.items():
        memory = row["memory"] or {}
        cells = [
            name,
            f"{row['best_rate']:g}",
            cell(row["mean"], ".4f", "diverged"),
            cell(row["standard_error"], ".4f"),
            str(len(row["losses"])),
            cell(memory.get("state_mib"), ".2f"),
            cell(memory.get("factored_share"), ".1%"),
            cell(memory.get("second_moment_ratio"), ".1%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grid_table(summary: dict[str, dict[str, Any]]) -> str:
    """The first seed's validation loss by peak rate as a Markdown table; empty where not tried."""
    rates = sorted({rate for row in summary.values() for rate in row["grid"]}, key=float)
    lines = [f"| first seed | {' | '.join(rates)} |", f"| --- |{' ---: |' * len(rates)}"]
    for name, row in summary.items():
        grid = row["grid"]
        cells = [cell(grid[rate], ".4f", "diverged") if rate in grid else "" for rate in rates]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def loss_of(row: dict[str, Any]) -> float:
    """The final validation loss; infinite for a run that diverged."""
    return math.inf if row["validation_loss"] is None else row["validation_loss"]


def trained(config: Config, run: Callable[..., Any], diverged: type[Exception]) -> dict[str, Any]:
    """Trains one model, on from where it was interrupted if it was; returns what is recorded.

    Args:
      config: The settings.
      run: Trains it.
      diverged: What `run` raises when the loss is not finite.
    """
    config = dataclasses.replace(config, resume=_is_interrupted(config))
    try:
        result: dict[str, Any] = run(config, keep=False)._asdict()
    except diverged as error:
        print(f"diverged: {error}")
        return {"validation_loss": None, "curve": [], "memory": None, "seconds": None}
    return result


def _is_interrupted(config: Config) -> bool:
    """Whether the folder of a run holds a checkpoint of one with these very settings."""
    resolved = resolve(config)
    try:
        before = json.loads((resolved.out / "settings.json").read_text())
    except (OSError, ValueError):
        return False
    used = settings(resolved, load_data(resolved).key)
    return any_saved(resolved.out) and before == json.loads(json.dumps(used))
