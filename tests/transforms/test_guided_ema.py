"""The running average of updates and its guidance."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from adapprox_jax.transforms.guided_ema import average_unless_zero
from tests.common import mesh_of, program_of


def updates(steps=5, shape=(6, 8)):
    rng = np.random.default_rng(0)
    common = rng.normal(size=shape)
    return [jnp.asarray(common + rng.normal(size=shape), jnp.float32) for _ in range(steps)]


@pytest.mark.parametrize("mu_dtype", [None, "int8"])
def test_nesterovs_momentum_is_corrected_by_all_decays_so_far(mu_dtype):
    """Of a decay that is a function of the step, from 1."""
    decays = [0.95, 0.9, 0.5, 0.8]
    given = updates(4, (64, 64))
    schedule = lambda step: jnp.asarray([0.0, *decays])[step]  # noqa: E731
    tx = adapprox_jax.guided_ema(schedule, nesterov=True, mu_dtype=mu_dtype)
    state, mu, left = tx.init(given[0]), np.zeros((64, 64)), 1.0
    for update, b1 in zip(given, decays, strict=True):
        emitted, state = jax.jit(tx.update)(update, state)
        mu, left = b1 * mu + (1 - b1) * update, b1 * left
        expected = b1 * mu / (1 - b1 * left) + (1 - b1) * update / (1 - left)
        allowed = 0.02 * float(jnp.max(jnp.abs(expected))) if mu_dtype else 1e-5
        np.testing.assert_allclose(emitted, expected, atol=allowed)
    assert int(state.step) == 4


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_state_goes_on_with_another_b1_and_with_or_without_nesterov(nesterov):
    """What is left of the start is known of any."""
    before = adapprox_jax.guided_ema(0.5)
    after = adapprox_jax.guided_ema(lambda step: 0.9, nesterov=nesterov)
    state = before.init(jnp.ones(1))
    for _ in range(2):  # an average of 0.75, and 0.25 is left of the start
        _, state = before.update(jnp.ones(1), state)
    emitted, state = after.update(jnp.full(1, 3.0), state)
    average = 0.9 * 0.75 + 0.1 * 3
    ahead = 0.9 * average / (1 - 0.9 * 0.9 * 0.25) + 0.1 * 3 / (1 - 0.9 * 0.25)
    np.testing.assert_allclose(state.mu, average, rtol=1e-6)
    np.testing.assert_allclose(emitted, ahead if nesterov else average, rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e-25])
def test_guidance_is_the_formula_of_the_paper_whatever_the_size_of_updates(size):
    tx = adapprox_jax.guided_ema(0.9, cosine_guidance=True)
    state, average = tx.init(updates()[0]), np.zeros((6, 8))
    for update in updates():
        emitted, state = tx.update(update * size, state)
        average = 0.9 * average + 0.1 * np.asarray(update, np.float64)
        cosine = np.sum(average * update) / np.linalg.norm(average) / np.linalg.norm(update)
        scale = min(1 / (1 - cosine + 1e-8), 10)  # the cap, at the first step
        np.testing.assert_allclose(emitted / size, scale * average, rtol=1e-4)
        np.testing.assert_allclose(state.mu / size, average, rtol=1e-4, atol=1e-6)


def test_clip_is_that_of_optax_on_each_matrix():
    stack = [100 * updates()[0], 0.01 * updates()[1]]
    alone = {"matrix": 3 * updates()[0], "vector": jnp.arange(4.0), "scalar": jnp.asarray(7.0)}
    expected, _ = optax.clip_by_block_rms(3.0).update(alone | {"stack": stack}, optax.EmptyState())
    clip = adapprox_jax.clip_by_matrix_rms(3.0)
    actual, _ = clip.update(alone | {"stack": jnp.stack(stack)}, optax.EmptyState())
    expected["stack"] = jnp.stack(expected["stack"])
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        *(((128, 32), (4, 32)), ((4096, 31), (128, 31)), ((31, 4096), (31, 128))),
        *(((16, 16, 16), ()), ((4095,), ()), ((4096,), (128,)), ((32, 128), (1, 128))),
        ((4096, 8, 128), (128, 8, 128)),
    ],
)
def test_leaves_of_one_block_and_enough_numbers_are_in_codes(shape, scales):
    state = adapprox_jax.guided_ema(0.9, mu_dtype="int8").init(jnp.zeros(shape))
    assert (state.mu.dtype == jnp.int8) == bool(scales)
    assert state.scale == optax.MaskedNode() if not scales else state.scale.shape == scales


@pytest.mark.all_platforms
@pytest.mark.parametrize("kind", ["cuda", "mesh"])
def test_codes_of_large_leaves_wait_for_one_another(kind):
    """On accelerators and meshes: else XLA has the new averages of all of them in memory."""

    def waits(rows):
        params = {name: jax.ShapeDtypeStruct((rows, 4096), jnp.float32) for name in "acd"}
        params["b"] = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
        tx = adapprox_jax.guided_ema(mu_dtype="int4")
        if kind == "mesh":
            with jax.set_mesh(mesh_of((8,), ("x",))):
                program = program_of(tx, params)
        else:
            program = program_of(tx, params, kind)
        codes = f"tensor<{rows}x4096xi4>"
        return len(re.findall(rf"optimization_barrier .* : {codes}, {codes}", program))

    assert (waits(2**10), waits(2**16)) == (0, 2)


@pytest.mark.all_platforms
def test_codes_of_updates_that_are_made_twice_wait_whatever_their_size():
    """Else XLA makes those of one size in one kernel, of averages in memory."""
    params = {name: jax.ShapeDtypeStruct((64, 4096), jnp.float32) for name in "abcd"}
    program = program_of(adapprox_jax.adapprox(1e-3, mu_dtype="int4"), params, "cuda")
    codes = "tensor<64x4096xi4>"
    assert len(re.findall(rf"optimization_barrier .* : {codes}, {codes}", program)) == 3


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("shape", "spec"), [((8, 48, 128), P(None, "x")), ((64, 128), P("x"))])
def test_devices_may_divide_blocks(shape, spec, kind, in_phases):
    """The largest numbers of a block are then on several of them."""
    tx = average_unless_zero(0.9, of_gradients=True, mu_dtype="int8", rounding="nearest")
    array = jax.random.normal(jax.random.key(0), shape)
    if kind != "cpu":
        in_phases(kind)
    expected, _ = jax.jit(tx.update)(array, tx.init(array))
    divided = jax.device_put(array, NamedSharding(mesh_of((8,), ("x",)), spec))
    state = jax.jit(tx.init)(divided)
    updates, state = jax.jit(tx.update)(divided, state)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    kept = adapprox_jax.dequantize(state.mu, state.scale, shape)
    np.testing.assert_allclose(kept, expected, atol=2**-7 * np.abs(expected).max())
