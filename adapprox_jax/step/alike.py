"""Small leaves that are alike go together as a stack, so that many compile quickly.

On CPUs alone, where kernels that are alike are compiled once. Leaves of about the same shape become
alike by zeros around them. What is cut out of an array at a place that the compiler knows is a
separate kernel. So places are numbers that it does not know.
"""

import collections
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.sharding.axes import explicit_sharding
from adapprox_jax.step.platform import Platform, on_platform
from adapprox_jax.step.xla_order import in_turn, materialize

SMALL = 10**5  # numbers of an array that may be copied
MANY = 8  # fewer take no longer one by one
_MOST_GROWTH = 1.5  # of a side, by zeros


def alike(trees: Sequence[Any], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Groups trees of arrays of nearly the same shapes. Large ones and few are alone.

    So is each on a mesh in use, even of one device, and each with an explicit sharding: arrays of
    one shape may be sharded otherwise.

    Args:
      trees: The first array of each tells whether it is large.
      kinds: What else must be equal, or None for a tree that is to be alone.

    Returns:
      The places of the members of each group.
    """
    sizes = [_sizes(tree) for tree in trees]
    groups: dict[Hashable, list[tuple[list[int], list[int]]]] = {}  # members, largest sizes
    for i in sorted(range(len(trees)), key=sizes.__getitem__):
        key = _key(trees[i], kinds[i])
        of_key = groups.setdefault(i if key is None else key, [])
        for members, largest in of_key:
            grown = list(map(max, largest, sizes[i]))
            smallest = zip(sizes[members[0]], sizes[i], strict=True)
            is_near = all(m <= n <= _MOST_GROWTH * m for m, n in smallest)
            if is_near and math.prod(grown[: jax.tree.leaves(trees[i])[0].ndim]) <= SMALL:
                members.append(i)
                largest[:] = grown
                break
        else:
            of_key.append(([i], list(sizes[i])))
    found = [sorted(members) for of_key in groups.values() for members, _ in of_key]
    return sorted(part for m in found for part in ([m] if len(m) >= MANY else [[i] for i in m]))


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


def each_alike(
    function: Callable[..., Any],
    tuples: Sequence[tuple[jax.Array, ...]],
    kinds: Sequence[Hashable],
    waits: int,
    most: int,
) -> list[Any]:
    """A function of each of some tuples of arrays, on CPUs of those that are alike together.

    Args:
      function: From a `Platform` and a tuple of arrays to a tuple of arrays, of the shapes of the
        first of these. Its numbers must not depend on zeros that `stacked` adds.
      tuples: Of arrays.
      kinds: As in `alike`.
      waits: As in `in_turn`, on accelerators.
      most: As there.
    """

    def call(platform: Platform, trees: Sequence[Any]) -> list[Any]:
        of_one = partial(function, platform)
        if not (platform.is_cpu and jax.sharding.get_abstract_mesh().empty):
            return in_turn(of_one, trees, waits, most)
        groups = alike(trees, kinds)
        places = places_within(groups, trees)
        results: dict[int, Any] = {}
        for group in groups:
            members = [trees[i] for i in group]
            if len(group) == 1:
                results[group[0]] = of_one(*members)
            else:
                done = unstacked(jax.vmap(of_one)(stacked(members)), places, members)
                results.update(zip(group, done, strict=True))
        return [results[i] for i in range(len(trees))]

    return on_platform(call, list(tuples)) if tuples else []


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of arrays as one with a new first axis, with zeros after all but the longest."""
    return jax.tree.map(lambda *arrays: _stacked(arrays), *trees)


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    shapes = np.array([x.shape for x in arrays], np.int32)
    largest = shapes.max(axis=0)
    if (shapes == largest).all():
        return jnp.stack(arrays)
    # To fill up each array with zeros would be a kernel for each. To gather from all is one.
    full = (len(arrays), *map(int, largest))
    within, inside = jnp.zeros(full, jnp.int32), jnp.ones(full, bool)
    for axis, sizes in enumerate(shapes.T):
        size = jax.lax.broadcast_in_dim(sizes, full, (0,))
        place = jax.lax.broadcasted_iota(jnp.int32, full, axis + 1)
        within, inside = within * size + place, inside & (place < size)
    starts = np.cumsum([0, *(x.size for x in arrays[:-1])], dtype=np.int32)
    flat = jnp.concatenate([x.ravel() for x in arrays])
    index = jax.lax.broadcast_in_dim(starts, full, (0,)) + within
    return jnp.where(inside, flat.at[index].get(mode="clip"), jnp.zeros((), flat.dtype))


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


def unstacked(tree: Any, places: Sequence[jax.Array], like: Sequence[Any]) -> list[Any]:
    """Undoes `stacked`.

    Args:
      tree: Of arrays with a common first axis.
      places: Of `places_within`.
      like: Trees of arrays of the shapes of the results.
    """
    structure: Any
    arrays, structure = jax.tree.flatten(tree)
    shapes = [[x.shape for x in jax.tree.leaves(of_one)] for of_one in like]
    parts = map(partial(_unstacked, places), arrays, zip(*shapes, strict=True))
    return [structure.unflatten(of_one) for of_one in zip(*parts, strict=True)]


def _unstacked(
    places: Sequence[jax.Array], array: jax.Array, shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    # In memory: a kernel that cuts one out of an elementwise array works it out anew.
    array = materialize(array) if jnp.issubdtype(array.dtype, jnp.floating) else array
    counts = collections.Counter(shapes)
    results = []
    for i, shape in enumerate(shapes):
        # One of a shape of its own has a kernel of its own, which may know the place.
        place = i if counts[shape] == 1 else places[i]
        one = jax.lax.dynamic_index_in_dim(array, place, 0, False, allow_negative_indices=False)
        results.append(one if one.shape == shape else one[tuple(map(slice, shape))])
    return results
