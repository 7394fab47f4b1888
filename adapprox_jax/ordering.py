"""When XLA works on a leaf, which decides how much is in memory at once, and what it does once."""

import jax
import jax.numpy as jnp

from adapprox_jax.sharding import varies_no_more


def begin_after(ready: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `ready`, which is never negative, is known.

    Without it XLA works on all leaves at once and holds the intermediates of all of them; on CPUs
    it ignores `optimization_barrier` there. Within `jax.shard_map` nothing waits where `ready`
    varies over devices and the array does not: it would come to vary, too.
    """
    waits = varies_no_more(ready, array)
    return jnp.where(ready < 0, 0, array).astype(array.dtype) if waits else array


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
