"""Small work of many arrays done at once: on accelerators a kernel costs much however small."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.sharding import explicit_sharding

_SMALL = 10**5  # numbers of an array that may be copied


def together(function: Callable[[list[Any]], list[Any]], trees: Sequence[Any]) -> list[Any]:
    """Calls a function of a list of stacks with those of one shape put together as one.

    Args:
      function: Of a list of stacks of one type to as many arrays of the same leading sizes.
      trees: Stacks, each an array or a tuple of arrays with one leading axis.

    Returns:
      The results in the order of the trees.
    """
    kinds: dict[Any, dict[Any, list[int]]] = {}
    for i, tree in enumerate(trees):
        arrays = jax.tree.leaves(tree)
        # Of one type are arrays that also vary over the same axes under `jax.shard_map`.
        kind = tuple(jax.typeof(jnp.zeros_like(x, shape=())) for x in arrays)
        shape = tuple((x.shape[1:], explicit_sharding(x)) for x in arrays)
        kinds.setdefault(kind, {}).setdefault(shape, []).append(i)
    results: dict[int, Any] = {}
    for groups in kinds.values():
        joined = [
            jax.tree.map(lambda *x: jnp.concatenate(x), *(trees[i] for i in group))
            for group in groups.values()
        ]
        for group, result in zip(groups.values(), function(joined), strict=True):
            sizes = [jax.tree.leaves(trees[i])[0].shape[0] for i in group]
            parts = jnp.split(result, np.cumsum(sizes)[:-1])
            results.update(zip(group, parts, strict=True))
    return [results[i] for i in range(len(trees))]


def sums_of(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of each of the arrays in stacks, (batch, ...) -> (batch,).

    Of small ones together; large ones are not copied for that.
    """
    results = {i: _sum(x) for i, x in enumerate(stacks) if math.prod(x.shape[1:]) > _SMALL}
    small = [i for i in range(len(stacks)) if i not in results]
    sums = together(lambda groups: [_sum(x) for x in groups], [stacks[i] for i in small])
    results.update(zip(small, sums, strict=True))
    return [results[i] for i in range(len(stacks))]


def _sum(stack: jax.Array) -> jax.Array:
    return stack.sum(tuple(range(1, stack.ndim)))
