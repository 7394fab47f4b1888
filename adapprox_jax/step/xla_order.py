"""Forces the order in which XLA works, to bound peak memory, and what it works out once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.sharding.axes import devices_in_use, explicit_sharding, varies_no_more
from adapprox_jax.step.platform import GPU, Platform, on_platform


def begin_after(platform: Platform, done: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `done` is there.

    Without it XLA works on all leaves at once and holds the intermediates of all of them. On CPUs
    it ignores `optimization_barrier`, so that a sum has to tell. Within `jax.shard_map` nothing
    waits if `done` varies over devices and the array does not: it would come to vary, too.

    Args:
      platform: The one in use.
      done: At least two numbers, few on CPUs.
      array: Any.
    """
    if not varies_no_more(done, array):
        return array
    if not platform.is_cpu:
        return jax.lax.optimization_barrier((done, array))[1]
    return jnp.where(_never(done), 0, array).astype(array.dtype)


def in_turn(
    function: Callable[..., Any], tuples: Sequence[tuple[jax.Array, ...]], waits: int, most: int
) -> list[Any]:
    """A function of each of some tuples of arrays, of large ones one after the other.

    Not on CPUs. Else XLA may make one kernel of several, with all intermediates in memory.

    Args:
      function: From a tuple of arrays to one of arrays.
      tuples: Of arrays.
      waits: Place of the array in a tuple that waits, and in a result of the one that it waits for.
      most: Numbers of an array that does not wait, at most.
    """
    results, last = [], None
    for operands in map(list, tuples):
        is_large = operands[waits].size > most
        if is_large and last is not None:
            operands[waits] = begin_after(GPU, last, operands[waits])
        results.append(function(tuple(operands)))
        last = results[-1][waits] if is_large else last
    return results


def on_cpus(function: Callable[..., Any], tree: Any, *operands: Any) -> Any:
    """A function of a tree of arrays and operands on CPUs, to a tree like it; else the tree.

    Nor on a mesh in use, where to wait for a few numbers they would be sent around.
    """

    def call(platform: Platform, tree: Any, *operands: Any) -> Any:
        return function(tree, *operands) if platform.is_cpu else tree

    return tree if devices_in_use() > 1 else on_platform(call, tree, *operands)


def materialize(array: jax.Array) -> jax.Array:
    """A floating-point array that XLA works out once, although several kernels read it.

    On CPUs XLA works an elementwise array out anew in each kernel that reads it, and ignores
    `optimization_barrier` there, too. It does not do so with a division: here by ones that it
    cannot know.
    """
    return array / jnp.where(_never(first_two(array)), array, 1)


def first_two(array: jax.Array) -> jax.Array:
    """The first two numbers of an array, (2,).

    A zero, so that nothing waits, if there are fewer, or under explicit axes, which are sharded.
    """
    if array.size < 2 or explicit_sharding(array) is not None:
        return jnp.zeros(1)
    return array.reshape(-1)[:2]


def _never(numbers: jax.Array) -> jax.Array:
    """False, once at least two numbers are there: of one XLA knows that no square is negative."""
    return jnp.sum(jnp.square(numbers.astype(jnp.float32))) < 0
