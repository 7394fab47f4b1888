"""Runs of a grid of learning rates: kept in a file of records, chosen among, and summed up.

Every rate is tried with the first seed, the best with the others too. A finished run is one line
of the records; runs with the same settings are not done again, so that an interrupted comparison
goes on where it was, and two processes can fill different parts of one file.
"""

import functools
import json
import math
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from examples.gpt2 import records
from examples.gpt2.config import UsageError

Record = dict[str, Any]
Score = Callable[[Record], float]  # of a run: higher is better, minus infinity if it diverged


class Runs(NamedTuple):
    """An optimizer's runs: those of the first seed by rate, and those of all seeds at the best."""

    grid: dict[float, Record]
    best_rate: float
    seeds: list[Record]


def new_folder(out: pathlib.Path) -> None:
    """Makes the folder of a comparison.

    Raises:
      UsageError: It is that of one run.
    """
    if (out / "settings.json").exists():
        raise UsageError(
            f"--out {out}: this is the folder of one run; give another for comparisons"
        )
    out.mkdir(parents=True, exist_ok=True)


def recorded(file: pathlib.Path, wanted: Record, words: str, make: Callable[[], Record]) -> Record:
    """The run with these settings: from the records, or made now and added to them.

    Args:
      file: The records, read anew because others may write to it.
      wanted: All settings that decide the result.
      words: What is printed before it is made.
      make: Makes what is recorded beside the settings and versions.
    """
    found = find(records.read(file), wanted)
    if found is None:
        print(f"-- {words}", flush=True)
        found = {**make(), "settings": wanted, "versions": versions()}
        jax.clear_caches()  # each run compiles its own functions
        records.append(file, found)
    return found


def find(rows: Iterable[Record], wanted: Record) -> Record | None:
    """The finished run with these settings, if it is among the records."""

    def written(used: Any) -> str:
        return json.dumps(used, sort_keys=True)  # where 1 is not 1.0: a rank, a fraction

    return next((row for row in rows if written(row.get("settings")) == written(wanted)), None)


def versions() -> dict[str, str | None]:
    """What the numbers were made with."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "revision": _revision(),
    }


@functools.cache
def _revision() -> str | None:
    """The commit of this clone, with a plus where code was changed since; None outside of one."""
    root = pathlib.Path(__file__).parents[2]

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "adapprox_jax", "benchmarks", "examples")
    except OSError:
        return None
    return commit.stdout.strip() + "+" * changed.returncode if commit.returncode == 0 else None


def runs_of(
    result: Callable[[float, int], Record],
    rates: Sequence[float],
    seeds: Sequence[int],
    score: Score,
) -> Runs:
    """Tries the rates with the first seed, and the best of them with all.

    Args:
      result: The record of a run at a rate with a seed.
      rates: To try; of equals the earlier is taken.
      seeds: At least one.
      score: By which the best is chosen.
    """
    grid = {rate: result(rate, seeds[0]) for rate in rates}
    best = max(rates, key=lambda rate: score(grid[rate]))
    return Runs(grid, best, [result(best, seed) for seed in seeds])


def summary_of(runs: Runs, value: Score) -> Record:
    """What the tables and figures show of an optimizer.

    Args:
      runs: Its runs.
      value: What is shown of one; not finite where it diverged.
    """
    rates = runs.grid.keys()
    return {
        "best_rate": runs.best_rate,
        "grid": {f"{rate:g}": finite(value(run)) for rate, run in runs.grid.items()},
        "standard_error": standard_error([value(run) for run in runs.seeds]),
        "at_edge": len(rates) > 1 and runs.best_rate in (min(rates), max(rates)),
        "memory": runs.seeds[0]["memory"],
    }


def print_edges(summary: Mapping[str, Record]) -> None:
    """Warns of optimizers whose best rate has a neighbour on one side alone."""
    for name, row in summary.items():
        if row["at_edge"]:
            print(f"warning: {name}: the best rate, {row['best_rate']:g}, is at the grid's edge")


def standard_error(values: list[float]) -> float | None:
    """The standard error of the mean; None of a single number, or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def finite(value: float) -> float | None:
    """A number, or None in place of one that JSON cannot hold."""
    return value if math.isfinite(value) else None


def cell(value: float | None, form: str, missing: str = "") -> str:
    """A cell of a table: a number in a form, or what stands where there is none."""
    return missing if value is None else format(value, form)
