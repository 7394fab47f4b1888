"""One step of all factored leaves in phases, the way that suits accelerators.

There a small decomposition costs the same for one matrix as for a hundred, and a branch or a loop
of unknown length is a round trip to the host. So what is small is done for all leaves together, and
what is large leaf by leaf:

1. each leaf: the target from its factors and its gradient, and its image of the start;
2. together: orthonormal bases of the images;
3. each leaf: the target once more, A^T q, the quotient, the error.

But for the largest that fit into a fixed number of bytes the targets are not kept from one phase to
another, for which barriers stand between them. Nothing waits for the host but one branch of
adaptive ranks, whose steps choose them or not.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.orthonormalize import ORTHONORMALIZE, WARM_ROUNDS
from adapprox_jax.linalg.srsi import power_of_two_below
from adapprox_jax.params.matrix_view import MatrixView, from_matrices, to_matrices, view_shape
from adapprox_jax.settings import Settings
from adapprox_jax.sharding.axes import devices_in_use, varying_alike, with_automatic_axes
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.batching import sums_of, together
from adapprox_jax.step.matrix import (
    ErrorParts,
    Errors,
    Matrices,
    Plan,
    ThinFactors,
    error_parts,
    errors_of,
    image_of,
    kept_columns,
    new_state,
    normal_image_of,
    project,
    quotient_of,
    scale_of,
)
from adapprox_jax.step.phase_choices import choose_columns, turned
from adapprox_jax.step.scalars import StepScalars, merge_known
from adapprox_jax.step.stacks import at_once, each, sweep

_MOST_AT_ONCE = 40 * 2**20  # entries of targets on a device, kept ones among them: 160 MiB
_MOST_KEPT = 2  # stacks: many small ones would pile up while others are still made


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
        measured = settings.rank.is_measured(traced.step)
        plans, flat = [], []
        for given, of_leaf, view in zip(grads, states, views, strict=True):
            own, grad, state = varying_alike((traced, given, of_leaf._replace(nu=())))
            scalars = merge_known(known, own, jnp.promote_types(grad.dtype, jnp.float32))
            _, rows, columns = view_shape(grad.shape, view)
            axis = 0 if rows <= columns else 1
            batch, capacity = math.prod(state.rank.shape), state.q.shape[-1]
            plans.append(Plan(scalars, settings, axis, batch, min(rows, columns), capacity))
            operands = to_matrices(grad, view), state
            depth = len(view.batch)
            flat.append(
                jax.tree.map(lambda x, b=batch, d=depth: x.reshape(b, *x.shape[d:]), operands)
            )
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

    def orthonormalize(images: list[jax.Array]) -> list[jax.Array]:
        added = [parts.sum(axis=1) for parts in images]
        unroll = rounds <= WARM_ROUNDS  # a loop costs an accelerator more than two rounds of code
        return ORTHONORMALIZE[subspace.orthogonalization](added, rounds, unroll)

    images = sweep(image_of, plans, stacks)
    bases = together(orthonormalize, [image for image, _ in images], have_sides=True)
    largest = together(_largest, [largest for _, largest in images], have_sides=True)
    units = [power_of_two_below(x) for x in largest]
    for _ in range(1, subspace.power_iterations):
        stacks, bases = _made_anew(stacks, bases)
        images_again = sweep(normal_image_of, plans, stacks, bases)
        bases = together(orthonormalize, images_again, have_sides=True)
    stacks, bases = _made_anew(stacks, bases)
    found = list(zip(bases, sweep(project, plans, stacks, bases), strict=True))

    choices = choose_columns(plans, stacks, found, units, measured)
    ranks = [choice.rank for choice in choices]
    kept = each(kept_columns, plans, stacks, turned(found, choices), ranks)
    residuals = [choice.residual for choice in choices]
    errors = together(
        _errors, each(error_parts, plans, stacks, residuals, _norms(kept, units), units)
    )
    states = each(new_state, plans, stacks, kept, ranks, errors)
    return list(zip(each(quotient_of, plans, stacks), states, strict=True))


def _as_stacks(
    plans: Sequence[Plan], leaves: Sequence[tuple[jax.Array, LeafState]]
) -> list[Matrices]:
    """Gradients and states with what tells how large the targets are."""
    us = [state.u.astype(jnp.promote_types(grad.dtype, jnp.float32)) for grad, state in leaves]
    largest = together(_largest, us, have_sides=True)
    grads = [grad for grad, _ in leaves]
    scales = each(scale_of, plans, grads, largest)
    return [
        Matrices(grad, state, *sizes)
        for (grad, state), *sizes in zip(leaves, largest, scales, strict=True)
    ]


def _norms(factors: Sequence[ThinFactors], units: Sequence[jax.Array]) -> list[jax.Array]:
    """||q u^T|| of each matrix, divided by its unit."""
    squares = [
        jnp.square(u / unit[:, None, None]) for (_, u), unit in zip(factors, units, strict=True)
    ]
    return [jnp.sqrt(x) for x in sums_of(squares)]


def _errors(groups: list[ErrorParts]) -> list[Errors]:
    """Errors and drift of stacks."""
    return [errors_of(group) for group in groups]


def _largest(groups: list[jax.Array]) -> list[jax.Array]:
    """Largest magnitude in each array of stacks."""
    return [jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim))) for x in groups]


def _made_anew(
    stacks: Sequence[Matrices], after: list[jax.Array]
) -> tuple[list[Matrices], list[jax.Array]]:
    """The stacks once `after` is there: most of their targets are made once more, and not kept."""
    kept = _kept([stack.grad.shape for stack in stacks])
    # Leaf by leaf, because under `jax.shard_map` what leaves a barrier varies as all that enters.
    pairs = [
        (stack.state.q, x) if i in kept else jax.lax.optimization_barrier((stack.state.q, x))
        for i, (stack, x) in enumerate(zip(stacks, after, strict=True))
    ]
    return [
        stack._replace(state=stack.state._replace(q=q))
        for stack, (q, _) in zip(stacks, pairs, strict=True)
    ], [x for _, x in pairs]


def _kept(shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """The few largest stacks that, kept in memory, leave room to work on each of the others."""
    kept: set[int] = set()
    most = _MOST_AT_ONCE * devices_in_use()
    largest_first = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    for place, i in enumerate(largest_first):
        others = [j for j in largest_first[: place + 2] if j not in kept and j != i]
        in_memory = sum(math.prod(shapes[j]) for j in (*kept, i))
        worked_on = max((math.prod(shapes[j][1:]) * at_once(shapes[j]) for j in others), default=0)
        if len(kept) < _MOST_KEPT and in_memory + worked_on <= most:
            kept.add(i)
    return kept
