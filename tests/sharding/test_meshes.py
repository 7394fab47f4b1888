"""Meshes, above all with explicit axes, where shardings are types that an update must keep."""

import chex
import jax
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import adapprox_jax
from tests.common import abstract, described, mesh_of, normal, on_one_device, put, run

LEAVES = {
    "kernel": ((48, 64), P("x", "y")),
    "wide": ((64, 24), P("y", "x")),
    "layers": ((3, 48, 64), P(None, "x", "y")),
    "experts": ((4, 48, 64), P("x", "y", None)),
    "heads": ((64, 4, 16), P("x", None, "y")),
    "bias": ((64,), P("y")),
    "replicated": ((48, 64), P()),
}
SHAPES, SPECS = ({name: leaf[i] for name, leaf in LEAVES.items()} for i in (0, 1))
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


def sharded(tree):
    """On the mesh in use."""
    return put(jax.sharding.get_mesh(), SPECS, tree)


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def assert_types_stay(tx, params):
    """Through an update; tracing tells them, without compiling."""
    state = tx.init(params)
    ends = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(described, ends) == jax.tree.map(described, types((params, state)))


@pytest.mark.parametrize("setting", OPTIMIZERS)
def test_an_update_keeps_every_type(explicit_mesh, setting):
    assert_types_stay(OPTIMIZERS[setting], sharded(normal(SHAPES)))


def assert_as_on_one_device(setting, names):
    """The second of two updates; and the state keeps its types."""
    tx, shapes = OPTIMIZERS[setting], {name: SHAPES[name] for name in names}
    params, *grads = (normal(shapes, seed) for seed in range(3))
    placed, *on_mesh = map(sharded, (params, *grads))
    before = jax.jit(tx.init, out_shardings=adapprox_jax.state_shardings(tx, placed))(placed)
    actual, after = run(tx, on_mesh, placed, before)
    assert types((actual[-1], after)) == types((placed, before))
    with on_one_device():
        expected, _ = run(tx, grads, params)
    ends = jax.device_get((actual[-1], expected[-1]))
    chex.assert_trees_all_close(*ends, rtol=1e-3, atol=1e-5)


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
    params = sharded(normal({name: SHAPES[name] for name in ("kernel", "bias")}))
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    assert types((updates, after)) == types((params, state))


@pytest.mark.parametrize("setting", ["adaptive", "paper"])  # the others begin alike
def test_init_of_abstract_values_and_under_jit(explicit_mesh, setting):
    tx, params = OPTIMIZERS[setting], sharded(normal(SHAPES))
    state = tx.init(params)
    shapes = abstract(explicit_mesh, LEAVES)
    assert types(tx.init(shapes)) == types(state)
    assert types(jax.jit(tx.init)(params)) == types(state)
    found = jax.tree.leaves(adapprox_jax.state_shardings(tx, params))
    for x, sharding in zip(jax.tree.leaves(state), found, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    for init in (jax.eval_shape(tx.init, params), jax.eval_shape(tx.init, shapes)):
        assert jax.tree.map(described, init) == jax.tree.map(described, types(state))


def test_init_of_abstract_values_without_a_mesh():
    tx = OPTIMIZERS["fixed"]
    shapes = jax.eval_shape(lambda: normal(SHAPES))
    chex.assert_trees_all_equal(tx.init(shapes), tx.init(normal(SHAPES)))


def test_without_the_mesh_in_context():
    """Arrays know the mesh that they lie on."""
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    tx, params = OPTIMIZERS["fixed"], put(mesh, SPECS, normal(SHAPES))
    assert_types_stay(tx, params)
    one = {"kernel": params["kernel"]}  # and it runs
    updates, _ = jax.jit(tx.update)(one, tx.init(one), one)
    assert types(updates) == types(one)
