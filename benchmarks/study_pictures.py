"""The results of `loss_study` as pictures."""

import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.loss_entries import GROUPS
from benchmarks.study_results import TEXTS, Results, Summary, columns_of


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
                means = [statistics.mean(values) for values in columns_of(curves)]
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
