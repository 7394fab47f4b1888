"""The rank of one matrix: how it grows, how it is chosen, and the factorization at that rank."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.low_rank import (
    mask_columns,
    rotate_to_principal,
    subspace_iteration,
    tail_error,
)
from adapprox_jax.products import MatrixProducts, column_energies
from adapprox_jax.rounding import round_stochastically
from adapprox_jax.settings import RankRule, Subspace
from adapprox_jax.validation import require_scalar


class Factors(NamedTuple):
    """Factorization of one matrix in buffers of fixed width: columns from `rank` on are zero."""

    q: jax.Array  # (m, capacity), the first `rank` columns orthonormal
    u: jax.Array  # (n, capacity)
    rank: jax.Array  # int32 scalar, columns in use
    error: jax.Array  # float32 scalar, the paper's xi when it was measured last


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


def truncate(
    decomposition: Decomposition,
    rank: jax.Array,
    products: MatrixProducts,
    measured: jax.Array,
    like: Factors,
    rounding: tuple[jax.Array, jax.Array] | None,
) -> tuple[Factors, jax.Array]:
    """The first columns of a decomposition as factors, and what they leave out.

    Args:
      decomposition: Of A.
      rank: Columns to keep, int32 scalar.
      products: Of A.
      measured: Whether the error is to be measured.
      like: The last factors, whose type these get, and whose error stands where none is measured.
      rounding: Random bits for q and for u where that type is bfloat16.

    Returns:
      The factors, and ||q u^T||.
    """
    q, u, energies, residual = decomposition
    q, u = (mask_columns(x, rank) for x in (q, u))
    error = tail_error(energies, residual, rank)
    if rounding is None:
        kept_q, kept_u = q.astype(like.q.dtype), u.astype(like.u.dtype)
    else:
        kept_q, kept_u = map(round_stochastically, (q, u), rounding)
    if kept_q.dtype != q.dtype:
        wide = kept_q.astype(q.dtype), kept_u.astype(u.dtype)
        left_out = residual_energy(products, *wide, measured)
        norm_squared = residual + jnp.sum(energies)
        error = jnp.sqrt(left_out / jnp.where(norm_squared == 0, 1, norm_squared))
    error = jnp.where(measured, error.astype(jnp.float32), like.error)
    norm = jnp.sqrt(jnp.sum(jnp.where(np.arange(energies.shape[0]) < rank, energies, 0)))
    return Factors(kept_q, kept_u, rank, error), norm


def decompose_at_rank(
    products: MatrixProducts,
    start_of: Callable[[int], jax.Array],
    first_image: jax.Array,
    previous: Factors,
    measured: jax.Array,
    error_threshold: jax.typing.ArrayLike,
    rule: RankRule,
    subspace: Subspace,
) -> tuple[Decomposition, jax.Array]:
    """Decomposes a matrix at the rank in use, or at one chosen anew.

    One decomposition tells the error at every rank up to its width (`low_rank.tail_error`), so that
    a choice of rank costs no more than a step without one, as long as it stays within one of the
    rule's sizes.

    Args:
      products: Of A, (m, n), as for `decompose`.
      start_of: From a width to a start (n, width), whose first columns do not depend on it.
      first_image: A times the start of the first of the rule's sizes.
      previous: The last factors; the width of their buffers is the largest rank.
      measured: Whether this is a step that measures the error, and chooses the rank if it is not
        fixed.
      error_threshold: xi_thresh.
      rule: Which ranks there may be.
      subspace: How to factor.

    Returns:
      The decomposition, in buffers, and the rank, an int32 scalar.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2, 7 and 8.
    """
    rows, capacity = previous.q.shape
    sizes = rule.sizes(capacity, rows)
    widest = subspace.width(sizes[-1], rows)

    def at_size(size: int) -> Decomposition:
        width = subspace.width(size, rows)
        known = width == first_image.shape[1]
        image = first_image if known else products.image(start_of(width))
        turned = subspace.turns(width, capacity, rule)
        rounds = subspace.rounds(width, capacity, rule)
        found = decompose(products, image, subspace, measured, rounds=rounds, turned=turned)
        q, u = (fit_columns(x, capacity) for x in (found.q, found.u))
        return Decomposition(q, u, fit_columns(found.energies, widest), found.residual)

    if rule.is_fixed(capacity):
        return at_size(capacity), jnp.full_like(previous.rank, capacity)

    def attempt(carry: Any) -> Any:
        """The first rank from the one wanted on that will do, or that needs a larger size."""
        *_, wanted = carry
        index = size_index(sizes, wanted)
        size = sum((index == i) * size for i, size in enumerate(sizes))
        found = jax.lax.switch(index, [partial(at_size, size) for size in sizes])
        of_found = found.energies, found.residual
        chosen = choose_rank(*of_found, wanted, size, capacity, threshold, rule)
        return found, jnp.minimum(chosen, size), chosen

    threshold = jnp.where(measured, error_threshold, jnp.inf)
    chosen_first = min(rule.first(capacity) + rule.rank_margin, capacity)
    first = jnp.where(measured, chosen_first, previous.rank).astype(jnp.int32)
    energies, residual = (jnp.zeros_like(previous.u, shape=shape) for shape in ((widest,), ()))
    first_carry = (
        Decomposition(previous.q, previous.u, energies, residual),
        jnp.zeros_like(first),
        first,
    )
    found, rank, _ = jax.lax.while_loop(lambda carry: carry[1] < carry[2], attempt, first_carry)
    return found, rank


def size_index(sizes: tuple[int, ...], rank: jax.Array) -> jax.Array:
    """Index of the first of `sizes` that holds a rank."""
    return sum(((rank > size).astype(jnp.int32) for size in sizes[:-1]), jnp.int32(0))


def fit_columns(array: jax.Array, width: int) -> jax.Array:
    """Cuts the last axis to `width`, or adds zeros there."""
    missing = max(width - array.shape[-1], 0)
    return jnp.pad(array[..., :width], [(0, 0)] * (array.ndim - 1) + [(0, missing)])
