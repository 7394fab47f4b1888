"""What the runs of `loss_study` came to: a summary for each entry whose runs are all there."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.loss_entries import AS_OURS, FASTER_ELSEWHERE, GROUPS, SETTINGS, Entry
from benchmarks.loss_study import Lookup, config_of, entries, recorded, tuned
from examples.gpt2.compare import loss_of
from examples.gpt2.config import resolve, settings
from examples.gpt2.rate_grid import standard_error

TEXTS = ("code", "prose")  # the settings that all are compared in
# What a reader looks for first.
FIRST = (
    *("adapprox", "adapprox, 8 bits", "adapprox, 4 bits"),
    *("AdamW, b2 0.95, clipped", "AdamW, b2 0.999, clipped"),
    *("AdamW in 8 bits, b2 0.999, clipped", "Adafactor", "Adafactor, 4 bits"),
    *(f"adapprox, 4 bits, {words}{FASTER_ELSEWHERE}" for words in ("", "b2 1 - t^-0.8, ")),
    f"AdamW, b2 0.999, clipped, {FASTER_ELSEWHERE}",
    f"Adafactor, 4 bits, {FASTER_ELSEWHERE}",
    *("adapprox_muon", "adapprox_muon, 8 bits", "adapprox_muon, 4 bits"),
    "adapprox_muon, no average",
    *("adapprox_muon, b1 0.95 and one rate", "Muon", AS_OURS, "NorMuon", "AdaMuon"),
)

# In full precision, clipped and not.
ADAMW = [label for label, entry in GROUPS["opponents"].items() if entry.optimizer == "adamw"]
ADAMW_WITH_ONE_RATE = [label for label in ADAMW if FASTER_ELSEWHERE not in label]


class Summary(NamedTuple):
    """What the runs of one entry on one text came to."""

    rate: float
    losses: dict[int, float]  # by seed, at the best rate; infinite where one diverged
    tried: dict[float, list[float]]  # by rate, of the first seeds
    finer: bool  # whether rates were tried by factors of the square root of 2
    bytes_a_parameter: float  # NaN where all runs diverged
    curves: list[list[tuple[int, float]]]

    @property
    def mean(self) -> float:
        """Of the losses over the seeds."""
        return statistics.mean(self.losses.values())

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None of one seed."""
        return standard_error(list(self.losses.values()))


Results = Mapping[tuple[str, str], Summary]  # by setting and label


def difference(one: Summary, other: Summary) -> tuple[float, float | None, int]:
    """Mean paired difference over the seeds of both, NaN if one diverged; its error; how many."""
    seeds = sorted(one.losses.keys() & other.losses.keys())
    differences = [one.losses[seed] - other.losses[seed] for seed in seeds]
    if not differences or not all(map(math.isfinite, differences)):
        return math.nan, None, len(seeds)
    return statistics.mean(differences), standard_error(differences), len(seeds)


def summarize(rows: list[dict[str, Any]]) -> Results:
    """All entries whose runs are all among the records.

    Raises:
      ValueError: A setting has records of two texts.
    """
    keys = texts(rows)
    found = {}
    for setting, label, entry in entries(tuple(GROUPS), tuple(SETTINGS)):

        def look_up(where: str, entry: Entry = entry) -> Lookup:
            return recorded(entry, where, keys.get(where, ""), rows)

        runs = tuned(entry, setting, look_up)
        if runs is None:
            continue
        memories = [run["memory"] for run in runs.runs if run["memory"] is not None]
        found[setting, label] = Summary(
            runs.rate,
            {run["settings"]["seed"]: loss_of(run) for run in runs.runs},
            {rate: [loss_of(run) for run in at_one] for rate, at_one in runs.grid.items()},
            entry.finer,
            memories[0]["state_mib"] * 2**20 / memories[0]["parameters"] if memories else math.nan,
            [run["curve"] for run in runs.runs],
        )
    return found


def rows_of_entries(
    rows: list[dict[str, Any]],
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """All runs of each entry, by setting and label, whether or not others are still missing.

    Raises:
      ValueError: A setting has records of two texts.
    """

    def without_rate_and_seed(used: dict[str, Any]) -> str:
        varying = "learning_rate", "min_learning_rate", "seed"
        return json.dumps({k: v for k, v in used.items() if k not in varying}, sort_keys=True)

    of_settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["setting"], without_rate_and_seed(row["settings"])
        of_settings.setdefault(key, []).append(row)
    keys, found = texts(rows), {}
    for setting, label, entry in entries(tuple(GROUPS), tuple(SETTINGS)):
        config = resolve(config_of(entry, setting, entry.rate, seed=0))
        used = without_rate_and_seed(settings(config, keys.get(setting, "")))
        if (setting, used) in of_settings:
            found[setting, label] = of_settings[setting, used]
    return found


def losses_by_rate(rows: list[dict[str, Any]]) -> dict[float, list[float]]:
    """The losses of the runs of one entry by rate, rising."""
    by_rate: dict[float, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["settings"]["learning_rate"]):
        by_rate.setdefault(row["settings"]["learning_rate"], []).append(loss_of(row))
    return by_rate


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The digest of the text of each setting.

    Raises:
      ValueError: A setting has records of two texts, as another Python's standard library is.
    """
    keys: dict[str, str] = {}
    for row in rows:
        setting, key = row["setting"], row["settings"]["data"]
        if keys.setdefault(setting, key) != key:
            raise ValueError(f"{setting} has runs on two texts: {keys[setting]} and {key}")
    return keys


def lowest(results: Results, text: str, labels: Iterable[str]) -> str | None:
    """The label with the least mean loss on a text, of those that ran with the most seeds."""
    known = {label: results[text, label] for label in labels if (text, label) in results}
    most = max((len(one.losses) for one in known.values()), default=0)
    whole = [label for label, one in known.items() if len(one.losses) == most]
    return min(whole, key=lambda label: known[label].mean, default=None)


def best_adamw(results: Results, text: str) -> str | None:
    """The label of the AdamW with the least loss on a text."""
    return lowest(results, text, ADAMW)


def columns_of(curves: list[list[tuple[int, float]]]) -> list[list[float]]:
    """The losses of all seeds at each validation."""
    return [[loss for _, loss in at] for at in zip(*curves, strict=True)]
