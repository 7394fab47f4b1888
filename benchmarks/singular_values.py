"""Singular values of second moments, the paper's Figure 1: `python -m benchmarks.singular_values`.

The matrices are the second moments of `benchmarks.srsi` at several steps of one training, and their
elementwise roots, which Adapprox factors by default. Each spectrum is divided by its first value.
Results go to `results/loss/singular_values.json`.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks import records
from benchmarks.srsi import second_moments

RESULTS = records.RESULTS / "loss"
TARGETS = {"V": lambda moment: moment, "root of V": jnp.sqrt}
RANKS = (1, 8, 32)


def spectrum(matrix: jax.Array) -> np.ndarray:
    """Singular values of a matrix over the largest one, in float64; zeros of a matrix of zeros."""
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return values / values[0] if values[0] > 0 else values


def error_of_rank(values: np.ndarray, rank: int) -> float:
    """The relative error of the best approximation of a rank, in the Frobenius norm."""
    total = np.sum(np.square(values))
    return float(np.sqrt(np.sum(np.square(values[rank:])) / total)) if total else 0.0


def measure(moments: dict[int, dict[str, jax.Array]], count: int) -> dict[str, Any]:
    """By step, matrix and target the first singular values and the errors of some ranks.

    Args:
      moments: Second moments by step and path.
      count: Singular values kept of each.
    """
    found: dict[str, Any] = {}
    for step, matrices in moments.items():
        for name, moment in tqdm(matrices.items(), desc=f"step {step}", unit="matrix"):
            for target, of_moment in TARGETS.items():
                values = spectrum(of_moment(moment))
                row = {
                    "singular_values": [float(f"{x:.4g}") for x in values[:count]],
                    "errors": {str(rank): error_of_rank(values, rank) for rank in RANKS},
                }
                found.setdefault(str(step), {}).setdefault(name, {})[target] = row
    return found


def main(
    width: int = 1024,
    layers: int = 2,
    steps: tuple[int, ...] = (10, 50, 200),
    count: int = 60,
    output: pathlib.Path = RESULTS / "singular_values.json",
) -> dict[str, Any]:
    """Prints mean errors by rank, and writes JSON.

    Args:
      width: Width of the model.
      layers: Blocks of the model.
      steps: Updates after which second moments are taken, rising.
      count: Singular values of each matrix that are kept.
      output: File for the JSON.
    """
    if width % 64 or min(width, layers, count, *steps, 1) < 1 or list(steps) != sorted(set(steps)):
        raise SystemExit(
            f"{width=}, {layers=}, {steps=}, {count=}; allowed: from 1, width in steps of 64, steps"
            " rising."
        )
    moments = second_moments(width, layers, steps)
    if not all(moments.values()):
        raise SystemExit(f"{width=}; allowed: at least 512, for matrices worth factoring.")
    result = {
        **records.header(),
        "matrices": {name: list(matrix.shape) for name, matrix in moments[steps[-1]].items()},
        "steps": measure(moments, count),
    }
    records.write(output, result, indent=None)
    print(table(result["steps"]))
    print(f"written: {output}")
    return result


def table(steps: dict[str, Any]) -> str:
    """Mean relative errors over the matrices, by step, target and rank."""
    rows = []
    for step, matrices in steps.items():
        for target in TARGETS:
            errors = [of_targets[target]["errors"] for of_targets in matrices.values()]
            means = [np.mean([one[str(rank)] for one in errors]) for rank in RANKS]
            rows.append([f"{target}, step {step}", *(f"{mean:.3f}" for mean in means)])
    return records.table(["", *(f"rank {rank}" for rank in RANKS)], rows)


if __name__ == "__main__":
    tyro.cli(main)
