"""Ranks beyond the first size, on CPUs: leaves that are alike share the code for them.

Most of the instructions of an adaptive step belong to the larger sizes of the rank, and few
matrices need them, if any. So a leaf is worked on at the first size by itself (`leaf_step`), and
those for which it does not do go through a loop, whose code is compiled once for all of one kind.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.matrix_step import step_beyond
from adapprox_jax.matrix_view import MatrixView, map_matrices, to_matrices, view_shape
from adapprox_jax.rank import fit_columns
from adapprox_jax.settings import Settings
from adapprox_jax.sharding import devices_in_use, varying_alike, with_automatic_axes
from adapprox_jax.state import LeafState
from adapprox_jax.step_scalars import StepScalars, merge_known


class Leaf(NamedTuple):
    """A leaf between the two parts of its step, or one of its matrices."""

    grad: jax.Array
    state: LeafState  # of the last step, with buffers of their full width
    found: LeafState  # what `matrix_step.step_matrix` made of it, in buffers of the first size


def with_larger_ranks(
    traced: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    found: Sequence[LeafState],
    *,
    known: StepScalars,
    views: Sequence[MatrixView],
    settings: Settings,
) -> list[LeafState]:
    """New states in full buffers, of matrices worked on anew where the first size does not do.

    Args:
      traced: The numbers of this step that are arrays; None for the others.
      grads: The gradients of all leaves.
      states: Their states of the last step.
      found: Their new states, as `matrix_step.step_matrix` leaves them.
      known: The numbers of this step that are known beforehand; None for the others.
      views: Which axes form matrices.
      settings: Of the optimizer.

    Returns:
      The new states. Leaves without larger sizes keep what was found.
    """
    kinds: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, (grad, state, new) in enumerate(zip(grads, states, found, strict=True)):
        if new.q.shape != state.q.shape:
            # On a mesh leaves of one shape may be divided in different ways.
            alone = i if devices_in_use() > 1 else None
            kinds[views[i], alone, *map(jax.typeof, jax.tree.leaves((grad, state)))].append(i)
    results = list(found)
    for members in kinds.values():
        leaves = [
            Leaf(grads[i], states[i]._replace(nu=()), found[i]._replace(nu=())) for i in members
        ]
        view = views[members[0]]
        new_states = of_one_kind(traced, leaves, known=known, view=view, settings=settings)
        for i, new in zip(members, new_states, strict=True):
            results[i] = new._replace(nu=found[i].nu)
    return results


@partial(jax.jit, static_argnames=("known", "view", "settings"))
def of_one_kind(
    traced: StepScalars,
    leaves: list[Leaf],
    *,
    known: StepScalars,
    view: MatrixView,
    settings: Settings,
) -> list[LeafState]:
    """`with_larger_ranks` of leaves that are alike."""
    batch, _, _ = view_shape(leaves[0].grad.shape, view)
    size = leaves[0].found.q.shape[-1]
    dtype = jnp.promote_types(leaves[0].grad.dtype, jnp.float32)

    def of_all(traced: StepScalars, leaves: list[Leaf]) -> list[LeafState]:
        traced, leaves = varying_alike((traced, leaves))
        scalars = merge_known(known, traced, dtype)

        def of_matrix(matrix: Leaf) -> LeafState:
            grad, state, found = matrix
            return jax.lax.cond(
                found.rank > size,
                lambda: step_beyond(scalars, grad, state, found.rank, settings),
                lambda: _in_buffers(found, state.q.shape[-1]),
            )

        def of_leaf(leaf: Leaf) -> LeafState:
            matrices = leaf._replace(grad=to_matrices(leaf.grad, view))
            return map_matrices(of_matrix, matrices, batch)

        def of_states(
            carry: tuple[jax.Array, list[LeafState]],
        ) -> tuple[jax.Array, list[LeafState]]:
            due, states = carry
            current = [leaf._replace(state=x) for leaf, x in zip(leaves, states, strict=True)]
            return jnp.zeros_like(due), _one_after_the_other(of_leaf, current)

        # A loop that runs once at most: a branch would copy all buffers.
        old = [leaf.state for leaf in leaves]
        ranks = jnp.stack([jnp.max(x.rank) for leaf in leaves for x in (leaf.state, leaf.found)])
        due = jnp.max(ranks) > size
        _, states = jax.lax.while_loop(lambda carry: carry[0], of_states, (due, old))
        return [_put(leaf.found, state) for leaf, state in zip(leaves, states, strict=True)]

    # So that under `jax.vmap`, too, the loop runs or not.
    function = jax.custom_batching.sequential_vmap(of_all)
    new_states: list[LeafState] = with_automatic_axes(function, [leaf.state for leaf in leaves])(
        traced, leaves
    )
    return new_states


def _one_after_the_other(
    function: Callable[[Leaf], LeafState], leaves: list[Leaf]
) -> list[LeafState]:
    """Calls a function for each of leaves that are alike, compiled once for all."""
    if len(leaves) == 1:
        return [function(leaves[0])]
    picks = [lambda leaves, i=i: leaves[i] for i in range(len(leaves))]
    stacked = jax.lax.map(
        lambda i: function(jax.lax.switch(i, picks, leaves)), jnp.arange(len(leaves))
    )
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(leaves))]


def _in_buffers(found: LeafState, capacity: int) -> LeafState:
    """What was found at the first size, with zeros up to the width of the buffers."""
    return found._replace(q=fit_columns(found.q, capacity), u=fit_columns(found.u, capacity))


def _put(found: LeafState, state: LeafState) -> LeafState:
    """What was found at the first size over the first columns of a state, where that size does.

    All other columns of the state are zeros there.
    """
    size = found.q.shape[-1]
    does = found.rank <= size

    def over(columns: jax.Array, buffer: jax.Array) -> jax.Array:
        first = jnp.where(does[..., None, None], columns, buffer[..., :size])
        return jax.lax.dynamic_update_slice(buffer, first, (0,) * buffer.ndim)

    scalars = {
        name: jnp.where(does, getattr(found, name), getattr(state, name))
        for name in ("rank", "error", "drift")
    }
    return state._replace(q=over(found.q, state.q), u=over(found.u, state.u), **scalars)
