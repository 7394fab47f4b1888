"""Within a step in phases: which ranks the leaves get, and what their columns leave out."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.products import contract, matmul
from adapprox_jax.linalg.srsi import principal_turn
from adapprox_jax.step.batching import grouping_of, join, part, sums_of, together
from adapprox_jax.step.matrix import (
    Choice,
    Matrices,
    Plan,
    ThinFactors,
    kept_columns,
    rank_of,
    residuals_of,
)
from adapprox_jax.step.stacks import each, sweep


def choose_columns(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[ThinFactors],
    units: Sequence[jax.Array],
    measured: jax.Array,
) -> list[Choice]:
    """Which columns to keep, and what they leave out.

    A fixed rank is measured at every step, which costs less than a branch.
    """
    choices: dict[int, Choice] = {}
    for decide, is_fixed in ((_choose_fixed, True), (partial(_choose_or_stay, measured), False)):
        of_kind = [i for i, plan in enumerate(plans) if plan.is_fixed == is_fixed]
        chosen = decide(
            [plans[i] for i in of_kind],
            [stacks[i] for i in of_kind],
            [found[i] for i in of_kind],
            [units[i] for i in of_kind],
        )
        choices.update(zip(of_kind, chosen, strict=True))
    return [choices[i] for i in range(len(plans))]


def _choose_fixed(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[ThinFactors],
    units: Sequence[jax.Array],
) -> list[Choice]:
    """All columns of a fixed rank: of more than those the best."""
    turns: list[jax.Array | None] = [None] * len(plans)
    if any(plan.width > plan.capacity for plan in plans):
        turns = [*_turns(found, units)]
    choices = [
        Choice(turn, jnp.full_like(stack.state.rank, plan.capacity), unit)
        for plan, stack, turn, unit in zip(plans, stacks, turns, units, strict=True)
    ]
    return _measured(plans, stacks, found, units, choices)


def _choose_or_stay(
    measured: jax.Array,
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[ThinFactors],
    units: Sequence[jax.Array],
) -> list[Choice]:
    """New ranks at steps that choose them, else those in use: one branch for all leaves.

    No factors pass through it, and what does is put together, because each array that leaves a
    branch is copied.
    """
    if not plans:
        return []
    stay = _stay(plans, stacks, found)
    grouping = grouping_of(stay)
    joined = jax.lax.cond(
        measured,
        lambda: join(_choose(plans, stacks, found, units), grouping),
        lambda: join(stay, grouping),
    )
    return part(joined, grouping)


def _choose(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[ThinFactors],
    units: Sequence[jax.Array],
) -> list[Choice]:
    """Algorithm 2 for all leaves: the first ranks that will do."""
    residuals = sums_of(sweep(residuals_of, plans, stacks, found, units))
    turns: list[jax.Array | None] = [None] * len(plans)
    if plans[0].settings.subspace.rotate:
        turns = [*_turns(found, units)]
    choices = [
        Choice(turn, stack.state.rank, residual)
        for turn, stack, residual in zip(turns, stacks, residuals, strict=True)
    ]
    ranks = each(rank_of, plans, turned(found, choices), units, residuals)
    choices = [choice._replace(rank=rank) for choice, rank in zip(choices, ranks, strict=True)]
    return _measured(plans, stacks, found, units, choices)


def _stay(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[ThinFactors]
) -> list[Choice]:
    """The ranks in use. What they leave out is not known."""
    choices = []
    for plan, stack, (_, u) in zip(plans, stacks, found, strict=True):
        turn = jnp.zeros_like(u[:, :1, :1]) + jnp.eye(plan.width, dtype=u.dtype)
        rotates = plan.settings.subspace.rotate
        unknown = jnp.full_like(u[:, 0, 0], jnp.nan)
        choices.append(Choice(turn if rotates else None, stack.state.rank, unknown))
    return choices


def _measured(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[ThinFactors],
    units: Sequence[jax.Array],
    choices: Sequence[Choice],
) -> list[Choice]:
    """Choices with what the columns leave out as they are kept."""
    ranks = [choice.rank for choice in choices]
    kept = each(kept_columns, plans, stacks, turned(found, choices), ranks)
    residuals = sums_of(sweep(residuals_of, plans, stacks, kept, units))
    return [
        choice._replace(residual=residual)
        for choice, residual in zip(choices, residuals, strict=True)
    ]


def _turns(found: Sequence[ThinFactors], units: Sequence[jax.Array]) -> list[jax.Array]:
    """What puts columns in order of falling singular value."""

    def gram(u: jax.Array, unit: jax.Array) -> jax.Array:
        columns = u / unit
        return contract(columns, columns, 0)

    grams = [jax.vmap(gram)(u, unit) for (_, u), unit in zip(found, units, strict=True)]
    return together(lambda groups: [principal_turn(group) for group in groups], grams)


def turned(found: Sequence[ThinFactors], choices: Sequence[Choice]) -> list[ThinFactors]:
    """Factors after their turns, if there are any."""

    def products(groups: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [jax.vmap(matmul)(x, jnp.swapaxes(turn, -2, -1)) for x, turn in groups]

    results = list(found)
    turns = {i: choice.turn for i, choice in enumerate(choices) if choice.turn is not None}
    pairs = [(x, turn) for i, turn in turns.items() for x in found[i]]
    in_order = together(products, pairs, have_sides=True)
    for i, q, u in zip(turns, in_order[::2], in_order[1::2], strict=True):
        results[i] = q, u
    return results
