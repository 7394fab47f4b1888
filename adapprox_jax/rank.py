"""The rank of one matrix: how large it may become, how it grows, and the adaptive factorization."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.low_rank import (
    MatrixProducts,
    Orthogonalization,
    column_energies,
    mask_columns,
    rotate_to_principal,
    subspace_iteration,
    tail_error,
)
from adapprox_jax.validation import require

RankGrowth: TypeAlias = Callable[[jax.Array], jax.Array]
_SMALLEST_SIZE = 16


class Factors(NamedTuple):
    """Factorization of one matrix in buffers of fixed width: columns from `rank` on are zero."""

    q: jax.Array  # (m, capacity), the first `rank` columns orthonormal
    u: jax.Array  # (n, capacity)
    rank: jax.Array  # int32 scalar, columns in use
    error: jax.Array  # float32 scalar, the paper's xi when it was measured last


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


def sampling_threshold(b2: float, at_least: float) -> Callable[[jax.Array], jax.Array]:
    """An error threshold that asks for no more than an average over the steps so far can know.

    max(at_least, h^(-1/2)) with h = (1 - b2^t) / (1 - b2), the gradients that the average at step t
    is made of: as an estimate of the expected squared gradient it is that far off itself. The first
    second moment is one squared gradient, of nearly full rank, and forgotten soon; with this its
    rank stays low. With `rank_margin` at 0 it would stay low ever after: see docs/memory.md.

    Args:
      b2: Decay of the second moment, in [0, 1).
      at_least: The threshold late in training, at least 0.

    Returns:
      A function from the step t, from 1, to the threshold: an `error_threshold`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import adapprox_jax
      >>> threshold = adapprox_jax.sampling_threshold(b2=0.999, at_least=0.05)
      >>> [round(float(threshold(t)), 2) for t in (1, 10, 100, 10000)]
      [1.0, 0.32, 0.1, 0.05]

    Source: ours (docs/memory.md).
    """
    require("b2", b2, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("at_least", at_least, lambda x: x >= 0, "a number of at least 0")

    def threshold(step: jax.Array) -> jax.Array:
        # From 1: `optax.inject_hyperparams` counts from 0.
        t = jnp.maximum(jnp.asarray(step, jnp.float32), 1)
        gradients = (1 - jnp.power(b2, t)) / (1 - b2)
        return jnp.maximum(at_least, gradients**-0.5)

    return threshold


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


def first_rank(initial_rank: int | None, capacity: int) -> int:
    """k_init cut to the buffers; all columns where none is given: the rank is fixed then."""
    return capacity if initial_rank is None else min(initial_rank, capacity)


def work_sizes(capacity: int, rows: int, initial_rank: int | None) -> tuple[int, ...]:
    """The ranks for which there is code of its own: 16, 64, 256, ... up to the buffers.

    A rank is worked on with as many columns as the next of these has, whatever the buffers hold, so
    that the cost follows the rank in use and nothing depends on the buffers.

    Args:
      capacity: Columns of the buffers.
      rows: The shorter side of the matrix.
      initial_rank: k_init. None, or `capacity` and above: the rank is fixed.

    Returns:
      Rising sizes, the last at least `capacity` and at most `rows`; of a fixed rank that alone.
    """
    if first_rank(initial_rank, capacity) == capacity:
        return (capacity,)
    sizes = [_SMALLEST_SIZE]
    while sizes[-1] < capacity:
        sizes.append(4 * sizes[-1])
    return tuple(min(size, rows) for size in sizes)


def adaptive_srsi(
    products: MatrixProducts,
    start_of: Callable[[int], jax.Array],
    first_image: jax.Array,
    previous_q: jax.Array,
    previous_u: jax.Array,
    previous_rank: jax.Array,
    previous_error: jax.Array,
    step: jax.Array,
    *,
    initial_rank: int | None,
    error_threshold: jax.typing.ArrayLike,
    rank_interval: int,
    rank_growth: RankGrowth,
    rank_margin: int,
    power_iterations: int,
    width_of: Callable[[int, int], int],
    rotate: bool,
    orthogonalization: Orthogonalization,
    factor_dtype: jax.typing.DTypeLike,
) -> tuple[Factors, jax.Array]:
    """Factors a matrix by S-RSI at the rank in use, or at one chosen anew every few steps.

    One subspace iteration tells the error at every rank up to its width (`low_rank.tail_error`),
    so that a choice of rank costs no more than a step without one, as long as it stays within one
    of `work_sizes`.

    Args:
      products: Of A, (m, n), float32 or wider, of a scale at which its square neither overflows nor
        vanishes.
      start_of: From a width to a start (n, width), whose first columns do not depend on it.
      first_image: A times the start of the first of `work_widths`.
      previous_q: q of the last step, (m, capacity): its width is the largest rank.
      previous_u: u of the last step, (n, capacity).
      previous_rank: Columns in use, int scalar.
      previous_error: The error when it was measured last, a scalar.
      step: t, from 1, int scalar. Where (t - 1) mod rank_interval = 0 the error is measured, and
        the rank chosen if it is not fixed.
      initial_rank: k_init, the first rank tried. None, or `capacity` and above: the rank is fixed.
      error_threshold: xi_thresh: the rank grows while the error is above it.
      rank_interval: Delta s, steps between choices of the rank.
      rank_growth: f, from the error to the columns to add; at least 1 is added.
      rank_margin: Columns kept beyond the rank at which the error is low enough.
      power_iterations: l.
      width_of: Columns worked on for a size and m: `work_width` with its p.
      rotate: Take the best k of the columns worked on; else the first k, as printed.
      orthogonalization: "qr" or "cholesky".
      factor_dtype: Type in which q and u are kept. The error counts the rounding.

    Returns:
      The factors with their rank and error, and ||q u^T||.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2, 7 and 8.
    """
    rows, capacity = previous_q.shape
    sizes = work_sizes(capacity, rows, initial_rank)
    start_rank = first_rank(initial_rank, capacity)
    widest = width_of(sizes[-1], rows)
    measured = (step - 1) % rank_interval == 0

    def residual_energy(q: jax.Array, u: jax.Array) -> jax.Array:
        """||A - q u^T||^2 where the error is measured, else 0: it costs a sweep."""
        zero = jnp.zeros((), q.dtype)
        return jax.lax.cond(measured, products.residual_energy, lambda *_: zero, q, u)

    def decompose(size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        width = width_of(size, rows)
        known = width == first_image.shape[1]
        image = first_image if known else products.image(start_of(width))
        q = subspace_iteration(products, image, power_iterations, orthogonalization)
        u = products.project(q)
        residual = residual_energy(q, u)
        if rotate:
            q, u = rotate_to_principal(q, u)
        energies = _fit(column_energies(u), widest)
        return _fit(q, capacity), _fit(u, capacity), energies, residual

    def finished(
        q: jax.Array, u: jax.Array, energies: jax.Array, residual: jax.Array, rank: jax.Array
    ) -> tuple[Factors, jax.Array]:
        q, u = (mask_columns(x, rank) for x in (q, u))
        kept_q, kept_u = q.astype(factor_dtype), u.astype(factor_dtype)
        error = tail_error(energies, residual, rank)
        if kept_q.dtype != q.dtype:
            left_out = residual_energy(kept_q.astype(q.dtype), kept_u.astype(u.dtype))
            norm_squared = residual + jnp.sum(energies)
            error = jnp.sqrt(left_out / jnp.where(norm_squared == 0, 1, norm_squared))
        error = jnp.where(measured, error.astype(jnp.float32), previous_error)
        norm = jnp.sqrt(jnp.sum(jnp.where(np.arange(widest) < rank, energies, 0)))
        return Factors(kept_q, kept_u, rank, error), norm

    if start_rank == capacity:
        return finished(*decompose(capacity), jnp.asarray(capacity, jnp.int32))

    def attempt(carry: Any) -> Any:
        """The first rank from the one wanted on that will do, or that needs a larger size."""
        *_, wanted = carry
        index = size_index(sizes, wanted)
        size = sum((index == i) * size for i, size in enumerate(sizes))
        branches = [partial(decompose, size) for size in sizes]
        q, u, energies, residual = jax.lax.switch(index, branches)

        def error_without_margin(rank: jax.Array) -> jax.Array:
            return tail_error(energies, residual, jnp.maximum(rank - rank_margin, 1))

        def too_small(rank: jax.Array) -> jax.Array:
            above = error_without_margin(rank) > error_threshold
            return (rank <= size) & measured & above & (rank < capacity)

        def grown(rank: jax.Array) -> jax.Array:
            more = jnp.maximum(rank_growth(error_without_margin(rank)), 1).astype(jnp.int32)
            return jnp.minimum(rank + more, capacity)

        wanted = jax.lax.while_loop(too_small, grown, wanted)
        return q, u, energies, residual, jnp.minimum(wanted, size), wanted

    chosen_first = min(start_rank + rank_margin, capacity)
    first = jnp.where(measured, chosen_first, previous_rank).astype(jnp.int32)
    zeros = (jnp.zeros(shape, previous_u.dtype) for shape in (widest, ()))
    nothing = (previous_q, previous_u, *zeros, jnp.int32(0), first)
    *results, _ = jax.lax.while_loop(lambda carry: carry[-2] < carry[-1], attempt, nothing)
    return finished(*results)


def work_width(size: int, rows: int, oversampling: int, rotate: bool) -> int:
    """Columns worked on for ranks up to `size`: p more, at most `rows` in all.

    As printed, oversampling changes nothing: without the rotation the columns beyond need not
    exist.
    """
    return min(size + (oversampling if rotate else 0), rows)


def warm_start(
    start: jax.Array,
    previous_u: jax.Array,
    known: jax.Array,
    inverse_scale: jax.typing.ArrayLike,
) -> jax.Array:
    """A start (n, width) with the columns of `previous_u` over its first.

    Args:
      start: (n, width).
      previous_u: (n, capacity).
      known: How many of its columns there are, int scalar.
      inverse_scale: What `previous_u` is multiplied by, so that A times it is not too large.
    """
    covered = min(start.shape[1], previous_u.shape[1])
    unit_u = previous_u[:, :covered].astype(start.dtype) * inverse_scale
    first = jnp.where(np.arange(covered) < known, unit_u, start[:, :covered])
    return jnp.concatenate([first, start[:, covered:]], axis=1)


def size_index(sizes: tuple[int, ...], rank: jax.Array) -> jax.Array:
    """Index of the first of `sizes` that holds a rank."""
    return sum(((rank > size).astype(jnp.int32) for size in sizes[:-1]), jnp.int32(0))


def _fit(array: jax.Array, width: int) -> jax.Array:
    """Cuts the last axis to `width`, or adds zeros there."""
    missing = max(width - array.shape[-1], 0)
    return jnp.pad(array[..., :width], [(0, 0)] * (array.ndim - 1) + [(0, missing)])
