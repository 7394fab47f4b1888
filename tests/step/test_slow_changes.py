"""What is stored in few bits follows changes that are smaller than its last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.linalg.rounding import round_stochastically
from tests.step.second_moments import beside_exact

SHAPE = (32, 48)
STEPS = 2000
RNG = np.random.default_rng(0)
SIZES = np.exp(RNG.normal(size=(32, 1)) + RNG.normal(size=(1, 48))).astype(np.float32)


def test_factors_in_bfloat16_follow_a_second_moment_that_falls():
    """Gradients that shrink to a tenth: V falls to a hundredth, by a thousandth of it a step."""
    tx = adapprox_jax.scale_by_adapprox(
        max_rank=4, min_dim_size_to_factor=1, factor_dtype=jnp.bfloat16
    )

    def gradient_at(t):
        size = jnp.where(t < 300, 1.0, 0.1)
        return size * SIZES * jax.random.normal(jax.random.fold_in(jax.random.key(1), t), SHAPE)

    _, *ratios = (
        np.median(kept**2 / exact) for _, kept, exact in beside_exact(tx, gradient_at, STEPS, 250)
    )
    # Of few gradients the factorization is not near V: float32 factors begin the same way.
    assert np.all(np.abs(np.array(ratios) - 1) < 0.1)


def test_an_average_in_codes_follows_a_slow_drift():
    """Over 2,000 steps in which updates fall to a tenth, with and without noise in them."""
    direction = RNG.normal(size=(64, 64)) * np.exp(RNG.normal(size=(64, 64)))
    direction = direction.astype(np.float32)
    b1 = 0.95
    tx = adapprox_jax.guided_ema(b1, mu_dtype="int4")

    @jax.jit
    def late_sums(noise):
        """Of what is emitted and of the exact average, over the second half of all steps."""

        def one_step(carry, t):
            state, exact, sums = carry
            size = 0.1 ** (t / STEPS)
            random = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), direction.shape)
            update = size * (direction + noise * jnp.std(direction) * random)
            emitted, state = tx.update(update, state)
            exact = b1 * exact + (1 - b1) * update
            late = jnp.where(t < STEPS // 2, 0, 1 / size)
            sums = jax.tree.map(lambda a, b: a + late * b, sums, (emitted, exact))
            return (state, exact, sums), None

        zeros = jnp.zeros_like(direction)
        start = tx.init(direction), zeros, (zeros, zeros)
        (_, _, sums), _ = jax.lax.scan(one_step, start, jnp.arange(STEPS, dtype=jnp.float32))
        return sums

    large = np.abs(direction) > 0.1
    for noise in (0.0, 1.0):
        coded, exact = map(np.asarray, late_sums(noise))
        assert abs(np.median((coded / exact)[large]) - 1) < 0.02
        # Means over 1,000 steps, some 50 of them independent, of errors of half a code at most.
        assert np.linalg.norm(coded - exact) < 0.1 * np.linalg.norm(exact)


def test_rounding_by_chance_keeps_the_expectation():
    as_they_are = [0.0, 2.0, np.inf, -np.inf, np.nan]  # what bfloat16 holds
    exact = np.asarray([1.001, -3.3e-20, 7e30, 1e-40, *as_they_are], np.float32)
    bits = np.arange(2**16, dtype=np.uint16)[:, None] * np.ones(9, np.uint16)
    rounded = np.asarray(jax.jit(round_stochastically)(np.broadcast_to(exact, bits.shape), bits))
    assert rounded.dtype == jnp.bfloat16
    mean = np.mean(rounded[:, :3].astype(np.float64), axis=0)
    np.testing.assert_allclose(mean, exact[:3], rtol=2e-5)
    expected = np.broadcast_to(exact[4:], (2**16, 5))
    np.testing.assert_array_equal(rounded[:, 4:].astype(np.float32), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_rounded_by_chance_are_right_on_average(bits):
    numbers = RNG.normal(size=(4, 64)).astype(np.float32)
    draws = np.linspace(0, 1, 1000, endpoint=False, dtype=np.float32)

    def decoded(draw):
        noise = jnp.full(numbers.shape, draw)
        codes, scales = adapprox_jax.quantize(numbers, bits, noise)
        return adapprox_jax.dequantize(codes, scales, numbers.shape)

    mean = np.mean(jax.jit(lambda: jax.lax.map(decoded, draws))(), axis=0)
    # One draw in a thousand, of a step between two codes of at most twice 1 / c.
    step = 2 * np.max(np.abs(numbers)) / (2 ** (bits - 1) - 1)
    np.testing.assert_allclose(mean, numbers, atol=2e-3 * step + 1e-5)


def test_the_factors_are_rounded_by_different_bits():
    """Of a matrix whose factors differ by a power of two alone."""
    side = np.abs(RNG.normal(size=(64, 1)))
    unit = (side / np.linalg.norm(side)).astype(np.float32)
    tx = adapprox_jax.scale_by_adapprox(
        0.75, max_rank=1, min_dim_size_to_factor=1, factor_dtype=jnp.bfloat16
    )
    grad = 4 * unit @ unit.T  # the root of V is half of it, and u twice q
    _, state = tx.update(grad, tx.init(grad))
    assert np.mean(state.u == 2 * state.q) < 0.9
