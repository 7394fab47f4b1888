"""Functions of one matrix, for the stacks of matrices of many leaves.

Small work is done for many leaves at once: on accelerators a kernel costs much, however small.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.linalg.tiles import in_tiles, tile_count
from adapprox_jax.sharding.axes import devices_in_use, explicit_sharding
from adapprox_jax.step.alike import SMALL
from adapprox_jax.step.matrix import Factors, Matrix, Plan
from adapprox_jax.step.platform import Platform, on_platform
from adapprox_jax.step.xla_order import begin_after


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
    function: Callable[[Any], Any], trees: Sequence[Any], *, have_sides: bool = False
) -> list[Any]:
    """Calls a function of a stack with stacks of one shape put together as one.

    Args:
      function: Of a stack to a tree of arrays of the same leading size.
      trees: Stacks, each an array or a tree of arrays with one leading axis.
      have_sides: As in `grouping_of`.

    Returns:
      The results in the order of the trees.
    """
    grouping = grouping_of(trees, have_sides=have_sides)
    return part([list(map(function, groups)) for groups in join(trees, grouping)], grouping)


def sums_of(stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of each of the arrays in stacks, (batch, ...) -> (batch,).

    Together on accelerators; those of large matrices are not copied for that.
    """
    results = {i: _sum(x) for i, x in enumerate(stacks) if math.prod(x.shape[1:]) > SMALL}
    small = [i for i in range(len(stacks)) if i not in results]

    def sums(platform: Platform, stacks: Sequence[jax.Array]) -> list[jax.Array]:
        if not platform.is_cpu:
            return together(_sum, stacks, have_sides=True)
        return list(map(_sum, stacks))

    of_small = on_platform(sums, [stacks[i] for i in small])
    results.update(zip(small, of_small, strict=True))
    return [results[i] for i in range(len(stacks))]


def _sum(stack: jax.Array) -> jax.Array:
    return stack.sum(tuple(range(1, stack.ndim)))


def matrices_at_once(platform: Platform, shape: tuple[int, ...]) -> int:
    """How many matrices of a stack are worked on at once, a divisor of all of them."""
    batch, rows, columns = shape
    if platform.largest_slice is None:
        return batch
    most = max(platform.largest_slice // max(rows * columns, 1), 1)
    return next(n for n in range(batch, 0, -1) if batch % n == 0 and n <= most)


def each(function: Callable[..., Any], plans: Sequence[Plan], *operands: Any) -> list[Any]:
    """A function of a plan and one matrix for all matrices of all leaves.

    Args:
      function: Of a plan and what it needs of one matrix.
      plans: Of the leaves.
      operands: Of each leaf an array or a tree, with the stack's axis in front.

    Returns:
      For each leaf the results with the stack's axis in front.
    """
    leaves = zip(plans, *operands, strict=True)
    return [_of_stack(plan, leaf, function=function, at_once=plan.batch) for plan, *leaf in leaves]


def sweep(
    function: Callable[..., Any], plans: Sequence[Plan], stacks: Sequence[Matrix], *more: Any
) -> list[Any]:
    """`each` for a pass over matrices: a part of a stack or of a large matrix at once.

    On accelerators a leaf waits for the one before it, so that few targets are in memory at once.

    Args:
      function: A pass, as in `matrix`.
      plans: Of the leaves.
      stacks: Of each leaf.
      more: What else the pass takes, for each leaf: `Factors` or one of the two, then the rest.

    Returns:
      As `each`.
    """
    results: list[Any] = []
    for plan, stack, *rest in zip(plans, stacks, *more, strict=True):
        if results and not plan.platform.is_cpu:
            done = jax.tree.leaves(results[-1])[0]
            stack = stack._replace(q=begin_after(plan.platform, done, stack.q))
        tiles = tile_count(stack.grad.shape[1:], plan.platform.largest_whole)
        tiled = function if tiles == 1 else _Tiled(function, tiles)
        at_once = matrices_at_once(plan.platform, stack.grad.shape)
        results.append(_of_stack(plan, [stack, *rest], function=tiled, at_once=at_once))
    return results


class _Tiled(NamedTuple):
    """A pass over a matrix that is done in tiles; one with equal fields is traced once."""

    function: Callable[..., Any]
    tiles: int

    def __call__(self, plan: Plan, matrix: Matrix, *more: Any) -> Any:
        factors, *rest = more or (Factors(None, None),)
        qs, us = (matrix.q, factors.q), (matrix.u, factors.u)
        cut, whole = (qs, us) if plan.axis == 0 else (us, qs)

        def of_tile(cut: Any, whole: Any) -> Any:
            grad, of_rows = cut
            (q, other_q), (u, other_u) = (of_rows, whole) if plan.axis == 0 else (whole, of_rows)
            tile = Matrix(grad, q, u, matrix.scale, matrix.entries)
            return self.function(plan, tile, Factors(other_q, other_u), *rest)

        return in_tiles(of_tile, self.tiles, (matrix.grad, cut), whole)


# Leaves of one shape share what is traced, which takes longer than the rest of tracing.
@partial(jax.jit, static_argnames=("function", "at_once"))
def _of_stack(
    plan: Plan, operands: Sequence[Any], *, function: Callable[..., Any], at_once: int
) -> Any:
    """A function of a plan and one matrix for all of a stack, or for some of them at once."""

    def of_some(operands: Any, _: None) -> Any:
        if len(jax.tree.leaves(operands)[0]) == 1:  # without the axis of the stack
            result = function(plan, *jax.tree.map(lambda x: x[0], operands))
            return jax.tree.map(lambda x: x[None], result)
        return jax.vmap(partial(function, plan))(*operands)

    return in_tiles(of_some, plan.batch // at_once, operands, None)
