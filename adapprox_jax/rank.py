"""The rank of one matrix: how large it may become, how it grows, and the adaptive factorization."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from adapprox_jax.low_rank import (
    Orthogonalization,
    gaussian_start,
    mask_columns,
    normalize,
    relative_error,
    rotate_to_principal,
    subspace_iteration,
)
from adapprox_jax.validation import require

RankGrowth: TypeAlias = Callable[[jax.Array], jax.Array]


class Factors(NamedTuple):
    """Factorization of one matrix in buffers of fixed width: columns from `rank` on are zero."""

    q: jax.Array  # (m, capacity), the first `rank` columns orthonormal
    u: jax.Array  # (n, capacity)
    rank: jax.Array  # int32 scalar, columns in use
    error: jax.Array  # float32 scalar, the paper's xi of this factorization


def sigmoid_growth(
    eta: float = 200.0, omega: float = -10.0, phi: float = -2.5, tau: float = -9.0
) -> RankGrowth:
    """The paper's f: how many columns to add at an approximation error.

    f(xi) = floor(eta / (1 + exp(omega xi - phi)) + tau): slow at first, then faster, then flat.
    With the defaults 6 at an error of 0, 175 at 0.5 and 190 at 1.

    Args:
      eta: Upper bound of the range, above 0.
      omega: Rate of change, below 0.
      phi: Offset along the error.
      tau: Offset of the value.

    Returns:
      A function from the error (scalar array) to an int32 number of columns, never negative.

    Raises:
      ValueError: eta or omega has the wrong sign.

    Example:
      >>> import adapprox_jax
      >>> int(adapprox_jax.sigmoid_growth()(0.5))
      175

    Source: paper, equation of f(xi). As printed it is negative everywhere; this is the form that
    fits the text (docs/algorithm.md, 1).
    """
    require("eta", eta, lambda x: x > 0, "a number above 0")
    require("omega", omega, lambda x: x < 0, "a number below 0")

    def growth(error: jax.Array) -> jax.Array:
        sigmoid = jax.nn.sigmoid(phi - omega * jnp.asarray(error))
        return jnp.maximum(jnp.floor(eta * sigmoid + tau), 0).astype(jnp.int32)

    return growth


def resolve_capacity(max_rank: int | float, rows: int, columns: int) -> int:
    """Columns of the factor buffers of a (rows, columns) matrix.

    Args:
      max_rank: The paper's k_max: an int, or a float as a fraction of min(rows, columns), rounded
        down.
      rows: Rows of the matrix.
      columns: Columns of the matrix.

    Returns:
      An int from 1 to min(rows, columns).
    """
    short = min(rows, columns)
    rank = math.floor(max_rank * short) if isinstance(max_rank, float) else max_rank
    return max(1, min(rank, short))


def adaptive_srsi(
    matrix: jax.Array,
    previous_u: jax.Array,
    previous_rank: jax.Array,
    step: jax.Array,
    key: jax.Array,
    *,
    initial_rank: int | None,
    error_threshold: float,
    rank_interval: int,
    rank_growth: RankGrowth,
    power_iterations: int,
    oversampling: int,
    rotate: bool,
    warm_start: bool,
    orthogonalization: Orthogonalization,
    factor_dtype: jax.typing.DTypeLike,
) -> Factors:
    """Factors a matrix by S-RSI at the rank in use, or at one chosen anew every few steps.

    All ranks share one subspace iteration at the width of the buffers, of which a smaller rank
    takes the first columns; a step in which the rank is chosen costs one rotation and one
    residual for each rank tried.

    Args:
      matrix: A, (m, n), float32 or wider.
      previous_u: u of the last step, (n, capacity); its width is the largest rank.
      previous_rank: Columns of it in use, int scalar.
      step: t, from 1, int scalar. The rank is chosen where (t - 1) mod rank_interval = 0.
      key: JAX random key of the Gaussian start.
      initial_rank: k_init, the first rank tried. None, or `capacity` and above: the rank is fixed.
      error_threshold: xi_thresh: the rank grows while the error is above it.
      rank_interval: Delta s, steps between choices of the rank.
      rank_growth: f, from the error to the columns to add; at least 1 is added.
      power_iterations: l.
      oversampling: p; k + p is cut to min(m, n).
      rotate: Take the best k of the k + p directions; else the first k, as printed.
      warm_start: Start from `previous_u`, with Gaussian columns where there is none.
      orthogonalization: "qr" or "cholesky".
      factor_dtype: Type in which q and u are kept. The error counts the rounding.

    Returns:
      The factors, their rank and their error.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2 and 7.
    """
    capacity = previous_u.shape[1]
    # As printed, oversampling changes nothing: the columns beyond the rank need not exist.
    width = min(capacity + oversampling, *matrix.shape) if rotate else capacity
    unit, scale = normalize(matrix)
    start = gaussian_start(key, width, matrix.shape[1], unit.dtype)
    if warm_start:
        start = _warm(start, previous_u.astype(unit.dtype))
    wide_q, wide_u = subspace_iteration(unit, start, power_iterations, orthogonalization)

    def truncated(rank: jax.Array) -> Factors:
        q, u = wide_q, wide_u
        if rotate:
            q, u = rotate_to_principal(q, mask_columns(u, rank + oversampling))
        q = mask_columns(q[:, :capacity], rank).astype(factor_dtype)
        u = mask_columns(u[:, :capacity], rank).astype(factor_dtype)
        error = relative_error(unit, q.astype(unit.dtype), u.astype(unit.dtype))
        return Factors(q, u, rank, error.astype(jnp.float32))

    def grown(factors: Factors) -> Factors:
        more = jnp.maximum(rank_growth(factors.error), 1).astype(jnp.int32)
        return truncated(jnp.minimum(factors.rank + more, capacity))

    if initial_rank is not None and initial_rank < capacity:
        chosen_anew = (step - 1) % rank_interval == 0
        factors = jax.lax.while_loop(
            lambda f: chosen_anew & (f.error > error_threshold) & (f.rank < capacity),
            grown,
            truncated(jnp.where(chosen_anew, initial_rank, previous_rank).astype(jnp.int32)),
        )
    else:
        factors = truncated(jnp.asarray(capacity, jnp.int32))
    return factors._replace(u=(factors.u * scale).astype(factor_dtype))  # exact: a power of two


def _warm(start: jax.Array, previous_u: jax.Array) -> jax.Array:
    """Puts the non-zero columns of `previous_u` (n, capacity) over the first of `start`."""
    width = start.shape[1]
    directions, _ = normalize(previous_u)
    directions = jnp.pad(directions, ((0, 0), (0, width - directions.shape[1])))
    return jnp.where(jnp.any(directions != 0, axis=0), directions, start)
