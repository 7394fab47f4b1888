"""The results of `loss_study` as pictures."""

import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.loss_entries import GROUPS
from benchmarks.study_results import FIRST, TEXTS, Results, Summary, columns_of

_HEIGHT = 11  # of the picture of bytes, inches


def draw_bytes(results: Results, path: pathlib.Path) -> None:
    """Draws loss against bytes of state per parameter, every point with its name, a text a column.

    Each column is cut at the widest gap between losses. What is far above all others stands at
    the upper edge, with its loss.
    """
    texts = [text for text in TEXTS if any(where == text for where, _ in results)]
    figure = Figure(figsize=(10 * len(texts), _HEIGHT))
    for column, text in enumerate(texts):
        drawn = [(one, style) for one, style in _drawn(results, text) if math.isfinite(one.mean)]
        losses = sorted(one.mean for one, _ in drawn)
        top = losses[-1 - len(drawn) // 10] + 0.05
        cut = max(itertools.pairwise(losses), key=lambda pair: min(pair[1], top) - pair[0])[0]
        parts = [[x for x in drawn if x[0].mean > cut], [x for x in drawn if x[0].mean <= cut]]
        for row, part in enumerate(parts):
            rows = slice(0, 2) if row == 0 else slice(2, 3)
            grid = figure.add_gridspec(3, len(texts))
            axes = figure.add_subplot(grid[rows, column])
            _draw_part(axes, part, top)
            axes.set_title("the axis is cut here" if row else text, fontsize=9 if row else None)
            axes.set_xlabel("bytes of optimizer state per parameter" if row else "")
            axes.set_ylabel("" if column else "validation loss (nats per token)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _draw_part(axes: Axes, drawn: list[tuple[Summary, dict[str, Any]]], top: float) -> None:
    """Draws points at their bytes and losses, those above `top` there, and writes their names."""
    labels, ends, bars = [], [], []
    for one, style in drawn:
        name, is_above = style.pop("label"), one.mean > top
        at = min(one.mean, top)
        error = 0.0 if is_above else one.error or 0.0
        ends += [at - error, at + error]
        bars.append((one.bytes_a_parameter, at - error, at + error))
        axes.errorbar(one.bytes_a_parameter, at, error or None, capsize=2, **style)
        words = f"{name}: {one.mean:.2f}" if is_above else name
        labels.append((one.bytes_a_parameter, at, words, style["color"]))
    low, high = min(ends), max(ends)
    margin = 0.1 * (high - low) or 0.1
    axes.set(xlim=(0.06, 128), ylim=(low - margin, high + margin))
    axes.set_xscale("log", base=2)
    ticks = ("0.125", "0.25", "0.5", "1", "2", "4", "8")
    axes.set_xticks([float(tick) for tick in ticks], ticks)
    axes.grid(alpha=0.3)
    inches = axes.get_position().height * _HEIGHT
    _name(axes, labels, bars, (high - low + 2 * margin) / (inches / 0.13))


def _name(
    axes: Axes,
    labels: list[tuple[float, float, str, str]],
    bars: list[tuple[float, float, float]],
    line: float,
) -> None:
    """Writes names (x, y, words, colour) to the right of their points, none over another.

    Nor over a bar (x, lower and upper end). `line` is the height of a name in units of y; the
    horizontal axis is logarithmic.
    """
    taken: list[tuple[float, float, float]] = [
        (math.log2(x) - 0.1, math.log2(x) + 0.1, y)
        for x, low, high in bars
        for y in np.linspace(low, high, 2 + int((high - low) / line))
    ]
    for x, y, words, color in sorted(labels, key=lambda label: label[1]):
        left = math.log2(x) + 0.18
        right = left + 0.07 * len(words)
        steps = (sign * step for step in range(99) for sign in (1, -1))
        at = next(
            y + step * line / 2
            for step in steps
            if not any(
                left < end and begin < right and abs(y + step * line / 2 - other) < 0.9 * line
                for begin, end, other in taken
            )
        )
        taken.append((left, right, at))
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.4, "alpha": 0.6}
        place = {"color": color, "fontsize": 7, "va": "center", "arrowprops": arrow}
        axes.annotate(words, (x, y), (2**left, at), **place)


def draw_curves(results: Results, path: pathlib.Path) -> None:
    """Draws loss, and perplexity on the right, against the step, a text an axes."""
    figure, all_axes = _figure_of_texts(results)
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text, FIRST):
            curves = [curve for curve in one.curves if curve]
            if curves:
                steps = [step for step, _ in curves[0]]
                means = [statistics.mean(values) for values in columns_of(curves)]
                axes.plot(steps, means, markersize=4, **style)
        axes.set(xlabel="step", title=text)
        perplexity = axes.secondary_yaxis("right", functions=(np.exp, _log))
        perplexity.set_ylabel("perplexity")
    _finish(figure, all_axes, path)


def draw_times(results: Results, path: pathlib.Path) -> None:
    """Draws loss on code against time, in steps of AdamW: steps times what one takes over its."""
    record = json.loads(TIMES.read_text())
    seconds = {name: row["seconds"] for name, row in record["records"]["tiny"].items()}
    figure, all_axes = _figure_of_texts({k: v for k, v in results.items() if k[0] == "code"})
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text, TIMED):
            name, curves = TIMED[style["label"]], [curve for curve in one.curves if curve]
            if curves and name in seconds:
                times = [step * seconds[name] / seconds["adamw"] for step, _ in curves[0]]
                means = [statistics.mean(values) for values in columns_of(curves)]
                axes.plot(times, means, markersize=4, **style)
        axes.set(xlabel="time, in steps of AdamW", title=text)
    _finish(figure, all_axes, path)


TIMES = pathlib.Path(__file__).parents[1] / "results" / "speed" / "training_step_16_tiny_cpu.json"
TIMED = {  # the names that `update_speed` has for them
    "adapprox": "adapprox",
    "adapprox, 8 bits": "adapprox 8 bits",
    "adapprox_muon": "adapprox_muon",
    "adapprox_muon, 4 bits": "adapprox_muon 4 bits",
    "AdamW, b2 0.999, clipped": "adamw",
    "Adafactor": "adafactor",
    "Muon": "muon",
}


def draw_sensitivity(results: Results, path: pathlib.Path) -> None:
    """Draws loss against the peak rate, first seeds, a text an axes."""
    figure, all_axes = _figure_of_texts(results)
    for text, axes in all_axes.items():
        for one, style in _drawn(results, text, FIRST):
            tried = {rate: of[0] for rate, of in one.tried.items() if math.isfinite(of[0])}
            axes.plot(list(tried), list(tried.values()), markersize=4, **style)
        axes.set(xlabel="peak rate", title=text)
        axes.set_xscale("log", base=2)
        ticks = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _finish(figure, all_axes, path)


def _figure_of_texts(results: Results) -> tuple[Figure, dict[str, Axes]]:
    texts = [text for text in TEXTS if any(where == text for where, _ in results)]
    figure = Figure(figsize=(6 * len(texts) + 4, 6), layout="constrained")
    axes = {text: figure.add_subplot(1, len(texts), place) for place, text in enumerate(texts, 1)}
    return figure, axes


def _drawn(
    results: Results, text: str, labels: Collection[str] | None = None
) -> Iterator[tuple[Summary, dict[str, Any]]]:
    """What is known on a text: ours as circles, opponents as squares, the second ten empty."""
    for group, marker, line in (("ours", "o", "-"), ("opponents", "s", "--")):
        wanted = [x for x in GROUPS[group] if labels is None or x in labels]
        for number, label in enumerate(wanted):
            if (text, label) in results:
                fill = "full" if number < 10 else "none"
                style = {"marker": marker, "linestyle": line, "fillstyle": fill}
                yield results[text, label], {**style, "color": f"C{number % 10}", "label": label}


def _finish(figure: Figure, all_axes: dict[str, Axes], path: pathlib.Path) -> None:
    handles = {}
    for axes in all_axes.values():
        axes.grid(alpha=0.3)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in itertools.islice(all_axes.values(), 1):
        axes.set_ylabel("validation loss (nats per token)")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=130)


def _log(values: np.ndarray) -> np.ndarray:
    """Of perplexities; matplotlib asks below zero, too."""
    return np.log(np.maximum(values, np.finfo(float).tiny))
