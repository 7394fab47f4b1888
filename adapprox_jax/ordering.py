"""The order in which XLA works on leaves, which decides how much is in memory at once."""

import jax
import jax.numpy as jnp

from adapprox_jax.sharding import varies_no_more


def begin_after(ready: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `ready`, which is never negative, is known.

    Without it XLA works on all leaves at once and holds the intermediates of all of them; on CPUs
    it ignores `optimization_barrier` there.
    """
    # Else a leaf would come to vary over devices as the one before it does.
    waits = varies_no_more(ready, array)
    return jnp.where(ready < 0, 0, array).astype(array.dtype) if waits else array
