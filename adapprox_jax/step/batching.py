"""Small work of many arrays done at once: on accelerators a kernel costs much however small."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.sharding.axes import devices_in_use, explicit_sharding
from adapprox_jax.step.platform import by_platform

_SMALL = 10**5  # numbers of an array that may be copied


class Grouping(NamedTuple):
    """Which of many stacks can be put together as one."""

    kinds: list[list[list[int]]]  # of one type, and within these of one shape
    sizes: list[int]  # of the leading axes


def grouping_of(trees: Sequence[Any], *, have_sides: bool = False) -> Grouping:
    """Groups stacks.

    Args:
      trees: Each an array or a tree of arrays with one leading axis.
      have_sides: Whether other axes are sides of a parameter. On a mesh these may be divided over
        the devices in another way for each, so that nothing is put together there.
    """
    kinds: dict[Any, dict[Any, list[int]]] = {}
    alone = have_sides and devices_in_use() > 1
    for i, tree in enumerate(trees):
        arrays = jax.tree.leaves(tree)
        # Of one type are arrays that also vary over the same axes under `jax.shard_map`.
        kind = tuple(jax.typeof(jnp.zeros_like(x, shape=())) for x in arrays)
        shape = i if alone else tuple((x.shape[1:], explicit_sharding(x)) for x in arrays)
        kinds.setdefault(kind, {}).setdefault(shape, []).append(i)
    sizes = [jax.tree.leaves(tree)[0].shape[0] for tree in trees]
    return Grouping([list(groups.values()) for groups in kinds.values()], sizes)


def join(trees: Sequence[Any], grouping: Grouping) -> list[list[Any]]:
    """Puts the stacks of each group together as one: a list of these for each kind."""
    return [
        [jax.tree.map(lambda *x: jnp.concatenate(x), *(trees[i] for i in group)) for group in kind]
        for kind in grouping.kinds
    ]


def part(joined: Sequence[Sequence[Any]], grouping: Grouping) -> list[Any]:
    """Undoes `join`."""
    parts: dict[int, Any] = {}
    for kind, trees in zip(grouping.kinds, joined, strict=True):
        for group, tree in zip(kind, trees, strict=True):
            ends = np.cumsum([grouping.sizes[i] for i in group])
            structure: Any
            arrays, structure = jax.tree.flatten(tree)
            split = [jnp.split(x, ends[:-1]) for x in arrays]
            for i, *of_one in zip(group, *split, strict=True):
                parts[i] = structure.unflatten(of_one)
    return [parts[i] for i in range(len(grouping.sizes))]


def together(
    function: Callable[[list[Any]], Sequence[Any]],
    trees: Sequence[Any],
    *,
    have_sides: bool = False,
) -> list[Any]:
    """Calls a function of a list of stacks with those of one shape put together as one.

    Args:
      function: Of a list of stacks of one type to as many results of the same leading sizes.
      trees: Stacks, each an array or a tree of arrays with one leading axis.
      have_sides: As in `grouping_of`.

    Returns:
      The results in the order of the trees.
    """
    grouping = grouping_of(trees, have_sides=have_sides)
    return part([function(groups) for groups in join(trees, grouping)], grouping)


def sums_of(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of each of the arrays in stacks, (batch, ...) -> (batch,).

    Of small ones together; large ones are not copied for that.
    """
    results = {i: _sum(x) for i, x in enumerate(stacks) if math.prod(x.shape[1:]) > _SMALL}
    small = [i for i in range(len(stacks)) if i not in results]

    def one_by_one(*stacks: jax.Array) -> list[jax.Array]:
        return [_sum(x) for x in stacks]

    def put_together(*stacks: jax.Array) -> list[jax.Array]:
        return together(lambda groups: one_by_one(*groups), stacks, have_sides=True)

    sums = by_platform(*(stacks[i] for i in small), cpu=one_by_one, default=put_together)
    results.update(zip(small, sums, strict=True))
    return [results[i] for i in range(len(stacks))]


def _sum(stack: jax.Array) -> jax.Array:
    return stack.sum(tuple(range(1, stack.ndim)))
