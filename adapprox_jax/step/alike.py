"""Small leaves that are alike go together as a stack, so that many compile quickly.

On CPUs alone, where kernels that are alike are compiled once. Leaves of about the same shape become
alike by zeros around them. What is cut out of an array at a place that the compiler knows is a
separate kernel. So places are numbers that it does not know.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.sharding.axes import explicit_sharding
from adapprox_jax.step.platform import Platform, on_platform

SMALL = 10**5  # numbers of an array that may be copied
MANY = 8  # fewer take no longer one by one


def alike(
    trees: Sequence[Any],
    kinds: Sequence[Hashable],
    about: Callable[[tuple[int, ...]], Hashable] = tuple,
) -> list[list[int]]:
    """Groups trees of arrays of the same shapes, types and kind. Large ones and few are alone.

    So is each on a mesh in use, even of one device, and each with an explicit sharding: arrays of
    one shape may be sharded otherwise.

    Args:
      trees: The first array of each tells whether it is large.
      kinds: What else must be equal, or None for a tree that is to be alone.
      about: From a shape to what must be equal of it.

    Returns:
      The places of the members of each group.
    """
    groups: dict[Any, list[int]] = {}
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    for i, (tree, kind) in enumerate(zip(trees, kinds, strict=True)):
        arrays = jax.tree.leaves(tree)
        key = kind, tuple((about(x.shape), x.dtype) for x in arrays)
        sharded = on_mesh or any(explicit_sharding(x) is not None for x in arrays)
        alone = sharded or kind is None or arrays[0].size > SMALL
        groups.setdefault(i if alone else key, []).append(i)
    parts = ([group] if len(group) >= MANY else [[i] for i in group] for group in groups.values())
    return [part for several in parts for part in several]


def padded(trees: Sequence[Any], kinds: Sequence[Hashable]) -> list[Any]:
    """Trees that are alone become alike, if there are many of about their shapes.

    Args:
      trees: As in `alike`. What is done with them must not depend on zeros after the last numbers
        along each axis.
      kinds: As in `alike`.

    Returns:
      The trees, some with such zeros. `cut` takes these away.
    """
    results = list(trees)
    alone = [group[0] for group in alike(trees, kinds) if len(group) == 1]
    few, of_kinds = ([x[i] for i in alone] for x in (trees, kinds))
    for group in alike(few, of_kinds, _about):
        members = [few[i] for i in group]
        shapes = jax.tree.map(lambda *x: np.max([y.shape for y in x], axis=0), *members)
        if len(group) > 1 and math.prod(jax.tree.leaves(shapes)[0]) <= SMALL:
            for i in group:
                results[alone[i]] = jax.tree.map(_with_zeros, few[i], shapes)
    return results


def _about(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Each size rounded up to two significant binary digits: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    shifts = [max(n.bit_length() - 2, 0) for n in shape]
    return tuple(-(-n >> shift << shift) for n, shift in zip(shape, shifts, strict=True))


def _with_zeros(array: jax.Array, shape: np.ndarray) -> jax.Array:
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
