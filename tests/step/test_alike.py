"""Many small leaves of one shape are worked on as a stack, and compiled once."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from adapprox_jax.step.alike import MANY, alike, places_within, stacked, unstacked
from tests.common import described

slow = pytest.mark.slow
TRANSFORMATIONS = {
    "adapprox": partial(adapprox_jax.adapprox, 0.1, max_rank=4),
    "adaptive": partial(adapprox_jax.adapprox, 0.1, initial_rank=1, max_rank=4, rank_interval=1),
    "in codes": partial(adapprox_jax.adapprox, 0.1, mu_dtype="int4"),
    "muon": partial(adapprox_jax.adapprox_muon, 0.1, mu_dtype="int4"),
}


def gradients(count):
    rng = np.random.default_rng(0)
    return {f"w{i}": normal(rng, (72, 80)) * np.float32(2.0**i) for i in range(count)}


def normal(rng, shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def assert_as_alone(name, among, alone):
    """Up to rounding, which may change a few codes of 4 bits by one."""
    if name == "muon":  # and with a code a little of all directions
        assert np.linalg.norm(among - alone) <= 0.01 * np.linalg.norm(alone)
    else:
        differ = np.abs(among - alone) > 2e-5
        assert np.mean(differ) <= (0.005 if name == "in codes" else 0)


# Of the same shape all go as those of about the same shape, below, without zeros around them.
@pytest.mark.parametrize(
    ("name", "jitted"),
    [
        ("adaptive", False),
        *(pytest.param(name, True, marks=slow) for name in TRANSFORMATIONS),
    ],
)
def test_a_leaf_among_many_is_as_alone(name, jitted):
    tx = TRANSFORMATIONS[name]()
    grads = gradients(MANY + 1)
    grads["w3"] = grads["w3"].at[0, 0].set(jnp.nan)  # of no concern to the others
    update = jax.jit(tx.update) if jitted else tx.update

    def two_steps(grads):
        state = tx.init(grads)
        _, state = update(grads, state, grads)
        return update(jax.tree.map(lambda x: x[::-1], grads), state, grads)[0]

    together = two_steps(grads)
    for leaf in ("w0", f"w{MANY}"):
        alone = two_steps({"w0": grads[leaf]})["w0"]
        assert bool(jnp.isfinite(alone).all())
        assert_as_alone(name, together[leaf], alone)


def test_a_stack_among_many_is_as_alone():
    tx = adapprox_jax.scale_by_adapprox(max_rank=4)
    rng = np.random.default_rng(0)
    grads = {f"w{i}": normal(rng, (2, 72, 80)) for i in range(MANY)}
    among, alone = (
        jax.jit(tx.update)(tree, tx.init(tree), tree)[0]["w0"]
        for tree in (grads, {"w0": grads["w0"]})
    )
    assert_as_alone("adapprox", among, alone)


def of_many_shapes(count):
    """Some that stand, some that lie. None has the longest rows and the longest columns of all."""
    rng = np.random.default_rng(0)
    sides = [(97 + i, 150 + (i if i < 2 else count - i)) for i in range(count)]
    shapes = [side if i % 2 else side[::-1] for i, side in enumerate(sides)]
    return {f"w{i}": normal(rng, shape) * np.float32(2.0**i) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("adapprox", {}, marks=slow),  # in codes its factors are the same
        *((name, {}) for name in ("adaptive", "in codes", "muon")),
        ("adapprox", dict(eps=0, approximate="moment")),
    ],
)
def test_a_leaf_among_many_of_about_its_shape_is_as_alone(name, changes):
    tx = TRANSFORMATIONS[name](**changes)
    grads = of_many_shapes(2 * MANY)
    ones = list(grads.values())[1::2]
    assert alike(ones, [()] * MANY) == [list(range(MANY))]
    assert stacked(ones).shape == (MANY, 96 + 2 * MANY, 147 + 2 * MANY)
    grads["w3"] = grads["w3"].at[0, 0].set(jnp.nan)  # of no concern to the others
    # With the longest side random starts are the same among many and alone.
    grads["longest"] = jax.random.normal(jax.random.key(1), (64, 200))

    def two_steps(grads):
        state, update = tx.init(grads), jax.jit(tx.update)
        _, state = update(grads, state, grads)
        return update(jax.tree.map(lambda x: x[::-1], grads), state, grads)

    together, state = two_steps(grads)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, tx.init(grads))
    few = ("w0", f"w{2 * MANY - 1}", "longest")
    for leaf, alone in two_steps({leaf: grads[leaf] for leaf in few})[0].items():
        assert_as_alone(name, together[leaf], alone)


@pytest.mark.parametrize("make", [gradients, of_many_shapes])
def test_a_program_does_not_grow_with_alike_leaves(make):
    """But for cutting out the results: the loop of the orthonormalization stands there once."""

    def loops(count):
        grads = make(count)
        tx = adapprox_jax.scale_by_adapprox()
        traced = jax.jit(tx.update).trace(grads, jax.eval_shape(tx.init, grads))
        return traced.lower(lowering_platforms=("cpu",)).as_text().count("stablehlo.while")

    sides = 2 if make == of_many_shapes else 1  # half of them stand
    assert loops(sides * MANY) == loops(3 * MANY) < loops(MANY - 1)


@pytest.mark.parametrize(
    ("name", "devices", "in_use", "runs"),
    [
        *((name, 4, True, name == "adapprox") for name in TRANSFORMATIONS),
        *(("in codes", 1, True, False), ("adaptive", 4, False, False)),
        *(pytest.param(name, 4, True, True, marks=slow) for name in ("adaptive", "muon")),
        *(pytest.param("in codes", n, True, True, marks=slow) for n in (1, 4)),
        pytest.param("adaptive", 4, False, True, marks=slow),
    ],
)
def test_many_leaves_on_a_mesh_with_explicit_axes(name, devices, in_use, runs):
    """Of one shape and sharded in two ways, so that they are no stack: tracing would find one."""
    axes = dict(axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])
    mesh = jax.make_mesh((devices,), ("x",), **axes)
    tx, grads = TRANSFORMATIONS[name](), gradients(MANY + 1)
    specs = {leaf: P("x", None) if int(leaf[1:]) % 2 else P(None, "x") for leaf in grads}
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        sharded = {
            leaf: jax.device_put(x, NamedSharding(mesh, specs[leaf])) for leaf, x in grads.items()
        }
        state = (jax.jit(tx.init) if in_use else tx.init)(sharded)
        update = jax.jit(tx.update) if runs else partial(jax.eval_shape, tx.update)
        updates, new = update(sharded, state, sharded)
    of = described if in_use else jnp.shape  # without a mesh in use counts begin on one device
    assert jax.tree.map(of, new) == jax.tree.map(of, state)
    if not runs:
        return
    expected = jax.jit(tx.update)(grads, tx.init(grads), grads)[0]
    for leaf in grads:
        # On a mesh directions are made of products in bfloat16, five times.
        difference = np.linalg.norm(updates[leaf] - expected[leaf])
        assert difference <= (0.05 if name == "muon" else 1e-4) * np.linalg.norm(expected[leaf])


@pytest.mark.parametrize("approximate", [pytest.param("root", marks=slow), "moment"])
def test_zeros_around_leaves_in_float64_under_strict_flags(approximate):
    """Their update and factors, and the derivatives, without eps: zeros are no 0 / 0."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        grads = {name: x.astype(jnp.float64) for name, x in of_many_shapes(2 * MANY).items()}
        grads = dict(list(grads.items())[::2])  # those that lie
        tx = adapprox_jax.adapprox(0.1, eps=0.0, approximate=approximate, max_rank=4)

        first, *others = tx.init(grads)
        rng = np.random.default_rng(0)
        q, u = jax.tree.map(lambda x: np.abs(rng.normal(size=x.shape)), (first.q, first.u))

        def size_of_results(grads):
            state = first._replace(q=q, u=u, count=first.count + 1), *others
            updates, (new, *_) = tx.update(grads, state, grads)
            return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves((updates, new.q, new.u)))

        for x in jax.tree.leaves(jax.jit(jax.value_and_grad(size_of_results))(grads)):
            assert x.dtype == jnp.float64
            assert np.all(np.isfinite(x))


def groups_of(*shapes):
    return alike([jnp.zeros(shape) for shape in shapes], [()] * len(shapes))


def test_no_leaf_becomes_large_by_zeros():
    flat, tall = [(257, 384)] * MANY, [(312, 320)] * MANY
    assert groups_of(*flat, *tall) == [list(range(MANY)), list(range(MANY, 2 * MANY))]
    assert groups_of(*flat[:4], *tall[:4]) == [[i] for i in range(8)]


def test_no_side_grows_by_more_than_half():
    sides = [*range(64, 64 + MANY), *range(97, 97 + MANY), 200]
    expected = [list(range(MANY)), list(range(MANY, 2 * MANY)), [2 * MANY]]
    assert groups_of(*((side, 80) for side in sides)) == expected


@pytest.mark.parametrize("changes", [dict(approximate="moment"), dict(mu_dtype="int4")])
def test_each_leaf_adds_little_to_compile(changes):
    """No products, and few instructions: results of all are not worked out anew for each."""

    def compiled_for(count):
        params = {f"w{i}": jax.ShapeDtypeStruct((72, 80), jnp.float32) for i in range(count)}
        tx = adapprox_jax.adapprox(0.1, max_rank=4, **changes)
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
        return text.count(" = "), text.count(" dot(")

    (instructions, products), (more, as_many) = (compiled_for(MANY + n) for n in (0, 8))
    assert products == as_many
    assert more - instructions <= 8 * 280  # 190 and 210; worked out anew 370 and 740


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.int4])
def test_stacks(dtype):
    shapes = [(2, 3), (3, 2), (3, 3), (2, 3), (2, 2), (3, 2), (2, 3), (3, 1)]
    arrays = [jnp.arange(-2, np.prod(shape) - 2).reshape(shape).astype(dtype) for shape in shapes]
    if dtype == jnp.float32:
        arrays[0] = arrays[0].at[1, 2].set(jnp.nan)  # next to the first number of the second
    trees = [{"a": array, "b": jnp.asarray(i)} for i, array in enumerate(arrays)]
    stack = stacked(trees)
    for whole, array in zip(stack["a"], arrays, strict=True):
        padded = np.zeros((3, 3))
        padded[tuple(map(slice, array.shape))] = array
        np.testing.assert_array_equal(whole, padded)
    assert places_within([[0]], trees) == []  # nothing is taken apart
    places = places_within([[0], range(8)], trees)
    for part, tree in zip(unstacked(stack, places, trees), trees, strict=True):
        jax.tree.map(np.testing.assert_array_equal, part, tree)
