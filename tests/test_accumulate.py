"""Gradients of micro-batches, added up in three bytes a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from adapprox_jax import accumulate
from tests.common import mesh_of
from tests.params.test_named_arrays import AXES, NamedArray

COUNT = 32


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["in"].astype(jnp.float32))
    return jnp.mean((hidden @ params["out"].astype(jnp.float32)) ** 2)


def inputs(dtype):
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(24, 64)), "out": rng.normal(size=(64, 3))}
    batches = jnp.asarray(rng.normal(size=(COUNT, 8, 24)), jnp.float32)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), batches


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_as_one_large_batch(dtype):
    params, batches = inputs(dtype)
    both = jax.value_and_grad(loss)
    value, gradients = jax.jit(lambda p, x: accumulate(both, p, x))(params, batches)
    expected, of_whole = both(
        jax.tree.map(lambda x: x.astype(jnp.float32), params), batches.reshape(-1, 24)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        size = np.max(np.abs(of_whole[name]))
        # Of bfloat16 COUNT sums with 16 significant bits, and gradients that are rounded, too.
        bound = COUNT * 2.0**-16 + 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(gradient.astype(jnp.float32), of_whole[name], atol=bound * size)


def test_small_numbers_are_not_lost_beside_a_large_one():
    def function(params, x):
        return x.astype(jnp.bfloat16), {"w": jnp.full(3, x).astype(jnp.bfloat16)}

    batches = jnp.asarray([1.0, *[2.0**-9] * 255], jnp.float32)
    value, gradients = accumulate(function, {"w": jnp.ones(3, jnp.bfloat16)}, batches)
    expected = (1 + 255 * 2.0**-9) / 256  # 1.5; in bfloat16 alone the sum stays 1
    assert value.dtype == jnp.bfloat16
    for mean in (value, gradients["w"]):
        np.testing.assert_allclose(mean.astype(jnp.float32), expected, rtol=2.0**-8)


def test_values_may_be_trees_with_plain_numbers_and_batches_too():
    def loss(params, batch):
        return jnp.sum(params * batch["x"]), {"count": batch["n"], "tokens": 8.0}

    batches = {"x": jnp.arange(6.0).reshape(3, 2), "n": jnp.asarray([1.0, 2.0, 6.0])}
    both = jax.value_and_grad(loss, has_aux=True)
    (value, more), gradient = accumulate(both, jnp.ones(2), batches)
    assert (float(value), float(more["count"]), float(more["tokens"])) == (5.0, 3.0, 8.0)
    np.testing.assert_array_equal(gradient, [2.0, 3.0])


@pytest.mark.parametrize(
    ("summed", "dtype"),
    [
        ("outside", jnp.float32),
        ("inside", jnp.bfloat16),
        ("of varying weights", jnp.bfloat16),
    ],
)
def test_under_shard_map(summed, dtype):
    """Values and gradients vary over the devices where the function's do, and else not."""
    whole, batches = inputs(dtype)
    mesh = mesh_of((4,), ("data",))
    both, varies = jax.value_and_grad(loss), summed == "of varying weights"
    params = jax.tree.map(lambda x: jnp.concatenate([x] * (4 if varies else 1)), whole)

    def of_part(params, batches):
        if summed == "inside":
            return accumulate(lambda p, x: jax.lax.pmean(both(p, x), "data"), params, batches)
        value, gradients = accumulate(both, params, batches)
        return jax.lax.pmean(value, "data"), jax.lax.pmean(gradients, "data")

    in_specs = P("data") if varies else P(), P(None, "data")
    run = jax.shard_map(of_part, mesh=mesh, in_specs=in_specs, out_specs=(P(), P()))
    value, gradients = jax.jit(run)(params, batches)
    expected, of_whole = accumulate(both, whole, batches)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    # JAX adds up gradients of weights that do not vary over the devices.
    devices = 1 if varies else 4
    # Two sums of COUNT numbers, in 16 or 24 bits, of gradients that are rounded, too.
    bound = COUNT * 2.0**-16 + 2.0**-6 if dtype == jnp.bfloat16 else COUNT * 2.0**-23
    for name, gradient in gradients.items():
        of_one = np.asarray(of_whole[name].astype(jnp.float32)) * devices
        atol = bound * np.max(np.abs(of_one))
        np.testing.assert_allclose(gradient.astype(jnp.float32), of_one, atol=atol)


def test_boxes():
    params = {"down": NamedArray(jnp.ones((3, 128, 64)), AXES["down"])}
    _, gradients = accumulate(lambda p, x: (x, p), params, jnp.ones(4))
    assert gradients["down"].axes == AXES["down"]
    np.testing.assert_array_equal(gradients["down"].array, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}}, r"3 at \['a'\], 2 at \['b'\]"),
        ({"batches": jnp.ones(())}, "first axes of lengths none at"),
        ({"batches": jnp.ones((0, 2))}, "first axes of lengths 0"),
        ({"batches": {}}, "first axes of lengths none"),
        ({"function": 3}, r"function is 3; allowed: a function of parameters and a batch"),
        ({"function": jax.grad(loss)}, r"function gave a dict; allowed: a pair"),
        (
            {"function": lambda p, x: ((x.sum(), jnp.int32(2)), p)},
            r"\[1\]: the value has type int32; .* more.$",
        ),
        (
            {"function": lambda p, x: (x.sum(), {"in": p["in"]})},
            r"got none in the gradients",
        ),
        (
            {"function": lambda p, x: (x.sum(), {**p, "out": jnp.ones(())})},
            r"\['out'\]: the gradient has shape \(\); expected \(64, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    params, batches = inputs(jnp.float32)
    arguments = {"function": jax.value_and_grad(loss), "params": params, "batches": batches}
    with pytest.raises((ValueError, TypeError), match=message):
        accumulate(**arguments | change)
