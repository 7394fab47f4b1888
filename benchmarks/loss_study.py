"""Trains what docs/results.md compares: `python -m benchmarks.loss_study`.

The best peak rate of each entry of `loss_entries` is looked for by factors of 2, of some then of
its square root, until it has a worse one on either side; where the first seed finds rates close,
three seeds decide (`tune`). A finished run is a line of `results/loss/study.jsonl` and is never
done again. The command can be stopped: a run then saves a checkpoint, from which the same command
goes on. Several can share the work. `python -m benchmarks.report` makes the page.
"""

import contextlib
import functools
import hashlib
import math
import os
import pathlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tyro
from tqdm import tqdm

from benchmarks.loss_entries import GROUPS, GROUPS_OF, SETTINGS, TUNED_IN, Entry
from examples.gpt2 import rate_grid
from examples.gpt2.command import exit_code
from examples.gpt2.compare import loss_of, trained
from examples.gpt2.config import Config, load_data, resolve, settings
from examples.gpt2.loop import Terminated
from examples.gpt2.metrics import DivergedError
from examples.gpt2.run import run

STUDY = pathlib.Path(__file__).parents[1] / "results" / "loss" / "study.jsonl"

CLOSE = 0.03  # nats: seeds differ by about as much in how they rank neighbouring rates
DECIDING = 3  # seeds whose mean decides between close rates

_CHECKPOINT_EVERY = 500  # steps; an interruption saves one in any case

Lookup = Callable[[float, int], dict[str, Any] | None]  # of a peak rate and a seed: the record


class Tuned(NamedTuple):
    """An entry's runs: of each rate those of its seeds, and those of all seeds at the best."""

    grid: dict[float, list[dict[str, Any]]]
    rate: float
    runs: list[dict[str, Any]]


def tune(entry: Entry, result: Lookup) -> Tuned | None:
    """Looks for the best rate of an entry, and runs its seeds there.

    Rates are tried with the first seed by factors of 2, of an entry that is `finer` then by
    factors of its square root, until the best has a worse one on either side. One seed does not
    tell rates apart whose losses are close: those within `CLOSE` of the least run with three, if
    the entry has as many, and the mean decides.

    Args:
      entry: What is trained.
      result: The record of a run, done now if need be; None where there is none.

    Returns:
      Its runs; None where one is missing.
    """
    runs: dict[tuple[int, int], dict[str, Any]] = {}  # by place and seed

    def loss(place: int, seed: int = 0) -> float:
        if (place, seed) not in runs:
            found = result(_rate_at(entry, place), seed)
            if found is None:
                raise _MissingError
            runs[place, seed] = found
        return loss_of(runs[place, seed])

    def mean(place: int) -> float:
        return statistics.mean(loss(place, seed) for seed in range(min(entry.seeds, DECIDING)))

    grid: dict[int, float] = {}  # losses of the first seed

    def least() -> int:
        return min(grid, key=lambda place: grid[place])

    def decided() -> int:
        close = [place for place in grid if grid[place] < grid[least()] + CLOSE]
        return min(close or [least()], key=mean)

    def between_worse(best: int, step: int, choose: Callable[[], int]) -> int:
        while wanted := [x for x in (best, best - step, best + step) if x not in grid]:
            grid.update({place: loss(place) for place in wanted})
            best = choose()
        return best

    best, steps = 0, (2, 1) if entry.finer else (2,)
    try:
        for step in steps:
            best = between_worse(best, step, least)
        best = between_worse(decided(), steps[-1], decided)
        for seed in range(entry.seeds):
            loss(best, seed)
    except _MissingError:
        return None
    by_rate = {
        _rate_at(entry, place): [runs[key] for key in sorted(runs) if key[0] == place]
        for place in sorted(grid)
    }
    rate = _rate_at(entry, best)
    return Tuned(by_rate, rate, by_rate[rate])


class _MissingError(Exception):
    """A run is not among the records."""


def _rate_at(entry: Entry, place: int) -> float:
    """The peak rate so many factors of the square root of 2 above an entry's first."""
    return entry.rate * 2 ** (place / 2)


def config_of(entry: Entry, setting: str, rate: float, seed: int) -> Config:
    """The configuration of one run."""
    digest = hashlib.sha256(repr((entry.hyper, entry.options)).encode()).hexdigest()[:12]
    name = f"{setting}-{entry.optimizer}-{rate:g}-{seed}-{digest}"
    return Config(
        optimizer=entry.optimizer,
        learning_rate=rate,
        seed=seed,
        hyper=entry.hyper,
        adapprox=entry.options,
        out=pathlib.Path("runs/study") / name,
        checkpoint_every=_CHECKPOINT_EVERY,
        **SETTINGS[setting],
    )


def recorded(entry: Entry, setting: str, key: str, rows: list[dict[str, Any]]) -> Lookup:
    """Finds the runs of an entry among records.

    Args:
      entry: What was trained.
      setting: Where.
      key: The digest of its text.
      rows: The records.
    """

    def result(rate: float, seed: int) -> dict[str, Any] | None:
        return rate_grid.find(rows, settings(resolve(config_of(entry, setting, rate, seed)), key))

    return result


def tuned(entry: Entry, setting: str, look_up: Callable[[str], Lookup]) -> Tuned | None:
    """The runs of an entry in a setting, at the best rate there or where rates are taken from.

    Args:
      entry: What is trained.
      setting: Where.
      look_up: From a setting to the runs there.

    Returns:
      As `tune`.
    """
    if setting not in TUNED_IN:
        return tune(entry, look_up(setting))
    elsewhere = tune(entry, look_up(TUNED_IN[setting]))
    if elsewhere is None:
        return None
    runs = [look_up(setting)(elsewhere.rate, seed) for seed in range(entry.seeds)]
    whole = [run for run in runs if run is not None]
    return Tuned({}, elsewhere.rate, whole) if len(whole) == len(runs) else None


def entries(
    groups: tuple[str, ...], where: tuple[str, ...], labels: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, Entry]]:
    """Setting, label and entry of all that is asked for; no labels for all."""
    for setting in where:
        for group in GROUPS_OF[setting]:
            for label, entry in GROUPS[group].items():
                if group in groups and (not labels or label in labels):
                    yield setting, label, entry


def main(
    groups: tuple[str, ...] = tuple(GROUPS),
    where: tuple[str, ...] = tuple(SETTINGS),
    labels: tuple[str, ...] = (),
    minutes: float = math.inf,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Trains what is missing.

    Args:
      groups: Of `loss_entries`.
      where: Settings of `loss_entries`.
      labels: Of entries in these groups; none for all.
      minutes: In all; then the run at work saves and ends.
      part: Which part of the entries is worked on, from 0.
      parts: Into how many they are divided: one for each process.
    """
    all_labels = [label for group in GROUPS.values() for label in group]
    for name, given, allowed in (
        ("groups", groups, GROUPS),
        ("where", where, SETTINGS),
        ("labels", labels, all_labels),
    ):
        unknown = [x for x in given if x not in allowed]
        if unknown:
            raise SystemExit(f"{name} has {unknown}; allowed: {'; '.join(allowed)}.")
    if not 0 <= part < parts:
        raise SystemExit(f"part is {part}; allowed: from 0 to parts - 1 = {parts - 1}.")
    chosen = _share(list(entries(groups, where, labels)), part, parts)
    end = time.monotonic() + 60 * minutes
    with _terminated_after(60 * minutes):
        code = exit_code(lambda: _train(chosen, end), "the same command")
    if code:
        raise SystemExit(code)


def _share(
    chosen: list[tuple[str, str, Entry]], part: int, parts: int
) -> list[tuple[str, str, Entry]]:
    """One process's part; what begins with the same run is one process's, whatever its labels."""
    first_runs = [config_of(entry, setting, entry.rate, 0).out for setting, _, entry in chosen]
    order = {out: number for number, out in enumerate(dict.fromkeys(first_runs))}
    shared = zip(first_runs, chosen, strict=True)
    return [one for out, one in shared if order[out] % parts == part]


@contextlib.contextmanager
def _terminated_after(seconds: float) -> Iterator[None]:
    """Within, this process gets a SIGTERM when the time is up, at which a run saves."""
    if math.isinf(seconds):
        yield
        return
    alarm = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    if seconds > 0:
        alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def _train(chosen: list[tuple[str, str, Entry]], end: float) -> None:
    """Trains what is missing of settings, labels and entries; no run begins after `end`."""
    where = {setting for setting, *_ in chosen}
    where |= {TUNED_IN[setting] for setting in where if setting in TUNED_IN}
    keys = {setting: load_data(resolve(Config(**SETTINGS[setting]))).key for setting in where}

    def made(entry: Entry, setting: str) -> Lookup:
        """Finds the runs of an entry, and makes those that are missing."""

        def result(rate: float, seed: int) -> dict[str, Any] | None:
            config = config_of(entry, setting, rate, seed)
            used = settings(resolve(config), keys[setting])

            def make() -> dict[str, Any]:
                if time.monotonic() >= end:
                    raise Terminated("the time is up")
                return {"setting": setting, **trained(config, run, DivergedError)}

            words = f"{setting}, {entry.optimizer}, peak rate {rate:g}, seed {seed}"
            return rate_grid.recorded(STUDY, used, words, make)

        return result

    with tqdm(chosen, unit="entry", disable=None) as bar:
        for setting, label, entry in bar:
            bar.set_description(f"{label}, {setting}")
            tuned(entry, setting, functools.partial(made, entry))


if __name__ == "__main__":
    tyro.cli(main)
