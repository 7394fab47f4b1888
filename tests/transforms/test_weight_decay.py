"""Cautious weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests.common import run

PARAMS = {"w": jnp.array([[2.0, -2.0, 2.0], [-2.0, 0.0, 2.0]]), "b": jnp.array([4.0, -4.0])}
UPDATES = {"w": jnp.array([[1.0, -1.0, -1.0], [1.0, 1.0, 0.0]]), "b": jnp.array([1.0, 1.0])}


def decayed(tx, updates=UPDATES, params=PARAMS):
    return tx.update(updates, tx.init(params), params)[0]


def test_only_entries_that_the_update_shrinks_decay():
    result = decayed(adapprox_jax.add_cautious_weight_decay(0.5))
    np.testing.assert_array_equal(result["w"], [[2.0, -2.0, -1.0], [1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(result["b"], [3.0, 1.0])


def test_types_are_kept():
    plain = adapprox_jax.add_cautious_weight_decay(0.5)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (UPDATES, PARAMS))
    assert decayed(plain, *halves)["w"].dtype == jnp.bfloat16
    assert decayed(plain, {"w": UPDATES["w"], "b": None}, {**PARAMS, "b": None})["b"] is None


MASK = {"w": True, "b": np.bool_(False)}


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize(("mask", "of_b"), [(MASK, 0), (True, -0.05), (lambda params: MASK, 0)])
def test_decay_is_decoupled_and_masked(mask, of_b, cautious):
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    tx = adapprox_jax.adapprox(0.5, weight_decay=0.1, mask=mask, cautious_weight_decay=cautious)
    updates = decayed(tx, jax.tree.map(jnp.zeros_like, params), params)
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], of_b, rtol=1e-6)


def test_boxes():
    nn = pytest.importorskip("flax.linen")
    boxed, updates = (
        {"w": nn.Partitioned(x["w"], ("a", None)), "b": x["b"]} for x in (PARAMS, UPDATES)
    )
    plain = adapprox_jax.add_cautious_weight_decay(0.5)
    np.testing.assert_array_equal(decayed(plain, updates, boxed)["w"].value, decayed(plain)["w"])


@pytest.mark.parametrize("make", [adapprox_jax.adapprox, adapprox_jax.adapprox_muon])
def test_in_the_optimizers_it_takes_the_place_of_the_plain_decay(make):
    """With a rate of one: what the two add differs, and nothing else."""
    params = {"mlp": jnp.where(jnp.arange(64 * 80).reshape(64, 80) % 3 == 0, 1.0, -1.0)}
    grads = {"mlp": jax.random.normal(jax.random.key(0), (64, 80))}

    def update(**keywords):
        tx = make(1.0, mask=None, **keywords)
        return jax.jit(tx.update)(grads, tx.init(params), params)[0]["mlp"]

    without = update(weight_decay=0.0)
    plain = update(weight_decay=0.25)
    cautious = update(weight_decay=0.25, cautious_weight_decay=True)
    agree = without * params["mlp"] <= 0  # both as they are added to the parameters
    assert 0 < np.mean(agree) < 1
    np.testing.assert_allclose(cautious, jnp.where(agree, plain, without), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "cautious"), [(adapprox_jax.adapprox, False), (adapprox_jax.adapprox_muon, True)]
)
def test_a_schedule_of_the_decay_is_followed(make, cautious):
    """As `optax.adamw` follows one: the first update takes what it gives for 0."""
    params = {"mlp": jnp.ones((64, 80))}
    grads = {"mlp": jax.random.normal(jax.random.key(0), (64, 80))}

    def updates_with(decay):
        tx = make(1.0, weight_decay=decay, cautious_weight_decay=cautious)
        return [x["mlp"] for x in run(tx, [grads] * 3, params)[0]]

    scheduled = updates_with(optax.linear_schedule(0.5, 0.0, 2))
    for actual, decay, step in zip(scheduled, (0.5, 0.25, 0.0), range(3), strict=True):
        np.testing.assert_allclose(actual, updates_with(decay)[step], rtol=1e-6)
