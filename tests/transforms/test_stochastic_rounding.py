"""bfloat16 weights that are rounded by chance: right on average, and the same for the same seed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax import stochastic_rounding
from tests.common import trained

SHAPE = (200, 250)


def ones(dtype=jnp.bfloat16):
    return {"a": jnp.ones(SHAPE, dtype), "b": jnp.full(SHAPE, -3.0, dtype)}


def run(tx, params, grads, steps):
    return trained(tx, params, [grads] * steps)[0]


def mean(array):
    return float(np.mean(np.asarray(array, np.float64)))


def test_changes_far_below_the_last_bit_are_right_on_average():
    params = run(stochastic_rounding(optax.sgd(1e-4)), ones(), ones(), 50)
    count = np.prod(SHAPE)
    for name, value in (("a", 1.0), ("b", -3.0)):
        # Fifty roundings, each with a variance of less than a share of the last bit squared.
        last_bit = 2.0**-8 if name == "a" else 2.0**-6
        share = 1e-4 * abs(value) / last_bit
        deviation = last_bit * np.sqrt(50 * share / count)
        assert abs(mean(params[name]) - value * (1 - 50e-4)) < 5 * deviation
    rounded = run(optax.sgd(1e-4), ones(), ones(), 50)
    assert mean(rounded["a"]) == 1  # which is what it is for


def test_the_seed_decides_and_leaves_and_steps_differ():
    params = {"a": ones()["a"], "b": ones()["a"]}

    def two_updates(seed):
        tx = stochastic_rounding(optax.sgd(1e-3), seed)
        first, state = tx.update(params, tx.init(params), params)
        second, _ = tx.update(params, state, params)
        return first["a"], second["a"], first["b"]

    zero, again, one = map(two_updates, (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, zero, again)
    draws = *zero, *one  # of two seeds in a row, which are not two steps in a row
    for i, draw in enumerate(draws):
        assert all(np.any(draw != other) for other in draws[:i])


def test_with_adapprox_a_state_is_float32():
    tx = stochastic_rounding(adapprox_jax.adapprox(1e-3))
    state = tx.init(ones())
    assert {x.dtype.name for x in jax.tree.leaves(state)} <= {"float32", "int32", "uint32"}
    params = run(tx, ones(), ones(), 3)
    assert params["a"].dtype == jnp.bfloat16
    assert 0.99 < mean(params["a"]) < 1


def test_what_is_no_finite_number_stays():
    params = {"w": jnp.array([np.inf, -np.inf, np.nan, 1.0], jnp.bfloat16)}
    grads = {"w": jnp.array([0.0, 0.0, 0.0, np.nan])}
    after = run(stochastic_rounding(optax.sgd(1.0)), params, grads, 2)
    np.testing.assert_array_equal(after["w"].astype(jnp.float32), [np.inf, -np.inf, np.nan, np.nan])


def test_bad_input():
    with pytest.raises(ValueError, match=r"\['a'\]: .* type float32; expected bfloat16"):
        run(stochastic_rounding(optax.sgd(1.0)), ones(jnp.float32), ones(), 1)
    tx = stochastic_rounding(optax.sgd(1.0))
    with pytest.raises(ValueError, match="params is None"):
        tx.update(ones(), tx.init(ones()))
    with pytest.raises(ValueError, match="expected StochasticRoundingState"):
        tx.update(ones(), optax.sgd(1.0).init(ones()), ones())
