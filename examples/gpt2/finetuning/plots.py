"""The paper's sensitivity figure: the score against the learning rate."""

import pathlib
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure


def plot_sensitivity(
    summary: Mapping[str, Mapping[str, Any]], label: str, path: pathlib.Path
) -> None:
    """Draws the first seed's score against the peak rate, a curve an optimizer.

    Args:
      summary: By optimizer, with `grid`: scores in percent by rate, None where a run diverged.
      label: Of the vertical axis.
      path: The PNG to write.
    """
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, row in summary.items():
        points = [(float(rate), score) for rate, score in row["grid"].items() if score is not None]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="peak learning rate", ylabel=label, xscale="log")
    rates = sorted({rate for row in summary.values() for rate in row["grid"]}, key=float)
    axes.set_xticks([*map(float, rates)], rates)  # matplotlib's own are written over each other
    axes.minorticks_off()
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
