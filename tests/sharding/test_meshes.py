"""Meshes, above all with explicit axes, where shardings are types that an update must keep."""

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import adapprox_jax
from tests.common import abstract, described, mesh_of, on_one_device, put

SPECS = {
    "kernel": P("x", "y"),
    "wide": P("y", "x"),
    "layers": P(None, "x", "y"),
    "experts": P("x", "y", None),
    "heads": P("x", None, "y"),
    "bias": P("y"),
    "replicated": P(),
}
SHAPES = {
    "kernel": (48, 64),
    "wide": (64, 24),
    "layers": (3, 48, 64),
    "experts": (4, 48, 64),
    "heads": (64, 4, 16),
    "bias": (64,),
    "replicated": (48, 64),
}
SETTINGS = {
    "fixed": dict(max_rank=4, min_dim_size_to_factor=1),
    "adaptive": dict(initial_rank=1, max_rank=6, error_threshold=0.1, min_dim_size_to_factor=1),
    "oversampled": dict(max_rank=4, oversampling=5, min_dim_size_to_factor=1),
    "guided": dict(max_rank=4, cosine_guidance=True, min_dim_size_to_factor=1),
    "paper": adapprox_jax.PAPER,
}
OPTIMIZERS = {name: adapprox_jax.adapprox(1e-2, **SETTINGS[name]) for name in SETTINGS}
OPTIMIZERS["muon"] = adapprox_jax.adapprox_muon(1e-2)
OPTIMIZERS["muon, 4 bits"] = adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4")

# The hyperparameters are traced.
OPTIMIZERS["injected"] = optax.inject_hyperparams(
    adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS
)(1e-2, **SETTINGS["adaptive"])
# What comes after the factors knows nothing of them: it is compared without, which compiles fast.
OPTIMIZERS["average"] = optax.chain(
    adapprox_jax.clip_by_matrix_rms(1.0), adapprox_jax.guided_ema(cosine_guidance=True)
)
# Each leaf under one setting that factors it, and those of the most kinds under most settings.
COMPARED = {
    "adaptive": ("kernel", "wide", "layers", "heads", "bias"),
    "average": ("kernel", "experts", "heads", "bias"),
    "oversampled": ("kernel", "replicated"),
    "paper": ("experts",),
}


@pytest.fixture
def explicit_mesh():
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield mesh


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def sharded(tree):
    """On the mesh in use."""
    return put(jax.sharding.get_mesh(), SPECS, tree)


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def after_an_update(tx, params, state):
    """The types of updates and state; tracing tells them, without compiling."""
    return jax.tree.map(described, jax.eval_shape(tx.update, params, state, params))


def two_updates(tx, place, names):
    """The second of two updates on leaves put somewhere; the types of the states around both."""
    params, *grads = (place({name: values(seed)[name] for name in names}) for seed in range(3))
    on_mesh = None if place is alone else adapprox_jax.state_shardings(tx, params)
    state, update = jax.jit(tx.init, out_shardings=on_mesh)(params), jax.jit(tx.update)
    before = types(state)
    for grad in grads:
        updates, state = update(grad, state, params)
    return updates, (before, types(state))


def alone(tree):
    return tree


def assert_close(actual, expected):
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("setting", OPTIMIZERS)
def test_an_update_keeps_every_type(explicit_mesh, setting):
    tx, params = OPTIMIZERS[setting], sharded(values(0))
    state = tx.init(params)
    before = jax.tree.map(described, types((params, state)))
    assert after_an_update(tx, params, state) == before


def assert_as_on_one_device(setting, names):
    tx = OPTIMIZERS[setting]
    updates, (before, after) = two_updates(tx, sharded, names)
    assert types(updates) == types(sharded({name: values(0)[name] for name in names}))
    assert before == after
    with on_one_device():
        expected, _ = two_updates(tx, alone, names)
    assert_close(updates, jax.device_get(expected))


@pytest.mark.parametrize(("setting", "names"), COMPARED.items(), ids=COMPARED)
def test_updates_are_those_of_one_device(explicit_mesh, setting, names):
    assert_as_on_one_device(setting, names)


@pytest.mark.parametrize("setting", ["adaptive", "muon"])
def test_updates_on_automatic_axes_are_those_of_one_device(mesh, setting):
    assert_as_on_one_device(setting, COMPARED["adaptive"])


def test_updates_in_phases_are_those_of_one_device(explicit_mesh, in_phases):
    """Ranks that adapt take the way of fixed ones at their second step."""
    in_phases()
    assert_as_on_one_device("adaptive", ("kernel", "wide", "layers", "replicated", "bias"))


def test_without_jit_too(explicit_mesh):
    tx = OPTIMIZERS["fixed"]
    params = sharded({name: values(0)[name] for name in ("kernel", "bias")})
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    assert types((updates, after)) == types((params, state))


@pytest.mark.parametrize("setting", ["adaptive", "paper"])  # the others begin alike
def test_init_of_abstract_values_and_under_jit(explicit_mesh, setting):
    tx, params = OPTIMIZERS[setting], sharded(values(0))
    state = tx.init(params)
    shapes = abstract(explicit_mesh, SHAPES, SPECS)
    assert types(tx.init(shapes)) == types(state)
    assert types(jax.jit(tx.init)(params)) == types(state)
    found = jax.tree.leaves(adapprox_jax.state_shardings(tx, params))
    for x, sharding in zip(jax.tree.leaves(state), found, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    for init in (jax.eval_shape(tx.init, params), jax.eval_shape(tx.init, shapes)):
        assert jax.tree.map(described, init) == jax.tree.map(described, types(state))


def test_init_of_abstract_values_without_a_mesh():
    tx = OPTIMIZERS["fixed"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values(0))
    chex.assert_trees_all_equal(tx.init(shapes), tx.init(values(0)))


def test_without_the_mesh_in_context():
    """Arrays know the mesh that they lie on."""
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    tx, params = OPTIMIZERS["fixed"], put(mesh, SPECS, values(0))
    state = tx.init(params)
    before = jax.tree.map(described, types((params, state)))
    assert after_an_update(tx, params, state) == before
    one = {"kernel": params["kernel"]}  # and it runs
    updates, _ = jax.jit(tx.update)(one, tx.init(one), one)
    assert types(updates) == types(one)
