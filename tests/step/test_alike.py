"""Many small leaves of one shape are worked on as a stack, and compiled once."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import adapprox_jax
from adapprox_jax.step.alike import MANY, alike
from tests.common import assert_near, described, mesh_of, program_of, put

TRANSFORMATIONS = {
    "adapprox": partial(adapprox_jax.adapprox, 0.1, max_rank=4),
    "adaptive": partial(adapprox_jax.adapprox, 0.1, initial_rank=1, max_rank=4, rank_interval=1),
    "in codes": partial(adapprox_jax.adapprox, 0.1, mu_dtype="int4"),
    "muon": partial(adapprox_jax.adapprox_muon, 0.1, mu_dtype="int4"),
}


def gradients(shape=(72, 80)):
    rng = np.random.default_rng(0)
    return {f"w{i}": normal(rng, shape) * np.float32(2.0**i) for i in range(MANY + 1)}


def of_many_shapes(count=2 * MANY):
    """Some that stand, some that lie. None has the longest rows and the longest columns of all."""
    rng = np.random.default_rng(0)
    sides = [(97 + i, 150 + (i if i < 2 else count - i)) for i in range(count)]
    shapes = [side if i % 2 else side[::-1] for i, side in enumerate(sides)]
    return {f"w{i}": normal(rng, shape) * np.float32(2.0**i) for i, shape in enumerate(shapes)}


def normal(rng, shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


# Of the same shape all go as those of about the same shape, without zeros around them.
@pytest.mark.parametrize(
    ("make", "name", "changes", "jitted"),
    [
        (gradients, "adaptive", {}, False),
        (partial(gradients, (2, 72, 80)), "adapprox", {}, True),
        *((of_many_shapes, name, {}, True) for name in ("adaptive", "in codes", "muon")),
        (of_many_shapes, "adapprox", dict(eps=0, approximate="moment"), True),
    ],
)
def test_a_leaf_among_many_is_as_alone(make, name, changes, jitted):
    tx, grads = TRANSFORMATIONS[name](**changes), make()
    few = ("w0", f"w{len(grads) - 1}", "longest")
    # With the longest side random starts are the same among many and alone.
    grads = grads | {"longest": jax.random.normal(jax.random.key(1), (64, 200))}
    grads["w3"] = grads["w3"].at[(0,) * grads["w3"].ndim].set(jnp.nan)  # of no concern to others

    def two_steps(grads):
        state, update = tx.init(grads), jax.jit(tx.update) if jitted else tx.update
        _, state = update(grads, state, grads)
        return update(jax.tree.map(lambda x: x[::-1], grads), state, grads)

    together, state = two_steps(grads)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, tx.init(grads))
    for leaf, alone in two_steps({leaf: grads[leaf] for leaf in few})[0].items():
        if name == "muon":  # with one code a little of all directions changes
            assert np.linalg.norm(together[leaf] - alone) <= 0.01 * np.linalg.norm(alone)
        else:  # rounding may change a few codes of 4 bits by one
            differ = np.abs(together[leaf] - alone) > 2e-5
            assert np.mean(differ) <= (0.005 if name == "in codes" else 0)


def test_a_program_does_not_grow_with_alike_leaves():
    """But for cutting out the results: the loop of the orthonormalization stands there once."""

    def loops(count):
        program = program_of(adapprox_jax.scale_by_adapprox(), of_many_shapes(count))
        return program.count("stablehlo.while")

    # Half of them stand.
    assert loops(2 * MANY) == loops(3 * MANY) < loops(MANY - 1)


@pytest.mark.parametrize(
    ("name", "devices", "in_use"),
    [*((name, 4, True) for name in TRANSFORMATIONS), ("in codes", 1, True), ("adaptive", 4, False)],
)
def test_many_leaves_on_a_mesh_with_explicit_axes(name, devices, in_use):
    """Of one shape and sharded in two ways, so that they are no stack: tracing would find one."""
    mesh = mesh_of((devices,), ("x",), AxisType.Explicit)
    tx, grads = TRANSFORMATIONS[name](), gradients()
    specs = {leaf: P("x", None) if int(leaf[1:]) % 2 else P(None, "x") for leaf in grads}
    runs = name == "adapprox"
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        sharded = put(mesh, specs, grads)
        state = (jax.jit(tx.init) if in_use else tx.init)(sharded)
        update = jax.jit(tx.update) if runs else partial(jax.eval_shape, tx.update)
        updates, new = update(sharded, state, sharded)
    of = described if in_use else jnp.shape  # without a mesh in use counts begin on one device
    assert jax.tree.map(of, new) == jax.tree.map(of, state)
    if runs:
        expected = jax.jit(tx.update)(grads, tx.init(grads), grads)[0]
        assert_near(jax.device_get(updates), expected, 1e-4)


def test_zeros_around_leaves_in_float64_under_strict_flags():
    """Their update and factors, and the derivatives, without eps: zeros are no 0 / 0."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        grads = {name: x.astype(jnp.float64) for name, x in of_many_shapes().items()}
        grads = dict(list(grads.items())[::2])  # those that lie
        tx = adapprox_jax.adapprox(0.1, eps=0.0, approximate="moment", max_rank=4)

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
