"""One step of all factored leaves in phases, the way that suits accelerators.

There a small decomposition costs the same for one matrix as for a hundred, and a branch or a loop
of unknown length is a round trip to the host. So what is small is done for all leaves together, and
what is large leaf by leaf:

1. each leaf: the target from its factors and its gradient, and its image of the start;
2. together: orthonormal bases of the images;
3. each leaf: the target once more, A^T q, the error, the quotient.

The target is not kept from one phase to another, for which barriers stand between them, and nothing
waits for the host but one branch of adaptive ranks, whose steps choose them or not.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.low_rank import power_of_two_below, principal_turn
from adapprox_jax.matrix_view import MatrixView, from_matrices, to_matrices, view_shape
from adapprox_jax.orthonormalize import ORTHONORMALIZE, unit_columns
from adapprox_jax.phase_parts import (
    Factored,
    Factors,
    Matrices,
    Plan,
    error_of,
    image_of,
    is_measured,
    kept_columns,
    new_state,
    normal_image_of,
    project,
    quotient_of,
    rank_of,
    residuals_of,
    scale_of,
)
from adapprox_jax.products import column_energies, contract, matmul
from adapprox_jax.settings import Settings
from adapprox_jax.sharding import varying_alike, with_automatic_axes
from adapprox_jax.state import LeafState
from adapprox_jax.step_scalars import StepScalars, join_known, merge_known, split_known
from adapprox_jax.together import sums_of, together

_LARGEST_SLICE = 2**25  # entries of a stack that are worked on at once: 128 MiB in float32


def step_in_phases(
    traced: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    known: StepScalars,
    views: Sequence[MatrixView],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """One step for all factored leaves.

    Args:
      traced: The numbers of this step that are arrays; None for the others.
      grads: The gradients of the factored leaves.
      states: Their states.
      known: The numbers of this step that are known beforehand; None for the others.
      views: Which of their axes form matrices.
      settings: Of the optimizer.

    Returns:
      For each leaf the scaled gradient in its type, and the new state.
    """

    def all_leaves(
        traced: StepScalars, grads: Sequence[jax.Array], states: Sequence[LeafState]
    ) -> list[tuple[jax.Array, LeafState]]:
        # Not of one leaf, which may vary over devices where others do not.
        measured = is_measured(traced.step, settings)
        plans, flat = [], []
        for given, of_leaf, view in zip(grads, states, views, strict=True):
            own, grad, state = varying_alike((traced, given, of_leaf._replace(nu=())))
            scalars = merge_known(known, own, jnp.promote_types(grad.dtype, jnp.float32))
            _, rows, columns = view_shape(grad.shape, view)
            axis = 0 if rows <= columns else 1
            plans.append(Plan(scalars, settings, axis, min(rows, columns), state.q.shape[-1]))
            operands = to_matrices(grad, view), state
            depth = len(view.batch)
            flat.append(jax.tree.map(lambda x, d=depth: x.reshape(-1, *x.shape[d:]), operands))
        stacks = _as_stacks(plans, flat)
        results = []
        leaves = zip(_step_stacks(plans, stacks, measured), grads, states, views, strict=True)
        for result, grad, state, view in leaves:
            batch = state.rank.shape
            scaled, new = jax.tree.map(lambda x, b=batch: x.reshape(*b, *x.shape[1:]), result)
            results.append((from_matrices(scaled, view, grad.shape), new._replace(nu=state.nu)))
        return results

    like = list(zip(grads, states, strict=True))
    return with_automatic_axes(all_leaves, like)(traced, list(grads), list(states))


def _step_stacks(
    plans: Sequence[Plan], stacks: Sequence[Matrices], measured: jax.Array
) -> list[tuple[jax.Array, LeafState]]:
    """The phases, for leaves as stacks of matrices."""
    if not plans:
        return []
    subspace, rule = plans[0].settings.subspace, plans[0].settings.rank
    rounds = max(subspace.rounds(plan.width, plan.capacity, rule) for plan in plans)
    orthonormalize = partial(ORTHONORMALIZE[subspace.orthogonalization], rounds=rounds)

    bases = together(orthonormalize, _sweep(image_of, plans, stacks))
    for _ in range(1, subspace.power_iterations):
        stacks, bases = _made_anew(stacks, bases)
        bases = together(orthonormalize, _sweep(normal_image_of, plans, stacks, bases))
    stacks, bases = _made_anew(stacks, bases)
    found = list(zip(bases, _sweep(project, plans, stacks, bases), strict=True))

    factored = _factor(plans, stacks, found, measured)
    states = _each(new_state, plans, stacks, factored)
    return list(zip(_each(quotient_of, plans, stacks), states, strict=True))


def _as_stacks(
    plans: Sequence[Plan], leaves: Sequence[tuple[jax.Array, LeafState]]
) -> list[Matrices]:
    """Gradients and states with what tells how large the targets are."""
    us = [state.u.astype(jnp.promote_types(grad.dtype, jnp.float32)) for grad, state in leaves]
    largest = together(_largest, us)
    grads = [grad for grad, _ in leaves]
    scales = _each(scale_of, plans, grads, largest)
    return [
        Matrices(grad, state, *sizes)
        for (grad, state), *sizes in zip(leaves, largest, scales, strict=True)
    ]


def _factor(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[Factors],
    measured: jax.Array,
) -> list[Factored]:
    """From the factors of all columns worked on those to keep.

    Those of a fixed rank are measured at every step, which costs less than a branch. Where there
    are others, one branch decides for all of them whether their ranks are chosen.
    """
    factored: dict[int, Factored] = {}
    for is_fixed in (True, False):
        of_kind = [i for i, plan in enumerate(plans) if plan.is_fixed == is_fixed]
        if not of_kind:
            continue
        leaves = (
            [plans[i] for i in of_kind],
            [stacks[i] for i in of_kind],
            [found[i] for i in of_kind],
        )
        if is_fixed:
            new = _cut(*leaves)
        else:
            new = jax.lax.cond(measured, partial(_choose, *leaves), partial(_keep, *leaves))
        factored.update(zip(of_kind, new, strict=True))
    return [factored[i] for i in range(len(plans))]


def _cut(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """The columns of a fixed rank: of more than those the best."""
    if any(plan.width > plan.capacity for plan in plans):
        found = _turn(found)
    ranks = [
        jnp.full_like(stack.state.rank, plan.capacity)
        for plan, stack in zip(plans, stacks, strict=True)
    ]
    return _measure(plans, stacks, found, ranks)


def _choose(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """Algorithm 2 for all leaves: the columns of the first ranks that will do."""
    units = _units(found)
    residuals = sums_of(_sweep(residuals_of, plans, stacks, found, units))
    if plans[0].settings.subspace.rotate:
        found = _turn(found)
    ranks = _each(rank_of, plans, found, units, residuals)
    return _measure(plans, stacks, found, ranks)


def _keep(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """The columns of the ranks in use."""
    ranks = [stack.state.rank for stack in stacks]
    kept = _each(kept_columns, plans, stacks, found, ranks)
    norms = _norms(kept, _units(kept))
    return [
        Factored(factors, stack.state.rank, stack.state.error, norm)
        for factors, stack, norm in zip(kept, stacks, norms, strict=True)
    ]


def _measure(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[Factors],
    ranks: Sequence[jax.Array],
) -> list[Factored]:
    """The first columns, and what they leave out."""
    kept = _each(kept_columns, plans, stacks, found, ranks)
    units = _units(kept)
    norms = _norms(kept, units)
    residuals = sums_of(_sweep(residuals_of, plans, stacks, kept, units))
    errors = _each(error_of, plans, residuals, units, norms)
    return list(map(Factored, kept, ranks, errors, norms))


def _turn(found: Sequence[Factors]) -> list[Factors]:
    """Factors turned so that their columns stand in order of falling singular value."""

    def unit_gram(u: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = unit_columns(u)
        return contract(columns, columns, 0), jnp.sqrt(column_energies(u / unit))

    grams = [
        jax.vmap(unit_gram)(u, unit) for (_, u), unit in zip(found, _units(found), strict=True)
    ]
    turns = together(lambda groups: [principal_turn(*group) for group in groups], grams)

    def turned(x: jax.Array, turn: jax.Array) -> jax.Array:
        return jax.vmap(matmul)(x, jnp.swapaxes(turn, -2, -1))

    return [(turned(q, turn), turned(u, turn)) for (q, u), turn in zip(found, turns, strict=True)]


def _units(factors: Sequence[Factors]) -> list[jax.Array]:
    """Powers of two near the largest entries of each u: divided by them, squares are numbers."""
    return [power_of_two_below(x) for x in together(_largest, [u for _, u in factors])]


def _norms(factors: Sequence[Factors], units: Sequence[jax.Array]) -> list[jax.Array]:
    """||q u^T|| of each matrix."""
    squares = [
        jnp.square(u / unit[:, None, None]) for (_, u), unit in zip(factors, units, strict=True)
    ]
    return [unit * jnp.sqrt(x) for unit, x in zip(units, sums_of(squares), strict=True)]


def _largest(groups: list[jax.Array]) -> list[jax.Array]:
    """Largest magnitude in each matrix of stacks."""
    return [jnp.max(jnp.abs(x), axis=(1, 2)) for x in groups]


def _made_anew(
    stacks: Sequence[Matrices], after: list[jax.Array]
) -> tuple[list[Matrices], list[jax.Array]]:
    """The stacks once `after` is there: their targets are made once more, and not kept."""
    # Leaf by leaf, because under `jax.shard_map` what leaves a barrier varies as all that enters.
    pairs = [
        jax.lax.optimization_barrier((stack.state.q, x))
        for stack, x in zip(stacks, after, strict=True)
    ]
    return [
        stack._replace(state=stack.state._replace(q=q))
        for stack, (q, _) in zip(stacks, pairs, strict=True)
    ], [x for _, x in pairs]


def _each(function: Callable[..., Any], plans: Sequence[Plan], *operands: Any) -> list[Any]:
    """A function of a plan and one matrix for all matrices of all leaves."""
    return [
        _of_stack(function, plan, None, leaf) for plan, *leaf in zip(plans, *operands, strict=True)
    ]


def _sweep(
    function: Callable[..., Any], plans: Sequence[Plan], stacks: Sequence[Matrices], *more: Any
) -> list[Any]:
    """`_each`, with as many matrices of a stack at once as there may be targets in memory."""
    results = []
    for plan, stack, *rest in zip(plans, stacks, *more, strict=True):
        batch, rows, columns = stack.grad.shape
        at_once = max(_LARGEST_SLICE // max(rows * columns, 1), 1)
        at_once_or_all = at_once if at_once < batch else None
        results.append(_of_stack(function, plan, at_once_or_all, [stack, *rest]))
    return results


def _of_stack(
    function: Callable[..., Any], plan: Plan, at_once: int | None, operands: Sequence[Any]
) -> Any:
    """A function of a plan and one matrix for all of a stack, or for some `at_once`."""
    known, traced = split_known(plan.scalars)
    static = plan._replace(scalars=known)
    return _of_stack_traced_once(traced, list(operands), function, static, at_once)


# Leaves of one shape share what is traced: tracing all of 117M would take longer than all else.
@partial(jax.jit, static_argnums=(2, 3, 4))
def _of_stack_traced_once(
    traced: StepScalars,
    operands: list[Any],
    function: Callable[..., Any],
    static: Plan,
    at_once: int | None,
) -> Any:
    plan = static._replace(scalars=join_known(static.scalars, traced))
    if at_once is None:
        return jax.vmap(partial(function, plan))(*operands)
    return jax.lax.map(lambda x: function(plan, *x), tuple(operands), batch_size=at_once)
