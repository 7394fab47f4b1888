"""Randomized low-rank factorization of one matrix: pure linear algebra, no pytrees, no optimizer.

Shapes: A is the matrix (m, n), q is (m, width) with orthonormal columns and u = A^T q is
(n, width), so that A is approximated by q @ u.T. Where an `axis` is named, q stands along that axis
of the matrix: with axis 1 the array holds A^T, (n, m), and nothing is ever transposed for that.
A `width` is the number of columns worked on, an `active` number of columns or a `rank` may be a
traced integer below it: columns beyond are zero. That keeps shapes static while the rank moves.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.tiles import Tiling, sweep
from adapprox_jax.validation import require, require_choice, require_integer

Orthogonalization: TypeAlias = Literal["qr", "cholesky"]
ORTHOGONALIZATIONS = ("qr", "cholesky")

_MOST_ROUNDS = 12  # of Cholesky QR; 1 to 8 are usual
_NORMALS = 8  # Gaussian columns that a random start is made of

# On GPUs and TPUs the default precision of a float32 product keeps 8 to 10 bits, which is more
# than the small entries of a second moment can lose.
_PRECISION = jax.lax.Precision.HIGHEST


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two matrices in their full precision on every backend."""
    return jnp.matmul(a, b, precision=_PRECISION)


def contract(matrix: jax.Array, factor: jax.Array, axis: int) -> jax.Array:
    """Product of a matrix and a factor along one axis of the matrix.

    Args:
      matrix: (m, n).
      factor: (m, width) for axis 0, (n, width) for axis 1.
      axis: Of the matrix, summed over.

    Returns:
      matrix.T @ factor, (n, width), for axis 0; matrix @ factor, (m, width), for axis 1.
    """
    if axis == 1:
        return matmul(matrix, factor)
    # XLA's product with a transposed first operand takes ten times as long on CPUs, and without
    # the barrier it would turn this form into that one.
    return jax.lax.optimization_barrier(matmul(factor.T, matrix)).T


def outer(q: jax.Array, u: jax.Array, axis: int) -> jax.Array:
    """The product q @ u.T, turned so that q stands along `axis`."""
    return matmul(q, u.T) if axis == 0 else matmul(u, q.T)


class MatrixProducts(NamedTuple):
    """What the subspace iteration asks of a matrix A (m, n)."""

    image: Callable[[jax.Array], jax.Array]  # x (n, width) -> A x
    normal_image: Callable[[jax.Array], jax.Array]  # q (m, width) -> A A^T q
    project: Callable[[jax.Array], jax.Array]  # q (m, width) -> A^T q
    residual_energy: Callable[[jax.Array, jax.Array], jax.Array]  # q, u -> ||A - q u^T||^2


def tiled_products(
    tile_of: Callable[[jax.typing.ArrayLike], jax.Array], tiling: Tiling
) -> MatrixProducts:
    """The products of a matrix that is made tile by tile.

    Args:
      tile_of: From an index to that tile of the matrix, (m, n / tiles), or (n / tiles, m) where q
        stands along axis 1.
      tiling: The tiles.

    Returns:
      The products. Each makes every tile once.
    """
    axis = tiling.axis

    def image(x: jax.Array) -> jax.Array:
        def part(index: jax.typing.ArrayLike) -> tuple[jax.Array, tuple[()]]:
            return contract(tile_of(index), tiling.take(x, 0, index), 1 - axis), ()

        return sweep(tiling, part)[0]

    def normal_image(q: jax.Array) -> jax.Array:
        def part(index: jax.typing.ArrayLike) -> tuple[jax.Array, tuple[()]]:
            tile = tile_of(index)
            return contract(tile, contract(tile, q, axis), 1 - axis), ()

        return sweep(tiling, part)[0]

    def project(q: jax.Array) -> jax.Array:
        def part(index: jax.typing.ArrayLike) -> tuple[tuple[()], tuple[jax.Array]]:
            return (), (contract(tile_of(index), q, axis),)

        return sweep(tiling, part, dims=(0,))[1][0]

    def residual_energy(q: jax.Array, u: jax.Array) -> jax.Array:
        def part(index: jax.typing.ArrayLike) -> tuple[jax.Array, tuple[()]]:
            difference = tile_of(index) - outer(q, tiling.take(u, 0, index), axis)
            return jnp.sum(jnp.square(difference)), ()

        return sweep(tiling, part)[0]

    return MatrixProducts(image, normal_image, project, residual_energy)


def products_of(matrix: jax.Array) -> MatrixProducts:
    """The products of a matrix (m, n) that is there as a whole."""
    return tiled_products(lambda _: matrix, Tiling(1, 0))


def srsi(
    matrix: jax.Array,
    rank: int,
    key: jax.Array,
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
      key: JAX random key of the Gaussian start.
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
    drawn = draw_start(key, matrix.shape[1], width, unit.dtype)
    start = start_columns(drawn, width, unit.dtype)
    products = products_of(unit)
    q = subspace_iteration(products, products.image(start), power_iterations, orthogonalization)
    u = products.project(q)
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


class RandomStart(NamedTuple):
    """What the columns of a random start are made of, for matrices of up to n columns."""

    normals: jax.Array  # (8, n), standard normal
    signs: jax.Array  # (blocks, n), 1 or -1 with even odds


def draw_start(
    key: jax.Array, n: int, width: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> RandomStart:
    """Draws what a random start of up to `width` columns and n rows needs: once for many matrices.

    Args:
      key: JAX random key.
      n: Rows of the start.
      width: Most columns.
      dtype: float32 or float64, the widest type of the matrices.

    Returns:
      The draws. More columns leave the first ones as they were.
    """
    normal_key, sign_key = jax.random.split(key)
    blocks = np.arange(-(-width // _NORMALS))
    words, bits = np.divmod(blocks, 32)
    drawn = jax.random.bits(sign_key, (words[-1] + 1, n), jnp.uint32)
    is_set = (drawn[words] >> bits[:, None].astype(np.uint32)) & 1
    normals = jax.random.normal(normal_key, (_NORMALS, n), dtype)
    return RandomStart(normals, 1 - 2 * is_set.astype(dtype))


def start_columns(
    drawn: RandomStart, width: int, dtype: jax.typing.DTypeLike, n: int | None = None
) -> jax.Array:
    """A random start (n, width), whose first columns do not depend on `width`.

    Eight independent Gaussian columns, then the same eight with independent random signs, and so
    on: every two columns are uncorrelated, and a column costs no random numbers of its own.

    Args:
      drawn: From `draw_start`.
      width: Columns.
      dtype: Type of the result.
      n: Rows, at most as many as were drawn; None for all.
    """
    blocks = -(-width // _NORMALS)
    columns = drawn.signs[:blocks, None, :n] * drawn.normals[:, :n]
    return columns.reshape(-1, columns.shape[-1])[:width].T.astype(dtype)


def mask_columns(matrix: jax.Array, active: jax.typing.ArrayLike) -> jax.Array:
    """Zeroes the columns from `active` (an integer, may be traced) on."""
    return jnp.where(jnp.arange(matrix.shape[1]) < active, matrix, 0)


def subspace_iteration(
    products: MatrixProducts,
    image: jax.Array,
    power_iterations: int,
    orthogonalization: Orthogonalization,
) -> jax.Array:
    """The loop of Algorithm 1, q = orth(A u), u = A^T q, up to the last q.

    Column j of q depends on the first j columns of the start alone, so one iteration at full width
    holds the iteration at every smaller width.

    Args:
      products: Of A, (m, n), normalized.
      image: A times the start, (m, width), width at most m.
      power_iterations: l, the number of passes.
      orthogonalization: "qr" or "cholesky".

    Returns:
      q (m, width), orthonormal.
    """
    orthonormalize = _ORTHONORMALIZE[orthogonalization]
    q = orthonormalize(image)
    if power_iterations == 1:  # the body of a loop that never runs is compiled all the same
        return q
    return jax.lax.fori_loop(
        1, power_iterations, lambda _, q: orthonormalize(products.normal_image(q)), q
    )


def orthonormalize_qr(matrix: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns of an (m, width) matrix by Householder QR."""
    return jnp.linalg.qr(matrix)[0]


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
    rows, width = matrix.shape
    epsilon = float(np.finfo(matrix.dtype).eps)
    eye = jnp.eye(width, dtype=matrix.dtype)
    # So small that it is lost in the rounding of columns of norm 1, and only fills empty ones: with
    # more, trajectories leave those of Householder QR ten times as fast.
    noise = epsilon / 16 / rows**0.5 * _noise(rows, width, matrix.dtype)

    def one_round(carry: Any) -> Any:
        rounds, basis, _ = carry
        gram = contract(basis, basis, 0)
        # A gram matrix near the identity has no eigenvalue near zero, and one round without a shift
        # then leaves nothing but rounding.
        is_last = jnp.all(jnp.abs(gram - eye) < 0.5 / width)
        shift = jnp.where(is_last, 0, 4 * width * epsilon)
        factor = jax.lax.linalg.cholesky(gram + shift * eye, symmetrize_input=False)
        inverse = jax.lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
        return rounds + 1, matmul(basis, inverse.T) + jnp.where(is_last, 0, noise), is_last

    rounds, basis, _ = jax.lax.while_loop(
        lambda carry: ~carry[2] & (carry[0] < _MOST_ROUNDS),
        one_round,
        (jnp.int32(0), unit_columns(matrix), jnp.zeros((), bool)),
    )
    return basis, rounds


def unit_columns(matrix: jax.Array) -> jax.Array:
    """The columns divided by their norms; zero columns stay zero."""
    norms = jnp.sqrt(column_energies(matrix))
    return matrix / jnp.where(norms == 0, 1, norms)


def _noise(rows: int, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A fixed matrix (rows, width) of full rank, with entries from -1 to 1 that look random."""
    index = jax.lax.iota(jnp.uint32, rows * width) + jnp.uint32(1)
    wrapped = (index * index * jnp.uint32(0x9E3779B1)).astype(jnp.int32)
    return (wrapped.astype(dtype) / 2.0**31).reshape(rows, width)


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
    # The singular vectors of the triangular factor, not the eigenvectors of u^T u: squaring would
    # lose the directions below 3e-4 of the largest in float32. The shift hardly changes the turn,
    # but singular values by up to 1 %, so that energies are to be taken from the turned columns.
    width, unit = u.shape[1], unit_columns(u)
    gram = contract(unit, unit, 0)
    shift = width * float(np.finfo(u.dtype).eps) * jnp.eye(width, dtype=u.dtype)
    factor = jax.lax.linalg.cholesky(gram + shift, symmetrize_input=False)
    # Should rounding outweigh the shift: the columns are then put in order, and turned no further.
    factor = jnp.where(jnp.isfinite(factor), factor, jnp.eye(width, dtype=u.dtype))
    _, _, turn = jnp.linalg.svd(factor.T * jnp.sqrt(column_energies(u)))
    return matmul(q, turn.T), matmul(u, turn.T)


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
    beyond = jnp.sum(jnp.where(np.arange(energies.shape[0]) < rank, 0, energies))
    norm_squared = residual_energy + jnp.sum(energies)
    return jnp.sqrt((residual_energy + beyond) / jnp.where(norm_squared == 0, 1, norm_squared))


def column_energies(matrix: jax.Array) -> jax.Array:
    """Squared norm of each column of an (n, width) matrix."""
    return jnp.sum(jnp.square(matrix), axis=0)


def relative_error(matrix: jax.Array, q: jax.Array, u: jax.Array) -> jax.Array:
    """xi, ||A - q u^T|| / ||A||, of any factors, from the residual itself; 0 for a zero matrix.

    Args:
      matrix: A, (m, n).
      q: (m, k).
      u: (n, k).
    """
    norm = frobenius_norm(matrix)
    residual = jnp.sqrt(products_of(matrix).residual_energy(q, u))
    return residual / jnp.where(norm == 0, 1, norm)
