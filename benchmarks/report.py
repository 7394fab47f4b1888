"""Writes what the records of `loss_study` say into the pages: `python -m benchmarks.report`.

A page has blocks between `<!-- NAME -->` and `<!-- end of NAME -->`; each is replaced by what a
function here makes of the records, so that no figure of theirs is typed by hand. Entries whose runs
are not all there are left out and named. The pictures lie beside the records.
"""

import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.loss_entries import GROUPS, SETTINGS, Entry
from benchmarks.loss_study import STUDY, Lookup, entries, recorded, tuned
from examples.gpt2 import records
from examples.gpt2.compare import loss_of
from examples.gpt2.rate_grid import standard_error

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("docs/results.md", "README.md")
PICTURES = ROOT / "results" / "loss"
TEXTS = ("code", "prose")  # the settings that all are compared in


class Summary(NamedTuple):
    """What the runs of one entry on one text came to."""

    rate: float
    losses: dict[int, float]  # by seed, at the best rate
    grid: dict[float, float]  # by rate, of the first seed
    bytes_a_parameter: float
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
    """Mean paired difference over the seeds at which neither diverged, its error, and how many."""
    seeds = {
        seed
        for seed in one.losses.keys() & other.losses.keys()
        if math.isfinite(one.losses[seed]) and math.isfinite(other.losses[seed])
    }
    if not seeds:
        return math.nan, None, 0
    differences = [one.losses[seed] - other.losses[seed] for seed in sorted(seeds)]
    return statistics.mean(differences), standard_error(differences), len(differences)


def summarize(rows: list[dict[str, Any]]) -> Results:
    """All entries whose runs are all among the records."""
    keys = {row["setting"]: row["settings"]["data"] for row in rows}
    found = {}
    for setting, label, entry in entries(tuple(GROUPS), tuple(SETTINGS)):

        def look_up(where: str, entry: Entry = entry) -> Lookup:
            return recorded(entry, where, keys.get(where, ""), rows)

        runs = tuned(entry, setting, look_up)
        if runs is None:
            continue
        memory = next(run["memory"] for run in runs.runs if run["memory"] is not None)
        found[setting, label] = Summary(
            runs.rate,
            {run["settings"]["seed"]: loss_of(run) for run in runs.runs},
            {rate: loss_of(run) for rate, run in runs.grid.items()},
            memory["state_mib"] * 2**20 / memory["parameters"],
            [run["curve"] for run in runs.runs],
        )
    return found


def comparison_table(results: Results) -> str:
    """Every optimizer of both groups: bytes, and loss and rate on each text."""
    titles = ["", "bytes per parameter"]
    for text in TEXTS:
        titles += [f"{text}: loss", "standard error", "seeds", "best peak rate"]
    lines = [_row(titles), _row(["---"] + ["---:"] * (len(titles) - 1))]
    for label in (*GROUPS["ours"], *GROUPS["opponents"]):
        of_texts = [results.get((text, label)) for text in TEXTS]
        known = [one for one in of_texts if one is not None]
        if not known:
            continue
        cells = [label, f"{known[0].bytes_a_parameter:.2f}"]
        for one in of_texts:
            if one is None:
                cells += [""] * 4
            else:
                cells += [_loss(one), _number(one.error), str(len(one.losses))]
                cells += [f"{one.rate:g}"]
        lines.append(_row(cells))
    return "\n".join(lines)


def measured_table(results: Results) -> str:
    """The few that a reader looks for first, on code."""
    lines = [
        _row(["", "bytes per parameter", "loss", "standard error", "seeds", "best peak rate"]),
        _row(["---"] + ["---:"] * 5),
    ]
    for label in _FIRST:
        one = results.get(("code", label))
        if one is not None:
            cells = [label, f"{one.bytes_a_parameter:.2f}", _loss(one), _number(one.error)]
            lines.append(_row([*cells, str(len(one.losses)), f"{one.rate:g}"]))
    return "\n".join(lines)


_FIRST = (
    *("adapprox", "adapprox, 8 bits", "adapprox, 4 bits"),
    *("AdamW, b2 0.95, clipped", "AdamW, b2 0.999, clipped", "AdamW in 8 bits, b2 0.95, clipped"),
    *("Adafactor", "Muon", "AdaMuon"),
    *("adapprox_muon", "adapprox_muon, 8 bits", "adapprox_muon, 4 bits"),
)


def controls_table(results: Results) -> str:
    """Loss by second moment and b2, each at its best rate; with bias correction behind it."""
    labels = [label for label in GROUPS["controls"] if "bias correction" not in label]
    moments = list(dict.fromkeys(label.rsplit(", b2 ", 1)[0] for label in labels))
    decays = list(dict.fromkeys(label.rsplit(", b2 ", 1)[1] for label in labels))
    lines = [_row(["b2", *decays]), _row(["---"] + ["---:"] * len(decays))]

    def cell(moment: str, decay: str) -> str:
        plain = results.get(("code", f"{moment}, b2 {decay}"))
        corrected = results.get(("code", f"{moment}, b2 {decay}, bias correction"))
        known = [one for one in (plain, corrected) if one is not None]
        return "; ".join(f"{_loss(one)} ({one.rate:g})" for one in known)

    lines += [_row([moment, *(cell(moment, decay) for decay in decays)]) for moment in moments]
    return "\n".join(lines)


def choices_table(results: Results) -> str:
    """What each choice changes: the paired difference with the optimizer that it is a choice of."""
    lines = [
        _row(["change of one thing", "loss", "difference", "standard error", "seeds", "peak rate"]),
        _row(["---"] + ["---:"] * 5),
    ]
    for label in GROUPS["choices"]:
        one, base = (results.get(("code", name)) for name in (label, label.rpartition(", ")[0]))
        if one is not None and base is not None:
            mean, error, seeds = difference(one, base)
            cells = [label, _loss(one), f"{mean:+.4f}", _number(error), str(seeds)]
            lines.append(_row([*cells, f"{one.rate:g}"]))
    return "\n".join(lines)


def claims(results: Results) -> str:
    """Whether what an optimizer of few bytes should be is so, on each text."""
    lines = []
    for text in TEXTS:
        ours = {x: results[text, x] for x in GROUPS["ours"] if (text, x) in results}
        theirs = {x: results[text, x] for x in GROUPS["opponents"] if (text, x) in results}
        if not ours or not theirs:
            continue
        beaten = [
            f"{other} is below and left of {label} by {-mean:.4f} (standard error {_number(error)})"
            for label, one in ours.items()
            for other, its in theirs.items()
            for mean, error, _ in [difference(its, one)]
            if its.bytes_a_parameter <= one.bytes_a_parameter and mean < -(error or 0)
        ]
        lines.append(f"- {text}: " + ("; ".join(beaten) or _NOBODY) + ".")
        adamw = {x: one for x, one in theirs.items() if x.startswith("AdamW")}
        for most, family, others in ((1.2, "adapprox", adamw), (0.75, "adapprox_muon", theirs)):
            small = {
                label: one
                for label, one in ours.items()
                if label.split(",")[0] == family and one.bytes_a_parameter <= most
            }
            if small and others:
                mine = min(small, key=lambda label: small[label].mean)
                best = min(others, key=lambda label: others[label].mean)
                mean, error, seeds = difference(small[mine], others[best])
                lines.append(
                    f"- {text}: {mine} at {small[mine].bytes_a_parameter:.2f} bytes per parameter"
                    f" against {best}: {mean:+.4f}, standard error {_number(error)}, {seeds} seeds."
                )
    return "\n".join(lines)


_NOBODY = "no opponent is both below and left of an optimizer of ours by more than a standard error"


def rates(results: Results) -> str:
    """The best peak rates over that of the best AdamW, on each text."""
    lines = []
    for text in TEXTS:
        adamw = [
            one
            for (where, label), one in results.items()
            if where == text and label.startswith("AdamW")
        ]
        if not adamw:
            continue
        base = min(adamw, key=lambda one: one.mean).rate
        cells = [
            f"{label} {results[text, label].rate / base:g}"
            for label in ("adapprox", "adapprox_muon")
            if (text, label) in results
        ]
        lines.append(f"- {text}: AdamW's best is {base:g}; times that, {' and '.join(cells)}.")
    return "\n".join(lines)


def steps_to_adamw(results: Results) -> str:
    """After which validation each optimizer is below the last loss of the best AdamW, on code."""
    of_code = {label: one for (text, label), one in results.items() if text == "code"}
    adamw = [one for label, one in of_code.items() if label.startswith("AdamW")]
    if not adamw:
        return ""
    best = min(adamw, key=lambda one: one.mean)
    lines = [_row(["", "steps", "of"]), _row(["---", "---:", "---:"])]
    for label in (*GROUPS["ours"], *GROUPS["opponents"]):
        if label in of_code:
            curves = [curve for curve in of_code[label].curves if curve]
            steps = [step for step, _ in curves[0]]
            means = [statistics.mean(values) for values in _columns(curves)]
            reached = [s for s, mean in zip(steps, means, strict=True) if mean <= best.mean]
            lines.append(_row([label, str(min(reached)) if reached else "", str(steps[-1])]))
    return "\n".join(lines)


def _columns(curves: list[list[tuple[int, float]]]) -> list[list[float]]:
    """The losses of all seeds at each validation."""
    return [[loss for _, loss in at] for at in zip(*curves, strict=True)]


def longer_table(results: Results) -> str:
    """The best with a larger model: at its short runs, where rates are tuned, and its long ones."""
    lines = [
        _row(["", "bytes per parameter", "best peak rate", "loss, short", "loss, long"]),
        _row(["---"] + ["---:"] * 4),
    ]
    for label in GROUPS["longer"]:
        short, long = results.get(("larger", label)), results.get(("longer", label))
        if short is not None:
            cells = [label, f"{short.bytes_a_parameter:.2f}", f"{short.rate:g}", _loss(short)]
            lines.append(_row([*cells, "" if long is None else _loss(long)]))
    return "\n".join(lines)


def averages_table(results: Results) -> str:
    """Losses with and without the running average, each at its best rate."""
    pairs = {
        "adapprox": ("adapprox", "adapprox, no average"),
        "Adafactor": ("Adafactor", "Adafactor, no average"),
        "AdamW": ("AdamW, b2 0.999, clipped", "AdamW, no average"),
    }
    lines = [_row(["", "with", "without"]), _row(["---", "---:", "---:"])]
    for name, labels in pairs.items():
        known = [results.get(("code", label)) for label in labels]
        lines.append(_row([name, *("" if one is None else _loss(one) for one in known)]))
    return "\n".join(lines)


def draw_bytes(results: Results, path: pathlib.Path) -> None:
    """Draws loss against bytes of state per parameter, a text an axes."""
    figure, all_axes = _figure_of_texts(results)
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text):
            if math.isfinite(one.mean):
                axes.errorbar(one.bytes_a_parameter, one.mean, one.error, capsize=2, **style)
        axes.set(xlabel="bytes of optimizer state per parameter", title=text)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    _finish(figure, all_axes, path)


def draw_curves(results: Results, path: pathlib.Path) -> None:
    """Draws loss, and perplexity on the right, against the step, a text an axes."""
    figure, all_axes = _figure_of_texts(results)
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text):
            curves = [curve for curve in one.curves if curve]
            if curves:
                steps = [step for step, _ in curves[0]]
                means = [statistics.mean(values) for values in _columns(curves)]
                axes.plot(steps, means, markersize=4, **style)
        axes.set(xlabel="step", title=text)
        perplexity = axes.secondary_yaxis("right", functions=(np.exp, _log))
        perplexity.set_ylabel("perplexity")
    _finish(figure, all_axes, path)


def draw_sensitivity(results: Results, path: pathlib.Path) -> None:
    """Draws loss against the peak rate over the best one, first seeds, a text an axes."""
    figure, all_axes = _figure_of_texts(results)
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text):
            tried = {r / one.rate: x for r, x in one.grid.items() if math.isfinite(x)}
            axes.plot(list(tried), list(tried.values()), markersize=4, **style)
        axes.set(xlabel="peak rate / best peak rate", title=text)
        axes.set_xscale("log", base=2)
    _finish(figure, all_axes, path)


def _figure_of_texts(results: Results) -> tuple[Figure, dict[str, Axes]]:
    texts = [text for text in TEXTS if any(where == text for where, _ in results)]
    figure = Figure(figsize=(6 * len(texts) + 4, 5))
    axes = {text: figure.add_subplot(1, len(texts), place) for place, text in enumerate(texts, 1)}
    return figure, axes


def _drawn(results: Results, text: str) -> Iterator[tuple[Summary, dict[str, Any]]]:
    """What is known on a text: ours as circles, opponents as squares, the second ten empty."""
    for group, marker, line in (("ours", "o", "-"), ("opponents", "s", "--")):
        for number, label in enumerate(GROUPS[group]):
            if (text, label) in results:
                fill = "full" if number < 10 else "none"
                style = {"marker": marker, "linestyle": line, "fillstyle": fill}
                yield results[text, label], {**style, "color": f"C{number % 10}", "label": label}


def _finish(figure: Figure, all_axes: dict[str, Axes], path: pathlib.Path) -> None:
    for axes in all_axes.values():
        axes.grid(alpha=0.3)
    first, *_, last = [*all_axes.values(), *all_axes.values()]
    first.set_ylabel("validation loss (nats per token)")
    last.legend(loc="center left", bbox_to_anchor=(1.15, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _log(values: np.ndarray) -> np.ndarray:
    """Of perplexities; matplotlib asks below zero, too."""
    return np.log(np.maximum(values, np.finfo(float).tiny))


BLOCKS: dict[str, Callable[[Results], str]] = {
    "comparison": comparison_table,
    "measured": measured_table,
    "controls": controls_table,
    "choices": choices_table,
    "claims": claims,
    "rates": rates,
    "steps": steps_to_adamw,
    "longer": longer_table,
    "averages": averages_table,
}
DRAWINGS: dict[str, Callable[[Results, pathlib.Path], None]] = {
    "loss_against_bytes.png": draw_bytes,
    "curves.png": draw_curves,
    "sensitivity.png": draw_sensitivity,
}


def filled(page: str, results: Results) -> str:
    """A page with its blocks as the records have them."""
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = f"{begin}{block(results)}\n{end}"
        page = re.sub(pattern, lambda _, text=text: text, page, flags=re.DOTALL)
    return page


def main() -> None:
    """Fills the pages, draws the pictures, and names what is not there yet."""
    results = summarize(records.read(STUDY))
    for name in PAGES:
        path = ROOT / name
        page = path.read_text()
        path.write_text(filled(page, results))
        print(f"{name}: {sum(f'<!-- {block} -->' in page for block in BLOCKS)} blocks filled")
    for file, drawing in DRAWINGS.items():
        drawing(results, PICTURES / file)
    missing = [
        f"{label} ({setting})"
        for setting, label, _ in entries(tuple(GROUPS), tuple(SETTINGS))
        if (setting, label) not in results
    ]
    if missing:
        print(f"not all runs are there of: {'; '.join(missing)}")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _loss(one: Summary) -> str:
    """The mean; of what diverged at some seeds that of the others, and at how many."""
    finite = [loss for loss in one.losses.values() if math.isfinite(loss)]
    diverged = len(one.losses) - len(finite)
    mean = f"{statistics.mean(finite):.4f}" if finite else ""
    return f"{mean} ({diverged} diverged)".strip() if diverged else mean


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
