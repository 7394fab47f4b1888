"""Codes of 8, 5 and 4 bits, and the running average that is kept in them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import adapprox_jax
from adapprox_jax import quantize
from adapprox_jax.linalg import quantization
from adapprox_jax.linalg.quantization import quantized_like
from tests.common import mesh_of, put, run

SHAPES = {"kernel": (64, 96), "odd": (50, 101), "bias": (96,)}
PARAMS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
each_bits = pytest.mark.parametrize("bits", [8, 5, 4])


def updates(t, like=PARAMS):
    rng = np.random.default_rng(t)
    return {name: rng.normal(size=x.shape).astype(np.float32) for name, x in like.items()}


@pytest.mark.parametrize(("bits", "most"), [(8, 0.0080), (5, 0.0492), (4, 0.0974)])
@pytest.mark.parametrize("n", [1, 5, 32, 33, 100])
def test_error_is_half_a_step_of_the_codes(bits, most, n):
    """Of a block's largest magnitude: 0.0059, 0.0471 and 0.0952 at most.

    A code k stands for f(k) = 2 k / (3 c - k). If both sides of a block are alike its scale is
    1 / f(c - 1), and half of the largest step is (1 - f(c - 2) / f(c - 1)) / 2. Scales are rounded
    by 2^-9.
    """
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(3, n)) * 10.0 ** np.arange(-3, 6, 3)[:, None])
    x = x.T if n >= 32 else x  # blocks lie along rows, if there are enough
    encode = jax.jit(quantize, static_argnums=1)
    codes, scales = encode(x, bits)
    back = np.asarray(jax.jit(adapprox_jax.dequantize, static_argnums=2)(codes, scales, x.shape))
    assert [(a.shape, a.dtype) for a in (codes, scales)] == [
        (a.shape, a.dtype) for a in quantized_like(x.shape, bits)
    ]
    again = adapprox_jax.dequantize(*encode(back, bits), x.shape)
    np.testing.assert_array_equal(again, back)
    x, back = (x.T, back.T) if n >= 32 else (x, back)
    for i in range(0, n, 32):
        block, error = x[:, i : i + 32], np.abs(back - x)[:, i : i + 32]
        assert np.all(error.max(1) <= most * np.abs(block).max(1))


def _to_bfloat16(x):
    """To the nearest bfloat16, as float32; of two that are as near to the smaller."""
    return ((x.view(np.int32) + 0x7FFF) & ~0xFFFF).view(np.float32)


@each_bits
def test_blocks_of_a_stack_lie_along_its_rows(bits):
    """The middle axis: two whole blocks and a short one, in plain NumPy."""
    stack = np.random.default_rng(0).normal(size=(3, 70, 8)).astype(np.float32)
    count, expected = 2 ** (bits - 1), np.zeros_like(stack)
    for start in (0, 32, 64):
        block = stack[:, start : start + 32]
        signs = block.max(1, keepdims=True), -block.min(1, keepdims=True)
        up, down = map(_to_bfloat16, signs)
        reach = 2 * (count - 1) / (2 * count + 1)  # of the last code on the shorter side
        scale = np.maximum(np.maximum(up, down), np.minimum(up, down) / reach)
        scale = _to_bfloat16(np.where(down >= up, scale, -scale))
        unit = block / scale
        codes = np.clip(np.round(3 * count * unit / (2 + abs(unit))), -count, count - 1)
        expected[:, start : start + 32] = scale * 2 * codes / (3 * count - abs(codes))
    codes, scales = quantize(jnp.asarray(stack), bits)
    assert scales.shape == (3, 3, 8)
    back = adapprox_jax.dequantize(codes, scales, stack.shape)
    np.testing.assert_allclose(back, expected, rtol=1e-6)


@each_bits
@pytest.mark.parametrize("rounded_up", [True, False])
def test_what_is_cut_before_has_the_same_scales_and_numbers(bits, rounded_up):
    """Along an axis that is not the first; of what is infinite or no number, too."""
    array = np.random.default_rng(0).normal(size=(2, 192, 5)) * [1e-30, 1, 1e30, 0, -1]
    array[1, 40, 1], array[1, 70, 2], array[0, 3, 4] = np.inf, np.nan, 3.4e38
    array = jnp.asarray(array, jnp.float32)
    cut = quantization.in_blocks(array, 1, quantization.CUT)
    scales = quantization.scales_of(array, bits, rounded_up=rounded_up)
    actual = quantization.scales_of_cut(cut, 1, bits, rounded_up=rounded_up)
    np.testing.assert_array_equal(*(x.astype(jnp.float32) for x in (actual, scales)))
    finite = jnp.nan_to_num(array)
    coded = quantize(finite, bits)
    numbers = quantization.dequantize_cut(*coded, array.shape, bits).reshape(array.shape)
    np.testing.assert_array_equal(numbers, adapprox_jax.dequantize(*coded, array.shape))


@each_bits
def test_zeros_and_the_ends_of_the_number_range(bits):
    x = jnp.asarray(np.r_[np.zeros(32), np.full(32, 1e-30), np.full(32, -3e38)], jnp.float32)
    back = adapprox_jax.dequantize(*quantize(x, bits), (96,))
    np.testing.assert_allclose(back, x, rtol=0.004)
    # There is no larger scale, so one side is beyond its last code.
    array = jnp.tile(jnp.array([3.3e38, -3.3e38]), 16)
    back = adapprox_jax.dequantize(*quantize(array, bits, jnp.zeros(32)), array.shape)
    np.testing.assert_allclose(back, array, rtol=2.0**-2)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (5, 0.2), (4, 0.4)])
def test_average_follows_that_of_float32(bits, most):
    """Alone behind another optimizer's scaling; small leaves are exact.

    Of updates that are noise alone. Stochastic rounding has twice the variance of rounding to the
    nearest, which ends below 0.25 here in 4 bits, so below 0.25 sqrt(2) = 0.36, with a margin.
    """
    grads = [updates(t) for t in range(40)]
    actual, expected = (
        run(optax.chain(optax.scale_by_rms(), adapprox_jax.guided_ema(0.9, mu_dtype=x)), grads)[0][
            -1
        ]
        for x in (f"int{bits}", None)
    )
    np.testing.assert_allclose(actual["bias"], expected["bias"], rtol=1e-5)
    for name in ("kernel", "odd"):
        distance = np.linalg.norm(actual[name] - expected[name])
        assert 0 < distance < most * np.linalg.norm(expected[name])


@each_bits
def test_codes_may_be_those_nearest_to_the_average(bits):
    """With half the noise; stochastic ones are the two around it."""
    nearest, stochastic = (
        run(adapprox_jax.guided_ema(0.0, mu_dtype=f"int{bits}", rounding=x), [updates(0)])[1]
        for x in ("nearest", "stochastic")
    )
    codes, scales = quantize(updates(0)["kernel"], bits)
    np.testing.assert_array_equal(nearest.mu["kernel"], codes)
    np.testing.assert_array_equal(nearest.scale["kernel"], scales)
    assert np.any(stochastic.mu["kernel"] != codes)


def test_specs_of_parameters_map_over_the_state():
    """Codes and scales lie under the paths of their parameters, as sharding recipes ask for."""
    tx = adapprox_jax.guided_ema(mu_dtype="int5")
    state = optax.tree_map_params(tx, lambda leaf: leaf.ndim, tx.init(PARAMS))
    assert state.mu == {name: len(shape) for name, shape in SHAPES.items()}
    assert state.scale == {"kernel": 2, "odd": 2, "bias": optax.MaskedNode()}


@each_bits
@pytest.mark.parametrize("rows", [256, 72])
def test_explicit_mesh(bits, rows):
    """The values of one device, sharded as the parameter; 3 blocks lie across the 4 devices."""
    mesh = mesh_of((4,), ("data",), AxisType.Explicit)
    grads = updates(0, {"kernel": np.ones((rows, 96))})
    tx = adapprox_jax.guided_ema(mu_dtype=f"int{bits}")
    expected, plain = jax.jit(tx.update)(grads, tx.init(grads))
    with jax.set_mesh(mesh):
        sharded = put(mesh, {"kernel": PartitionSpec("data", None)}, grads)
        state = tx.init(sharded)
        actual, new = jax.jit(tx.update)(sharded, state)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        assert jax.typeof(new.mu["kernel"]).sharding.spec[0] == "data"
        assert jax.typeof(new.scale["kernel"]).sharding.spec[0] == ("data" if rows == 256 else None)
    np.testing.assert_allclose(actual["kernel"], expected["kernel"], rtol=1e-6)
    np.testing.assert_array_equal(new.mu["kernel"], plain.mu["kernel"])


@pytest.mark.parametrize("bits", [5, 4])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_arrays_without_entries(bits, shape):
    codes, scales = quantize(jnp.zeros(shape), bits)
    assert adapprox_jax.dequantize(codes, scales, shape).shape == shape


def test_bad_types_and_shapes_are_named():
    with pytest.raises(
        ValueError,
        match="mu_dtype is int16; allowed: None, floating-point types of 16 bits or more, 'int8'",
    ):
        adapprox_jax.guided_ema(mu_dtype=jnp.int16)
    with pytest.raises(ValueError, match="rounding is 'up'; allowed: 'stochastic', 'nearest'"):
        adapprox_jax.guided_ema(rounding="up")
    tx = adapprox_jax.guided_ema(mu_dtype=jnp.int4)
    state = jax.jit(tx.init)(PARAMS)
    wrong = {**PARAMS, "kernel": np.ones((64, 90), np.float32)}
    with pytest.raises(ValueError, match=r"\['kernel'\]: the state's average has shape \(64, 96\)"):
        tx.update(wrong, state)
    others = {"int8": "codes of 8 bits", "int5": "codes of 5 bits", None: "no codes"}
    for dtype, asked in others.items():
        other = adapprox_jax.guided_ema(mu_dtype=dtype)
        with pytest.raises(ValueError, match=f"has codes of 4 bits; mu_dtype asks for {asked}"):
            other.update(PARAMS, state)
    with pytest.raises(ValueError, match="has no codes; mu_dtype asks for codes of 4 bits"):
        tx.update(PARAMS, jax.jit(adapprox_jax.guided_ema().init)(PARAMS))


def test_within_shard_map_the_numbers_of_one_device_count(monkeypatch):
    """Where a TPU's compiler could fail, scales are made in memory; there arrays are parts."""
    monkeypatch.setattr(quantization, "_LARGE", 1000)
    mesh = mesh_of((8,), ("x",))
    spec = PartitionSpec("x")

    def decode(codes, scales):
        return quantization.dequantize(codes, scales, codes.shape)

    within = jax.shard_map(decode, mesh=mesh, in_specs=spec, out_specs=spec)
    codes, scales = quantization.quantize(jnp.ones((8 * 32, 64)), 4)
    assert "optimization_barrier" in jax.jit(within).lower(codes, scales).as_text()
    assert "optimization_barrier" not in jax.jit(decode).lower(codes, scales).as_text()
