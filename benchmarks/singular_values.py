"""How near second moments are to a low rank, after the paper's Figure 1.

    python -m benchmarks.singular_values

The matrices are the second moments of `benchmarks.srsi` at several steps of one training, and their
elementwise roots, which Adapprox factors by default. Results go to
`results/loss/singular_values.json`.
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

TARGETS = {"V": lambda moment: moment, "root of V": jnp.sqrt}
RANKS = (1, 8, 32)


def errors(matrix: jax.Array) -> dict[str, float]:
    """The relative error of a matrix's best approximation, by rank, in the Frobenius norm."""
    squares = np.square(np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False))
    total = max(np.sum(squares), np.finfo(float).tiny)
    return {str(rank): float(np.sqrt(np.sum(squares[rank:]) / total)) for rank in RANKS}


def measure(moments: dict[int, dict[str, jax.Array]]) -> dict[str, Any]:
    """Errors by step, matrix, target and rank.

    Args:
      moments: Second moments by step and path.
    """
    return {
        str(step): {
            name: {target: errors(of_moment(moment)) for target, of_moment in TARGETS.items()}
            for name, moment in tqdm(matrices.items(), desc=f"step {step}", unit="matrix")
        }
        for step, matrices in moments.items()
    }


def main(
    width: int = 1024,
    steps: tuple[int, ...] = (10, 50, 200),
    output: pathlib.Path = records.RESULTS / "loss" / "singular_values.json",
) -> None:
    """Prints mean errors by rank, and writes JSON.

    Args:
      width: Width of the model.
      steps: Updates after which second moments are taken, rising.
      output: File for the JSON.
    """
    moments = second_moments(width, steps)
    shapes = {name: list(matrix.shape) for name, matrix in moments[steps[-1]].items()}
    result = {**records.header(), "matrices": shapes, "steps": measure(moments)}
    records.finish(output, result, table(result["steps"]))


def table(steps: dict[str, Any]) -> str:
    """Mean errors over the matrices, by step, target and rank."""
    rows = []
    for step, matrices in steps.items():
        for target in TARGETS:
            means = [
                np.mean([of_target[target][str(rank)] for of_target in matrices.values()])
                for rank in RANKS
            ]
            rows.append([f"{target}, step {step}", *(f"{mean:.3f}" for mean in means)])
    return records.table(["", *(f"rank {rank}" for rank in RANKS)], rows)


if __name__ == "__main__":
    tyro.cli(main)
