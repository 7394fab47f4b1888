"""Flax: nnx.Optimizer, Linen's TrainState, and boxes whose metadata describes what is in them."""

import importlib.metadata

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adapprox_jax
from tests.common import stepping

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

OLD_FLAX = tuple(map(int, importlib.metadata.version("flax").split(".")[:3])) < (0, 12, 4)
TX = adapprox_jax.adapprox(1e-2, max_rank=2, min_dim_size_to_factor=1)
MESH = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
NAMES = {"a": ("x", "y"), "b": ("y", None)}  # of the axes of kernels


class Model(nnx.Module):
    def __init__(self, named):
        def linear(layer, *sizes):
            init = nnx.initializers.lecun_normal()
            init = nnx.with_partitioning(init, NAMES[layer]) if named else init
            return nnx.Linear(*sizes, kernel_init=init, rngs=nnx.Rngs(0))

        self.a = linear("a", 24, 40)
        self.b = linear("b", 40, 24)


def arrays_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def boxes():
    """The same parameters as Linen has them."""
    return {
        layer: {**arrays, "kernel": nn.Partitioned(arrays["kernel"], NAMES[layer])}
        for layer, arrays in arrays_of(Model(named=False)).items()
    }


def gradients(params):
    return jax.tree.map(jnp.cos, params)


def train_nnx(model, steps=3):
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, gradients(nnx.state(model, nnx.Param)))

    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def trained_arrays():
    """Without boxes."""
    params = arrays_of(Model(named=False))
    state = TX.init(params)
    for _ in range(3):
        params, state = stepping(TX)(params, state, gradients(params))
    return params


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def assert_described(opt_state, names_of):
    """Metadata of what belongs to the kernel of `a` names the axes that it follows."""
    state, average = opt_state[0], opt_state[1]
    for tree, names in ((state.q, ("x", None)), (state.u, ("y", None)), (average.mu, ("x", "y"))):
        assert names_of(tree["a"]["kernel"]) == names


def names_of_nnx(box):
    found = box.get_metadata()
    return found.get("out_sharding", found.get("sharding_names"))


def test_nnx_optimizer_with_metadata_trains_as_without():
    with jax.set_mesh(MESH):
        named = Model(named=True)
        assert_described(train_nnx(named).opt_state, names_of_nnx)
    assert_close(arrays_of(named), trained_arrays())


@pytest.mark.skipif(OLD_FLAX, reason="it has one sharding for both")
def test_a_sharding_for_the_state_alone():
    """Flax' `optimizer_sharding` names axes of a parameter: factors have those that they follow."""
    model = Model(named=False)
    model.a.kernel = nnx.Param(model.a.kernel[...], optimizer_sharding=("x", "y"))
    with jax.set_mesh(MESH):
        assert_described(train_nnx(model, 1).opt_state, names_of_nnx)


def test_linen_boxes_describe_the_factors_and_survive_training():
    train = TrainState.create(apply_fn=None, params=boxes(), tx=TX)
    step = jax.jit(lambda train: train.apply_gradients(grads=gradients(train.params)))
    for _ in range(3):
        train = step(train)
    assert_described(train.opt_state, lambda box: box.names)
    assert_close(nn.unbox(train.params), trained_arrays())


def test_of_merged_axes_the_first_leads():
    numbers = {"heads": adapprox_jax.MatrixDimensionNumbers(0, (1, 2))}
    params = {"heads": nn.Partitioned(jnp.ones((24, 4, 8)), names=("model", "heads", None))}
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, weight_dimension_numbers=numbers)
    u = tx.init(params).u["heads"]
    assert (u.names, u.value.shape) == (("heads", None), (32, 8))


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
    boxed, plain = boxes(), arrays_of(Model(named=False))
    update = jax.jit(tx.update)
    actual, state = update(boxed, tx.init(boxed), boxed)
    expected, _ = update(plain, tx.init(plain), plain)
    assert_close(nn.unbox(actual), expected)
    assert len(adapprox_jax.rank_report(state, boxed)) == 2  # kernels
    model = Model(named=False)
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
        1e-2, factor_dtype=jnp.bfloat16, initial_rank=1, min_dim_size_to_factor=1
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
    model = Model(named=False)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, SKIPPED[name], wrt=nnx.Param)

    def update(model, optimizer):
        optimizer.update(model, gradients(nnx.state(model, nnx.Param)))

    def step(model, optimizer, skip):
        nnx.cond(skip, lambda *_: None, update, model, optimizer)

    nnx.eval_shape(step, model, optimizer, jnp.asarray(True))
