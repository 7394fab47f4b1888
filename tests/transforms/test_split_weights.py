"""Weights of 16 bits with remainders: as float32, under every wrapper, on meshes, in Flax."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from adapprox_jax import SplitWeightsState, join_weights, split, split_weights
from tests.common import described, mesh_of, normal, put, stepping, temporaries
from tests.linalg.test_tiles import of_newer_compilers
from tests.params.test_named_arrays import Axis, NamedArray

SHAPES = {"kernel": (64, 96), "stack": (2, 64, 64), "bias": (96,), "scalar": ()}


def weights(seed=0):
    return jax.tree.map(jnp.asarray, normal(SHAPES, seed))


def gradients(steps):
    return [jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(t + 1)) for t in range(steps)]


def run(tx, params, state, steps=8):
    step = stepping(tx)
    for grads in gradients(steps):
        grads = jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), grads, params)
        params, state = step(params, state, grads)
    return params, state


def wide(tx):
    """An optimizer that is given bfloat16 gradients in float32."""
    cast = optax.stateless(lambda u, _: jax.tree.map(lambda x: x.astype(jnp.float32), u))
    return optax.chain(cast, tx)


# What the wrapped optimizer is does not matter, but for the weights that some look at.
@pytest.mark.parametrize(
    ("inner", "half"),
    [
        (optax.sgd(1e-3, momentum=0.9), jnp.float16),
        (optax.contrib.schedule_free_adamw(1e-3), jnp.bfloat16),
    ],
)
def test_32_bits_are_float32_and_24_are_close(inner, half):
    tx, start = wide(inner), weights()
    expected, _ = run(tx, start, tx.init(start))
    for bits in (24, 32):
        splitting = split_weights(inner, bits, half)
        params, state = split(splitting, start)
        assert all(x.dtype == half for x in jax.tree.leaves(params))
        joined = join_weights(*run(splitting, params, state))
        for leaf, x in joined.items():
            # Eight roundings to 16 significant bits, or one of differences as XLA fuses them.
            bound = 8 * 2.0**-16 if bits == 24 else 2.0**-22
            np.testing.assert_allclose(x, expected[leaf], rtol=bound, atol=bound)


def changed_by(factor):
    """An optimizer that multiplies each weight by a factor, given as the gradient."""
    return optax.GradientTransformation(
        optax.init_empty_state, lambda u, s, p: (jax.tree.map(lambda u, p: u * p - p, u, p), s)
    )


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("bits", [24, 32])
def test_parts_stand_for_the_weight_that_was_meant_after_any_change(bits, is_fused):
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=2**16) * np.exp(rng.uniform(-30, 30, 2**16)), jnp.float32)
    factors = jnp.asarray(
        np.exp(rng.uniform(-20, 20, 2**16)) * rng.choice([-1, 1], 2**16), jnp.float32
    )
    tx = split_weights(changed_by(factors), bits)
    params, state = split(tx, start)
    before = np.asarray(join_weights(params, state), np.float64)
    if is_fused:
        params, state = stepping(tx)(params, state, factors)
    else:
        updates, state = jax.jit(tx.update)(factors, state, params)
        params = optax.apply_updates(params, updates)
    after = np.asarray(join_weights(params, state), np.float64)
    meant = np.asarray(before.astype(np.float32) * factors, np.float64)
    # float32 rounds the difference and the sum, which is felt where a weight shrinks by far.
    of_remainder = 2.0**-16 if bits == 24 else 0
    bound = 2.0**-22 * (np.abs(before) + np.abs(meant)) + of_remainder * np.abs(meant)
    assert np.all(np.abs(after - meant) <= bound)


def test_where_another_weight_is_reached_the_remainder_leads_towards_what_was_meant():
    """float32 rounds the difference of 1 and a far smaller negative weight."""
    rng = np.random.default_rng(0)
    tx = split_weights(optax.identity())
    params, state = split(tx, jnp.asarray(rng.uniform(1 - 2.0**-10, 1, 2**16), jnp.float32))
    before = np.asarray(join_weights(params, state))
    added = (-before * 2.0 ** rng.uniform(-20, -14, 2**16)).astype(np.float32) - before
    params, state = stepping(tx)(params, state, jnp.asarray(added))
    meant = (before + added).astype(np.float64)
    reached, after = np.asarray(params, np.float64), np.asarray(join_weights(params, state))
    missed = (np.abs(reached - meant) > 2.0**-7 * np.abs(meant)) & (reached != 0)
    assert np.any(missed)
    assert np.all((np.abs(after - meant) < np.abs(reached - meant))[missed])


def test_weights_at_the_ends_of_the_range():
    values = np.float32([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-40, 0.0, -0.0, 1.0])
    tx, zeros = split_weights(optax.sgd(1.0)), jnp.zeros(9, jnp.bfloat16)
    params, state = split(tx, jnp.asarray(values))
    for _ in range(3):
        params, state = stepping(tx)(params, state, zeros)
    joined = join_weights(params, state)
    # bfloat16's largest number and a remainder are within 1/256 of float32's.
    np.testing.assert_allclose(joined, values, rtol=2.0**-8, atol=2.0**-126)
    assert joined[-1] == 1
    # A weight that becomes no number stays none, and its neighbour goes on.
    params, state = stepping(tx)(params, state, jnp.full(9, np.nan, jnp.bfloat16).at[-1].set(0.5))
    params, state = stepping(tx)(params, state, zeros)
    assert np.all(np.isnan(join_weights(params, state)[:-1]))
    assert params[-1] == 0.5


@pytest.mark.all_platforms
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_compiler_may_leave_out_a_rounding(platform):
    """XLA may drop a conversion to 16 bits where one back to float32 follows."""
    tx = split_weights(optax.adamw(1e-3))
    params, state = split(tx, weights())
    traced = stepping(tx).trace(params, state, gradients(1)[0])
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(
        r"(%\w+) = stablehlo.convert (%\w+) : \(tensor<([\dx]*)f32>\) -> tensor<\3bf16>",
        text,
    )
    assert found  # the weights that are reached
    for rounded, *_ in found:
        assert not re.search(rf"stablehlo.convert {rounded} :", text)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def labels(params):
    return jax.tree.map(lambda x: "a" if x.ndim >= 2 else "b", params)


WRAPPED = {
    "masked": lambda tx: optax.masked(tx, is_matrix),
    "partition": lambda tx: optax.partition({"a": tx, "b": split_weights(optax.sgd(1e-3))}, labels),
    "float32 beside": lambda tx: optax.partition({"a": tx, "b": optax.sgd(1e-3)}, labels),
    "multi steps around": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    # Optax 0.2.7 would give the rate the type of the first gradient from the first step on.
    "injected": lambda tx: optax.inject_hyperparams(
        lambda rate: split_weights(optax.chain(optax.scale_by_adam(), optax.scale(rate))),
        hyperparam_dtype=jnp.float32,
    )(rate=-1e-3),
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_under_wrappers(name):
    start = weights()
    tx = WRAPPED[name](split_weights(optax.adam(1e-3)))
    params, state = split(tx, start)
    for leaf, x in join_weights(params, state).items():
        np.testing.assert_allclose(x, start[leaf], rtol=2.0**-16)
    types = jax.tree.map(jnp.result_type, (params, state))
    if name in ("masked", "float32 beside"):
        assert params["bias"].dtype == jnp.float32
        assert params["kernel"].dtype == jnp.bfloat16
    params, state = run(tx, params, state, 4)
    assert jax.tree.map(jnp.result_type, (params, state)) == types
    moved = jax.tree.map(
        lambda x, y: float(jnp.max(jnp.abs(x - y))), join_weights(params, state), start
    )
    split_leaves = ("kernel", "stack") if name == "masked" else SHAPES
    assert all(1e-4 < moved[leaf] < 1e-2 for leaf in split_leaves)


def test_explicit_axes_of_a_mesh_that_is_not_in_use():
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    placed = {"w": jax.device_put(weights()["stack"], NamedSharding(mesh, P(None, "x", "y")))}
    tx = split_weights(adapprox_jax.adapprox(1e-3))
    params, state = jax.jit(lambda params: split(tx, params))(placed)
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert updates["w"].sharding.spec == P(None, "x", "y")


@pytest.mark.parametrize("shapes", [[(0,)], [(0, 4, 3), (5, 0), (1, 1)]])
def test_leaves_with_few_weights_or_none(shapes):
    tx = split_weights(adapprox_jax.adapprox_muon(0.5))
    params, state = split(tx, [jnp.ones(shape) for shape in shapes])
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(params, state, params)
        assert [x.shape for x in updates] == shapes
        for x in optax.apply_updates(params, updates):
            assert bool((x < 1).all())


def test_around_multi_steps():
    tx = split_weights(optax.MultiSteps(optax.sgd(1e-3), 2).gradient_transformation())
    params, state = split(tx, weights())
    first, second = gradients(2)
    middle, state = stepping(tx)(params, state, first)
    np.testing.assert_array_equal(middle["kernel"], params["kernel"])
    params, state = stepping(tx)(middle, state, second)
    expected = (
        weights()["kernel"] - 1e-3 * (first["kernel"] + second["kernel"].astype(jnp.float32)) / 2
    )
    np.testing.assert_allclose(
        join_weights(params, state)["kernel"], expected, rtol=2.0**-15, atol=1e-8
    )


def test_reports_maps_and_conversions():
    start = weights()
    tx = split_weights(adapprox_jax.adapprox(1e-3))
    params, state = split(tx, start)
    assert set(adapprox_jax.rank_report(state, params)) == {"['kernel']", "['stack']"}
    inside = adapprox_jax.state_nbytes(adapprox_jax.adapprox(1e-3), start)
    remainders = sum(x.size for x in params.values())
    assert adapprox_jax.state_nbytes(tx, params) == inside + remainders + 2
    counted = optax.tree_map_params(tx, jnp.size, state)
    assert counted.remainder == {name: math.prod(shape) for name, shape in SHAPES.items()}
    adam_state = optax.adam(1e-3).init(start)
    converted = adapprox_jax.from_adam(tx, adam_state, start)
    chex.assert_trees_all_equal(converted.remainder, state.remainder)
    wider = adapprox_jax.resize(converted, 12)
    assert isinstance(wider, SplitWeightsState)
    jax.eval_shape(tx.update, params, wider, params)


def of_linen(array, *names):
    return pytest.importorskip("flax.linen").Partitioned(array, names)


def of_nnx(array, *names):
    return pytest.importorskip("flax.nnx").Param(array, out_sharding=names, eager_sharding=False)


def of_haliax(array, *names):
    return NamedArray(array, tuple(map(Axis, names, array.shape)))


@pytest.mark.parametrize("box", [of_linen, of_nnx, of_haliax])
def test_boxes(box):
    """Whatever axes they name, each part of a weight has the same names."""
    start = {"kernel": box(jnp.ones((64, 96)), "x", "y"), "plain": jnp.ones(3)}
    tx = split_weights(adapprox_jax.adapprox(1e-2))
    params, state = split(tx, start)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    joined = jax.eval_shape(join_weights, params, after)
    for tree in (params, updates, after.remainder, joined):
        assert jax.tree.structure(tree) == jax.tree.structure(start)
    assert {x.dtype for x in jax.tree.leaves(joined)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_remainders_lie_as_the_weights(kind):
    mesh = mesh_of((2, 2), ("x", "y"), kind)
    specs = {"kernel": P("x", "y"), "stack": P(None, "y", "x"), "bias": P("y"), "scalar": P()}
    start = weights()
    tx = split_weights(adapprox_jax.adapprox(1e-3))
    with jax.set_mesh(mesh):
        placed = put(mesh, specs, start)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), placed)
        shardings = adapprox_jax.state_shardings(tx, params)
        assert {n: x.spec for n, x in shardings.remainder.items()} == specs
        params, state = jax.jit(
            lambda x: split(tx, x),
            out_shardings=(jax.tree.map(lambda x: x.sharding, params), shardings),
        )(placed)
        if kind == AxisType.Explicit:  # there they are types, which tracing tells
            ends = jax.eval_shape(stepping(tx), params, state, params)
            assert jax.tree.map(described, ends) == jax.tree.map(described, (params, state))
            return
        together = join_weights(*run(tx, params, state, 3))
    alone = join_weights(*run(tx, *split(tx, start), 3))
    for name, x in together.items():
        np.testing.assert_allclose(x, alone[name], rtol=1e-3, atol=1e-4)


def test_an_optimizer_of_nnx_trains_them():
    nnx = pytest.importorskip("flax.nnx")
    inputs = jnp.ones((4, 8), jnp.bfloat16)
    model = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, split_weights(optax.sgd(1e-3)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.mean((m(inputs) - 1) ** 2))(model)
        optimizer.update(model, grads)

    before = model.kernel[...]
    step(model, optimizer)
    assert model.kernel[...].dtype == jnp.bfloat16
    joined = join_weights(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert np.any(joined["kernel"][...] != before.astype(jnp.float32))


SGD = optax.sgd(1e-3)
SPLIT = split_weights(SGD)
HALF = {"w": jnp.ones(3, jnp.bfloat16)}
WIDE = {"w": jnp.ones(3)}
NO_VECTOR = optax.stateless(lambda u, _: jax.tree.map(lambda x: x[None], u))


def updated(params=HALF, tx=SPLIT, state=None, grads=None):
    state = tx.init(params) if state is None else state
    return tx.update(params if grads is None else grads, state, params)


def joined(params, state=None):
    return join_weights(params, SPLIT.init(HALF) if state is None else state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: updated(WIDE), "float32; expected bfloat16"),
        (lambda: updated({"w": jnp.ones(3, jnp.float16)}), "float16; expected bfloat16 or float32"),
        (lambda: updated(state=SGD.init(HALF)), "expected SplitWeightsState"),
        (
            lambda: updated(tx=split_weights(SGD, 32), state=SPLIT.init(HALF)),
            "type int8; expected int16",
        ),
        (
            lambda: updated(tx=split_weights(NO_VECTOR)),
            r"update has shape \(1, 3\); expected \(3,\)",
        ),
        (
            lambda: updated(state=SPLIT.init({"w": HALF["w"][:2]})),
            r"shape \(3,\); expected \(2,\)",
        ),
        (lambda: updated(grads={"v": HALF["w"]}), "got .* in the gradients"),
        (
            lambda: updated(grads={"w": jnp.ones((1, 3))}),
            r"the gradient has shape \(1, 3\); expected \(3,\)",
        ),
        (lambda: SPLIT.update(HALF, SPLIT.init(HALF)), "params is None"),
        (lambda: split_weights(SGD, 16), "bits is 16; allowed: 24, 32"),
        (
            lambda: optax.inject_hyperparams(split_weights)(SGD).init(HALF),
            "bits is .*; allowed: 24, 32",
        ),
        (lambda: split_weights(1e-3), "tx is a float"),
        (lambda: split(SGD, WIDE), "tx splits no weights; allowed"),
        (lambda: split(optax.chain(SPLIT, SPLIT), WIDE), "two remainders"),
        (lambda: split(split_weights(SPLIT), WIDE), "two remainders"),
        (lambda: joined(HALF, SGD.init(HALF)), "has no remainders"),
        (lambda: joined({"w": jnp.ones(4)}), r"the weight has shape \(4,\); expected \(3,\)"),
        (lambda: joined({"v": HALF["w"]}), "the weight has shape of none; expected"),
        (lambda: joined({"w": jnp.ones(3, jnp.float16)}), "type float16; expected bfloat16"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_integer_weights():
    with pytest.raises(TypeError, match=r"\['w'\]: the weight has type int32"):
        split_weights(SGD).init({"w": jnp.ones(3, jnp.int32)})


@of_newer_compilers
@pytest.mark.parametrize(
    "inner",
    [
        adapprox_jax.adapprox(1e-3, mu_dtype="int4"),
        adapprox_jax.adapprox_muon(1e-3, mu_dtype="int4"),
    ],
    ids=["adapprox", "adapprox_muon"],
)
def test_on_a_cpu_a_training_step_needs_no_more_than_its_gradients(inner):
    """Not while activations are there: no copies of weights, and nothing of the update."""
    tx = split_weights(inner)
    stacks = {"in": (12, 256, 512), "out": (12, 512, 256)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in stacks.items()}
    state = jax.eval_shape(tx.init, params)
    batch = jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16)

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["in"]) @ w["out"], None))
        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)))

    def step(params, state, batch):
        return stepping(tx)(params, state, jax.grad(loss)(params, batch))

    whole = temporaries(step, params, state, batch, donate_argnums=(0, 1))
    more = whole - temporaries(jax.grad(loss), params, batch)
    count = sum(x.size for x in params.values())
    assert more < 2.5 * count  # bytes; the gradients have 2 a weight
