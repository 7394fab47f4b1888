"""Stochastic rounding: up or down with the odds that keep the expectation."""

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_BFLOAT16 = 2.0**128 - 2.0**120


def wide_dtype(*dtypes: jax.typing.DTypeLike) -> np.dtype:
    """The widest of some floating-point types and float32, under any rule of promotion."""
    return max(map(jnp.dtype, (jnp.float32, *dtypes)), key=lambda dtype: dtype.itemsize)


def round_stochastically(array: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds to bfloat16, up or down with the odds that keep the expectation.

    Rounded to the nearest, an average that moves by less than half of its last bit a step stands
    still.

    Args:
      array: Real, of any shape.
      bits: Random uint16 of that shape.

    Returns:
      bfloat16 of that shape. What is not finite stays as it is, and what is finite stays finite.
    """
    single = array.astype(jnp.float32)
    words = jax.lax.bitcast_convert_type(single, jnp.uint32) + bits.astype(jnp.uint32)
    # The upper half of a float32 is the bfloat16 below it in magnitude.
    below = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    finite = jnp.clip(below, -LARGEST_BFLOAT16, LARGEST_BFLOAT16)
    return jnp.where(jnp.isfinite(single), finite, single).astype(jnp.bfloat16)


def uniform_noise(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """Numbers in [0, 1) that look random, others for every count.

    Args:
      shape: Of the result.
      count: Integer scalar.
    """
    return (random_words(shape, count) >> 8).astype(jnp.float32) * 2.0**-24


def random_words(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """uint32 that look random, others for every count.

    A hash of position and count and no random generator, which would take longer than the
    rest of the work on an average.

    Args:
      shape: Of the result.
      count: Integer scalar.
    """
    words = count.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    for axis in range(len(shape)):  # position by position, so that a sharding is kept
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        words = (words + along) * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)
