"""Which leaves a CPU steps together, so that they share code."""

from collections.abc import Sequence

import jax

from adapprox_jax.linalg.tiles import tiling_of
from adapprox_jax.params.matrix_view import MatrixView, view_shape
from adapprox_jax.settings import Settings
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.factorize import MOST_TOGETHER

_MOST_ENTRIES = 6 * 2**20  # of a group's matrices, whose targets are held at once


def groups_of(
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    views: Sequence[MatrixView],
    settings: Settings,
) -> list[list[int]]:
    """Matrices of one shape whose ranks are chosen, a few at a time; every other leaf by itself.

    Code for ranks that are chosen takes long to compile. The more share it the sooner it is
    compiled, but the more is in memory at once, and a step takes longer. Large matrices go in
    pairs, and those that are worked on in tiles alone.

    Args:
      grads: The gradients.
      states: The leaves' states.
      views: Which axes form matrices.
      settings: Of the optimizer.

    Returns:
      The indices of the leaves of each group, in the order of the first of each.
    """
    alike: dict[object, list[int]] = {}
    for i, (grad, state, view) in enumerate(zip(grads, states, views, strict=True)):
        batch, rows, columns = view_shape(grad.shape, view)
        has_company = (
            state.is_factored
            and not batch
            and not settings.rank.is_fixed(state.q.shape[-1])
            and tiling_of((rows, columns)).tiles == 1
        )
        # With their sharding, and the axes of a `jax.shard_map` over which they vary.
        types = [jax.typeof(x) for x in (grad, *state._replace(nu=state.rank))]
        key = (view, *types) if has_company else i
        alike.setdefault(key, []).append(i)
    groups = []
    for leaves in alike.values():
        most = min(max(_MOST_ENTRIES // max(grads[leaves[0]].size, 1), 2), MOST_TOGETHER)
        count = -(-len(leaves) // most)
        size = -(-len(leaves) // count)
        groups += [leaves[i : i + size] for i in range(0, len(leaves), size)]
    return sorted(groups)
