"""Forces the order in which XLA works, to bound peak memory, and what it works out once."""

import jax
import jax.numpy as jnp

from adapprox_jax.sharding.axes import devices_in_use, explicit_sharding, varies_no_more
from adapprox_jax.step.platform import Platform, on_platform


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
    if not platform.leaf_after_leaf:
        return jax.lax.optimization_barrier((done, array))[1]
    return jnp.where(_never(done), 0, array).astype(array.dtype)


def begin_late_on_cpu(update: jax.Array, array: jax.Array) -> jax.Array:
    """An array that goes with an update, on CPUs once that is known.

    Else XLA decodes the averages of all leaves, whole matrices, before it works on the first leaf.
    Not on a mesh in use, where to wait for a few numbers they would be sent around.

    Args:
      update: Of at least one axis.
      array: Any.
    """

    def wait(platform: Platform, update: jax.Array, array: jax.Array) -> jax.Array:
        if not platform.leaf_after_leaf:
            return array
        return begin_after(platform, first_two(update), array)

    if devices_in_use() > 1:
        return array
    return on_platform(wait, update, array)


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
    return array[(0,) * (array.ndim - 1)][:2]


def _never(numbers: jax.Array) -> jax.Array:
    """False, once at least two numbers are there: of one XLA knows that no square is negative."""
    return jnp.sum(jnp.square(numbers.astype(jnp.float32))) < 0
