"""Flax: nnx.Optimizer, Linen's TrainState, and boxes whose metadata describes what is in them."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adapprox_jax

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

OLD_FLAX = tuple(map(int, importlib.metadata.version("flax").split(".")[:3])) < (0, 12, 4)
TX = adapprox_jax.adapprox(1e-2, max_rank=2, min_dim_size_to_factor=1)
MESH = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
INPUTS = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)


class NnxModel(nnx.Module):
    def __init__(self, named, rngs):
        def kernel(*names):
            init = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(init, names) if named else init

        self.a = nnx.Linear(24, 40, kernel_init=kernel("x", "y"), rngs=rngs)
        self.b = nnx.Linear(40, 24, kernel_init=kernel("y", None), rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.relu(nn.Dense(40, kernel_init=nn.with_partitioning(init, ("x", "y")))(x))
        return nn.Dense(24, kernel_init=nn.with_partitioning(init, ("y", None)))(x)


def train_nnx(model, steps=3):
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean((model(INPUTS) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def train_arrays(params, loss, steps=3):
    state, grad, update = TX.init(params), jax.jit(jax.grad(loss)), jax.jit(TX.update)
    for _ in range(steps):
        updates, state = update(grad(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def assert_described(opt_state):
    """Metadata of what belongs to `a.kernel` names the axes that it follows."""
    state, average = opt_state[0], opt_state[1]
    for tree, names in ((state.q, ("x", None)), (state.u, ("y", None)), (average.mu, ("x", "y"))):
        found = tree["a"]["kernel"].get_metadata()
        assert found.get("out_sharding", found.get("sharding_names")) == names


def test_nnx_optimizer_with_metadata_trains_as_without():
    with jax.set_mesh(MESH):
        named = NnxModel(True, nnx.Rngs(0))
        assert_described(train_nnx(named).opt_state)
    plain = NnxModel(False, nnx.Rngs(0))
    arrays = nnx.to_pure_dict(nnx.state(plain))

    def loss(p):
        hidden = nnx.relu(INPUTS @ p["a"]["kernel"] + p["a"]["bias"])
        return jnp.mean((hidden @ p["b"]["kernel"] + p["b"]["bias"] - 1) ** 2)

    expected = train_arrays(arrays, loss)
    train_nnx(plain)
    assert_close(nnx.to_pure_dict(nnx.state(plain)), expected)
    assert_close(nnx.to_pure_dict(nnx.state(named)), expected)


@pytest.mark.skipif(OLD_FLAX, reason="it has one sharding for both")
def test_a_sharding_for_the_state_alone():
    """Flax' `optimizer_sharding` names axes of a parameter: factors have those that they follow."""
    model = NnxModel(False, nnx.Rngs(0))
    model.a.kernel = nnx.Param(model.a.kernel[...], optimizer_sharding=("x", "y"))
    with jax.set_mesh(MESH):
        assert_described(train_nnx(model, 1).opt_state)


def test_linen_boxes_describe_the_factors_and_survive_training():
    model = LinenModel()
    boxed = jax.jit(model.init)(jax.random.key(0), INPUTS)["params"]
    train = TrainState.create(apply_fn=model.apply, params=boxed, tx=TX)

    def loss(params):
        return jnp.mean((model.apply({"params": params}, INPUTS) - 1) ** 2)

    step = jax.jit(lambda train: train.apply_gradients(grads=jax.grad(loss)(train.params)))
    structure = jax.tree.structure(train.opt_state)
    for _ in range(3):
        train = step(train)
    assert jax.tree.structure(train.opt_state) == structure
    state, average = train.opt_state[0], train.opt_state[1]
    for tree, names in ((state.q, ("x", None)), (state.u, ("y", None)), (average.mu, ("x", "y"))):
        assert tree["Dense_0"]["kernel"].names == names
    expected = train_arrays(nn.unbox(boxed), loss)
    assert_close(nn.unbox(train.params), expected)


def test_boxes_under_guidance_and_dimension_numbers():
    numbers = adapprox_jax.MatrixDimensionNumbers(0, (1, 2))
    params = {"heads": nn.Partitioned(jnp.ones((24, 4, 8)), names=("model", "heads", None))}
    tx = adapprox_jax.adapprox(
        1e-2,
        max_rank=2,
        min_dim_size_to_factor=1,
        cosine_guidance=True,
        weight_dimension_numbers={"heads": numbers},
    )
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert updates["heads"].names == params["heads"].names
    assert after[0].u["heads"].names == ("heads", None)  # of merged axes the first leads
    assert after[0].u["heads"].value.shape == (32, 2)


def test_averages_in_codes_of_small_boxed_leaves_are_in_boxes():
    params = {
        "kernel": nn.Partitioned(jnp.ones((64, 128)), names=("in", "out")),
        "bias": nn.Partitioned(jnp.ones(128), names=("out",)),
    }
    tx = adapprox_jax.adapprox(1e-2, mu_dtype="int4")
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert after[1].scale["bias"] == optax.MaskedNode()
    assert updates["bias"].names == ("out",)


NUMBERS = adapprox_jax.MatrixDimensionNumbers(0, 1)
BY_FUNCTION = {
    "partition": optax.partition(
        {"ours": TX, "adamw": optax.adamw(1e-2)},
        lambda tree: jax.tree.map(lambda x: "ours" if x.ndim > 1 else "adamw", tree),
    ),
    "numbers": adapprox_jax.adapprox(
        1e-2,
        max_rank=2,
        min_dim_size_to_factor=1,
        cosine_guidance=True,
        weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda x: NUMBERS if x.ndim > 1 else None, tree
        ),
    ),
}


@pytest.mark.parametrize("tx", BY_FUNCTION.values(), ids=BY_FUNCTION)
def test_functions_mapped_over_boxes(tx):
    """Masks, labels and dimension numbers made by mapping over parameters lie in their boxes."""
    boxed = jax.jit(LinenModel().init)(jax.random.key(0), INPUTS)["params"]
    plain = nn.unbox(boxed)
    update = jax.jit(tx.update)
    actual, state = update(boxed, tx.init(boxed), boxed)
    expected, _ = update(plain, tx.init(plain), plain)
    assert_close(nn.unbox(actual), expected)
    assert len(adapprox_jax.rank_report(state, boxed)) == 2  # kernels
    model = NnxModel(False, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    assert len(adapprox_jax.rank_report(optimizer.opt_state, params)) == 2
    nnx.eval_shape(lambda optimizer, model: optimizer.update(model, params), optimizer, model)


ON_STATE = {"optimizer_sharding": (None, "y")}


@pytest.mark.parametrize(
    ("metadata", "spec"),
    [
        ({"out_sharding": ("x", "y")}, ("x", "y")),
        ({"out_sharding": ("x", None), **ON_STATE}, (None, "y")),
        ({"optimizer_sharding": (None, "out"), "sharding_rules": (("out", "y"),)}, (None, "y")),
    ],
)
def test_state_shardings_follow_the_metadata(metadata, spec):
    kernel = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    params = {"kernel": nnx.Param(kernel, **metadata, eager_sharding=False)}
    state, average = adapprox_jax.state_shardings(TX, params, mesh=MESH)[:2]
    assert average.mu["kernel"].get_value().spec == PartitionSpec(*spec)
    assert state.u["kernel"].get_value().spec[0] == spec[1]


def test_the_sharding_for_the_state_comes_before_that_of_the_array():
    on_devices = jax.device_put(jnp.ones((16, 32)), NamedSharding(MESH, PartitionSpec("x")))
    average = adapprox_jax.state_shardings(TX, {"kernel": nnx.Param(on_devices, **ON_STATE)})[1]
    assert average.mu["kernel"].get_value().spec == PartitionSpec(None, "y")


RATE = optax.linear_schedule(1e-2, 0.0, 10)
SKIPPED = {
    "schedule": adapprox_jax.adapprox(RATE, b2=adapprox_jax.increasing_decay(), mu_dtype="int4"),
    "adaptive": adapprox_jax.adapprox(
        1e-2, initial_rank=1, min_dim_size_to_factor=1, factor_dtype=jnp.bfloat16
    ),
    "injected": optax.inject_hyperparams(
        adapprox_jax.adapprox_muon,
        static_args=adapprox_jax.MUON_STATIC_ARGS,
        hyperparam_dtype=jnp.float32,
    )(RATE, mu_dtype="int8", min_dim_size_to_factor=1),
    "split": adapprox_jax.split_weights(adapprox_jax.adapprox(RATE)),
    "rounded by chance": adapprox_jax.stochastic_rounding(adapprox_jax.adapprox_muon(RATE)),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_an_update_may_be_skipped(name):
    """The branches of a cond must have the same types: an update changes none of its state."""
    model = NnxModel(False, nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, SKIPPED[name], wrt=nnx.Param)

    def update(model, optimizer, grads):
        optimizer.update(model, grads)

    def step(model, optimizer, skip):
        loss = lambda model: jnp.mean((model(INPUTS.astype(jnp.bfloat16)) - 1) ** 2)  # noqa: E731
        grads = nnx.grad(loss)(model)
        nnx.cond(skip, lambda *_: None, update, model, optimizer, grads)

    nnx.eval_shape(step, model, optimizer, jnp.asarray(True))
