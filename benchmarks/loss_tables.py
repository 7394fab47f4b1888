"""What the runs of `loss_study` came to: summaries, tables in Markdown and a picture."""

import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import records

STUDY = records.RESULTS / "loss" / "study.jsonl"


class Summary(NamedTuple):
    """The runs of one contender at its best peak rate."""

    rate: float
    losses: dict[int, float]  # by seed; infinite where a run diverged
    bytes_a_parameter: float  # of optimizer state; NaN where all runs diverged

    @property
    def mean(self) -> float:
        """Of the losses."""
        return statistics.mean(self.losses.values())


Results = Mapping[tuple[str, str], Summary]  # by setting and contender


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs of a file, one a line. A line that a stopped process left unfinished is passed over.

    Args:
      path: The file; its fields are explained in `results/loss/README.md`.
    """
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def loss_of(row: Mapping[str, Any]) -> float:
    """The final validation loss of a run; infinite if it diverged."""
    return math.inf if row["validation_loss"] is None else row["validation_loss"]


def summarize(rows: Iterable[Mapping[str, Any]]) -> Results:
    """The best peak rate of each contender, and what its seeds came to there.

    The best rate is the one with the least mean loss, among those that ran with the most seeds.
    """
    runs: dict[tuple[str, str], dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        by_rate = runs.setdefault((row["setting"], row["contender"]), {})
        by_rate.setdefault(row["settings"]["learning_rate"], []).append(row)
    found = {}
    for key, by_rate in runs.items():

        def order(rate: float, by_rate: Any = by_rate) -> tuple[int, float]:
            of_rate = by_rate[rate]
            return -len(of_rate), statistics.mean(map(loss_of, of_rate))

        best = min(by_rate, key=order)
        sizes = [
            row["memory"]["state_mib"] * records.MIB / row["memory"]["parameters"]
            for row in by_rate[best]
            if row["memory"] is not None
        ]
        losses = {row["settings"]["seed"]: loss_of(row) for row in by_rate[best]}
        found[key] = Summary(best, losses, sizes[0] if sizes else math.nan)
    return found


def difference(one: Summary, other: Summary) -> str:
    """The mean difference over the seeds of both, with its standard error; empty where none is."""
    seeds = one.losses.keys() & other.losses.keys()
    differences = [one.losses[seed] - other.losses[seed] for seed in sorted(seeds)]
    if not differences or not all(map(math.isfinite, differences)):
        return ""
    return with_error(differences, "+.4f")


def with_error(values: Iterable[float], form: str = ".4f") -> str:
    """A mean with its standard error, which a single value does not have."""
    values = list(values)
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {format(error, form.removeprefix('+'))}"


def _loss(one: Summary) -> str:
    """The mean loss with its standard error, or how many seeds diverged."""
    diverged = sum(map(math.isinf, one.losses.values()))
    if diverged:
        return f"{diverged} of {len(one.losses)} diverged"
    return with_error(one.losses.values())


def comparison(
    results: Results,
    names: Sequence[str],
    baseline: str,
    settings: Sequence[str],
    with_rates: bool = True,
) -> str:
    """A row for each contender, with its difference from a baseline, paired by seed.

    Args:
      results: The summaries.
      names: Contenders.
      baseline: The contender that the others are compared with, the row with 0.
      settings: Each has columns of its own.
      with_rates: Whether the best peak rates are among them.
    """
    titles = ["", "bytes per parameter", "seeds"]
    for setting in settings:
        titles += [f"{setting}: loss", "minus baseline", *["peak rate"] * with_rates]
    rows = []
    for name in names:
        known = [results[setting, name] for setting in settings if (setting, name) in results]
        if not known:
            continue
        seeds = dict.fromkeys(str(len(one.losses)) for one in known)
        cells = [name, f"{known[0].bytes_a_parameter:.2f}", ", ".join(seeds)]
        for setting in settings:
            one, base = results.get((setting, name)), results.get((setting, baseline))
            if one is None:
                cells += ["", "", *[""] * with_rates]
                continue
            less = "" if base is None else difference(one, base)
            cells += [_loss(one), "0" if name == baseline else less]
            cells += [f"{one.rate:.3g}"] * with_rates
        rows.append(cells)
    return records.table(titles, rows)


def differences(results: Results, pairs: Iterable[tuple[str, str]], settings: Sequence[str]) -> str:
    """Differences of pairs of contenders, paired by seed."""
    rows = []
    for one, other in pairs:
        cells = [f"{one}, minus {other}"]
        for setting in settings:
            found = [results.get((setting, name)) for name in (one, other)]
            cells.append("" if None in found else difference(*found))
        rows.append(cells)
    return records.table(["", *settings], rows)


def changes(results: Results, of: Mapping[str, Sequence[str]], setting: str) -> str:
    """What changes of single settings are worth, as paired differences from the default.

    Args:
      results: The summaries.
      of: By the name of a contender, what its variants have behind that name.
      setting: Where.
    """
    rows = []
    for base, variants in of.items():
        for variant in variants:
            one = results[setting, f"{base} {variant}"]
            cells = [f"{one.bytes_a_parameter:.2f}", difference(one, results[setting, base])]
            rows.append([f"{base} {variant}", *cells, str(len(one.losses)), f"{one.rate:.3g}"])
    titles = ["", "bytes per parameter", "loss minus that of the default", "seeds", "peak rate"]
    return records.table(titles, rows)


def draw(
    results: Results, names: Sequence[str], settings: Sequence[str], path: pathlib.Path
) -> None:
    """Draws loss against bytes of state per parameter, a setting a panel."""
    figure = Figure(figsize=(5 * len(settings) + 4, 5), layout="constrained")
    panels = figure.subplots(1, len(settings), squeeze=False)
    for setting, axes in zip(settings, panels[0], strict=True):
        for number, name in enumerate(names):
            one = results.get((setting, name))
            if one is None or not math.isfinite(one.mean):
                continue
            marker = "os^vD"[number // 10 % 5]
            axes.scatter(
                one.bytes_a_parameter, one.mean, marker=marker, color=f"C{number % 10}", label=name
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=setting, xlabel="bytes of optimizer state per parameter")
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("validation loss (nats per token)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
