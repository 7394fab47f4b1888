"""Meshes, above all with explicit axes, where shardings are types that an update must keep."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax

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


@pytest.fixture
def mesh():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def sharded(tree):
    return {name: jax.device_put(leaf, SPECS[name]) for name, leaf in tree.items()}


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def abstract(tree, mesh):
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def described(value):
    """Shape, dtype and sharding; an abstract value that is not sharded may have None for it."""
    spec = tuple(value.sharding.spec) if value.sharding is not None else ()
    return value.shape, value.dtype, spec if any(spec) else ()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_update_keeps_every_type_and_gives_the_values_of_one_device(mesh, settings):
    tx = adapprox_jax.adapprox(1e-2, **settings)
    params = sharded(values(0))
    state = tx.init(params)
    before = types(state)
    update = jax.jit(tx.update)
    for seed in (1, 2):
        updates, state = update(sharded(values(seed)), state, params)
    assert types(state) == before
    assert types(updates) == types(params)
    with jax.set_mesh(jax.make_mesh((1,), ("z",), axis_types=(AxisType.Auto,))):
        alone = tx.init(values(0))
        for seed in (1, 2):
            expected, alone = jax.jit(tx.update)(values(seed), alone, values(0))
    chex.assert_trees_all_close(
        jax.device_get(updates), jax.device_get(expected), rtol=1e-3, atol=1e-5
    )


def test_a_mesh_with_automatic_axes_gives_the_values_of_one_device():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    tx = adapprox_jax.adapprox(1e-2, **SETTINGS["adaptive"])
    params = jax.device_put(values(0), shardings)
    actual, _ = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    expected, _ = jax.jit(tx.update)(values(0), tx.init(values(0)), values(0))
    chex.assert_trees_all_close(
        jax.device_get(actual), jax.device_get(expected), rtol=1e-3, atol=1e-5
    )


def test_without_jit_too(mesh):
    tx = adapprox_jax.adapprox(1e-2, **SETTINGS["fixed"])
    params = {name: leaf for name, leaf in sharded(values(0)).items() if name in ("kernel", "bias")}
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    assert types(after) == types(state)
    assert types(updates) == types(params)


def test_hyperparameters_may_be_traced(mesh):
    inject = optax.inject_hyperparams(adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS)
    tx = inject(1e-2, **SETTINGS["adaptive"])
    params = sharded(values(0))
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert types(after) == types(state)
    assert types(updates) == types(params)


def test_factors_are_sharded_as_the_axes_that_they_follow(mesh):
    tx = adapprox_jax.scale_by_adapprox(max_rank=4, min_dim_size_to_factor=1)
    state = tx.init(sharded(values(0)))
    spec = lambda leaf: tuple(jax.typeof(leaf).sharding.spec)  # noqa: E731
    assert spec(state.q["kernel"]) == ("x", None)
    assert spec(state.u["kernel"]) == ("y", None)
    assert spec(state.q["wide"]) == ("x", None)  # rows are the shorter side, 24
    assert spec(state.q["experts"]) == ("x", "y", None)
    assert spec(state.rank["experts"]) == ("x",)
    assert spec(state.u["heads"]) == (None, "x", None)
    assert spec(state.nu["bias"]) == ("y",)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_init_of_abstract_values_and_under_jit(mesh, settings):
    tx = adapprox_jax.adapprox(1e-2, **settings)
    params = sharded(values(0))
    state = tx.init(params)
    shapes = abstract(values(0), mesh)
    assert types(tx.init(shapes)) == types(state)
    assert types(jax.jit(tx.init)(params)) == types(state)
    for init in (jax.eval_shape(tx.init, params), jax.eval_shape(tx.init, shapes)):
        assert jax.tree.map(described, init) == jax.tree.map(described, types(state))


def test_init_of_abstract_values_without_a_mesh():
    tx = adapprox_jax.adapprox(1e-2, **SETTINGS["fixed"])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values(0))
    chex.assert_trees_all_equal(tx.init(shapes), tx.init(values(0)))
    assert jnp.shape(tx.init(shapes)[0].q["kernel"]) == (48, 4)


def test_without_the_mesh_in_context():
    """Arrays know the mesh that they lie on."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    params = {
        name: jax.device_put(leaf, NamedSharding(mesh, SPECS[name]))
        for name, leaf in values(0).items()
    }
    tx = adapprox_jax.adapprox(1e-2, **SETTINGS["fixed"])
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.map(described, types(after)) == jax.tree.map(described, types(state))
    assert types(updates) == types(params)
