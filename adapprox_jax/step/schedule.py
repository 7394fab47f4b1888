"""One step of `scale_by_adapprox` for leaves: of their matrices, or of their dense moments.

Here CPUs and accelerators part. On a CPU memory is slow and what is small is cheap:
leaves go one after the other, each in full, with branches for what is not needed; those whose ranks
are chosen share code (`groups`). On accelerators
they go in phases (`phases`), and so do fixed ranks wherever a mesh divides them: then the sums over
devices of a phase are done for all leaves at once. In phases adaptive ranks work on all columns of
their buffers, and may differ from those of a CPU; so on a mesh of CPUs they go one after the other,
and have the ranks of one CPU.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.params.matrix_view import (
    MatrixView,
    from_matrices,
    map_matrices,
    to_matrices,
    view_shape,
)
from adapprox_jax.settings import Settings
from adapprox_jax.sharding.axes import devices_in_use, varying_alike, with_automatic_axes
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.approximation import APPROXIMATIONS, average_of_moments
from adapprox_jax.step.factorize import within_range
from adapprox_jax.step.groups import groups_of
from adapprox_jax.step.matrix_step import divide_by_root, step_matrices, step_matrix
from adapprox_jax.step.phases import step_in_phases
from adapprox_jax.step.platform import by_platform
from adapprox_jax.step.scalars import StepScalars, merge_known, split_known
from adapprox_jax.step.xla_order import begin_after, materialize


def step_leaves(
    scalars: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    views: tuple[MatrixView, ...],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """One step for all leaves, in the way that suits the platform and the mesh in use.

    Args:
      scalars: The numbers of this step.
      grads: The gradients, of any shapes and real floating-point types.
      states: The leaves' states.
      views: Which axes form matrices.
      settings: Of the optimizer.

    Returns:
      For each leaf the scaled gradient in its type, and the new state.
    """
    known, traced = split_known(scalars)
    in_turn = partial(step_in_turn, known=known, views=views, settings=settings)
    in_phases = partial(step_all_in_phases, known=known, views=views, settings=settings)
    operands = traced, list(grads), list(states)
    widths = [state.q.shape[-1] for state in states if state.is_factored]
    if devices_in_use() > 1 and all(settings.rank.is_fixed(width) for width in widths):
        return in_phases(*operands)
    results: list[tuple[jax.Array, LeafState]] = by_platform(
        *operands, cpu=in_turn, default=in_phases
    )
    return results


def step_in_turn(
    traced: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    known: StepScalars,
    views: tuple[MatrixView, ...],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """`step_leaves` on a CPU: one leaf after the other, or a few of one shape."""
    results: dict[int, tuple[jax.Array, LeafState]] = {}
    traced = traced._replace(draws=jax.tree.map(materialize, traced.draws))
    ready = last_error = jnp.zeros(())
    for group in groups_of(grads, states, views, settings):
        stepped = step_group(
            traced,
            ready,
            [grads[i] for i in group],
            [states[i] for i in group],
            known=known,
            view=views[group[0]],
            settings=settings,
        )
        results.update(zip(group, stepped, strict=True))
        scaled, new = stepped[-1]
        if new.is_factored:
            # A group waits for the last quotient of the one before it and the factors of the one
            # before that: the small decompositions run beside the next group's products.
            ready = jnp.minimum(jnp.sum(jnp.square(scaled.astype(jnp.float32))), last_error)
            last_error = jnp.max(new.error)
    return [results[i] for i in range(len(grads))]


@partial(jax.jit, static_argnames=("known", "views", "settings"))
def step_all_in_phases(
    traced: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    known: StepScalars,
    views: tuple[MatrixView, ...],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """`step_leaves` on an accelerator, or of fixed ranks on a mesh: factored leaves in phases."""
    factored = [i for i, state in enumerate(states) if state.is_factored]
    stacks = step_in_phases(
        traced,
        [grads[i] for i in factored],
        [states[i] for i in factored],
        known=known,
        views=[views[i] for i in factored],
        settings=settings,
    )
    results = dict(zip(factored, stacks, strict=True))
    for i, (grad, state) in enumerate(zip(grads, states, strict=True)):
        if i not in results:
            scalars = merge_known(known, traced, jnp.promote_types(grad.dtype, jnp.float32))
            results[i] = step_dense(scalars, grad, state)
    return [results[i] for i in range(len(grads))]


@partial(jax.jit, static_argnames=("known", "view", "settings"))
def step_group(
    traced: StepScalars,
    ready: jax.Array,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    known: StepScalars,
    view: MatrixView,
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """One step for leaves of one shape: of their matrices, or of a dense second moment.

    Compiled by itself, once for each shape and settings, where the caller compiles nothing; within
    a compiled step it is a part of that.

    Args:
      traced: The numbers of this step that are arrays; None for the others.
      ready: A number that is not negative, of the group before: only then does this one begin.
      grads: The gradients, of any one shape and real floating-point type. Several only of matrices
        whose ranks are chosen.
      states: The leaves' states.
      known: The numbers of this step that are known beforehand; None for the others.
      view: Which axes form a matrix.
      settings: Of the optimizer.

    Returns:
      For each leaf the scaled gradient in the type of the gradient, and the new state.
    """
    dtype = jnp.promote_types(grads[0].dtype, jnp.float32)
    if not states[0].is_factored:
        scalars = merge_known(known, traced, dtype)
        return [step_dense(scalars, *leaf) for leaf in zip(grads, states, strict=True)]

    def of_one(traced: StepScalars, grads: Any, states: Any) -> list[tuple[jax.Array, LeafState]]:
        scalars = merge_known(known, traced, dtype)
        return [step_matrix(scalars, grads[0], states[0], settings)]

    def of_some(traced: StepScalars, grads: Any, states: Any) -> list[tuple[jax.Array, LeafState]]:
        return step_matrices(merge_known(known, traced, dtype), grads, states, settings)

    step = of_one
    if not settings.rank.is_fixed(states[0].q.shape[-1]):
        # So that under `jax.vmap`, too, a branch is taken or not.
        step = jax.custom_batching.sequential_vmap(of_some)

    def of_all(
        traced: StepScalars, ready: jax.Array, grads: Any, states: Any
    ) -> list[tuple[jax.Array, LeafState]]:
        batch, _, _ = view_shape(grads[0].shape, view)
        waiting = [state._replace(nu=()) for state in states]
        waiting[0] = waiting[0]._replace(q=begin_after(ready, waiting[0].q))
        operands = traced, [to_matrices(grad, view) for grad in grads], waiting
        traced, matrices, waiting = varying_alike(operands)
        stepped = map_matrices(lambda some: step(traced, *some), (matrices, waiting), batch)
        return [
            (from_matrices(scaled, view, grad.shape), new._replace(nu=state.nu))
            for (scaled, new), grad, state in zip(stepped, grads, states, strict=True)
        ]

    results_like = list(zip(grads, states, strict=True))
    return with_automatic_axes(of_all, results_like)(traced, ready, grads, states)


def step_dense(
    scalars: StepScalars, grad: jax.Array, state: LeafState
) -> tuple[jax.Array, LeafState]:
    """One step for a leaf that keeps its second moment as it is."""
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    nu = average_of_moments(state.nu, wide, scalars.b2)
    nu = jnp.where(jnp.isfinite(wide), within_range(nu, nu.dtype), nu)
    scaled = divide_by_root(wide, nu, scalars, APPROXIMATIONS["moment"])
    return scaled.astype(grad.dtype), state._replace(nu=nu.astype(state.nu.dtype))
