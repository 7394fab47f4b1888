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
# By a name: the contender, and where its dot has the name, in points from it.
Points = Mapping[str, tuple[str, tuple[float, float]]]


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


def paired(one: Summary, other: Summary) -> list[float]:
    """The differences of losses over the seeds that both have."""
    seeds = one.losses.keys() & other.losses.keys()
    return [one.losses[seed] - other.losses[seed] for seed in sorted(seeds)]


def difference(one: Summary, other: Summary) -> str:
    """The mean difference over the seeds of both, with its standard error; empty where none is."""
    differences = paired(one, other)
    if not differences or not all(map(math.isfinite, differences)):
        return ""
    return with_error(differences, "+.4f")


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def with_error(values: Iterable[float], form: str = ".4f") -> str:
    """A mean with its standard error, which a single value does not have."""
    values = list(values)
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(standard_error(values), form.removeprefix('+'))}"


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
    labels: Mapping[str, str] | None = None,
    sizes: Mapping[str, str] | None = None,
) -> str:
    """A row for each contender, with its difference from a baseline, paired by seed.

    Args:
      results: The summaries.
      names: Contenders.
      baseline: The contender that the others are compared with, the row with 0.
      settings: Each has columns of its own.
      with_rates: Whether the best peak rates are among them.
      labels: What contenders are called; None for their names.
      sizes: Bytes per parameter of the model with 117M, by contender; None for no such column.
    """
    titles = ["", "bytes per parameter", *["at 117M"] * bool(sizes), "seeds"]
    for setting in settings:
        titles += [f"{setting}: loss", "minus baseline", *["peak rate"] * with_rates]
    rows = []
    for name in names:
        known = [results[setting, name] for setting in settings if (setting, name) in results]
        if not known:
            continue
        seeds = dict.fromkeys(str(len(one.losses)) for one in known)
        cells = [(labels or {}).get(name, name), f"{known[0].bytes_a_parameter:.2f}"]
        cells += [sizes.get(name, "")] if sizes else []
        cells.append(", ".join(seeds))
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


def contender_of(name: str) -> str:
    """The name in `benchmarks.contenders` of what a row shows."""
    return name.lower().replace(",", "")


def draw_points(
    results: Results,
    points: Points,
    settings: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Draws loss against bytes of state per parameter, one setting above the other.

    Args:
      results: The summaries.
      points: By the label of a dot.
      settings: Each has a panel.
      path: Of the picture.
    """
    figure = Figure(figsize=(6, 2.7 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), squeeze=False)
    for setting, axes in zip(settings, panels[:, 0], strict=True):
        for name, (contender, offset) in points.items():
            one = results[setting, contender]
            place = one.bytes_a_parameter, one.mean
            color = "C0" if name.startswith("adapprox") else "0.45"
            axes.scatter(*place, color=color, s=45)
            axes.annotate(name, place, offset, textcoords="offset points", ha="center", color=color)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=f"trained on {setting}", ylabel="validation loss")
        axes.margins(x=0.12, y=0.2)
        axes.grid(alpha=0.3)
    axes.set_xlabel("bytes of optimizer state per parameter")
    figure.savefig(path, dpi=150)
