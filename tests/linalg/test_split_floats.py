"""A float32 in two parts: every exponent and mantissa of the 16-bit types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adapprox_jax.linalg import split_floats
from adapprox_jax.linalg.split_floats import HALVES, REMAINDERS, joined, remainder_of

# How far a sum may be from a number, in places of float32 at the exponents that the type has.
BOUNDS = {
    ("bfloat16", 24): 2**7,
    ("bfloat16", 32): 0,
    ("float16", 24): 2**4,
    ("float16", 32): 0,
}
each_kind = pytest.mark.parametrize(("half", "bits"), [(h, b) for h in HALVES for b in REMAINDERS])


@jax.jit(static_argnums=(1, 2))
def parts(wide, half, bits):
    return split_floats.parts(wide, half, REMAINDERS[bits])


def uppers(half):
    """Every number of a type, also infinities and those that are none."""
    return np.arange(2**16, dtype=np.uint16).view(half)


@each_kind
def test_all_parts_are_different_numbers_and_come_back(half, bits):
    kept = REMAINDERS[bits]
    numbers = uppers(half)
    numbers = numbers[np.isfinite(numbers.astype(np.float32)) & (numbers.view(np.uint16) != 0x8000)]
    low_bits = 16 if half == jnp.bfloat16 else 13
    ends = 1 << min(8 * kept.itemsize, low_bits) >> 1
    largest = jnp.finfo(half).max
    for remainder in sorted({-ends, 1 - ends, -100, -1, 0, 1, 77, ends - 2, ends - 1}):
        remainders = np.full(numbers.shape, remainder, kept)
        wide = joined(numbers, remainders)
        upper, back = parts(wide, half, bits)
        # The last place of all is the largest number's last remainder but none.
        inside = (numbers != largest) & (numbers != -largest)
        inside &= (numbers != 0) | (remainder >= 0)  # no size is below 0
        np.testing.assert_array_equal(upper[inside], numbers[inside])
        np.testing.assert_array_equal(back[inside], remainder)


def place_of(wide):
    word = np.asarray(wide).view(np.int32).astype(np.int64)
    return np.where(word < 0, -(word & 0x7FFFFFFF), word)


@each_kind
def test_a_sum_is_within_the_bound_and_both_signs_are_cut_alike(half, bits):
    """Also in the middle between two 16-bit numbers, which would shift all weights to one side."""
    words = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32, endpoint=False)
    exponents = np.arange(512, dtype=np.uint32) << 23  # both signs
    ends = [exponents + x for x in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x7FFF80, 0x7F8000)]
    halves = uppers(half).astype(np.float32)
    halves = halves[np.abs(halves) < 1e4]
    wide = np.concatenate(
        [(halves[1:] + halves[:-1]) / 2, np.concatenate([words, *ends]).view(np.float32)]
    )
    wide = wide[np.abs(wide) < float(jnp.finfo(half).max)]
    upper, remainder = map(np.asarray, parts(wide, half, bits))
    mirrored = parts(-wide, half, bits)
    np.testing.assert_array_equal(upper, -mirrored[0])
    np.testing.assert_array_equal(remainder, mirrored[1])
    off = np.abs(place_of(joined(upper, remainder)) - place_of(wide))
    normal = np.abs(wide) >= float(jnp.finfo(half).smallest_normal)
    # Below the smallest normal float16 places are equally far apart.
    assert np.max(off[normal | (half == jnp.bfloat16)]) <= BOUNDS[half.name, bits]
    # The 16-bit number is next to it, but for a share that the remainder's rounding may add.
    gap = np.spacing(np.abs(upper).astype(np.float32)) * 2.0 ** (23 - jnp.finfo(half).nmant)
    distance = np.abs(wide - upper.astype(np.float32))
    assert np.all(distance[normal] <= gap[normal] * (0.5 + 2.0**-8))


@each_kind
def test_numbers_below_the_smallest_exponent(half, bits):
    smallest = float(jnp.finfo(half).smallest_subnormal)
    wide = np.linspace(-40, 40, 40001, dtype=np.float32) * np.float32(smallest)
    if half == jnp.bfloat16:  # JAX itself counts these as zero, where it computes with them
        wide = (np.arange(-40 * 2**16, 40 * 2**16, 99, np.int64)).astype(np.int32)
        wide = np.where(wide < 0, -wide | -(2**31), wide).astype(np.int32).view(np.float32)
    upper, remainder = parts(wide, half, bits)
    if half == np.float16:
        assert np.max(np.abs(np.asarray(upper, np.float64) - wide)) <= smallest * (0.5 + 2.0**-8)
    sums = np.asarray(joined(upper, remainder))
    low_bits = 16 if half == jnp.bfloat16 else 13
    step = 2.0 ** -min(8 * REMAINDERS[bits].itemsize, low_bits)
    errors = np.abs(sums.astype(np.float64) - wide)
    # A float16's places are rounded by themselves first.
    assert np.max(errors) <= smallest * (step + 2.0**-low_bits) / 2


@each_kind
def test_what_is_no_finite_number(half, bits):
    wide = np.array([np.inf, -np.inf, np.nan], np.float32)
    wide = np.append(wide, np.array([0x7F800001, 0xFF80FFFF], np.uint32).view(np.float32))
    upper, remainder = parts(wide, half, bits)
    np.testing.assert_array_equal(np.asarray(upper).astype(np.float32), wide)
    np.testing.assert_array_equal(remainder, 0)
    for other in (remainder, remainder - 5, remainder + 5):
        np.testing.assert_array_equal(joined(upper, other), wide)
    # What is finite stays finite, however large.
    largest = np.array([1, -1], np.float32) * np.finfo(np.float32).max
    upper, remainder = parts(largest, half, bits)
    np.testing.assert_array_equal(upper, np.array([1, -1], half) * jnp.finfo(half).max)
    assert np.all(np.isfinite(joined(upper, remainder)))


def test_a_remainder_of_another_number_is_cut_off():
    upper = jnp.array([1.0, 1.0, 1.0], jnp.bfloat16)
    wide = jnp.array([2.0, 0.5, 1.0], jnp.float32)
    np.testing.assert_array_equal(remainder_of(wide, upper, np.dtype(np.int8)), [127, -128, 0])
