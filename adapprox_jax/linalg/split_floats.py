"""A float32 cut in two: a 16-bit number that is used as it is, and an integer for what it lacks.

The sizes of float32 numbers have places: 0, then 1 for the smallest one above it, and so on. The
sizes of bfloat16 numbers are each 65,536th of them, so that a bfloat16 and the distance to it name
a place. With all 16 bits of that distance nothing is lost; with the upper 8 a number keeps 16
significant bits. A float16 has fewer exponents. Its places go on below its smallest normal number
in equal steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

REMAINDERS: dict[int, np.dtype] = {
    24: np.dtype(np.int8),
    32: np.dtype(np.int16),
}  # by the bits of both parts together


class _Places(NamedTuple):
    """How the numbers of a 16-bit type lie among those of float32."""

    low_bits: int  # that float32 has and the type lacks
    lost_exponents: int  # at the lower end
    infinity: int  # its bits


_PLACES = {
    np.dtype(jnp.bfloat16): _Places(16, 0, 0x7F80),
    np.dtype(np.float16): _Places(13, 112, 0x7C00),
}
HALVES = tuple(_PLACES)  # the 16-bit types


def parts(
    wide: jax.Array, dtype: jax.typing.DTypeLike, remainder: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """The 16-bit number next to each number, and what is to be kept beside it.

    Args:
      wide: float32, of any shape.
      dtype: bfloat16 or float16.
      remainder: Type of the remainder, int8 or int16.
    """
    upper = upper_part(wide, dtype, remainder)
    return upper, remainder_of(wide, upper, remainder)


def upper_part(wide: jax.Array, dtype: jax.typing.DTypeLike, remainder: np.dtype) -> jax.Array:
    """The nearest 16-bit number; of two the larger in size, so that -128 fits into 8 bits.

    Args:
      wide: float32, of any shape.
      dtype: bfloat16 or float16.
      remainder: Type of the remainder, int8 or int16.

    Returns:
      That type and shape. Finite numbers beyond the largest one with a remainder become that one.
    """
    places = _PLACES[np.dtype(dtype)]
    dropped = _dropped(places, remainder)
    kept_bits = places.low_bits - dropped
    size = (_kept(wide, places, dropped) + (1 << kept_bits >> 1)) >> kept_bits
    sign = jax.lax.bitcast_convert_type(wide, jnp.uint32) >> 16 & 0x8000
    return jax.lax.bitcast_convert_type(size.astype(jnp.uint16) | sign.astype(jnp.uint16), dtype)


def remainder_of(wide: jax.Array, upper: jax.Array, remainder: np.dtype) -> jax.Array:
    """What is to be kept of each size beside a 16-bit number, cut off where it does not fit.

    Args:
      wide: float32, of any shape.
      upper: bfloat16 or float16, that shape, next to `wide`.
      remainder: Type of the result, int8 or int16.
    """
    places = _PLACES[upper.dtype]
    dropped = _dropped(places, remainder)
    kept_bits = places.low_bits - dropped
    distance = _kept(wide, places, dropped) - ((_word(upper) & 0x7FFF) << kept_bits)
    half = 1 << kept_bits >> 1
    return jnp.clip(distance, -half, half - 1).astype(remainder)


def joined(upper: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 numbers that two parts stand for, of the same shape.

    Args:
      upper: bfloat16 or float16, of any shape.
      remainder: int8 or int16, that shape.
    """
    places = _PLACES[upper.dtype]
    dropped = _dropped(places, remainder.dtype)
    word, infinity = _word(upper), places.infinity << places.low_bits
    place = (word & 0x7FFF) << places.low_bits
    # What is no finite number has no remainder.
    added = jnp.where(place < infinity, remainder.astype(jnp.int32) << dropped, 0)
    place = jnp.maximum(place + added, 0)
    bits = place + (places.lost_exponents << 23)
    if places.lost_exponents:
        bits = jnp.where(place < infinity, bits, place - infinity + _INFINITY)
    number = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if places.lost_exponents:
        steps = place.astype(jnp.float32) / _steps_a_unit(places)
        number = jnp.where(place < 1 << 23, steps, number)
    return jnp.where(word < 0x8000, number, -number)


_INFINITY = 0x7F800000  # the bits of float32's


def _dropped(places: _Places, remainder: np.dtype) -> int:
    """Last bits of a place that a remainder has no room for."""
    return max(places.low_bits - 8 * remainder.itemsize, 0)


def _kept(wide: jax.Array, places: _Places, dropped: int) -> jax.Array:
    """Places of sizes without their last bits, rounded to the nearest, of two to the even one.

    All that is no number becomes one such. In integers throughout: a TPU would write what
    `jnp.isfinite` gives into memory.
    """
    size = jax.lax.bitcast_convert_type(wide, jnp.int32) & 0x7FFFFFFF
    place = size - (places.lost_exponents << 23)
    if places.lost_exponents:
        steps = jnp.round(jnp.abs(wide) * _steps_a_unit(places)).astype(jnp.int32)
        place = jnp.where(place < 1 << 23, steps, place)
    infinity = places.infinity << places.low_bits
    # The last place whose upper part is finite.
    largest = infinity - (1 << places.low_bits >> 1) - (1 << dropped)
    no_number = infinity + (1 << places.low_bits)
    beyond = jnp.where(size == _INFINITY, infinity, no_number)
    place = jnp.where(size < _INFINITY, jnp.minimum(place, largest), beyond)
    if not dropped:
        return place
    return (place + (1 << dropped >> 1) - 1 + ((place >> dropped) & 1)) >> dropped


def _steps_a_unit(places: _Places) -> float:
    """Places from 0 to 1, were they all as near as those at 0. The exponent of float32 is 127."""
    return 2.0 ** (127 + 22 - places.lost_exponents)


def _word(upper: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(upper, jnp.uint16).astype(jnp.int32)
