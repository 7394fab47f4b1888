"""What is the same for all frameworks: optimizers, text, and the check of a training."""

import argparse
import inspect
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import adapprox_jax
from adapprox_jax.state.report import tree_nbytes

RATE = 3e-3
STEPS = 20
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(RATE),
    "adapprox": lambda: adapprox_jax.adapprox(RATE),
    "adapprox 4 bits": lambda: adapprox_jax.adapprox(RATE, mu_dtype="int4"),
    "adapprox_muon 4 bits": lambda: adapprox_jax.adapprox_muon(4 * RATE, mu_dtype="int4"),
}


class Trained(NamedTuple):
    """What a training returns: losses of the steps made now, and the arrays at its end."""

    losses: list[float]
    params: Any
    state: Any


Train = Callable[[optax.GradientTransformation, int, pathlib.Path], Trained]


def tokens(step: int, rows: int = 16, length: int = 64) -> np.ndarray:
    """The same int32 bytes of source code, (rows, length), for a step, every time."""
    text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)
    starts = np.random.default_rng(step).integers(0, len(text) - length, rows)
    return np.stack([text[start : start + length] for start in starts]).astype(np.int32)


def check(package: str, train: Train) -> None:
    """Trains with each optimizer, once through and once with a stop, and prints a row for each.

    The rows are written as JSON, too, where the command line names a file.

    Args:
      package: Of the framework, for its version.
      train: Trains up to a number of steps, from the checkpoint in a folder if one is there, and
        leaves a checkpoint at the end.

    Raises:
      SystemExit: After all rows, if a training does not end bit for bit alike after a stop.
    """
    record = {"package": package, "version": version(package), "jax": jax.__version__, "rows": []}
    for name, make in OPTIMIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            at_once, in_parts = pathlib.Path(folder, "at_once"), pathlib.Path(folder, "in_parts")
            at_once.mkdir()
            in_parts.mkdir()
            whole = train(make(), STEPS, at_once)
            train(make(), STEPS // 2, in_parts)
            resumed = train(make(), STEPS, in_parts)
        row = {"optimizer": name, **_compared(whole, resumed)}
        record["rows"].append(row)
        print(package, *(f"{key} {value}" for key, value in row.items()), sep=", ", flush=True)
    for file in sys.argv[1:]:
        pathlib.Path(file).write_text(json.dumps(record, indent=1) + "\n")
    lost = [row["optimizer"] for row in record["rows"] if not row["resumes bit for bit"]]
    if lost:
        raise SystemExit(f"{package} does not go on as it would have: {', '.join(lost)}")


def _compared(whole: Trained, resumed: Trained) -> dict[str, Any]:
    ours, theirs = (jax.tree.leaves((x.params, x.state)) for x in (whole, resumed))
    arrays = [x for x in jax.tree.leaves(whole.state) if isinstance(x, jax.Array)]
    total = tree_nbytes(arrays)
    on_one = tree_nbytes([x.addressable_shards[0].data for x in arrays])
    numbers = sum(x.size for x in jax.tree.leaves(whole.params))
    return {
        "first loss": round(float(whole.losses[0]), 3),
        "last loss": round(float(whole.losses[-1]), 3),
        "state bytes per parameter": round(total / numbers, 2),
        "share of it on one of eight devices": round(on_one / total, 3),
        "resumes bit for bit": len(ours) == len(theirs)
        and all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, theirs, strict=True)),
    }
