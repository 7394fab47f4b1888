"""What several files of tests do alike."""

import functools

import jax
import numpy as np


@functools.cache
def compiled(tx):
    """The update of a transformation, compiled once for all that ask."""
    return jax.jit(tx.update)


def run(tx, grads, params=None, state=None):
    """All updates, and the last state."""
    params = jax.tree.map(np.ones_like, grads[0]) if params is None else params
    state, all_updates = tx.init(params) if state is None else state, []
    for grad in grads:
        updates, state = compiled(tx)(grad, state, params)
        all_updates.append(updates)
    return all_updates, state


def described(value):
    """Shape, dtype and sharding; an abstract value that is not sharded may have None for it."""
    spec = tuple(value.sharding.spec) if value.sharding is not None else ()
    return value.shape, value.dtype, spec if any(spec) else ()
