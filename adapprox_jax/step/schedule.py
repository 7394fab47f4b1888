"""Which leaves a step works on together: the two schedules, which hold no mathematics.

On a CPU memory is slow and what is small is cheap: one matrix goes after the other, each in full.
On accelerators, and wherever a mesh divides the leaves, all go through the phases together: the
small decompositions are then one, and so are the sums over devices.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.matrix_view import (
    MatrixView,
    from_matrices,
    to_matrices,
    view_shape,
)
from adapprox_jax.settings import Settings
from adapprox_jax.sharding.axes import devices_in_use, varying_alike, with_automatic_axes
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.alike import alike, places_within, stacked, unstacked
from adapprox_jax.step.matrix import Plan, step_dense
from adapprox_jax.step.phases import Scaled, step_stacks
from adapprox_jax.step.platform import MESH_OF_CPUS, Platform, on_platform
from adapprox_jax.step.scalars import StepScalars
from adapprox_jax.step.xla_order import begin_after, first_two, materialize

Stepped = list[tuple[Scaled, LeafState]]
_WithSquares = list[tuple[Scaled, LeafState, jax.Array | None]]  # sums of squares of matrices


def step_leaves(
    scalars: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    views: tuple[MatrixView, ...],
    settings: Settings,
    *,
    twice: bool = False,
) -> Stepped:
    """One step for all leaves, on the schedule that suits the platform and the mesh in use.

    Args:
      scalars: The numbers of this step.
      grads: The gradients, of any shapes and real floating-point types.
      states: The leaves' states.
      views: Which axes form matrices.
      settings: Of the optimizer.
      twice: As in `step_stacks`.

    Returns:
      For each leaf the scaled gradient in its type, and the new state. If there is a threshold, the
      gradients of factored leaves are clipped.
    """

    def step(platform: Platform, *operands: Any) -> Stepped:
        if platform.is_cpu and devices_in_use() > 1:
            platform = MESH_OF_CPUS
        static: dict[str, Any] = {"platform": platform, "views": views, "settings": settings}
        if platform.is_cpu:
            return _leaf_after_leaf(*operands, **static)
        stepped = _together(*operands, twice=twice, **static)
        return [(scaled, new) for scaled, new, _ in stepped]

    return on_platform(step, scalars, list(grads), list(states))


def _leaf_after_leaf(
    scalars: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    views: tuple[MatrixView, ...],
    **static: Any,
) -> Stepped:
    """One step for one leaf after the other, so that the intermediates of few are in memory."""
    results: dict[int, tuple[jax.Array, LeafState]] = {}
    scalars = dataclasses.replace(scalars, draws=materialize(scalars.draws))
    # The first leaf waits for its gradient, or XLA would work on its state long before.
    done, last_error = None, jnp.zeros((), jnp.float32)
    kinds = [
        _kind_of(grad, state, view, static["settings"]) if state.is_factored else None
        for grad, state, view in zip(grads, states, views, strict=True)
    ]
    leaves = list(zip(grads, states, strict=True))
    groups = alike(leaves, kinds)
    places = places_within(groups, grads)
    for group in groups:
        members = [leaves[i] for i in group]
        (grad, state), view, entries = members[0], views[group[0]], None
        if len(group) > 1:
            (grad, state), view = stacked(members), view.stacked()
            if any(grads[i].shape != grad.shape[1:] for i in group):
                counts = [grads[i].size for i in group]
                entries = jnp.array(counts, wide_dtype(grad.dtype))
        if state.is_factored:
            done = first_two(grad) if done is None else done
            state = state._replace(q=begin_after(static["platform"], done, state.q))
        stepped = _together(scalars, [grad], [state], [entries], views=(view,), **static)
        [((scaled, _), new, squares)] = stepped
        if len(group) > 1:
            parts = unstacked((scaled, new), places, members)
            results.update(zip(group, parts, strict=True))
        else:
            results[group[0]] = scaled, new
        if squares is not None:
            # A leaf waits for the squares of the quotient before it and the factors of the leaf
            # before that: small decompositions run beside the next leaf's products.
            done = jnp.stack([jnp.sum(squares).astype(jnp.float32), last_error])
            last_error = jnp.max(new.error).astype(jnp.float32)
    in_order = (results[i] for i in range(len(grads)))
    return [(Scaled(scaled, scaled), new) for scaled, new in in_order]


def _kind_of(
    grad: jax.Array, state: LeafState, view: MatrixView, settings: Settings
) -> tuple[Hashable, ...]:
    """What leaves that go together have in common, besides nearly equal shapes."""
    _, rows, columns = view_shape(grad.shape, view)
    capacity = state.q.shape[-1]
    width = settings.width(capacity, min(rows, columns))
    # Zeros along an axis are whole rows or columns only where the leaf itself is the matrix.
    return view, capacity, width, rows <= columns, () if grad.ndim == 2 else grad.shape


# Outside of a compiled step it is compiled by itself, once for each shape and settings.
@partial(jax.jit, static_argnames=("platform", "views", "settings", "twice"))
def _together(
    scalars: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    entries: Sequence[jax.Array | None] | None = None,
    *,
    platform: Platform,
    views: tuple[MatrixView, ...],
    settings: Settings,
    twice: bool = False,
) -> _WithSquares:
    """One step for all leaves in phases."""
    factored = [i for i, state in enumerate(states) if state.is_factored]
    of_matrices = [views[i] for i in factored]

    def all_stacks(
        scalars: StepScalars, grads: Sequence[jax.Array], states: Sequence[LeafState]
    ) -> _WithSquares:
        # Not of one leaf, which may vary over devices where others do not.
        chooses = settings.chooses_at(scalars.step)
        plans, stacks, lasts = [], [], []
        for given, of_leaf, view in zip(grads, states, of_matrices, strict=True):
            own, grad, state = varying_alike((scalars, given, of_leaf))
            batch, rows, columns = view_shape(grad.shape, view)
            capacity = state.q.shape[-1]
            plan = Plan(
                own.in_type(wide_dtype(grad.dtype)),
                settings,
                platform,
                axis=0 if rows <= columns else 1,
                batch=math.prod(batch),
                width=settings.width(capacity, min(rows, columns)),
                capacity=capacity,
            )
            plans.append(plan)
            stacks.append(to_matrices(grad, view))
            lasts.append(jax.tree.map(lambda x, b=batch: x.reshape(-1, *x.shape[len(b) :]), state))
        results: _WithSquares = []
        alone: Any = [None] * len(plans)
        stepped = step_stacks(plans, stacks, lasts, entries or alone, chooses, twice)
        for result, grad, state, view in zip(stepped, grads, states, of_matrices, strict=True):
            scaled, *rest = result
            batch = state.rank.shape
            rest = jax.tree.map(lambda x, b=batch: x.reshape(*b, *x.shape[1:]), rest)
            in_leaf = Scaled(*(from_matrices(x, view, grad.shape) for x in scaled))
            results.append((in_leaf, *rest))
        return results

    some = [grads[i] for i in factored], [states[i] for i in factored]
    like = [(Scaled(grad, grad), state, state.rank) for grad, state in zip(*some, strict=True)]
    of_factored = with_automatic_axes(all_stacks, like)(scalars, *some)
    results = dict(zip(factored, of_factored, strict=True))
    for i, (grad, state) in enumerate(zip(grads, states, strict=True)):
        if i not in results:
            scaled, new = step_dense(scalars, grad, state)
            results[i] = Scaled(scaled, scaled), new, None
    return [results[i] for i in range(len(grads))]
