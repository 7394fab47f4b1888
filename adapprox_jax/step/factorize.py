"""The new factors of matrices, from the image of the start on: Algorithms 1 and 2 on a state.

A fixed rank is factored once. Where ranks are chosen the code is long, for several sizes, and takes
long to compile; so matrices of one shape share it, in one loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.linalg.products import MatrixProducts
from adapprox_jax.linalg.random_start import start_columns, warm_start
from adapprox_jax.settings import Settings, Subspace
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.rank_choice import (
    Decomposition,
    attempt_rank,
    decompose_at_size,
    error_of,
    norm_of,
    truncate,
)
from adapprox_jax.step.scalars import StepScalars

# Matrices that share a loop. Their numbers lie in arrays of this length, whatever their count: the
# small kernels of all groups are then the same, and compiled once.
MOST_TOGETHER = 6


class Begun(NamedTuple):
    """What the factorization of a matrix starts from."""

    image: jax.Array  # the target times the start of the first size, (m, width)
    target_scale: jax.Array  # what the target is divided by
    known: jax.Array  # how many columns of the last u the start has, int32 scalar


def factorize(
    scalars: StepScalars,
    products: MatrixProducts,
    begun: Begun,
    state: LeafState,
    settings: Settings,
) -> LeafState:
    """The new factors of a matrix of fixed rank.

    Args:
      scalars: The numbers of this step.
      products: Of the target, (m, n).
      begun: What there is of it already.
      state: Of the matrix: q (m, capacity), u (n, capacity), and scalars.
      settings: Of the optimizer.

    Returns:
      The new state.
    """
    capacity = state.q.shape[1]
    start = partial(
        start_of, scalars, state.u, begun.known, begun.target_scale, subspace=settings.subspace
    )
    measured = settings.rank.is_measured(scalars.step)
    found = decompose_at_size(
        products, start, begun.image, capacity, capacity, measured, settings.rank, settings.subspace
    )
    rank = jnp.full_like(state.rank, capacity)
    q, u = kept_factors(scalars, found, rank, begun.target_scale, state)
    error, drift = known_of(scalars, found, rank, products, begun.target_scale, state, settings)
    return state._replace(q=q, u=u, rank=rank, error=error, drift=drift)


def factorize_in_turn(
    scalars: StepScalars,
    products: Sequence[MatrixProducts],
    begun: Sequence[Begun],
    states: Sequence[LeafState],
    settings: Settings,
) -> list[LeafState]:
    """The new factors of matrices of one shape, each at the rank in use or at one chosen anew.

    Args:
      scalars: The numbers of this step.
      products: Of each target, (m, n).
      begun: What there is of each already.
      states: Of the matrices.
      settings: Of the optimizer.

    Returns:
      The new states.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2, 7 and 8.
    """
    rule, subspace = settings.rank, settings.subspace
    capacity = states[0].q.shape[1]
    measured = rule.is_measured(scalars.step)
    images = jnp.stack([one.image for one in begun])
    target_scales, knowns = (
        in_slots([getattr(one, name) for one in begun]) for name in ("target_scale", "known")
    )
    ranks, errors, drifts = (
        in_slots([getattr(state, name) for state in states]) for name in ("rank", "error", "drift")
    )
    first = min(rule.first(capacity) + rule.rank_margin, capacity)
    # Of a matrix at least one, so that the loop goes on to the next; none after the last.
    firsts = jnp.where(measured, first, jnp.maximum(ranks, 1)).astype(jnp.int32)
    firsts = jnp.where(np.arange(firsts.shape[0]) < len(states), firsts, 0)

    def attempt(carry: Any) -> Any:
        """One decomposition of the matrix at hand, which leaves it for the next one if it will do.

        An array changes where it lies, in a `cond` of its own: XLA copies what a branch for several
        passes on.
        """
        index, _, wanted, qs, us, ranks, errors, drifts = carry
        image, target_scale, known = (x[index] for x in (images, target_scales, knowns))

        def start(width: int) -> jax.Array:
            covered = min(width, capacity)
            u = jax.lax.switch(index, [lambda u=u: u[:, :covered] for u in us])
            return start_of(scalars, u, known, target_scale, width, subspace)

        at_hand = MatrixProducts(
            *(partial(_of_one, index, functions) for functions in zip(*products, strict=True))
        )
        found, rank, chosen = attempt_rank(
            at_hand,
            start,
            image,
            wanted,
            capacity,
            measured,
            scalars.error_threshold,
            rule,
            subspace,
        )
        will_do = chosen <= rank
        last = states[0]._replace(rank=ranks[index], error=errors[index], drift=drifts[index])
        error, drift = known_of(scalars, found, rank, at_hand, target_scale, last, settings)
        is_next = (np.arange(ranks.shape[0]) == index) & will_do

        def kept(which: int, _: jax.Array) -> jax.Array:
            return kept_factors(scalars, found, rank, target_scale, last)[which]

        def unchanged(array: jax.Array) -> jax.Array:
            return array

        qs = [jax.lax.cond(is_next[i], partial(kept, 0), unchanged, q) for i, q in enumerate(qs)]
        us = [jax.lax.cond(is_next[i], partial(kept, 1), unchanged, u) for i, u in enumerate(us)]
        olds, news = (ranks, errors, drifts), (rank, error, drift)
        scalars_of_all = (jnp.where(is_next, new, old) for old, new in zip(olds, news, strict=True))
        index = index + will_do
        tried = jnp.where(will_do, 0, rank)
        wanted = jnp.where(will_do, firsts[index], chosen)
        return index, tried, wanted, qs, us, *scalars_of_all

    def is_wanted(carry: Any) -> jax.Array:
        # Not of the index: XLA would look for the number of rounds through all of the loop.
        _, tried, wanted, *_ = carry
        return tried < wanted

    zero = jnp.zeros_like(firsts[0])
    qs, us = [state.q for state in states], [state.u for state in states]
    _, _, _, qs, us, *of_all = jax.lax.while_loop(
        is_wanted, attempt, (zero, zero, firsts[0], qs, us, ranks, errors, drifts)
    )
    return [
        state._replace(q=q, u=u, rank=rank, error=error, drift=drift)
        for state, q, u, rank, error, drift in zip(states, qs, us, *of_all, strict=False)
    ]


def in_slots(values: Sequence[jax.Array]) -> jax.Array:
    """Scalars as an array of a fixed length, one longer than there may be, zeros beyond them."""
    missing = MOST_TOGETHER + 1 - len(values)
    return jnp.stack([*values, *[jnp.zeros_like(values[0])] * missing])


def _of_one(
    index: jax.Array, functions: Sequence[Callable[..., jax.Array]], *operands: jax.Array
) -> jax.Array:
    return jax.lax.switch(index, functions, *operands)


def start_of(
    scalars: StepScalars,
    u: jax.Array,
    known: jax.Array,
    target_scale: jax.Array,
    width: int,
    subspace: Subspace,
) -> jax.Array:
    """The start of a subspace iteration, (n, width), whose first columns do not depend on `width`.

    Args:
      scalars: The numbers of this step.
      u: The last one, (n, at least as many of its columns as the start has).
      known: How many of its columns there are, int32 scalar.
      target_scale: What the target is divided by.
      width: Columns.
      subspace: Whether it starts from there.
    """
    start = start_columns(scalars.draws, width, target_scale.dtype, u.shape[0])
    return warm_start(start, u, known, 1 / target_scale) if subspace.warm_start else start


def kept_factors(
    scalars: StepScalars,
    found: Decomposition,
    rank: jax.Array,
    target_scale: jax.Array,
    state: LeafState,
) -> tuple[jax.Array, jax.Array]:
    """Q and u as the state keeps them."""
    q, u = rounded_factors(scalars, found, rank, state)
    return q, within_range(u * target_scale, u.dtype).astype(u.dtype)


def rounded_factors(
    scalars: StepScalars, found: Decomposition, rank: jax.Array, state: LeafState
) -> tuple[jax.Array, jax.Array]:
    """Q and u, of the target divided by its scale, in the types of the state's."""
    q, u = state.q, state.u
    of_q, of_u = rounding_bits(scalars.rounding, q, u)
    return truncate(found.q, rank, q.dtype, of_q), truncate(found.u, rank, u.dtype, of_u)


def known_of(
    scalars: StepScalars,
    found: Decomposition,
    rank: jax.Array,
    products: MatrixProducts,
    target_scale: jax.Array,
    state: LeafState,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """What is known of the new factors: their error and the drift, with those of a state before."""
    measured = settings.rank.is_measured(scalars.step)
    kept = rounded_factors(scalars, found, rank, state)
    error = error_of(found, rank, products, measured, state.error, kept)
    decay = settings.approximation.drift_decay(scalars.b2)
    norm = target_scale * norm_of(found.energies, rank)
    return error, accumulate_drift(state.drift, error, norm, decay)


def accumulate_drift(
    drift: jax.Array, error: jax.Array, norm: jax.Array, decay: jax.typing.ArrayLike
) -> jax.Array:
    """Carries the estimate of the distance from the exact target over one step.

    With D the distance in the Frobenius norm, D_t <= decay D_(t-1) + ||target - q u^T||: averaging
    shrinks an old distance, cutting off entries below zero does not grow it, and the factorization
    adds its own. A bound, up to rounding, where xi is measured at every step.

    Args:
      drift: D_(t-1).
      error: xi, measured at this step or the last one known.
      norm: ||q u^T||, from which with xi follows ||target - q u^T||: the two are orthogonal.
      decay: How averaging shrinks a distance: b2, of the root its root.
    """
    norm = within_range(norm, drift.dtype)
    left_out = error * norm / jnp.sqrt(jnp.maximum(1 - jnp.square(error), 1e-6))
    return within_range(drift * decay + left_out, drift.dtype).astype(drift.dtype)


def within_range(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Numbers, none beyond the largest of a type; NaN stays.

    An infinite second moment of finite gradients would never fall again, and
    `optax.apply_if_finite`, which looks at gradients alone, would not see it.
    """
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(x, -largest, largest)


def rounding_bits(
    bits: jax.Array | None, q: jax.Array, u: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """The random bits for the factors of one matrix; None where they are not in bfloat16."""
    if bits is None or q.dtype != jnp.bfloat16:
        return None, None
    of_q, of_u = bits
    return of_q[: q.shape[0], : q.shape[1]], of_u[: u.shape[0], : u.shape[1]]
