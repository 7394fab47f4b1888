"""Forces the order in which XLA works, to bound peak memory, and what it works out once."""

import jax
import jax.numpy as jnp

from adapprox_jax.sharding.axes import devices_in_use, varies_no_more
from adapprox_jax.step.platform import Platform, on_platform


def begin_after(platform: Platform, done: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `done` is there.

    Without it XLA works on all leaves at once and holds the intermediates of all of them. On CPUs
    it ignores `optimization_barrier`, so that a sum has to tell. Within `jax.shard_map` nothing
    waits if `done` varies over devices and the array does not: it would come to vary, too.

    Args:
      platform: The one in use.
      done: At least two numbers, few on CPUs: of one XLA knows that its square is never negative.
      array: Any.
    """
    if not varies_no_more(done, array):
        return array
    if not platform.leaf_after_leaf:
        return jax.lax.optimization_barrier((done, array))[1]
    ready = jnp.sum(jnp.square(done.astype(jnp.float32)))
    return jnp.where(ready < 0, 0, array).astype(array.dtype)


def begin_late_on_cpu(update: jax.Array, array: jax.Array) -> jax.Array:
    """An array that goes with an update, on CPUs once that is known.

    Else XLA decodes the averages of all leaves, whole matrices, before it works on the first leaf.
    Not on a mesh in use, where to wait for a few numbers they would be sent around.

    Args:
      update: Of at least one axis.
      array: Any.
    """

    def wait(platform: Platform, update: jax.Array, array: jax.Array) -> jax.Array:
        some = update[(0,) * (update.ndim - 1)][:2]
        return begin_after(platform, some, array) if platform.leaf_after_leaf else array

    if devices_in_use() > 1:
        return array
    waits: jax.Array = on_platform(wait, update, array)
    return waits


@jax.jit
def materialize(array: jax.Array) -> jax.Array:
    """The array as the result of a loop over its rows, so that it is worked out once.

    On CPUs XLA works an elementwise array out anew in each kernel that reads it, once a leaf, and
    ignores `optimization_barrier` there, too.

    Args:
      array: Of at least two rows, to have an effect: XLA inlines a loop of one.
    """
    rows = array.shape[0]
    empty = jnp.zeros_like(array)
    return jax.lax.fori_loop(0, rows, lambda row, kept: kept.at[row].set(array[row]), empty)
