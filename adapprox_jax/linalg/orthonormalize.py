"""Orthonormal bases of the columns of tall matrices, of many at once."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.linalg.products import contract, matmul

Orthogonalization: TypeAlias = Literal["qr", "cholesky"]
ROUNDS = 8  # of Cholesky QR: enough for columns that are dependent up to rounding
_Round: TypeAlias = tuple[list[jax.Array], list[jax.Array]]  # bases, squared norms of columns
_SHORT = 0.5  # squared norm of a column that is not yet a direction
WARM_ROUNDS = 2  # enough where they are nearly those of the step before


def orthonormalize_qr(
    matrices: Sequence[jax.Array], rounds: int = ROUNDS, unroll: bool = False
) -> list[jax.Array]:
    """Orthonormal bases of the columns of matrices (batch, m, width) by Householder QR.

    Columns get noise as in `orthonormalize_cholesky`, once. `rounds` and `unroll` are not used.
    """
    del rounds, unroll
    return [jnp.linalg.qr(unit_columns(x) + _trace_of_noise(x))[0] for x in matrices]


def orthonormalize_cholesky(
    matrices: Sequence[jax.Array], rounds: int = ROUNDS, unroll: bool = False
) -> list[jax.Array]:
    """Orthonormal bases of the columns of matrices by shifted Cholesky QR.

    Columns are scaled to norm 1. A fixed number of times they get a trace of noise, and then
    Y <- Y L^-T with L L^T = Y^T Y + shift. Without the noise a basis that starts from the last one
    never leaves a subspace that the matrix maps to itself. A shifted round stretches what is
    independent of the columns before by up to 1 / sqrt(shift), and noise where nothing is. So
    dependent and zero columns, too, become unit vectors, and there is no breakdown to fall back
    from. With fewer rounds than that takes, such columns come out shorter, never longer, and
    perhaps not orthogonal: those are zero. (Fukaya et al., 2020, "Shifted Cholesky QR for computing
    the QR factorization of ill-conditioned matrices".)

    All widths take part in one Cholesky factorization and one triangular solve a round: on
    accelerators each costs the same for one matrix as for a hundred.

    Args:
      matrices: Each (batch, m, width), width at most m; all of one type.
      rounds: At least 1.
      unroll: Write the rounds out instead of a loop of known length. On CPUs, where each leaf has
        its own code, that took a tenth longer to compile, and steps were slower and held more.

    Returns:
      A basis for each, of its shape.
    """
    noises = [_trace_of_noise(x) for x in matrices]

    def one_round(_: Any, carry: _Round) -> _Round:
        bases = [basis + noise for basis, noise in zip(carry[0], noises, strict=True)]
        grams = [jax.vmap(lambda x: contract(x, x, 0))(basis) for basis in bases]
        inverses = _inverse_factors([_shifted(gram) for gram in grams])
        new = [
            matmul(basis, jnp.swapaxes(inverse, -2, -1))
            for basis, inverse in zip(bases, inverses, strict=True)
        ]
        # The squared norms of the new columns, without another sum over rows.
        energies = [
            jnp.sum(matmul(inverse, gram) * inverse, axis=-1)[:, None, :]
            for inverse, gram in zip(inverses, grams, strict=True)
        ]
        return new, energies

    bases = [unit_columns(x) for x in matrices]
    start = bases, [jnp.zeros_like(basis[:, :1]) for basis in bases]
    bases, energies = jax.lax.fori_loop(0, rounds, one_round, start, unroll=unroll)
    return [jnp.where(e > _SHORT, basis, 0) for basis, e in zip(bases, energies, strict=True)]


def column_sizes(matrix: jax.Array) -> jax.Array:
    """The largest magnitude in each column of (..., m, width), as (..., 1, width)."""
    return jnp.max(jnp.abs(matrix), axis=-2, keepdims=True)


def unit_columns(matrix: jax.Array) -> jax.Array:
    """The columns of (..., m, width) divided by their norms; zero columns stay zero."""
    # Largest entry first: the squares of small columns vanish, of large ones they overflow.
    inverse = 1 / _nonzero(column_sizes(matrix))
    energies = jnp.sum(jnp.square(matrix * inverse), axis=-2, keepdims=True)
    return matrix * (inverse / _nonzero(jnp.sqrt(energies)))


def _inverse_factors(grams: Sequence[jax.Array]) -> list[jax.Array]:
    """L^-1 with L L^T = G of each of many positive definite matrices, (batch, width, width)."""
    widest = max(x.shape[-1] for x in grams)
    stacked = jnp.concatenate([_padded(gram, widest) for gram in grams])
    eye = np.eye(widest, dtype=stacked.dtype)[None]
    factor = jax.lax.linalg.cholesky(stacked, symmetrize_input=False)
    # Should rounding outweigh the shift: this round then does nothing.
    is_finite = jnp.isfinite(jnp.sum(factor, axis=(-2, -1), keepdims=True))
    factor = jnp.where(is_finite, factor, eye)
    inverse = jax.lax.linalg.triangular_solve(
        factor, jnp.broadcast_to(eye, factor.shape), left_side=True, lower=True
    )
    ends = np.cumsum([x.shape[0] for x in grams])
    parts = zip(jnp.split(inverse, ends[:-1]), grams, strict=True)
    return [part[:, : gram.shape[-1], : gram.shape[-1]] for part, gram in parts]


def _padded(gram: jax.Array, width: int) -> jax.Array:
    """The Gram matrix of the same columns and, up to a width, of orthogonal ones of norm 1."""
    missing = width - gram.shape[-1]
    if not missing:
        return gram
    wide = jnp.pad(gram, ((0, 0), (0, missing), (0, missing)))
    return wide + np.diag(np.arange(width) >= gram.shape[-1]).astype(gram.dtype)[None]


def _shifted(gram: jax.Array) -> jax.Array:
    """The Gram matrix and a shift, unless it is near the identity.

    Then no eigenvalue is near zero, and a round without a shift leaves nothing but rounding.
    """
    width = gram.shape[-1]
    eye = np.eye(width, dtype=gram.dtype)[None]
    is_near = jnp.all(jnp.abs(gram - eye) < 0.5 / width, axis=(-2, -1), keepdims=True)
    return gram + jnp.where(is_near, 0, 4 * width * float(np.finfo(gram.dtype).eps) * eye)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)


def _trace_of_noise(matrix: jax.Array) -> jax.Array:
    """A fixed matrix (1, m, width) of full rank with entries that look random.

    It is so small that it is lost in the rounding of columns of norm 1, and only fills empty ones.
    With more, trajectories of the two orthogonalizations part ten times as fast.
    """
    rows, width = matrix.shape[-2:]
    index = jax.lax.iota(jnp.uint32, rows * width) + jnp.uint32(1)
    wrapped = (index * index * jnp.uint32(0x9E3779B1)).astype(jnp.int32)
    noise = (wrapped.astype(matrix.dtype) / 2.0**31).reshape(1, rows, width)
    return float(np.finfo(matrix.dtype).eps) / 16 / rows**0.5 * noise


ORTHONORMALIZE: dict[str, Callable[..., list[jax.Array]]] = {
    "qr": orthonormalize_qr,
    "cholesky": orthonormalize_cholesky,
}
