"""The order of a step's work, for the stacks of matrices of one leaf or of many.

1. each leaf: the target from its factors and its gradient, and its image of the start;
2. together: orthonormal bases of the images;
3. each leaf: the target once more, A^T q, the quotient, the error.

On accelerators a small decomposition costs the same for one matrix as for a hundred, and a branch
or a loop of unknown length is a round trip to the host. So all leaves go through the phases at
once, and but for the largest that fit into a fixed number of bytes their targets are not kept from
one phase to another, for which barriers stand between them. Nothing waits for the host but one
branch of adaptive ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.orthonormalize import ORTHONORMALIZE, WARM_ROUNDS
from adapprox_jax.linalg.srsi import normalize, power_of_two_below, principal_turn
from adapprox_jax.sharding.axes import devices_in_use
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.batching import (
    each,
    grouping_of,
    join,
    matrices_at_once,
    part,
    sums_of,
    sweep,
    together,
)
from adapprox_jax.step.matrix import (
    Choice,
    Errors,
    ErrorTerms,
    Factors,
    Matrix,
    Plan,
    error_terms,
    errors_of,
    gram_of,
    image_and_quotient,
    image_of,
    kept_columns,
    new_state,
    project,
    quotient_of,
    rank_of,
    residuals_of,
    scale_of,
    start_of,
    target_of,
    turned,
)
from adapprox_jax.step.platform import Platform


class Found(NamedTuple):
    """What a step has found of the stacks of leaves; in each list an entry a leaf."""

    plans: Sequence[Plan]
    stacks: Sequence[Matrix]
    lasts: Sequence[LeafState]
    factors: Sequence[Factors]  # of all columns that were worked on
    units: Sequence[jax.Array]  # powers of two, about as large as the largest image

    def of(self, leaves: Sequence[int]) -> "Found":
        """That of some leaves."""
        lists: Any = ([x[i] for i in leaves] for x in self)
        return Found(*lists)


_MOST_AT_ONCE = 40 * 2**20  # entries of targets on a device, kept ones among them: 160 MiB
_MOST_KEPT = 2  # stacks: many small ones would pile up while others are still made


def step_stacks(
    plans: Sequence[Plan],
    grads: Sequence[jax.Array],
    lasts: Sequence[LeafState],
    measured: jax.Array,
) -> list[tuple[jax.Array, LeafState]]:
    """One step of Algorithm 3 up to the clip.

    Args:
      plans: Of the leaves, all with the same settings.
      grads: Of each leaf its matrices, (batch, m, n) or (batch, n, m).
      lasts: Their states, with an axis for the batch in front.
      measured: Whether this step chooses ranks.

    Returns:
      For each leaf the scaled gradients and the new states.
    """
    if not plans:
        return []
    subspace, rule = plans[0].settings.subspace, plans[0].settings.rank
    platform = plans[0].platform
    rounds = max(subspace.rounds(plan.width, plan.capacity, rule) for plan in plans)

    def orthonormalize(images: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        added = [parts.sum(axis=1) for parts in images]
        unroll = platform.unrolls_rounds and rounds <= WARM_ROUNDS
        bases = ORTHONORMALIZE[subspace.orthogonalization](added, rounds, unroll)
        # A unit is known this early, so that no residual waits for another leaf's u.
        units = [power_of_two_below(jnp.max(jnp.abs(x), axis=(1, 2))) for x in added]
        return list(zip(bases, units, strict=True))

    largest = _largest([last.u for last in lasts], grads)
    scales = each(scale_of, plans, grads, largest)
    stacks = [
        Matrix(grad, last.q, last.u, scale)
        for grad, last, scale in zip(grads, lasts, scales, strict=True)
    ]
    if platform.keeps_targets:
        stacks = [_with_target(plan, stack) for plan, stack in zip(plans, stacks, strict=True)]
    starts = each(start_of, plans, [last.u for last in lasts], largest)
    images: Sequence[jax.Array]
    bases: Sequence[jax.Array]
    quotients: Sequence[jax.Array] = ()
    if platform.quotient_with_image:
        of_first_pass = sweep(image_and_quotient, plans, stacks, starts, like_u=1)
        images, quotients = zip(*of_first_pass, strict=True)
    else:
        images = sweep(image_of, plans, stacks, starts, like_u=1)
    bases, units = zip(*together(orthonormalize, images, have_sides=True), strict=True)
    for _ in range(1, subspace.power_iterations):
        stacks, bases = _made_anew(plans, stacks, bases)
        us = sweep(project, plans, stacks, bases, like_q=1)
        starts = [jax.vmap(normalize)(u)[0] for u in us]
        images = sweep(image_of, plans, stacks, starts, like_u=1)
        bases, units = zip(*together(orthonormalize, images, have_sides=True), strict=True)
    stacks, bases = _made_anew(plans, stacks, bases)
    us = sweep(project, plans, stacks, bases, like_q=1)
    factors = [Factors(q, u) for q, u in zip(bases, us, strict=True)]
    found = Found(plans, stacks, lasts, factors, units)
    choices = choose_columns(found, measured)
    ranks = [choice.rank for choice in choices]
    kept = _kept_factors(found, choices)
    residuals = [choice.residual for choice in choices]
    norms = _norms(kept, units)
    terms = each(error_terms, plans, lasts, scales, residuals, norms, units)
    errors = together(_errors, terms)
    states = each(new_state, plans, lasts, scales, kept, ranks, errors)
    if not quotients:
        quotients = sweep(quotient_of, plans, stacks)
    return list(zip(quotients, states, strict=True))


def choose_columns(found: Found, measured: jax.Array) -> list[Choice]:
    """Which columns to keep, and what they leave out.

    Ranks are chosen, and errors measured, at some steps alone: in one branch for all leaves, out of
    which no factors pass, because each array that leaves a branch is copied. On accelerators the
    error of a fixed rank costs less than a branch and is measured at every step.
    """
    choices: dict[int, Choice] = {}
    for choose, is_fixed in ((_choose_fixed, True), (_choose_adaptive, False)):
        leaves = [i for i, plan in enumerate(found.plans) if plan.is_fixed == is_fixed]
        if leaves:
            chosen = choose(found.of(leaves), measured)
            choices.update(zip(leaves, chosen, strict=True))
    return [choices[i] for i in range(len(found.plans))]


def _choose_fixed(found: Found, measured: jax.Array) -> list[Choice]:
    """All columns of a fixed rank: of more than those the best."""
    turns: Sequence[jax.Array | None] = [None] * len(found.plans)
    if any(plan.width > plan.capacity for plan in found.plans):
        turns = _turns(found)
    # Read, and not a constant: of an argument that nothing reads the memory cannot be reused.
    choices = [
        choice._replace(rank=jnp.maximum(choice.rank, plan.capacity))
        for plan, choice in zip(found.plans, _unmeasured(found, turns), strict=True)
    ]
    if found.plans[0].platform.measures_every_step:
        return _with_residuals(found, choices)
    return _branch(measured, lambda: _with_residuals(found, choices), choices)


def _choose_adaptive(found: Found, measured: jax.Array) -> list[Choice]:
    """Algorithm 2 at steps that choose ranks; else the ranks in use, without a turn."""
    rotates = found.plans[0].settings.subspace.rotate
    no_turns = [
        jnp.zeros_like(u[:, :1, :1]) + jnp.eye(u.shape[2], dtype=u.dtype) if rotates else None
        for _, u in found.factors
    ]

    def choose() -> list[Choice]:
        residuals = _residuals(found, found.factors)
        choices = _unmeasured(found, _turns(found) if rotates else no_turns)
        factors = _turned(found.factors, choices)
        ranks = each(rank_of, found.plans, factors, found.units, residuals)
        choices = [x._replace(rank=rank) for x, rank in zip(choices, ranks, strict=True)]
        return _with_residuals(found, choices)

    return _branch(measured, choose, _unmeasured(found, no_turns))


def _unmeasured(found: Found, turns: Sequence[jax.Array | None]) -> list[Choice]:
    """The ranks in use. What they leave out is not known."""
    return [
        Choice(turn, last.rank, jnp.full_like(unit, jnp.nan))
        for turn, last, unit in zip(turns, found.lasts, found.units, strict=True)
    ]


def _branch(
    measured: jax.Array, choose: Callable[[], list[Choice]], stay: list[Choice]
) -> list[Choice]:
    """Choices at steps that make them. What passes through the branch is put together."""
    grouping = grouping_of(stay)
    joined = jax.lax.cond(measured, lambda: join(choose(), grouping), lambda: join(stay, grouping))
    return part(joined, grouping)


def _with_residuals(found: Found, choices: Sequence[Choice]) -> list[Choice]:
    """Choices with what the columns leave out as they are kept."""
    residuals = _residuals(found, _kept_factors(found, choices))
    return [x._replace(residual=r) for x, r in zip(choices, residuals, strict=True)]


def _kept_factors(found: Found, choices: Sequence[Choice]) -> list[Factors]:
    ranks = [choice.rank for choice in choices]
    return each(kept_columns, found.plans, found.lasts, _turned(found.factors, choices), ranks)


def _residuals(found: Found, factors: Sequence[Factors]) -> list[jax.Array]:
    qs, us = zip(*factors, strict=True)
    of_matrices = found.plans, found.stacks
    return sums_of(sweep(residuals_of, *of_matrices, qs, us, found.units, like_q=1, like_u=1))


def _turns(found: Found) -> list[jax.Array]:
    """What puts columns in order of falling singular value."""
    pairs = zip(found.factors, found.units, strict=True)
    grams = [jax.vmap(gram_of)(u, unit) for (_, u), unit in pairs]
    return together(lambda groups: [principal_turn(group) for group in groups], grams)


def _turned(factors: Sequence[Factors], choices: Sequence[Choice]) -> list[Factors]:
    """Factors after their turns, if there are any."""

    def products(groups: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [jax.vmap(turned)(x, turn) for x, turn in groups]

    results = list(factors)
    turns = {i: choice.turn for i, choice in enumerate(choices) if choice.turn is not None}
    pairs = [(x, turn) for i, turn in turns.items() for x in factors[i]]
    in_order = together(products, pairs, have_sides=True)
    for i, q, u in zip(turns, in_order[::2], in_order[1::2], strict=True):
        results[i] = Factors(q, u)
    return results


def _norms(factors: Sequence[Factors], units: Sequence[jax.Array]) -> list[jax.Array]:
    """||q u^T|| of each matrix, divided by its unit."""
    squares = [
        jnp.square(u / unit[:, None, None]) for (_, u), unit in zip(factors, units, strict=True)
    ]
    return [jnp.sqrt(x) for x in sums_of(squares)]


def _errors(groups: list[ErrorTerms]) -> list[Errors]:
    """`errors_of` of stacks."""
    return [errors_of(group) for group in groups]


def _largest(arrays: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    """The largest magnitude in each array of stacks, in the type that its gradient is worked in."""

    def largest(groups: list[jax.Array]) -> list[jax.Array]:
        return [jnp.max(jnp.abs(x), axis=(1, 2)) for x in groups]

    wide = [
        x.astype(jnp.promote_types(grad.dtype, jnp.float32))
        for x, grad in zip(arrays, grads, strict=True)
    ]
    return together(largest, wide, have_sides=True)


def _with_target(plan: Plan, stack: Matrix) -> Matrix:
    """A stack with its target in memory, unless that is large."""
    largest = plan.platform.largest_whole
    if largest is not None and stack.grad.size > largest:
        return stack
    [target] = each(target_of, [plan], [stack])
    return stack._replace(target=target)


def _made_anew(
    plans: Sequence[Plan], stacks: Sequence[Matrix], after: Sequence[jax.Array]
) -> tuple[list[Matrix], Sequence[jax.Array]]:
    """Recomputes targets after `after` instead of storing them, but for those that are kept."""
    if plans[0].platform.keeps_targets:
        return list(stacks), after
    kept = _kept(plans[0].platform, [stack.grad.shape for stack in stacks])
    # Leaf by leaf, because under `jax.shard_map` what leaves a barrier varies as all that enters.
    pairs = [
        (stack.q, x) if i in kept else jax.lax.optimization_barrier((stack.q, x))
        for i, (stack, x) in enumerate(zip(stacks, after, strict=True))
    ]
    anew = [stack._replace(q=q) for stack, (q, _) in zip(stacks, pairs, strict=True)]
    return anew, [x for _, x in pairs]


def _kept(platform: Platform, shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """The few largest stacks that, kept in memory, leave room to work on each of the others."""
    kept: set[int] = set()
    most = _MOST_AT_ONCE * devices_in_use()
    largest_first = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    for place, i in enumerate(largest_first):
        others = [j for j in largest_first[: place + 2] if j not in kept and j != i]
        in_memory = sum(math.prod(shapes[j]) for j in (*kept, i))
        sizes = (math.prod(shapes[j][1:]) * matrices_at_once(platform, shapes[j]) for j in others)
        if len(kept) < _MOST_KEPT and in_memory + max(sizes, default=0) <= most:
            kept.add(i)
    return kept
