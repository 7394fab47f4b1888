"""Error and time of S-RSI against rank, the paper's Figure 2: `python -m benchmarks.srsi`.

The matrices are exact second moments of a real training: a GPT-2 of two layers, as wide as the
345M model, trained by Adam on the standard library's source. Three methods factor each of them:
S-RSI, the singular value decomposition, and Adafactor's means of rows and columns (rank 1). Results
go to `results/speed/srsi_<device>.json`.
"""

import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

import adapprox_jax
from benchmarks import records
from examples.gpt2.config import Config
from examples.gpt2.train import train

RESULTS = records.RESULTS / "speed"
_STEPS = 100  # updates of the training


def second_moments(
    width: int, steps: Sequence[int], layers: int = 2
) -> dict[int, dict[str, jax.Array]]:
    """Trains a GPT-2 by Adam and returns the exact second moments of its matrices, by path.

    Args:
      width: Size of the residual stream.
      steps: Updates, each of four windows of 128 tokens, after which they are taken; rising.
      layers: Number of blocks.

    Returns:
      By step, matrices (m, n), m <= n, worth factoring.

    Raises:
      SystemExit: If the width or the steps are not as they should be.
    """
    if width < 512 or width % 64 or steps[0] < 1 or list(steps) != sorted(set(steps)):
        raise SystemExit(
            f"{width=}, {steps=}; allowed: width from 512 in steps of 64, steps rising from 1."
        )
    found: dict[int, dict[str, jax.Array]] = {}
    adam = optax.adamw(optax.warmup_constant_schedule(0.0, 3e-4, 20), b2=0.999)

    def keep(step: jax.Array, nu: Any) -> None:
        found[int(step)] = _large_matrices(nu)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = adam.update(grads, state, params)
        step, nu = state[0].count, state[0].nu
        is_wanted = jnp.isin(step, jnp.asarray(steps))
        jax.lax.cond(is_wanted, lambda: jax.debug.callback(keep, step, nu), lambda: None)
        return updates, state

    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            layers=layers,
            width=width,
            heads=width // 64,
            context=128,
            steps=steps[-1],
            warmup=0,
            batch_size=4,
            eval_every=steps[-1],
            eval_batches=1,
            out=pathlib.Path(folder) / "run",
        )
        watched = optax.GradientTransformation(adam.init, update)
        train(config, optimizer=lambda _: watched, keep=False)
    jax.effects_barrier()
    return found


def _large_matrices(nu: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(nu)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.asarray(v)
        if v.shape[0] <= v.shape[1]
        else jnp.asarray(v.T)
        for path, v in leaves
        if v.ndim == 2 and min(v.shape) >= 512
    }


def relative_error(matrix: jax.Array, q: jax.Array, u: jax.Array) -> jax.Array:
    """The Frobenius norm of the matrix less q u^T, over that of the matrix."""
    return jnp.linalg.norm(matrix - q @ u.T) / jnp.linalg.norm(matrix)


def adafactor(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adafactor's rank-1 factorization as q, u: row sums times column sums over the total."""
    rows, columns = jnp.sum(matrix, axis=1, keepdims=True), jnp.sum(matrix, axis=0, keepdims=True)
    return rows / jnp.sum(rows), columns.T


def measure(
    moments: dict[str, jax.Array], ranks: tuple[int, ...], rounds: int
) -> dict[str, dict[str, Any]]:
    """Errors of each method at each rank, means over the matrices, and times on the largest one.

    Args:
      moments: Second moments.
      ranks: Ranks to factor at.
      rounds: How often each method is timed; the median counts.

    Returns:
      For each method its `error` by rank, its `seconds`, and `times_faster_than_svd`.
    """
    largest = max(moments.values(), key=lambda matrix: matrix.size)
    key = jax.random.key(0)
    svd = jax.jit(functools.partial(jnp.linalg.svd, full_matrices=False))
    rank_one = jax.jit(adafactor)
    srsi = {
        rank: jax.jit(functools.partial(adapprox_jax.srsi, rank=rank, key=key)) for rank in ranks
    }
    timed: dict[str, Callable[..., Any]] = {"svd": svd, "adafactor": rank_one}
    timed |= {f"srsi {rank}": function for rank, function in srsi.items()}

    xi = jax.jit(relative_error)
    errors: dict[str, list[float]] = {}
    for matrix in tqdm(moments.values(), desc="errors", unit="matrix"):
        left, values, right = svd(matrix)
        errors.setdefault("adafactor", []).append(float(xi(matrix, *rank_one(matrix))))
        for rank in ranks:
            errors.setdefault(f"srsi {rank}", []).append(float(xi(matrix, *srsi[rank](matrix))))
            best = left[:, :rank], (right[:rank] * values[:rank, None]).T
            errors.setdefault(f"svd {rank}", []).append(float(xi(matrix, *best)))

    times: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in tqdm(range(rounds + 1), desc="times", unit="round"):
        for name, function in timed.items():
            start = time.perf_counter()
            jax.block_until_ready(function(largest))
            if round_:  # the first round compiles
                times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, values in errors.items():
        method = name if name in median else name.split()[0]
        found[name] = {
            "error": float(np.mean(values)),
            "seconds": median[method],
            "times_faster_than_svd": median["svd"] / median[method],
        }
    return found


def main(
    width: int = 1024,
    ranks: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256),
    rounds: int = 7,
    output: pathlib.Path | None = None,
) -> None:
    """Measures S-RSI (l = 5, p = 5), prints a table and writes JSON.

    Args:
      width: Width of the model; its largest matrices are width x 4 width.
      ranks: Ranks to factor at, at most `width`.
      rounds: How often each method is timed.
      output: File for the JSON.
    """
    if rounds < 1 or not ranks or not 1 <= min(ranks) <= max(ranks) <= width:
        raise SystemExit(f"{rounds=}, {ranks=}; allowed: from 1, ranks to width = {width}.")
    moments = second_moments(width, [_STEPS])[_STEPS]
    result = {
        **records.header(),
        "matrices": {name: list(matrix.shape) for name, matrix in moments.items()},
        "timed_on": list(max(moments.values(), key=lambda matrix: matrix.size).shape),
        "records": measure(moments, ranks, rounds),
    }
    path = output or RESULTS / f"srsi_{records.name_of_device(result['device'])}.json"
    records.finish(path, result, table(result["records"]))


def table(methods: dict[str, dict[str, float]]) -> str:
    """A row for Adafactor's means, and one for each rank of S-RSI and the SVD."""
    one = methods["adafactor"]
    rows = [
        ["Adafactor's means, rank 1", f"{one['error']:.3f}", f"{methods['svd 1']['error']:.3f}"]
    ]
    rows[0].append(f"{one['times_faster_than_svd']:.0f}")
    for name in (name for name in methods if name.startswith("srsi")):
        ours, best = methods[name], methods[name.replace("srsi", "svd")]
        cells = [f"{ours['error']:.3f}", f"{best['error']:.3f}"]
        rows.append(
            [name.replace("srsi", "S-RSI, rank"), *cells, f"{ours['times_faster_than_svd']:.0f}"]
        )
    return records.table(["", "mean error", "that of the SVD", "times faster than the SVD"], rows)


if __name__ == "__main__":
    tyro.cli(main)
