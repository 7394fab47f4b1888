"""What several files of tests do alike."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding


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


def mesh_of(sizes, names, kind=AxisType.Auto):
    """A mesh of the first devices, where there are enough."""
    count = math.prod(sizes)
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=jax.devices()[:count])


def on_one_device():
    """A context in which one device is the mesh in use."""
    return jax.set_mesh(mesh_of((1,), ("z",)))


def put(mesh, specs, tree):
    """The arrays of a dictionary on a mesh."""
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}


def abstract(mesh, shapes, specs):
    """The shapes of a dictionary on a mesh, in float32."""
    return {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }


def abstract_state(tx, params, shardings):
    """A state where `state_shardings` puts it."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )


def described(value):
    """Shape, dtype and sharding; an abstract value that is not sharded may have None for it."""
    spec = tuple(value.sharding.spec) if value.sharding is not None else ()
    return value.shape, value.dtype, spec if any(spec) else ()
