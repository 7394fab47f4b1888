"""Adam in 8 bits: its codes, and that it is Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.opponents.adam_8_bits import (
    SIGNED,
    UNSIGNED,
    Codes,
    decode,
    encode,
    scale_by_adam_8_bits,
)


def test_the_codes_are_the_papers_dynamic_trees():
    for values, bits in ((SIGNED, 7), (UNSIGNED, 8)):
        assert values.shape == (256,)
        assert np.all(np.diff(values) > 0)
        assert values[-1] == 1
        sizes = values[values > 0]
        # Half of all codes of one sign between a tenth and one, half of the rest below, and so on.
        for exponent in range(bits - 1):
            inside = (sizes > 10.0 ** -(exponent + 1)) & (sizes < 10.0**-exponent)
            assert abs(np.sum(inside) - 2 ** (bits - 1 - exponent)) <= 1
    np.testing.assert_array_equal(SIGNED[:127], -SIGNED[128:255][::-1])
    assert SIGNED[127] == UNSIGNED[0] == 0


@pytest.mark.parametrize("values", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_an_entry_is_read_back_as_the_nearest_code(values):
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-8, 3, (3, 700))).astype(np.float32)
    x = x if values[0] == 0 else x * rng.choice([-1, 1], x.shape).astype(np.float32)
    codes = encode(jnp.asarray(x), values)
    assert codes.code.dtype == jnp.uint8
    actual = np.asarray(decode(codes, values, x.shape))
    blocks = np.pad(x.reshape(-1), (0, -x.size % 256)).reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True)
    nearest = np.abs(blocks[..., None] / scale[..., None] - values).argmin(-1)
    expected = (values[nearest] * scale).reshape(-1)[: x.size].reshape(x.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_it_is_adam_up_to_its_codes_in_a_quarter_of_the_bytes():
    params = {"w": jnp.zeros((64, 128)), "b": jnp.zeros(128)}
    ours, adam = scale_by_adam_8_bits(0.9, 0.95), optax.scale_by_adam(0.9, 0.95)
    state, expected_state = ours.init(params), adam.init(params)
    assert isinstance(state.mu["w"], Codes)
    assert isinstance(state.mu["b"], jax.Array)
    for step in range(10):
        keys = jax.random.split(jax.random.key(step))
        grads = {
            name: jax.random.normal(key, x.shape)
            for key, (name, x) in zip(keys, params.items(), strict=True)
        }
        updates, state = jax.jit(ours.update)(grads, state)
        expected, expected_state = adam.update(grads, expected_state)
        np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-4, atol=1e-6)
        if step == 0:  # before anything was in codes
            np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)
    difference = np.linalg.norm(updates["w"] - expected["w"]) / np.linalg.norm(expected["w"])
    assert difference < 0.05
    sizes = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in (state, expected_state)]
    assert sizes[0] < 0.3 * sizes[1]
