"""Randomized low-rank factorization of one matrix: pure linear algebra, no pytrees, no optimizer.

Shapes: A is the matrix (m, n), q is (m, width) with orthonormal columns and u = A^T q is
(n, width), so that A is approximated by q @ u.T. A `width` is the number of columns worked on,
an `active` number of columns or a `rank` may be a traced integer below it: columns beyond are
zero. That keeps shapes static while the rank moves.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.validation import require, require_choice, require_integer

Orthogonalization: TypeAlias = Literal["qr", "cholesky"]
ORTHOGONALIZATIONS = ("qr", "cholesky")

# On GPUs and TPUs the default precision of a float32 product keeps 8 to 10 bits, which is more
# than the small entries of a second moment can lose.
_PRECISION = jax.lax.Precision.HIGHEST


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two matrices in their full precision on every backend."""
    return jnp.matmul(a, b, precision=_PRECISION)


def srsi(
    matrix: jax.Array,
    rank: int,
    key: jax.Array,
    *,
    power_iterations: int = 5,
    oversampling: int = 5,
    rotate: bool = True,
    orthogonalization: Orthogonalization = "qr",
) -> tuple[jax.Array, jax.Array]:
    """Streamlined randomized subspace iteration: `matrix` is approximated by `q @ u.T`.

    Args:
      matrix: A, real, of shape (m, n). Any scale: it is normalized first.
      rank: k, the columns to return, from 1 to min(m, n).
      key: JAX random key of the Gaussian start.
      power_iterations: l >= 1, passes over the matrix; each multiplies by A and by A^T once.
      oversampling: p >= 0, further columns worked on; k + p is cut to min(m, n).
      rotate: Choose the best k of the k + p directions before truncation. False is the
        algorithm as printed, where the p columns have no effect.
      orthogonalization: "qr" (Householder) or "cholesky" (Cholesky QR, made of matrix products,
        with a fallback to Householder where it fails).

    Returns:
      q of shape (m, k) with orthonormal columns and u = A^T q of shape (n, k), float32 or wider.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax, adapprox_jax
      >>> a = jax.numpy.outer(jax.numpy.arange(1., 5.), jax.numpy.arange(1., 4.))
      >>> q, u = adapprox_jax.srsi(a, rank=1, key=jax.random.key(0))
      >>> bool(jax.numpy.allclose(q @ u.T, a, rtol=1e-5))
      True

    Source: paper, Algorithm 1. The rotation is a documented deviation (docs/algorithm.md, 7).
    """
    require("matrix.ndim", jnp.ndim(matrix), lambda d: d == 2, "2, a matrix (m, n)")
    limit = min(matrix.shape)
    require("rank", rank, lambda k: 1 <= k <= limit, f"an integer from 1 to min(m, n) = {limit}")
    require_integer("power_iterations", power_iterations, 1)
    require_integer("oversampling", oversampling, 0)
    require_choice("orthogonalization", orthogonalization, ORTHOGONALIZATIONS)
    width = min(rank + oversampling, limit)
    unit, scale = normalize(matrix)
    start = gaussian_start(key, width, matrix.shape[1], unit.dtype)
    q, u = subspace_iteration(unit, start, power_iterations, orthogonalization)
    if rotate:
        q, u = rotate_to_principal(q, u)
    return q[:, :rank], u[:, :rank] * scale


def normalize(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides by a power of two, so that squared norms neither overflow nor vanish.

    Args:
      matrix: (m, n), real.

    Returns:
      The matrix in float32 or wider with its largest magnitude in [1, 2), or a little outside at
      the ends of the number range, and the scalar it was divided by (1 for a zero matrix). A power
      of two: to undo it rounds nothing.
    """
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(matrix), initial=0)
    _, exponent = jnp.frexp(largest)
    limit = -int(np.finfo(matrix.dtype).minexp)  # 1 / scale, too, is a normal number
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent - 1, -limit, limit))
    scale = jnp.where(largest == 0, 1, scale)
    return matrix / scale, scale


def frobenius_norm(matrix: jax.Array) -> jax.Array:
    """Frobenius norm, a scalar; the matrix must be of a scale at which squares are numbers."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix)))


def gaussian_start(key: jax.Array, width: int, n: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Standard normal (n, width), whose first columns do not depend on `width`."""
    return jax.random.normal(key, (width, n), dtype).T


def mask_columns(matrix: jax.Array, active: jax.typing.ArrayLike) -> jax.Array:
    """Zeroes the columns from `active` (an integer, may be traced) on."""
    return jnp.where(jnp.arange(matrix.shape[1]) < active, matrix, 0)


def subspace_iteration(
    matrix: jax.Array, start: jax.Array, power_iterations: int, orthogonalization: Orthogonalization
) -> tuple[jax.Array, jax.Array]:
    """The loop of Algorithm 1: q = orth(A u), u = A^T q, from a given start.

    Column j of q and u depends on the first j columns of the start alone, so one iteration at
    full width holds the iteration at every smaller width.

    Args:
      matrix: A, (m, n), normalized.
      start: u before the first pass, (n, width), width at most min(m, n).
      power_iterations: l, the number of passes.
      orthogonalization: "qr" or "cholesky".

    Returns:
      q (m, width), orthonormal, and u = A^T q (n, width).
    """
    orthonormalize = _ORTHONORMALIZE[orthogonalization]

    def one_pass(_: int, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q = orthonormalize(matmul(matrix, factors[1]))
        return q, matmul(matrix.T, q)

    return jax.lax.fori_loop(1, power_iterations, one_pass, one_pass(0, (start, start)))


def orthonormalize_qr(matrix: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns of an (m, width) matrix by Householder QR."""
    return jnp.linalg.qr(matrix)[0]


def orthonormalize_cholesky(matrix: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns of an (m, width) matrix by shifted Cholesky QR.

    Columns are scaled to norm 1, then three times Y <- Y L^-T with L L^T = Y^T Y, the first time
    shifted (Fukaya et al., 2020, "Shifted Cholesky QR for computing the QR factorization of
    ill-conditioned matrices"). Where the columns are too dependent for that, the result of
    Householder QR is returned instead: the branch is taken at run time.
    """
    width = matrix.shape[1]
    eye = jnp.eye(width, dtype=matrix.dtype)
    epsilon = float(np.finfo(matrix.dtype).eps)
    norms = jnp.linalg.norm(matrix, axis=0)
    basis = matrix / jnp.where(norms == 0, 1, norms)
    for shift in (10 * width * epsilon, 0.0, 0.0):
        factor = jnp.linalg.cholesky(matmul(basis.T, basis) + shift * eye)
        basis = jax.lax.linalg.triangular_solve(
            factor, basis, left_side=False, lower=True, transpose_a=True
        )
    deviation = jnp.max(jnp.abs(matmul(basis.T, basis) - eye))
    # A loop of at most one round, and no `cond`, which under `jax.vmap` would always run both.
    _, basis = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda _: (jnp.bool(False), orthonormalize_qr(matrix)),
        (~(deviation < 10 * epsilon), basis),
    )
    return basis


_ORTHONORMALIZE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "qr": orthonormalize_qr,
    "cholesky": orthonormalize_cholesky,
}


def rotate_to_principal(q: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns q and u within their span so that columns stand in order of falling singular value.

    q @ u.T stays as it was, and its best rank-k part is then the first k columns.

    Args:
      q: (m, width), orthonormal.
      u: (n, width); zero columns are ordered last.

    Returns:
      The turned q and u.
    """
    # The singular vectors of the triangular factor, not the eigenvectors of u^T u: squaring
    # would lose the directions below 3e-4 of the largest in float32.
    _, _, turn = jnp.linalg.svd(jnp.linalg.qr(u, mode="r"))
    return matmul(q, turn.T), matmul(u, turn.T)


def tail_errors(matrix: jax.Array, u: jax.Array, residual: jax.Array) -> jax.Array:
    """The paper's xi of q @ u.T cut to its first k columns, for every k at once.

    With q orthonormal and u = A^T q the residual of all columns is orthogonal to each column, so
    that ||A - q_k u_k^T||^2 = ||A - q u^T||^2 + ||u_(k+1)||^2 + ... Sums of positive numbers: the
    shorter ||A||^2 - ||u_k||^2 cancels in float32 below about 3e-3.

    Args:
      matrix: A, (m, n).
      u: (n, width).
      residual: ||A - q u^T||, a scalar.

    Returns:
      (width,), the error of the first 1, 2, ... columns; zeros for a zero matrix.
    """
    energies = jnp.sum(jnp.square(u), axis=0)
    left_out = jnp.append(jnp.cumsum(energies[:0:-1])[::-1], 0)  # of the columns after each
    norm = frobenius_norm(matrix)
    return jnp.sqrt(jnp.square(residual) + left_out) / jnp.where(norm == 0, 1, norm)


def relative_error(matrix: jax.Array, q: jax.Array, u: jax.Array) -> jax.Array:
    """xi, ||A - q u^T|| / ||A||, of any factors, from the residual itself; 0 for a zero matrix.

    Args:
      matrix: A, (m, n).
      q: (m, k).
      u: (n, k).
    """
    norm = frobenius_norm(matrix)
    return frobenius_norm(matrix - matmul(q, u.T)) / jnp.where(norm == 0, 1, norm)
