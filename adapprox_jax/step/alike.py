"""Small leaves that are alike go together as a stack, so that many are soon compiled.

On CPUs alone, where kernels that are alike are compiled once. What is cut out of an array at a
place that the compiler knows is a separate kernel. So places are numbers that it does not know.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.step.platform import Platform, on_platform

SMALL = 10**5  # numbers of an array that may be copied
MANY = 8  # fewer take no longer one by one


def alike(trees: Sequence[Any], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Groups trees of arrays of the same shapes, types and kind. Large ones and few are alone.

    So is each on a mesh, even of one device, where arrays of one shape may be sharded otherwise.

    Args:
      trees: The first array of each tells whether it is large.
      kinds: What else must be equal, or None for a tree that is to be alone.

    Returns:
      The places of the members of each group.
    """
    groups: dict[Any, list[int]] = {}
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    for i, (tree, kind) in enumerate(zip(trees, kinds, strict=True)):
        arrays = jax.tree.leaves(tree)
        key = kind, tuple((x.shape, x.dtype) for x in arrays)
        alone = on_mesh or kind is None or arrays[0].size > SMALL
        groups.setdefault(i if alone else key, []).append(i)
    parts = ([group] if len(group) >= MANY else [[i] for i in group] for group in groups.values())
    return [part for several in parts for part in several]


def each_alike(function: Callable[..., Any], trees: Sequence[Any]) -> list[Any]:
    """A function of each of some trees of arrays, on CPUs of those that are alike together.

    Args:
      function: Of a tree of arrays.
      trees: Of arrays.
    """

    def call(platform: Platform, trees: Sequence[Any]) -> list[Any]:
        if not platform.leaf_after_leaf:
            return list(map(function, trees))
        groups = alike(trees, [()] * len(trees))
        places = places_within(groups, trees)
        results: dict[int, Any] = {}
        for group in groups:
            if len(group) == 1:
                results[group[0]] = function(trees[group[0]])
            else:
                done = jax.vmap(function)(stacked([trees[i] for i in group]))
                results.update(zip(group, unstacked(done, places[: len(group)]), strict=True))
        return [results[i] for i in range(len(trees))]

    if not (trees and jax.sharding.get_abstract_mesh().empty):
        return list(map(function, trees))
    results: list[Any] = on_platform(call, list(trees))
    return results


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of arrays of one shape as one tree with a new first axis."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def places_within(groups: Sequence[Sequence[int]], trees: Sequence[Any]) -> list[jax.Array]:
    """0, 1, 2, ... for the members of any group, as int32 scalars that the compiler does not know.

    They are made of any array, and the same for all groups: each of them costs a kernel.
    """
    largest = max(groups, key=len, default=())
    if len(largest) < MANY:
        return []
    array = jax.tree.leaves(trees[largest[0]])[0]
    first = array[(0,) * array.ndim].astype(jnp.float32)
    one = jnp.clip(jax.lax.bitcast_convert_type(first, jnp.int32), 1, 1).astype(jnp.float32)
    number = jnp.stack([one - 1, one])[None]
    add_one = np.array([[1, 0], [1, 1]], np.float32)
    places = []
    for _ in largest:
        places.append(number[0, 0].astype(jnp.int32))
        number = number @ add_one  # a sum would be worked out anew in each kernel that reads it
    return places


def unstacked(tree: Any, places: Sequence[jax.Array]) -> list[Any]:
    """What is at some places of the first axis of all arrays."""
    return [
        jax.tree.map(lambda x, p=place: jax.lax.dynamic_index_in_dim(x, p, keepdims=False), tree)
        for place in places
    ]
