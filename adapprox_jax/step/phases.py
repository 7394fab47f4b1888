"""The order of a step's work, for the stacks of matrices of one leaf or of many.

1. each leaf: the target from its factors and its gradient, and its image of the start;
2. together: orthonormal bases of the images;
3. each leaf: the target once more, A^T q, the quotient, the error.

On accelerators a small decomposition costs the same for one matrix as for a hundred. A branch, or a
loop of unknown length, is a round trip to the host. So all leaves go through the phases at
once. Their targets are made anew in each phase, one after the other. Nothing waits for the host but
one branch of adaptive ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.linalg.orthonormalize import ORTHONORMALIZE, WARM_ROUNDS, column_sizes
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.linalg.srsi import normalize, power_of_two_below, principal_turn
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.batching import (
    each,
    grouping_of,
    join,
    part,
    sums_of,
    sweep,
    together,
)
from adapprox_jax.step.matrix import (
    Factors,
    Matrix,
    Plan,
    clipped,
    error_terms,
    errors_of,
    gram_of,
    image_of,
    kept_columns,
    new_state,
    project,
    quotient_in_pieces,
    quotient_of,
    rank_of,
    residuals_and_quotient,
    residuals_and_squares,
    residuals_of,
    scale_of,
    start_of,
    target_of,
    turned,
    wide_quotient_of,
)


class Scaled(NamedTuple):
    """Scaled gradients twice: the same arrays, or made anew for a second pass over them.

    None instead of the second ones if the first are in memory in any case.
    """

    first: Any
    again: Any


class Found(NamedTuple):
    """What a step has found of the stacks of leaves; in each list an entry a leaf."""

    plans: Sequence[Plan]
    stacks: Sequence[Matrix]
    lasts: Sequence[LeafState]
    factors: Sequence[Factors]  # of all columns that were worked on
    units: Sequence[jax.Array]  # powers of two, about as large as the largest image


def step_stacks(
    plans: Sequence[Plan],
    grads: Sequence[jax.Array],
    lasts: Sequence[LeafState],
    entries: Sequence[jax.Array | None],
    chooses: jax.Array,
    twice: bool,
) -> list[tuple[Scaled, LeafState, jax.Array]]:
    """One step of Algorithm 3 up to the clip, and with it if there is a threshold.

    Args:
      plans: Of the leaves, all with the same settings.
      grads: Of each leaf its matrices, (batch, m, n) or (batch, n, m).
      lasts: Their states, with an axis for the batch in front.
      entries: Where zeros stand around matrices, how many entries each has, (batch,).
      chooses: Whether this step chooses ranks.
      twice: Whether scaled gradients are read for an average in codes.

    Returns:
      For each leaf the scaled gradients, the new states, and the sum of the squares of each scaled
      gradient before the clip.
    """
    if not plans:
        return []
    settings, platform = plans[0].settings, plans[0].platform
    largest = _largest_in_columns([last.u for last in lasts], grads)
    scales = each(scale_of, plans, grads, [jnp.max(jnp.abs(x), axis=1) for x in largest])
    stacks = [
        Matrix(grad, last.q, last.u, scale, count)
        for grad, last, scale, count in zip(grads, lasts, scales, entries, strict=True)
    ]
    most = platform.largest_whole or 0
    if platform.is_cpu and all(x.grad.size <= most for x in stacks):
        targets = each(target_of, plans, stacks)
        stacks = [x._replace(target=target) for x, target in zip(stacks, targets, strict=True)]
    found = _factored(plans, stacks, lasts, largest)
    chosen = _choose_fixed(found) if settings.is_fixed else _choose_adaptive(found, chooses)
    turns, ranks = zip(*chosen, strict=True)
    kept = each(kept_columns, plans, lasts, _turned(found.factors, turns), ranks)
    found, residuals, squares, quotients = _last_pass(found, kept)
    pairs = zip(kept, found.units, strict=True)
    energies = sums_of([jnp.square(u / unit[:, None, None]) for (_, u), unit in pairs])
    finite = _finite_sums(residuals)
    terms = each(error_terms, plans, lasts, scales, finite, energies, found.units)
    errors = together(errors_of, terms)
    states = each(new_state, plans, lasts, scales, kept, ranks, errors)
    scaled = _scaled(found, squares, quotients, entries, twice)
    return list(zip(scaled, states, squares, strict=True))


def _factored(
    plans: Sequence[Plan],
    stacks: Sequence[Matrix],
    lasts: Sequence[LeafState],
    largest: Sequence[jax.Array],
) -> Found:
    """The subspace iteration of all matrices: an orthonormal q of each, and u = A^T q."""
    settings, platform = plans[0].settings, plans[0].platform
    rounds = settings.rounds
    unroll = not platform.is_cpu and rounds <= WARM_ROUNDS
    orthonormalize = partial(
        ORTHONORMALIZE[settings.orthogonalization], rounds=rounds, unroll=unroll
    )
    us = each(start_of, plans, [last.u for last in lasts], largest)
    for iteration in range(settings.power_iterations):
        starts = [jax.vmap(normalize)(u)[0] for u in us] if iteration else us
        images = sweep(image_of, plans, stacks, [Factors(None, u) for u in starts])
        grouping = grouping_of(images, have_sides=True)
        joined = [[x.sum(axis=1) for x in of_one_type] for of_one_type in join(images, grouping)]
        # A unit is known this early, so that no residual waits for another leaf's u.
        units = part([list(map(_units, added)) for added in joined], grouping)
        bases = part(list(map(orthonormalize, joined)), grouping)
        stacks, bases = _made_anew(plans, stacks, bases)
        us = sweep(project, plans, stacks, [Factors(q, None) for q in bases])
    factors = [Factors(q, u) for q, u in zip(bases, us, strict=True)]
    return Found(plans, stacks, lasts, factors, units)


def _last_pass(
    found: Found, kept: Sequence[Factors]
) -> tuple[Found, Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]]:
    """What factors leave out of the targets, and the sums for the clip.

    Returns:
      What was found, with targets that may be made anew; for each leaf the sums of squares of what
      is left out, those of the quotients, and on CPUs the quotients.
    """
    plans, platform = found.plans, found.plans[0].platform
    if platform.is_cpu:
        of_pass = _compared(residuals_and_quotient, found, kept)
        residuals, squares, quotients = zip(*of_pass, strict=True)
        return found, residuals, squares, quotients
    if platform.fuses_products:
        residuals, squares = zip(*_compared(residuals_and_squares, found, kept), strict=True)
        return found, residuals, squares, ()
    # In the pass that makes the targets for `project`. The last pass makes them once more, or
    # XLA would keep them.
    sums = sums_of(list(map(jnp.square, sweep(wide_quotient_of, plans, found.stacks))))
    stacks, _ = _made_anew(plans, found.stacks, [u for _, u in found.factors])
    found = found._replace(stacks=stacks)
    return found, _compared(residuals_of, found, kept), sums, ()


def _scaled(
    found: Found,
    squares: Sequence[jax.Array],
    quotients: Sequence[jax.Array],
    entries: Sequence[jax.Array | None],
    twice: bool,
) -> list[Scaled]:
    """Scaled gradients after the clip, from quotients if there are any."""
    plans, stacks, platform = found.plans, found.stacks, found.plans[0].platform
    twice = twice and platform.makes_averages_twice
    for_scales = quotient_in_pieces if platform.fuses_in_pieces else quotient_of
    # Both times anew, or XLA keeps targets of the pass before, or one update for both.
    updates = []
    for one_pass in (*[for_scales] * twice, quotient_of):
        if twice:
            stacks, _ = _made_anew(plans, stacks, squares)
        of_pass = quotients or sweep(one_pass, plans, stacks)
        updates.append(each(clipped, plans, of_pass, squares, entries))
    return list(map(Scaled, updates[0], updates[-1]))


def _choose_fixed(found: Found) -> list[Any]:
    """Turns and ranks of a fixed rank: all columns, of more than those the best."""
    turns: Sequence[jax.Array | None] = [None] * len(found.plans)
    if any(plan.width > plan.capacity for plan in found.plans):
        turns = _turns(found)
    # Read, and not a constant: of an argument that nothing reads the memory cannot be reused.
    ranks = [
        jnp.maximum(last.rank, plan.capacity)
        for plan, last in zip(found.plans, found.lasts, strict=True)
    ]
    return list(zip(turns, ranks, strict=True))


def _choose_adaptive(found: Found, chooses: jax.Array) -> list[Any]:
    """Algorithm 2 at steps that choose ranks; else the ranks in use, without a turn.

    In one branch for all leaves. No factors pass out of it, because each array that leaves a branch
    is copied, and what passes is put together.
    """
    rotates = found.plans[0].settings.rotate
    no_turns = [
        jnp.zeros_like(u[:, :1, :1]) + jnp.eye(u.shape[2], dtype=u.dtype)[None] if rotates else None
        for _, u in found.factors
    ]
    last_ranks = [last.rank for last in found.lasts]
    stay = list(zip(no_turns, last_ranks, strict=True))
    grouping = grouping_of(stay)

    def choose() -> list[list[Any]]:
        residuals = _finite_sums(_compared(residuals_of, found, found.factors))
        turns = _turns(found) if rotates else no_turns
        factors = _turned(found.factors, turns)
        ranks = each(rank_of, found.plans, factors, found.units, residuals)
        return join(list(zip(turns, ranks, strict=True)), grouping)

    return part(jax.lax.cond(chooses, choose, lambda: join(stay, grouping)), grouping)


def _finite_sums(residuals: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums of squares, none infinite: then factors miss what is far larger than all they see."""
    sums = sums_of(residuals)
    return [jnp.minimum(x, float(np.finfo(x.dtype).max) / 4) for x in sums]


def _compared(function: Callable[..., Any], found: Found, factors: Sequence[Factors]) -> list[Any]:
    """A pass over all matrices that compares them with some factors."""
    return sweep(function, found.plans, found.stacks, factors, found.units)


def _turns(found: Found) -> list[jax.Array]:
    """What puts columns in order of falling singular value."""
    pairs = zip(found.factors, found.units, strict=True)
    grams = [jax.vmap(gram_of)(u, unit) for (_, u), unit in pairs]
    return together(principal_turn, grams)


def _turned(factors: Sequence[Factors], turns: Sequence[jax.Array | None]) -> list[Factors]:
    """Factors after their turns, if there are any."""
    if turns[0] is None:
        return list(factors)
    pairs = [(x, turn) for of_leaf, turn in zip(factors, turns, strict=True) for x in of_leaf]
    in_order = together(lambda pair: jax.vmap(turned)(*pair), pairs, have_sides=True)
    return list(map(Factors, in_order[::2], in_order[1::2]))


def _units(images: jax.Array) -> jax.Array:
    """Powers of two about as large as the largest entry of each image.

    NaN where the reciprocal of that entry vanishes: the columns of the basis would be zero.
    """
    largest = jnp.max(column_sizes(images), axis=(1, 2))
    return jnp.where(jnp.isfinite(4 * largest), power_of_two_below(largest), jnp.nan)


def _largest_in_columns(arrays: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    """In each column the number of largest magnitude, in the type that the leaf is worked in."""
    wide = [x.astype(wide_dtype(grad.dtype)) for x, grad in zip(arrays, grads, strict=True)]

    def largest(stack: jax.Array) -> jax.Array:
        # Two largest, so that one all-reduce can take both across devices.
        up, down = jnp.max(stack, axis=1), jnp.max(-stack, axis=1)
        return jnp.where(up >= down, up, -down)

    return together(largest, wide, have_sides=True)


def _made_anew(
    plans: Sequence[Plan], stacks: Sequence[Matrix], after: Sequence[jax.Array]
) -> tuple[list[Matrix], list[jax.Array]]:
    """Recomputes targets after `after` instead of storing them."""
    anew, later = list(stacks), list(after)
    for i, plan in enumerate(plans):
        if not plan.platform.is_cpu:
            # Leaf by leaf: under `jax.shard_map` what leaves a barrier varies as all that enters.
            q, later[i] = jax.lax.optimization_barrier((stacks[i].q, after[i]))
            anew[i] = stacks[i]._replace(q=q)
    return anew, later
