"""Forces the order in which XLA works, to bound peak memory, and what it works out once."""

import jax
import jax.numpy as jnp

from adapprox_jax.sharding.axes import devices_in_use, varies_no_more
from adapprox_jax.step.platform import Platform, on_platform


def begin_after(ready: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `ready`, which is never negative, is known.

    Without it XLA works on all leaves at once and holds the intermediates of all of them; on CPUs
    it ignores `optimization_barrier` there. Within `jax.shard_map` nothing waits where `ready`
    varies over devices and the array does not: it would come to vary, too.
    """
    waits = varies_no_more(ready, array)
    return jnp.where(ready < 0, 0, array).astype(array.dtype) if waits else array


def begin_behind_barrier(done: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `done` is there: `begin_after` for accelerators, which heed barriers."""
    waits = varies_no_more(done, array)
    return jax.lax.optimization_barrier((done, array))[1] if waits else array


def begin_behind(platform: Platform, done: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once matrices (batch, m, n) are there: `begin_after` or a barrier, by platform.

    A row of each matrix tells, because a batch of matrices is done all at once.
    """
    if platform.leaf_after_leaf:
        return begin_after(jnp.sum(jnp.abs(done[:, 0])).astype(jnp.float32), array)
    return begin_behind_barrier(done, array)


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
        # Of two numbers: of one XLA knows that its square is never negative.
        some = update[(0,) * (update.ndim - 1)][:2].astype(jnp.float32)
        return begin_after(jnp.sum(jnp.square(some)), array)

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
