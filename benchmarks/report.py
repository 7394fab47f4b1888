"""Writes what the records of `loss_study` say into the pages: `python -m benchmarks.report`.

A page has blocks between `<!-- NAME -->` and `<!-- end of NAME -->`; each is replaced by what a
function here makes of the records, so that no figure of theirs is typed by hand. Entries whose runs
are not all there are left out. The pictures lie beside the records.
"""

import math
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.loss_entries import GROUPS, TEXTS
from benchmarks.loss_study import STUDY, entries, lookup, tune
from examples.gpt2 import records
from examples.gpt2.compare import loss_of

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("docs/results.md", "README.md")
PICTURE = ROOT / "results" / "loss" / "loss_against_bytes.png"


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


Results = Mapping[tuple[str, str], Summary]  # by text and label


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None of one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def difference(one: Summary, other: Summary) -> tuple[float, float | None, int]:
    """Mean paired difference over the seeds that both have, its standard error, and how many."""
    seeds = one.losses.keys() & other.losses.keys()
    differences = [one.losses[seed] - other.losses[seed] for seed in sorted(seeds)]
    return statistics.mean(differences), standard_error(differences), len(differences)


def summarize(rows: list[dict[str, Any]]) -> Results:
    """All entries whose runs are all among the records."""
    keys = {row["text"]: row["settings"]["data"] for row in rows}
    found = {}
    for text, label, entry in entries(tuple(GROUPS), tuple(keys)):
        tuned = tune(entry, lookup(entry, text, keys[text], lambda: rows))
        if tuned is None or not all(math.isfinite(loss_of(run)) for run in tuned.runs):
            continue
        memory = tuned.runs[0]["memory"]
        found[text, label] = Summary(
            tuned.rate,
            {run["settings"]["seed"]: loss_of(run) for run in tuned.runs},
            {rate: loss_of(run) for rate, run in tuned.grid.items()},
            memory["state_mib"] * 2**20 / memory["parameters"],
            [run["curve"] for run in tuned.runs],
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
                cells += [f"{one.mean:.4f}", _number(one.error), str(len(one.losses))]
                cells += [f"{one.rate:g}"]
        lines.append(_row(cells))
    return "\n".join(lines)


def controls_table(results: Results) -> str:
    """Loss by second moment and b2, each at its best rate; with bias correction behind it."""
    labels = [label for label in GROUPS["controls"] if "bias correction" not in label]
    moments = list(dict.fromkeys(label.rsplit(", b2 ", 1)[0] for label in labels))
    decays = list(dict.fromkeys(label.rsplit(", b2 ", 1)[1] for label in labels))
    lines = [_row(["b2", *decays]), _row(["---"] + ["---:"] * len(decays))]

    def cell(moment: str, decay: str) -> str:
        plain = results.get(("code", f"{moment}, b2 {decay}"))
        corrected = results.get(("code", f"{moment}, b2 {decay}, bias correction"))
        parts = ["" if one is None else f"{one.mean:.4f} ({one.rate:g})" for one in (plain,)]
        if corrected is not None:
            parts.append(f"{corrected.mean:.4f} ({corrected.rate:g})")
        return "; ".join(parts)

    lines += [_row([moment, *(cell(moment, decay) for decay in decays)]) for moment in moments]
    return "\n".join(lines)


def choices_table(results: Results) -> str:
    """What each choice changes: the paired difference with the optimizer that it is a choice of."""
    lines = [
        _row(["change of one thing", "loss", "difference", "standard error", "seeds", "peak rate"]),
        _row(["---"] + ["---:"] * 5),
    ]
    for label in GROUPS["choices"]:
        one, base = (results.get(("code", name)) for name in (label, label.split(", ")[0]))
        if one is not None and base is not None:
            mean, error, seeds = difference(one, base)
            cells = [label, f"{one.mean:.4f}", f"{mean:+.4f}", _number(error), str(seeds)]
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
            curves = of_code[label].curves
            steps = [step for step, _ in curves[0]]
            means = [statistics.mean(values) for values in _columns(curves)]
            reached = [s for s, mean in zip(steps, means, strict=True) if mean <= best.mean]
            lines.append(_row([label, str(min(reached)) if reached else "", str(steps[-1])]))
    return "\n".join(lines)


def _columns(curves: list[list[tuple[int, float]]]) -> list[list[float]]:
    """The losses of all seeds at each validation."""
    return [[loss for _, loss in at] for at in zip(*curves, strict=True)]


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws loss against bytes of state per parameter, a text an axes."""
    texts = [text for text in TEXTS if any(where == text for where, _ in results)]
    figure = Figure(figsize=(7 * len(texts) + 3, 5))
    for place, text in enumerate(texts, 1):
        axes = figure.add_subplot(1, len(texts), place)
        for number, label in enumerate((*GROUPS["ours"], *GROUPS["opponents"])):
            one = results.get((text, label))
            if one is not None:
                axes.errorbar(
                    one.bytes_a_parameter,
                    one.mean,
                    one.error,
                    fmt="o" if label in GROUPS["ours"] else "s",
                    color=f"C{number % 10}",
                    fillstyle="full" if number < 10 else "none",
                    capsize=2,
                    label=label,
                )
        axes.set(xlabel="bytes of optimizer state per parameter", title=text)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.grid(alpha=0.3)
        if place == 1:
            axes.set_ylabel("validation loss (nats per token)")
        if place == len(texts):
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "comparison": comparison_table,
    "controls": controls_table,
    "choices": choices_table,
    "claims": claims,
    "rates": rates,
    "steps": steps_to_adamw,
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
    """Fills the pages and draws the picture."""
    results = summarize(records.read(STUDY))
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(), results))
    draw(results, PICTURE)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
