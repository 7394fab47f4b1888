"""Trains what docs/results.md compares: `python -m benchmarks.loss_study`.

The best peak rate of each entry of `loss_entries` is looked for with the first seed, by factors of
two, until it has a worse one on either side; then the other seeds run at it. A finished run is a
line of `results/loss/study.jsonl` and is never done again, so that the command can be stopped and
goes on; several can share the work. `python -m benchmarks.report` makes the page.
"""

import hashlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tyro
from tqdm import tqdm

from benchmarks.loss_entries import GROUPS, ON_BOTH_TEXTS, TEXTS, Entry
from examples.gpt2 import records
from examples.gpt2.compare import find, finished, loss_of
from examples.gpt2.config import Config, load_data, resolve, settings
from examples.gpt2.metrics import DivergedError
from examples.gpt2.run import run

STUDY = pathlib.Path(__file__).parents[1] / "results" / "loss" / "study.jsonl"

Lookup = Callable[[float, int], dict[str, Any] | None]  # of a peak rate and a seed: the record


class Tuned(NamedTuple):
    """An entry's runs: those of the first seed by rate, and those of all seeds at the best."""

    grid: dict[float, dict[str, Any]]
    rate: float
    runs: list[dict[str, Any]]


def tune(entry: Entry, result: Lookup) -> Tuned | None:
    """Looks for the best rate of an entry, and runs its seeds there.

    Args:
      entry: What is trained.
      result: The record of a run, done now if need be; None where there is none.

    Returns:
      Its runs; None where one is missing.
    """
    grid: dict[float, dict[str, Any]] = {}
    wanted = [entry.rate, entry.rate / 2, entry.rate * 2]
    while wanted:
        for rate in wanted:
            found = result(rate, 0)
            if found is None:
                return None
            grid[rate] = found
        best = min(grid, key=lambda rate: loss_of(grid[rate]))
        wanted = [rate for rate in (best / 2, best * 2) if rate not in grid]
    runs = [result(best, seed) for seed in range(entry.seeds)]
    whole = [run for run in runs if run is not None]
    return Tuned(dict(sorted(grid.items())), best, whole) if len(whole) == len(runs) else None


def config_of(entry: Entry, text: str, rate: float, seed: int) -> Config:
    """The settings of one run."""
    digest = hashlib.sha256(repr((entry.hyper, entry.options)).encode()).hexdigest()[:12]
    name = f"{text}-{entry.optimizer}-{rate:g}-{seed}-{digest}"
    return Config(
        optimizer=entry.optimizer,
        data=TEXTS[text],
        learning_rate=rate,
        seed=seed,
        hyper=entry.hyper,
        adapprox=entry.options,
        out=pathlib.Path("runs/study") / name,
    )


def lookup(entry: Entry, text: str, key: str, rows: Callable[[], list[dict[str, Any]]]) -> Lookup:
    """Finds the runs of an entry.

    Args:
      entry: What was trained.
      text: On which text.
      key: The text's digest.
      rows: Reads the records, which grow while others run.
    """

    def result(rate: float, seed: int) -> dict[str, Any] | None:
        wanted = settings(resolve(config_of(entry, text, rate, seed)), key)
        return find(rows(), wanted)

    return result


def entries(groups: tuple[str, ...], texts: tuple[str, ...]) -> Iterator[tuple[str, str, Entry]]:
    """Text, label and entry of all that is asked for."""
    for text in texts:
        for group in groups:
            if text == "code" or group in ON_BOTH_TEXTS:
                yield from ((text, label, entry) for label, entry in GROUPS[group].items())


def main(
    groups: tuple[str, ...] = tuple(GROUPS),
    texts: tuple[str, ...] = tuple(TEXTS),
    minutes: float = math.inf,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Trains what is missing.

    Args:
      groups: Of `loss_entries`.
      texts: Of `loss_entries`.
      minutes: No run begins after so many.
      part: Which part of the entries is worked on, from 0.
      parts: Into how many they are divided: one for each process.
    """
    for name, given, allowed in (("groups", groups, GROUPS), ("texts", texts, TEXTS)):
        unknown = [x for x in given if x not in allowed]
        if unknown:
            raise SystemExit(f"{name} has {unknown}; allowed: {', '.join(allowed)}.")
    if not 0 <= part < parts:
        raise SystemExit(f"part is {part}; allowed: from 0 to parts - 1 = {parts - 1}.")
    end = time.monotonic() + 60 * minutes
    keys = {text: load_data(resolve(Config(data=TEXTS[text]))).key for text in texts}
    chosen = list(entries(groups, texts))[part::parts]
    with tqdm(chosen, unit="entry", disable=None) as bar:
        for text, label, entry in bar:
            bar.set_description(f"{label}, {text}")
            recorded = lookup(entry, text, keys[text], lambda: records.read(STUDY))

            def result(
                rate: float,
                seed: int,
                recorded: Lookup = recorded,
                text: str = text,
                entry: Entry = entry,
            ) -> dict[str, Any] | None:
                found = recorded(rate, seed)
                if found is None and time.monotonic() < end:
                    config = config_of(entry, text, rate, seed)
                    used = settings(resolve(config), keys[text])
                    found = finished(config, used, run, DivergedError)
                    records.append(STUDY, {"text": text, **found})
                return found

            tune(entry, result)


if __name__ == "__main__":
    tyro.cli(main)
