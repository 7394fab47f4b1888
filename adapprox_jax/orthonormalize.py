"""Orthonormal bases of the columns of a tall matrix."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.products import column_energies, contract, matmul

_MOST_ROUNDS = 12  # of Cholesky QR; 1 to 8 are usual


def orthonormalize_qr(matrix: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns of an (m, width) matrix by Householder QR.

    Of the columns divided by their norms, with a trace of noise: without it a basis that starts
    from the last one never leaves a subspace that the matrix maps to itself.
    """
    return jnp.linalg.qr(unit_columns(matrix) + _trace_of_noise(matrix))[0]


def orthonormalize_cholesky(matrix: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns of an (m, width) matrix by shifted Cholesky QR.

    Columns are scaled to norm 1, then Y <- Y L^-T with L L^T = Y^T Y + shift until Y is nearly
    orthonormal, and once more without a shift (Fukaya et al., 2020, "Shifted Cholesky QR for
    computing the QR factorization of ill-conditioned matrices"). A shifted round stretches what is
    independent of the columns before by up to 1 / sqrt(shift), and a trace of fixed noise stands in
    for what is not, so that dependent and zero columns, too, become unit vectors: there is no
    breakdown to fall back from.
    """
    return cholesky_rounds(matrix)[0]


def cholesky_rounds(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`orthonormalize_cholesky` and the number of rounds that it took, an int32 scalar."""
    width = matrix.shape[1]
    epsilon = float(np.finfo(matrix.dtype).eps)
    eye = jnp.eye(width, dtype=matrix.dtype)
    noise = _trace_of_noise(matrix)

    def one_round(carry: Any) -> Any:
        rounds, basis, _ = carry
        gram = contract(basis, basis, 0)
        # A gram matrix near the identity has no eigenvalue near zero, and one round without a shift
        # then leaves nothing but rounding.
        is_last = jnp.all(jnp.abs(gram - eye) < 0.5 / width)
        shift = jnp.where(is_last, 0, 4 * width * epsilon)
        factor = jax.lax.linalg.cholesky(gram + shift * eye, symmetrize_input=False)
        # Should rounding outweigh the shift: this round then does nothing.
        factor = jnp.where(jnp.isfinite(factor), factor, eye)
        inverse = jax.lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
        return rounds + 1, matmul(basis, inverse.T) + jnp.where(is_last, 0, noise), is_last

    rounds = jnp.zeros_like(matrix[0, 0], jnp.int32)  # like it in varying under `jax.shard_map`
    rounds, basis, _ = jax.lax.while_loop(
        lambda carry: ~carry[2] & (carry[0] < _MOST_ROUNDS),
        one_round,
        (rounds, unit_columns(matrix), jnp.zeros_like(rounds, bool)),
    )
    return basis, rounds


def unit_columns(matrix: jax.Array) -> jax.Array:
    """The columns divided by their norms; zero columns stay zero."""
    norms = jnp.sqrt(column_energies(matrix))
    return matrix / jnp.where(norms == 0, 1, norms)


def _trace_of_noise(matrix: jax.Array) -> jax.Array:
    """A fixed matrix of full rank with entries that look random, like `matrix` in shape and type.

    So small that it is lost in the rounding of columns of norm 1, and only fills empty ones: with
    more, trajectories of the two orthogonalizations part ten times as fast.
    """
    rows, width = matrix.shape
    index = jax.lax.iota(jnp.uint32, rows * width) + jnp.uint32(1)
    wrapped = (index * index * jnp.uint32(0x9E3779B1)).astype(jnp.int32)
    noise = (wrapped.astype(matrix.dtype) / 2.0**31).reshape(rows, width)
    return float(np.finfo(matrix.dtype).eps) / 16 / rows**0.5 * noise


ORTHONORMALIZE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "qr": orthonormalize_qr,
    "cholesky": orthonormalize_cholesky,
}
