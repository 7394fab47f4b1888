"""Many small leaves of one shape are worked on as a stack, and compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.step.alike import MANY, unstacked

TRANSFORMATIONS = {
    "adapprox": lambda: adapprox_jax.adapprox(0.1, max_rank=4),
    "adaptive": lambda: adapprox_jax.adapprox(0.1, initial_rank=1, max_rank=4, rank_interval=1),
    "in codes": lambda: adapprox_jax.adapprox(0.1, mu_dtype="int4"),
    "muon": lambda: adapprox_jax.adapprox_muon(0.1, mu_dtype="int4"),
}


def gradients(count):
    keys = jax.random.split(jax.random.key(0), count)
    return {f"w{i}": jax.random.normal(key, (72, 80)) * 2.0**i for i, key in enumerate(keys)}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("jitted", [True, False])
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
        np.testing.assert_allclose(together[leaf], alone, rtol=0, atol=2e-5)


def test_a_program_does_not_grow_with_alike_leaves():
    """But for cutting out the results: the loop of the orthonormalization stands there once."""

    def loops(count):
        grads = gradients(count)
        tx = adapprox_jax.scale_by_adapprox()
        return jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text().count(" while(")

    assert loops(MANY) == loops(3 * MANY) < loops(MANY - 1)


def test_unstacked():
    array = jnp.arange(24.0).reshape(6, 2, 2).at[0, 0, 0].set(jnp.nan)
    parts = unstacked({"a": array, "b": array[:, 0, 1]}, 6)
    for place, part in enumerate(parts):
        np.testing.assert_array_equal(part["a"], array[place])
        np.testing.assert_array_equal(part["b"], array[place, 0, 1])
