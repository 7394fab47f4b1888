"""One transformation for hidden matrices, and then another one for all other parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import check_state
from adapprox_jax.sharding.axes import with_automatic_axes
from adapprox_jax.state.report import adapprox_states
from adapprox_jax.step.xla_order import begin_after
from adapprox_jax.transforms.neuron_moment import ScaleByNeuronMomentState


class PartitionedState(NamedTuple):
    """State of `partitioned`."""

    hidden: optax.MaskedState
    others: optax.MaskedState


def partitioned(
    hidden: optax.GradientTransformation,
    others: optax.GradientTransformation,
    is_hidden: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """`optax.partition` of two that are worked on one after the other.

    What both need in between is then not in memory at once. The second waits for second moments of
    the first, by neurons or in factors; without any it does not.

    Args:
      hidden: Of the leaves that are chosen.
      others: Of all other leaves.
      is_hidden: From parameters or updates to a tree of booleans.

    Returns:
      An `optax.GradientTransformation` with state `PartitionedState`.
    """

    def is_other(tree: Any) -> Any:
        return jax.tree.map(lambda flag: not flag, is_hidden(tree))

    first, second = optax.masked(hidden, is_hidden), optax.masked(others, is_other)

    def init(params: optax.Params) -> PartitionedState:
        return PartitionedState(first.init(params), second.init(params))

    def update(
        updates: optax.Updates, state: PartitionedState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PartitionedState]:
        check_state(state, PartitionedState, "adapprox_muon")
        updates, of_hidden = first.update(updates, state.hidden, params)
        updates = _others_after(_second_moments(of_hidden), is_hidden(updates), updates)
        updates, of_others = second.update(updates, state.others, params)
        return updates, PartitionedState(of_hidden, of_others)

    return optax.GradientTransformation(init, update)


def _second_moments(state: Any) -> list[jax.Array]:
    """Small arrays, never negative, that are known once second moments are made; none without."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScaleByNeuronMomentState))
    by_neurons = [node.nu for node in nodes if isinstance(node, ScaleByNeuronMomentState)]
    return jax.tree.leaves([by_neurons, [of.error for of in adapprox_states(state)]])


def _others_after(known: list[jax.Array], mask: Any, updates: optax.Updates) -> optax.Updates:
    """The updates, those that the mask leaves out once `known` is."""
    if not known:
        return updates

    def after(known: list[jax.Array], tree: Any) -> Any:
        ready = jnp.sum(jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in known]))
        return jax.tree.map(lambda x: begin_after(ready, x), tree)

    def one(flag: bool, tree: Any) -> Any:
        return tree if flag else with_automatic_axes(after, tree)(known, tree)

    return jax.tree.map(one, mask, updates)
