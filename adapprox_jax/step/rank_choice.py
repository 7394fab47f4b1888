"""The rank of one matrix: how it grows, how it is chosen, and the factorization at that rank."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import require_scalar
from adapprox_jax.linalg.products import MatrixProducts, column_energies
from adapprox_jax.linalg.rounding import rounded
from adapprox_jax.linalg.srsi import (
    mask_columns,
    rotate_to_principal,
    subspace_iteration,
    tail_error,
)
from adapprox_jax.settings import RankRule, Subspace


class Decomposition(NamedTuple):
    """What one subspace iteration finds of A, for every rank up to its width."""

    q: jax.Array  # (m, capacity), orthonormal; zero beyond the columns worked on
    u: jax.Array  # (n, capacity), A^T q
    energies: jax.Array  # squared norms of all columns worked on, zero beyond
    residual: jax.Array  # ||A - q u^T||^2 of all columns worked on, 0 where it was not asked for


def decompose(
    products: MatrixProducts,
    image: jax.Array,
    subspace: Subspace,
    measured: jax.Array,
    *,
    rounds: int,
    turned: bool,
) -> Decomposition:
    """Algorithm 1 at the width of an image, with what tells the error at every rank.

    Args:
      products: Of A, (m, n), float32 or wider, of a scale at which its square neither overflows nor
        vanishes.
      image: A times the start, (m, width).
      subspace: How to go on from there.
      measured: Whether the residual is asked for: it costs a sweep.
      rounds: Of Cholesky QR.
      turned: Whether the columns are put in order of falling singular value.

    Returns:
      Factors and energies of `width` columns.
    """
    q = subspace_iteration(
        products, image, subspace.power_iterations, subspace.orthogonalization, rounds
    )
    u = products.project(q)
    residual = residual_energy(products, q, u, measured)
    if turned:
        q, u = rotate_to_principal(q, u)
    return Decomposition(q, u, column_energies(u), residual)


def residual_energy(
    products: MatrixProducts, q: jax.Array, u: jax.Array, measured: jax.Array
) -> jax.Array:
    """||A - q u^T||^2 where it is asked for, else 0: it costs a sweep."""
    zero = jnp.zeros_like(q[0, 0])
    return jax.lax.cond(measured, products.residual_energy, lambda *_: zero, q, u)


def choose_rank(
    energies: jax.Array,
    residual: jax.Array,
    wanted: jax.Array,
    size: jax.typing.ArrayLike,
    capacity: int,
    error_threshold: jax.typing.ArrayLike,
    rule: RankRule,
) -> jax.Array:
    """Algorithm 2's loop, as far as one decomposition can tell: the first rank that will do.

    Args:
      energies: Squared norms of the columns, zero beyond those worked on.
      residual: ||A - q u^T||^2 of all of them.
      wanted: The rank to begin with, int32 scalar.
      size: The largest rank that the decomposition was made for.
      capacity: The largest rank.
      error_threshold: xi_thresh: the rank grows while the error is above it. NaN: to the largest.
      rule: Growth and margin.

    Returns:
      An int32 scalar: the rank, or one above `size`, for which there must be more columns.

    Raises:
      ValueError: the growth is not one number.
    """

    def error_without_margin(rank: jax.Array) -> jax.Array:
        return tail_error(energies, residual, jnp.maximum(rank - rule.rank_margin, 1))

    def is_too_small(rank: jax.Array) -> jax.Array:
        above = (error_without_margin(rank) > error_threshold) | jnp.isnan(error_threshold)
        return (rank <= size) & above & (rank < capacity)

    def next_rank(rank: jax.Array) -> jax.Array:
        return grown(rank, error_without_margin(rank), capacity, rule)

    return jax.lax.while_loop(is_too_small, next_rank, wanted)


def choose_rank_by_table(
    energies: jax.Array,
    residual: jax.Array,
    capacity: int,
    error_threshold: jax.typing.ArrayLike,
    rule: RankRule,
) -> jax.Array:
    """`choose_rank` from the first rank on and without a loop: from every rank to its next.

    Following the table from a rank to the next, then to the one after that, and then four further,
    needs as many lookups as the capacity has bits.

    Args:
      energies: As in `choose_rank`, of all columns that there are.
      residual: Likewise.
      capacity: The largest rank.
      error_threshold: Likewise.
      rule: First rank, growth and margin.

    Returns:
      An int32 scalar of at most `capacity`.

    Raises:
      ValueError: the growth is not one number.
    """

    def next_rank(rank: jax.Array) -> jax.Array:
        error = tail_error(energies, residual, jnp.maximum(rank - rule.rank_margin, 1))
        above = (error > error_threshold) | jnp.isnan(error_threshold)
        return jnp.where(above, grown(rank, error, capacity, rule), rank)

    table = jax.vmap(next_rank)(jnp.arange(capacity + 1, dtype=jnp.int32))
    for _ in range(capacity.bit_length()):
        table = table[table]
    return table[min(rule.first(capacity) + rule.rank_margin, capacity)]


def grown(rank: jax.Array, error: jax.Array, capacity: int, rule: RankRule) -> jax.Array:
    """The next rank to try, at least one larger and at most the capacity.

    Raises:
      ValueError: the growth is not one number.
    """
    given = rule.rank_growth(error)
    require_scalar("rank_growth", given)
    more = jnp.asarray(given)
    more = jnp.where(more >= 1, jnp.minimum(more, capacity), 1)  # 1 also where it is NaN
    return jnp.minimum(rank + more.astype(jnp.int32), capacity)


def decompose_at_size(
    products: MatrixProducts,
    start_of: Callable[[int], jax.Array],
    first_image: jax.Array,
    size: int,
    capacity: int,
    measured: jax.Array,
    rule: RankRule,
    subspace: Subspace,
) -> Decomposition:
    """Decomposes a matrix with as many columns as ranks up to `size` need.

    Args:
      products: Of A, (m, n), as for `decompose`.
      start_of: From a width to a start (n, width), whose first columns do not depend on it.
      first_image: A times the start of the first of the rule's sizes.
      size: One of the rule's.
      capacity: Width of the buffers, the largest rank.
      measured: Whether the residual is asked for.
      rule: Which ranks there may be.
      subspace: How to factor.

    Returns:
      The decomposition, in buffers; energies of as many columns as the largest size needs.
    """
    rows, known = first_image.shape
    width = subspace.width(size, rows)
    image = first_image if width == known else products.image(start_of(width))
    turned = subspace.turns(width, capacity, rule)
    rounds = subspace.rounds(width, capacity, rule)
    found = decompose(products, image, subspace, measured, rounds=rounds, turned=turned)
    q, u = (fit_columns(x, capacity) for x in (found.q, found.u))
    widest = subspace.width(rule.sizes(capacity, rows)[-1], rows)
    return Decomposition(q, u, fit_columns(found.energies, widest), found.residual)


def attempt_rank(
    products: MatrixProducts,
    start_of: Callable[[int], jax.Array],
    first_image: jax.Array,
    wanted: jax.Array,
    capacity: int,
    measured: jax.Array,
    error_threshold: jax.typing.ArrayLike,
    rule: RankRule,
    subspace: Subspace,
) -> tuple[Decomposition, jax.Array, jax.Array]:
    """Decomposes a matrix at the first size that holds the rank wanted, and chooses from there on.

    One decomposition tells the error at every rank up to its width (`low_rank.tail_error`), so that
    a choice of rank costs no more than a step without one, as long as it stays within one size.

    Args:
      products: As in `decompose_at_size`, and so what is not named here.
      start_of: Likewise.
      first_image: Likewise.
      wanted: The rank to begin with, int32 scalar.
      capacity: Likewise.
      measured: Whether a rank is chosen at this step; else it is the one wanted.
      error_threshold: xi_thresh.
      rule: Likewise.
      subspace: Likewise.

    Returns:
      The decomposition; the rank, an int32 scalar, at most the size; and the rank to attempt next,
      above the size, or the rank itself where that will do.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2, 7 and 8.
    """
    sizes = rule.sizes(capacity, first_image.shape[0])
    index = size_index(sizes, wanted)
    size = sum((index == i) * size for i, size in enumerate(sizes))
    common = capacity, measured, rule, subspace
    branches = [
        partial(decompose_at_size, products, start_of, first_image, size, *common) for size in sizes
    ]
    found = jax.lax.switch(index, branches)
    threshold = jnp.where(measured, error_threshold, jnp.inf)
    of_found = found.energies, found.residual
    chosen = choose_rank(*of_found, wanted, size, capacity, threshold, rule)
    return found, jnp.minimum(chosen, size), chosen


def truncate(
    factor: jax.Array, rank: jax.Array, dtype: jax.typing.DTypeLike, bits: jax.Array | None = None
) -> jax.Array:
    """The first columns of a factor (m, capacity) in the type that it is kept in, zeros beyond.

    Args:
      factor: In float32 or wider.
      rank: Columns to keep, int32 scalar.
      dtype: Of the result.
      bits: Random uint16 of its shape, where that type is bfloat16 and rounding stochastic.
    """
    return rounded(mask_columns(factor, rank), dtype, bits)


def error_of(
    decomposition: Decomposition,
    rank: jax.Array,
    products: MatrixProducts,
    measured: jax.Array,
    last_error: jax.Array,
    kept: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """The paper's xi of the factors that are kept.

    Args:
      decomposition: Of A.
      rank: Columns kept, int32 scalar.
      products: Of A.
      measured: Whether the error is to be measured.
      last_error: What stands where it is not.
      kept: q and u as they are kept: rounded, they leave out more.

    Returns:
      A float32 scalar.
    """
    error = tail_error(decomposition.energies, decomposition.residual, rank)
    dtype = decomposition.q.dtype
    if kept[0].dtype != dtype:
        q, u = (x.astype(dtype) for x in kept)
        left_out = residual_energy(products, q, u, measured)
        norm_squared = decomposition.residual + jnp.sum(decomposition.energies)
        error = jnp.sqrt(left_out / jnp.where(norm_squared == 0, 1, norm_squared))
    return jnp.where(measured, error.astype(jnp.float32), last_error)


def norm_of(energies: jax.Array, rank: jax.Array) -> jax.Array:
    """||q u^T|| of the first columns, from the squared norms of all."""
    return jnp.sqrt(jnp.sum(jnp.where(np.arange(energies.shape[0]) < rank, energies, 0)))


def size_index(sizes: tuple[int, ...], rank: jax.Array) -> jax.Array:
    """Index of the first of `sizes` that holds a rank."""
    return sum(((rank > size).astype(jnp.int32) for size in sizes[:-1]), jnp.int32(0))


def fit_columns(array: jax.Array, width: int) -> jax.Array:
    """Cuts the last axis to `width`, or adds zeros there."""
    missing = max(width - array.shape[-1], 0)
    return jnp.pad(array[..., :width], [(0, 0)] * (array.ndim - 1) + [(0, missing)])
