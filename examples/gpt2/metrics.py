"""The numbers of a run: losses, ranks and bytes, in its folder, on the screen and in a figure."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import adapprox_jax
from adapprox_jax.state.report import shaped_nbytes, tree_nbytes
from examples.gpt2.command import DivergedError
from examples.gpt2.folder import write_whole
from examples.gpt2.loop import TrainState
from examples.gpt2.processes import is_first

MIB = 2**20


class Metrics:
    """Rows of numbers, appended to `metrics.jsonl`.

    Of several processes the first one writes, and all have the rows.
    """

    def __init__(self, out: pathlib.Path, step: int):
        """Goes on after `step`: rows that an interrupted run wrote beyond it are dropped."""
        path = out / "metrics.jsonl"
        # A process may have been ended while it wrote the last line.
        lines = path.read_text().split("\n")[:-1] if step and path.exists() else []
        self.rows = [row for row in map(json.loads, lines) if row["step"] <= step]
        self._writes = is_first()
        if self._writes:
            write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 (whole lines, at once)

    def write(self, step: int, **values: Any) -> None:
        """Appends a row."""
        self.rows.append({"step": step, **values})
        if self._writes:
            self._file.write(json.dumps(self.rows[-1]) + "\n")

    def record(self, step: int, losses: list[float], seconds: float, rate: optax.Schedule) -> None:
        """Writes the losses of the steps up to `step`, which took some seconds together.

        Raises:
          DivergedError: If a loss is not finite.
        """
        for at, loss in enumerate(losses, step - len(losses) + 1):
            _require_finite("loss", loss, at)
            each = seconds / len(losses)
            self.write(at, loss=loss, learning_rate=float(rate(at - 1)), seconds=each)

    def validate(self, step: int, loss: float, state: TrainState) -> None:
        """Writes and prints a validation loss, with the ranks that the state has.

        Raises:
          DivergedError: If the loss is not finite.
        """
        _require_finite("validation loss", loss, step)
        row: dict[str, Any] = {"validation_loss": loss}
        words = f"step {step}: validation loss {loss:.4f}"
        report = adapprox_jax.rank_report(state.opt_state, state.params)
        if report:
            row["ranks"] = {leaf: info.rank for leaf, info in report.items()}
            row["mean_rank"] = float(np.mean(list(row["ranks"].values())))
            row["state_mib"] = tree_nbytes(state.opt_state) / MIB
            words += f", mean rank {row['mean_rank']:.1f}, state {row['state_mib']:.2f} MiB"
        self.write(step, **row)
        tqdm.write(words)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """The steps and values of the rows that have this number."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    def close(self) -> None:
        """Closes the file."""
        if self._writes:
            self._file.close()


def _require_finite(what: str, loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise DivergedError(f"the {what} is {loss} at step {step}; try a lower --learning-rate")


def memory(state: TrainState) -> dict[str, float]:
    """Sizes of the optimizer's state, and how much of the model is in factored leaves."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    report = adapprox_jax.rank_report(state.opt_state, state.params).values()
    return {
        "parameters": parameters,
        "state_mib": tree_nbytes(state.opt_state) / MIB,
        "adamw_state_mib": (2 * 4 * parameters + 4) / MIB,  # in float32, with its count
        "factored_share": sum(math.prod(info.shape) for info in report) / parameters,
    }


def describe(state: TrainState) -> str:
    """`memory` in words, and what of it lies on one device."""
    sizes = memory(state)
    on_one = sum(
        shaped_nbytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(state.opt_state)
    )
    return (
        f"parameters {sizes['parameters']:,}, {sizes['factored_share']:.1%} of them in factored"
        f" leaves; optimizer state {sizes['state_mib']:.2f} MiB, {on_one / MIB:.2f} on each device"
        f" (AdamW's: {sizes['adamw_state_mib']:.2f} MiB)"
    )


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the losses of a run."""
    figure = Figure(figsize=(6, 4), layout="tight")
    axes = figure.subplots()
    for name, style in (("loss", {"color": "0.8"}), ("validation_loss", {"marker": "."})):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)
