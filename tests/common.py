"""What several files of tests do alike."""

import functools
import math

import jax
import numpy as np
import optax
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


def assert_near(actual, expected, most):
    """Each array is as near to the other as this share of its norm, or nearer."""

    def check(path, x, y):
        assert np.linalg.norm(x - y) <= most * np.linalg.norm(y), jax.tree_util.keystr(path)

    jax.tree.map_with_path(check, actual, expected)


def normal(shapes, seed=0):
    """Arrays of normal numbers in float32, by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


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


def abstract(mesh, leaves):
    """Leaves of shapes and specs on a mesh, in float32."""
    return {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in leaves.items()
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


@functools.cache
def stepping(tx):
    """A training step, compiled once for all that ask."""

    @jax.jit
    def step(params, state, grads, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx, params, grads, state=None, **extra):
    """Parameters and state after a step with each of the gradients."""
    state = tx.init(params) if state is None else state
    for grad in grads:
        params, state = stepping(tx)(params, state, grad, **extra)
    return params, state


def program_of(tx, params, kind="cpu"):
    """An update as it is lowered for a platform, which need not be there."""
    traced = jax.jit(tx.update).trace(params, jax.eval_shape(tx.init, params), params)
    return traced.lower(lowering_platforms=(kind,)).as_text()


def temporaries(function, *arguments, **options):
    """The bytes that XLA plans for what is neither given nor returned."""
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes
