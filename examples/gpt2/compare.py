"""Compares optimizers, each at its own best learning rate.

Every rate is tried with the first seed, the best with the others too. A finished run is one line
of `results.jsonl`; runs with the same settings are not done again, so that an interrupted
comparison goes on where it was, and two processes can fill different parts of one file.
"""

import dataclasses
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from examples.gpt2 import plots, records
from examples.gpt2.config import Config, UsageError, load_data, resolve, settings


def compare(config: Config, run: Callable[..., Any], diverged: type[Exception]) -> None:
    """Runs what is missing; prints the tables, writes `comparison.png` and `comparison.json`.

    Args:
      config: The settings of all runs; `compare`, `seeds` and `learning_rates` say which.
      run: Trains one model: settings to a `run.Result`.
      diverged: What `run` raises when the loss is not finite; that run counts as an infinite loss.
    """
    resolved = resolve(config)
    out, rates = resolved.out, resolved.learning_rates or (resolved.learning_rate,)
    if (out / "settings.json").exists():
        raise UsageError(
            f"--out {out}: this is the folder of one run; give another for comparisons"
        )
    out.mkdir(parents=True, exist_ok=True)
    key = load_data(resolved).key

    def result(name: str, rate: float, seed: int) -> dict[str, Any]:
        label = f"{name}-{rate:g}-seed{seed}"
        one = dataclasses.replace(
            config, optimizer=name, learning_rate=rate, seed=seed, compare=(), out=out / label
        )
        wanted = settings(resolve(one), key)
        found = find(records.read(out / "results.jsonl"), wanted)
        if found is None:
            print(f"-- {name}, peak rate {rate:g}, seed {seed}", flush=True)
            found = finished(one, wanted, run, diverged)
            records.append(out / "results.jsonl", found)
        return found

    summary, curves, used = {}, {}, []
    for name in dict.fromkeys(config.compare):
        grid = {rate: result(name, rate, config.seed) for rate in rates}
        best = min(rates, key=lambda rate: loss_of(grid[rate]))
        seeds = range(config.seed, config.seed + config.seeds)
        runs = [result(name, best, seed) for seed in seeds]
        losses = [loss_of(one) for one in runs]
        summary[name] = {
            "best_rate": best,
            "grid": {f"{rate:g}": _finite(loss_of(one)) for rate, one in grid.items()},
            "mean": _finite(float(np.mean(losses))),
            "standard_error": standard_error(losses),
            "losses": [_finite(loss) for loss in losses],
            "at_edge": len(rates) > 1 and best in (min(rates), max(rates)),
            "memory": runs[0]["memory"],
        }
        curves[name] = [one["curve"] for one in runs if math.isfinite(loss_of(one))]
        used += [*grid.values(), *runs[1:]]
    command = " ".join(["python -m examples.gpt2.train", *sys.argv[1:]])
    record = {"command": command, "summary": summary, "runs": used}
    plots.plot_comparison(curves, out / "comparison.png")
    temporary = out / "comparison.json.partial"
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.rename(out / "comparison.json")
    table = "\n\n".join([results_table(summary), grid_table(summary)])
    (out / "comparison.md").write_text(table + "\n")
    print(f"\n{table}\n")
    for name, row in summary.items():
        if row["at_edge"]:
            print(f"warning: {name}: the best rate, {row['best_rate']:g}, is at the grid's edge")
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


def find(rows: Iterable[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The finished run with these settings, if it is among the records."""

    def written(used: dict[str, Any]) -> str:
        return json.dumps(used, sort_keys=True)  # where 1 is not 1.0: a rank, a fraction

    return next((row for row in rows if written(row["settings"]) == written(wanted)), None)


def loss_of(row: dict[str, Any]) -> float:
    """The final validation loss; infinite for a run that diverged."""
    return math.inf if row["validation_loss"] is None else row["validation_loss"]


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__}


def finished(
    config: Config, used: dict[str, Any], run: Callable[..., Any], diverged: type[Exception]
) -> dict[str, Any]:
    """Trains one model, and returns its record.

    Args:
      config: The settings.
      used: What `settings` makes of them.
      run: Trains it.
      diverged: What `run` raises when the loss is not finite.
    """
    result: dict[str, Any] = {"validation_loss": None, "curve": [], "memory": None, "seconds": None}
    try:
        result = run(config, keep=False)._asdict()
    except diverged as error:
        print(f"diverged: {error}")
    jax.clear_caches()  # each run compiles its own functions
    return {**result, "settings": used, "versions": versions()}


def standard_error(losses: list[float]) -> float | None:
    """The standard error of the mean; None of a single number, or where one is not finite."""
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    return float(np.std(losses, ddof=1) / math.sqrt(len(losses)))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def cell(value: float | None, form: str, missing: str = "") -> str:
    """A cell of a table: a number in a form, or what stands where there is none."""
    return missing if value is None else format(value, form)
