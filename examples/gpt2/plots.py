"""The figures: one run's curves and ranks, and the curves of a comparison."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def plot_run(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the losses of a run's metrics rows and, where there are any, the ranks over time."""
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    ranks = [(row["step"], row["ranks"]) for row in rows if row.get("ranks")]
    figure = Figure(figsize=(11 if ranks else 6, 4))
    axes = figure.subplots(1, 2 if ranks else 1)
    left, right = axes if ranks else (axes, None)
    left.plot(*zip(*train, strict=True), color="0.8", linewidth=0.8, label="training")
    left.plot(*zip(*validation, strict=True), marker="o", markersize=3, label="validation")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.legend()
    if right is not None:
        steps, reports = zip(*ranks, strict=True)
        kinds = {leaf: _kind(leaf) for leaf in reports[0]}
        colors = {kind: f"C{i}" for i, kind in enumerate(sorted(set(kinds.values())))}
        for leaf, kind in kinds.items():
            curve = [report[leaf] for report in reports]
            right.plot(steps, curve, color=colors[kind], alpha=0.7, linewidth=1, label=kind)
        handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
        right.legend(handles.values(), handles.keys(), fontsize="small")
        right.set(xlabel="step", ylabel="rank of the second moment", ylim=(0, None))
    _save(figure, path)


def plot_comparison(
    curves: Mapping[str, Sequence[Sequence[Sequence[float]]]], path: pathlib.Path
) -> None:
    """Draws each optimizer's mean validation curve with a band of one standard error.

    Args:
      curves: By optimizer, a list of runs, each a list of (step, loss).
      path: The PNG to write.
    """
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, runs in curves.items():
        if not runs:
            continue
        steps = [step for step, _ in runs[0]]
        losses = np.array([[loss for _, loss in run] for run in runs])
        mean = losses.mean(0)
        [line] = axes.plot(steps, mean, label=f"{name} ({len(runs)} runs)")
        if len(runs) > 1:
            error = losses.std(0, ddof=1) / np.sqrt(len(runs))
            axes.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="step", ylabel="validation loss (nats per token)")
    axes.legend()
    _save(figure, path)


def plot_ranks(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws rank and error of every matrix over the steps of a run, as two heat maps.

    Args:
      rows: Of a run's metrics, with `step`, and `ranks` and `errors` by matrix.
      path: The PNG to write.
    """
    leaves = sorted(rows[0]["ranks"], key=lambda leaf: (_kind(leaf), leaf))
    figure = Figure(figsize=(13, 2 + 0.25 * len(leaves)))
    figure.set_layout_engine("constrained")
    titles = {"ranks": "rank", "errors": "relative error of the last factorization"}
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        values = np.array([[np.max(row[name][leaf]) for row in rows] for leaf in leaves], float)
        image = axes.imshow(values, aspect="auto", interpolation="nearest")
        every = max(len(rows) // 10, 1)
        places = range(0, len(rows), every)
        axes.set(xlabel="step", title=title)
        axes.set_xticks(places, [str(rows[i]["step"]) for i in places])
        figure.colorbar(image, ax=axes)
    figure.axes[0].set_yticks(range(len(leaves)), leaves, fontsize="small")
    figure.savefig(path, dpi=120)


def _kind(leaf: str) -> str:
    """A leaf's path without the number of its block: those of one kind share a colour."""
    return ".".join(re.findall(r"[A-Za-z_]\w*", leaf.replace("blocks", "").replace("kernel", "")))


def _save(figure: Figure, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
