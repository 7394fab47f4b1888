"""The average with the noise of codes: as noisy, and right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

import adapprox_jax
from examples.opponents.noisy_average import noisy_ema


def test_its_noise_is_as_large_as_that_of_codes_and_has_no_direction():
    grads = {"w": jax.random.normal(jax.random.key(0), (256, 256)), "b": jnp.ones(256)}
    noisy, plain = noisy_ema(0.9, 4), optax.ema(0.9, debias=False)
    coded = adapprox_jax.guided_ema(0.9, mu_dtype=jnp.int4)
    updates, state = noisy.update(grads, noisy.init(grads))
    expected, _ = plain.update(grads, plain.init(grads))
    _, codes = coded.update(grads, coded.init(grads))
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)  # noise comes after it
    np.testing.assert_array_equal(state.mu["b"], updates["b"])
    noise = np.asarray(state.mu["w"] - updates["w"])
    read = adapprox_jax.dequantize(codes.mu["w"], codes.scale["w"], 256)
    of_codes = np.asarray(read - updates["w"])
    # 65,536 errors: a hundredth is more than three deviations of the ratio of their sizes.
    np.testing.assert_allclose(np.std(noise), np.std(of_codes), rtol=0.02)
    for other in (np.asarray(updates["w"]), of_codes):
        assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 5 / 256


def test_each_step_and_each_leaf_has_noise_of_its_own():
    leaf = jnp.ones((64, 64)).at[:, ::32].set(2)  # a half of the largest is no code of 4 bits
    grads = {"v": leaf, "w": leaf}
    tx = noisy_ema(0.0, 4)
    _, first = tx.update(grads, tx.init(grads))
    _, second = tx.update(grads, first)
    assert np.any(first.mu["v"] != first.mu["w"])
    assert np.any(first.mu["v"] != second.mu["v"])
