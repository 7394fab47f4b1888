"""Small leaves that are alike go together as a stack, so that many compile quickly.

On CPUs alone, where kernels that are alike are compiled once. Leaves of about the same shape become
alike by zeros around them. What is cut out of an array at a place that the compiler knows is a
separate kernel. So places are numbers that it does not know.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.sharding.axes import explicit_sharding
from adapprox_jax.step.platform import Platform, on_platform
from adapprox_jax.step.xla_order import materialize

SMALL = 10**5  # numbers of an array that may be copied
MANY = 8  # fewer take no longer one by one
_MOST_GROWTH = 1.5  # of a side, by zeros


def alike(trees: Sequence[Any], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Groups trees of arrays of the same shapes, types and kind. Large ones and few are alone.

    So is each on a mesh in use, even of one device, and each with an explicit sharding: arrays of
    one shape may be sharded otherwise.

    Args:
      trees: The first array of each tells whether it is large.
      kinds: What else must be equal, or None for a tree that is to be alone.

    Returns:
      The places of the members of each group.
    """
    groups: dict[Any, list[int]] = {}
    for i, (tree, kind) in enumerate(zip(trees, kinds, strict=True)):
        key = _key(tree, kind)
        groups.setdefault(i if key is None else (key, _sizes(tree)), []).append(i)
    parts = ([group] if len(group) >= MANY else [[i] for i in group] for group in groups.values())
    return [part for several in parts for part in several]


def padded(trees: Sequence[Any], kinds: Sequence[Hashable]) -> list[Any]:
    """Trees become alike, if there are many of nearly the same shapes.

    Args:
      trees: As in `alike`. What is done with them must not depend on zeros after the last numbers
        along each axis.
      kinds: As in `alike`.

    Returns:
      The trees, some with such zeros. `cut` takes these away.
    """
    sizes = [_sizes(tree) for tree in trees]
    groups: dict[Hashable, list[list[int]]] = {}
    for i in sorted(range(len(trees)), key=sizes.__getitem__):
        key = _key(trees[i], kinds[i])
        if key is None:
            continue
        for group in groups.setdefault(key, []):
            smallest = zip(sizes[group[0]], sizes[i], strict=True)
            if all(m <= n <= _MOST_GROWTH * m for m, n in smallest):
                group.append(i)
                break
        else:
            groups[key].append([i])
    results = list(trees)
    for group in (group for of_key in groups.values() for group in of_key):
        members = [trees[i] for i in group]
        shapes = jax.tree.map(lambda *x: np.max([y.shape for y in x], axis=0), *members)
        if len(group) >= MANY and math.prod(jax.tree.leaves(shapes)[0]) <= SMALL:
            for i in group:
                results[i] = jax.tree.map(_with_zeros, trees[i], shapes)
    return results


def _key(tree: Any, kind: Hashable) -> Hashable:
    """What trees that are alike have in common besides sizes; None for one that is to be alone."""
    arrays = jax.tree.leaves(tree)
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    sharded = on_mesh or any(explicit_sharding(x) is not None for x in arrays)
    if sharded or kind is None or arrays[0].size > SMALL:
        return None
    return kind, tuple((x.ndim, x.dtype) for x in arrays)


def _sizes(tree: Any) -> tuple[int, ...]:
    return tuple(n for array in jax.tree.leaves(tree) for n in array.shape)


def _with_zeros(array: jax.Array, shape: np.ndarray) -> jax.Array:
    if tuple(shape) == array.shape:
        return array
    missing = [(0, int(n - m), 0) for m, n in zip(array.shape, shape, strict=True)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), missing)


def cut(tree: Any, like: Any) -> Any:
    """The first numbers along each axis, as many as the arrays of another tree have."""

    def cut_one(array: jax.Array, like: jax.Array) -> jax.Array:
        return array if array.shape == like.shape else array[tuple(map(slice, like.shape))]

    return jax.tree.map(cut_one, tree, like)


def each_alike(
    function: Callable[..., Any], trees: Sequence[Any], kinds: Sequence[Hashable]
) -> list[Any]:
    """A function of each of some trees of arrays, on CPUs of those that are alike together.

    Args:
      function: From a tree of arrays to one of arrays of the same shapes. Its numbers must not
        depend on zeros that `padded` adds.
      trees: Of arrays.
      kinds: As in `alike`.
    """

    def call(platform: Platform, trees: Sequence[Any]) -> list[Any]:
        if not platform.leaf_after_leaf:
            return list(map(function, trees))
        of_one_shape = padded(trees, kinds)
        groups = alike(of_one_shape, kinds)
        places = places_within(groups, trees)
        results: dict[int, Any] = {}
        for group in groups:
            if len(group) == 1:
                results[group[0]] = function(trees[group[0]])
            else:
                done = jax.vmap(function)(stacked([of_one_shape[i] for i in group]))
                results.update(zip(group, unstacked(done, places[: len(group)]), strict=True))
        return [cut(results[i], tree) for i, tree in enumerate(trees)]

    if not (trees and jax.sharding.get_abstract_mesh().empty):
        return list(map(function, trees))
    return on_platform(call, list(trees))


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
    # XLA works a number out anew in each kernel that reads it, but neither a root nor a quotient.
    one = jnp.sqrt(
        jnp.clip(jax.lax.bitcast_convert_type(first, jnp.int32), 1, 1).astype(jnp.float32)
    )
    places, place = [], one - 1
    for _ in largest:
        places.append(place.astype(jnp.int32))
        place = (place + 1) / one
    return places


def unstacked(tree: Any, places: Sequence[jax.Array]) -> list[Any]:
    """What is at some places of the first axis of all arrays."""
    # In memory: a kernel that cuts one out of an elementwise array works it out anew.
    tree = jax.tree.map(
        lambda x: materialize(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
    take = partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [jax.tree.map(lambda x, p=place: take(x, p), tree) for place in places]
