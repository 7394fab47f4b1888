"""The numbers of a run: losses, ranks and bytes, in its folder and on the screen."""

import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import tensorboardX
from tqdm import tqdm

import adapprox_jax
from examples.gpt2 import records
from examples.gpt2.config import UsageError
from examples.gpt2.elastic import IsFull
from examples.gpt2.processes import is_first
from examples.gpt2.step import TrainState

MIB = 2**20


class DivergedError(RuntimeError):
    """The loss is not finite."""


class Metrics:
    """Rows of numbers, appended to `metrics.jsonl` and to TensorBoard; `rows` has all of them.

    Of several processes the first one writes, and all have the rows.
    """

    def __init__(self, out: pathlib.Path, step: int):
        """Goes on after `step`: rows that an interrupted run wrote beyond it are dropped.

        Raises:
          UsageError: If there is no file of the rows up to `step`.
        """
        path = out / "metrics.jsonl"
        if step and not path.exists():
            raise UsageError(
                f"--resume: {path} is missing, with the losses up to step {step}; put it back, or"
                " make an empty file of that name to go on without them"
            )
        self.rows = [row for row in records.read(path) if row.get("step", math.inf) <= step]
        self._writes = is_first()
        if not self._writes:
            return
        records.write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (whole lines, at once)
        self._board = tensorboardX.SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: Any) -> None:
        """Appends a row; numbers go to TensorBoard too."""
        self.rows.append({"step": step, **values})
        if not self._writes:
            return
        self._file.write(json.dumps(self.rows[-1]) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still held back."""
        if not self._writes:
            return
        self._file.close()
        self._board.close()


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def memory(state: TrainState) -> dict[str, float]:
    """Sizes of the optimizer's state, and how much of the model is in factored leaves."""
    leaves = jax.tree.leaves(state.params)
    report = adapprox_jax.rank_report(state.opt_state, state.params).values()
    nodes = jax.tree.leaves(state.opt_state, is_leaf=_has_second_moment)
    moments = [node for node in nodes if _has_second_moment(node)]
    parameters = sum(leaf.size for leaf in leaves)
    dense = sum(leaf.nbytes for leaf in leaves)
    sizes = {
        "parameters": parameters,
        "state_mib": nbytes(state.opt_state) / MIB,
        "adamw_state_mib": adapprox_jax.state_nbytes(optax.adamw(1.0), state.params) / MIB,
    }
    if report:
        held = [getattr(node, name, ()) for node in moments for name in ("q", "u", "nu")]
        kept = [x for x in jax.tree.leaves(held) if x.ndim]  # scalars stand for what is not there
        sizes["factored_share"] = sum(math.prod(info.shape) for info in report) / parameters
        sizes["second_moment_ratio"] = nbytes(kept) / dense
    return sizes


def _has_second_moment(node: Any) -> bool:
    return isinstance(
        node, adapprox_jax.ScaleByAdapproxState | adapprox_jax.ScaleByNeuronMomentState
    )


def describe(sizes: dict[str, float]) -> str:
    """`memory` in words."""
    words = (
        f"parameters {sizes['parameters']:,}; optimizer state {sizes['state_mib']:.2f} MiB "
        f"(AdamW's: {sizes['adamw_state_mib']:.2f} MiB)"
    )
    if "factored_share" in sizes:
        words += (
            f"; {sizes['factored_share']:.1%} of the parameters in factored leaves, second moment "
            f"{sizes['second_moment_ratio']:.1%} of the dense one's size"
        )
    return words


def record(
    metrics: Metrics, step: int, losses: list[float], rate: optax.Schedule, speed: float
) -> None:
    """Writes the losses of the steps up to `step`; raises DivergedError where one is not finite."""
    for at, loss in enumerate(losses, step - len(losses) + 1):
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} at step {at}; try a lower --learning-rate")
        learning_rate = float(rate(at - 1))
        metrics.write(at, loss=loss, learning_rate=learning_rate, tokens_per_second=speed)


def validate(
    metrics: Metrics, step: int, loss: float, state: TrainState, is_full: IsFull | None
) -> None:
    """Writes and prints a validation loss, ranks and bytes.

    Args:
      metrics: Where they are written.
      step: The step that the state is of.
      loss: The validation loss.
      state: The state that it was measured with.
      is_full: Whether a matrix fills its buffers; None where the ranks are fixed.

    Raises:
      DivergedError: If the loss is not finite.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss} at step {step}; try a lower --learning-rate"
        )
    row: dict[str, Any] = {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}
    words = f"step {step}: validation loss {loss:.4f}, perplexity {row['perplexity']:.2f}"
    report = adapprox_jax.rank_report(state.opt_state, state.params)
    if report:
        row["ranks"] = {leaf: info.rank for leaf, info in report.items()}
        row["errors"] = {leaf: float(np.max(info.error)) for leaf, info in report.items()}
        row["mean_rank"] = float(np.mean(list(row["ranks"].values())))
        row["state_mib"] = nbytes(state.opt_state) / MIB
        earlier = (old.get("peak_state_mib", 0) for old in metrics.rows)
        row["peak_state_mib"] = max([row["state_mib"], *earlier])
    if report and is_full is not None:
        row["full"] = [leaf for leaf, info in report.items() if is_full(info)]
        words += (
            f", mean rank {row['mean_rank']:.1f}, {len(row['full'])} of {len(report)} matrices"
            f" full, state {row['state_mib']:.2f} MiB (at most {row['peak_state_mib']:.2f})"
        )
    metrics.write(step, **row)
    tqdm.write(words)
