"""Randomized low-rank factorization of one matrix: pure linear algebra, no pytrees, no optimizer.

Shapes as in `products`: A (m, n) is approximated by q @ u.T. A rank may be a traced integer: then
columns beyond it are zero, and shapes stay as they are while the rank moves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import require_choice, require_flag, require_integer
from adapprox_jax.linalg.orthonormalize import ORTHONORMALIZE, Orthogonalization
from adapprox_jax.linalg.products import contract, matmul
from adapprox_jax.linalg.random_keys import require_key
from adapprox_jax.linalg.rounding import wide_dtype


def srsi(
    matrix: jax.Array,
    rank: int,
    key: int | jax.Array,
    *,
    power_iterations: int = 5,
    oversampling: int = 5,
    rotate: bool = True,
    orthogonalization: Orthogonalization = "cholesky",
) -> tuple[jax.Array, jax.Array]:
    """Streamlined randomized subspace iteration: `matrix` is approximated by `q @ u.T`.

    Args:
      matrix: A, real, of shape (m, n). Any scale: it is normalized first.
      rank: k, the columns to return, from 1 to min(m, n).
      key: An int seed or a JAX random key of the Gaussian start.
      power_iterations: l >= 1, passes over the matrix; each multiplies by A and by A^T once.
      oversampling: p >= 0, further columns worked on; k + p is cut to min(m, n).
      rotate: Choose the best k of the k + p directions before truncation. False is the
        algorithm as printed, where the p columns have no effect.
      orthogonalization: "cholesky" (Cholesky QR, made of matrix products) or "qr" (Householder, as
        the paper has it).

    Returns:
      q of shape (m, k) with orthonormal columns and u = A^T q of shape (n, k), float32 or wider.

    Raises:
      ValueError: an argument is out of range.

    Examples:
      >>> import jax, adapprox_jax
      >>> a = jax.numpy.outer(jax.numpy.arange(1., 5.), jax.numpy.arange(1., 4.))
      >>> q, u = adapprox_jax.srsi(a, rank=1, key=jax.random.key(0))
      >>> bool(jax.numpy.allclose(q @ u.T, a, rtol=1e-5))
      True

    Source: paper, Algorithm 1. The rotation is a documented deviation (docs/algorithm.md, 7).
    """
    dtype = getattr(matrix, "dtype", type(matrix).__name__)
    if getattr(matrix, "ndim", None) != 2 or not jnp.issubdtype(dtype, jnp.floating):
        shape = getattr(matrix, "shape", "unknown")
        allowed = "an array (m, n) of a real floating-point type"
        raise ValueError(f"matrix is of type {dtype} and shape {shape}; allowed: {allowed}.")
    limit = min(matrix.shape)
    require_integer("rank", rank, 1, limit)
    require_integer("power_iterations", power_iterations, 1)
    require_integer("oversampling", oversampling, 0)
    require_flag("rotate", rotate)
    require_choice("orthogonalization", orthogonalization, tuple(ORTHONORMALIZE))
    key = require_key(key)
    width = min(rank + oversampling, limit)
    unit, scale = normalize(matrix)
    u = jax.random.normal(key, (width, matrix.shape[1]), unit.dtype).T

    def iteration(_: Any, u: jax.Array) -> jax.Array:
        return contract(unit, basis_of(u), 0)

    def basis_of(u: jax.Array) -> jax.Array:
        return ORTHONORMALIZE[orthogonalization]([contract(unit, u, 1)[None]])[0][0]

    if power_iterations > 1:  # the body of a loop that never runs is compiled all the same
        u = jax.lax.fori_loop(1, power_iterations, iteration, u)
    q = basis_of(u)
    u = contract(unit, q, 0)
    if rotate:
        turn = principal_turn(contract(u, u, 0))
        q, u = matmul(q, turn.T), matmul(u, turn.T)
    return q[:, :rank], u[:, :rank] * scale


def normalize(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides by a power of two, so that squared norms neither overflow nor vanish.

    Args:
      matrix: (m, n), real.

    Returns:
      The matrix in float32 or wider, and the scalar that it was divided by (1 for a zero matrix).
      Its largest magnitude is in [1, 2), or a little outside at the ends of the number range. To
      undo a power of two rounds nothing.
    """
    matrix = matrix.astype(wide_dtype(matrix.dtype))
    scale = power_of_two_below(jnp.max(jnp.abs(matrix), initial=0))
    return matrix / scale, scale


def power_of_two_below(largest: jax.Array) -> jax.Array:
    """The power of two in (x / 2, x] whose reciprocal, too, is a normal number; 1 for 0."""
    _, exponent = jnp.frexp(largest)
    limit = -int(np.finfo(largest.dtype).minexp)
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent - 1, -limit, limit))
    return jnp.where(largest == 0, 1, scale)


def principal_turn(gram: jax.Array) -> jax.Array:
    """The turn that puts columns in order of falling singular value: x -> x @ turn.T.

    Args:
      gram: Of the columns, (..., width, width); those of norm 0 are ordered last.

    Returns:
      (..., width, width), orthogonal.
    """
    # The singular vectors of the triangular factor, not the eigenvectors of u^T u: squaring would
    # lose the directions below 3e-4 of the largest in float32. The shift hardly changes the turn,
    # but singular values by up to 1 %, so that energies are to be taken from the turned columns.
    width = gram.shape[-1]
    eye = np.eye(width, dtype=gram.dtype).reshape((1,) * (gram.ndim - 2) + (width, width))
    shift = width * float(np.finfo(gram.dtype).eps)
    norms = jnp.sqrt(jnp.sum(jnp.where(eye == 1, gram, 0), axis=-1))
    inverse = 1 / jnp.where(norms == 0, 1, norms)
    unit = inverse[..., None] * gram * inverse[..., None, :]
    factor = jax.lax.linalg.cholesky(unit + shift * eye, symmetrize_input=False)
    # Should rounding outweigh the shift: the columns are then put in order, and turned no further.
    factor = jnp.where(jnp.isfinite(factor), factor, eye)
    _, _, turn = jnp.linalg.svd(jnp.swapaxes(factor, -2, -1) * norms[..., None, :])
    return turn


def tail_error(
    energies: jax.Array, residual_energy: jax.Array, rank: jax.typing.ArrayLike
) -> jax.Array:
    """The paper's xi of q @ u.T cut to its first `rank` columns.

    With q orthonormal and u = A^T q the residual of all columns is orthogonal to each column, so
    that ||A - q_k u_k^T||^2 = ||A - q u^T||^2 + ||u_(k+1)||^2 + ... Sums of positive numbers: the
    shorter ||A||^2 - ||u_k||^2 cancels in float32 below about 3e-3.

    Args:
      energies: ||u_j||^2 of each column, (width,).
      residual_energy: ||A - q u^T||^2, a scalar.
      rank: k, from 0 to width.

    Returns:
      A scalar; 0 for a zero matrix.
    """
    beyond = jnp.sum(jnp.where(np.arange(energies.shape[0], dtype=np.int32) < rank, 0, energies))
    norm_squared = residual_energy + jnp.sum(energies)
    return jnp.sqrt((residual_energy + beyond) / jnp.where(norm_squared == 0, 1, norm_squared))
