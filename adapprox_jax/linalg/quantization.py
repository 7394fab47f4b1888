"""Arrays in 8, 5 or 4 bits a number, with one scale for each block of 32 along the last axis."""

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import require, require_choice, require_integer
from adapprox_jax.linalg.rounding import LARGEST_BFLOAT16, round_stochastically

BLOCK = 32
_SCALE_DTYPE = jnp.bfloat16
BITS = (8, 5, 4)


def quantize(
    array: jax.Array, bits: int = 8, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds an array to signed codes of 8, 5 or 4 bits.

    A number x of a block with largest magnitude s has the code round(3 c x / (2 s + |x|)) with
    c = 127, 15 or 7. That stands for 2 s code / (3 c - |code|). Steps are two thirds of equal ones
    at zero and three halves at s, about as fine as numbers are dense.

    Args:
      array: (..., n), real.
      bits: 8, 5 or 4.
      noise: Random numbers in [0, 1) of the shape of the array. Numbers are then rounded up or
        down, with the odds at which the codes are right on average. An average that is stored again
        and again needs that. None: to the nearest code.

    Returns:
      Codes: int8 (..., n), uint8 (..., 20 blocks) or uint8 (..., n / 2 rounded up). Scales:
      bfloat16 (..., blocks), where blocks is n / 32 rounded up. A number costs 1.06, 0.69 or 0.56
      bytes.

    Raises:
      ValueError: bits is none of these, or the array is a scalar.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> codes, scales = adapprox_jax.quantize(jnp.linspace(-1, 1, 5))
      >>> print(adapprox_jax.dequantize(codes, scales, 5))
      [-1.         -0.49836066  0.          0.49836066  1.        ]

    Source: block-wise quantization of optimizer states, Dettmers et al., 2022; a quotient instead
    of their table of codes.
    """
    require_choice("bits", bits, BITS)
    given = getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__)
    if given[0] is None or not jnp.issubdtype(given[1], jnp.floating):
        allowed = "an array of a real floating-point type"
        raise ValueError(f"array has type {given[1]}; allowed: {allowed}.")
    if noise is not None and getattr(noise, "shape", None) != array.shape:
        shape = getattr(noise, "shape", type(noise).__name__)
        raise ValueError(f"noise has shape {shape}; allowed: that of the array, {array.shape}.")
    require("array.ndim", array.ndim, lambda d: d >= 1, "at least 1: blocks lie along an axis")
    n = array.shape[-1]
    blocks = in_blocks(array.astype(jnp.float32))
    largest_in_block = jnp.max(jnp.abs(blocks), axis=-1)
    scales = jnp.where(
        jnp.isinf(largest_in_block), jnp.inf, jnp.minimum(largest_in_block, LARGEST_BFLOAT16)
    )
    if noise is None:
        scales = scales.astype(_SCALE_DTYPE)
    else:  # up: a number beyond its scale would be cut off
        ones = jnp.full(scales.shape, 0xFFFF, jnp.uint16)
        scales = jnp.where(jnp.isinf(scales), jnp.inf, round_stochastically(scales, ones))
        scales = scales.astype(_SCALE_DTYPE)
    # An eighth of both: the reciprocal of the largest numbers would count as zero.
    wide = scales.astype(jnp.float32)[..., None] / 8
    unit = blocks / 8 / jnp.where(wide == 0, 1, wide)
    largest = 2 ** (bits - 1) - 1
    exact = 3 * largest * unit / (2 + jnp.abs(unit))
    if noise is None:
        codes = jnp.round(exact)
        codes = jnp.clip(codes, -largest, largest)  # a scale may have been rounded down
    else:
        below = jnp.clip(jnp.floor(exact), -largest, largest - 1)
        low, high = _units(below, largest), _units(below + 1, largest)
        codes = jnp.where(in_blocks(noise) < (unit - low) / (high - low), below + 1, below)
    codes = codes.astype(jnp.int8)
    if bits == 5:
        return _packed_in_5_bits(codes), scales
    codes = codes.reshape(*array.shape[:-1], blocks.shape[-2] * BLOCK)
    return (codes[..., :n] if bits == 8 else _packed(codes[..., : n + n % 2])), scales


def dequantize(codes: jax.Array, scales: jax.Array, n: int) -> jax.Array:
    """The numbers that codes stand for.

    Args:
      codes: From `quantize`; their type and number tell the bits.
      scales: From `quantize`.
      n: Numbers along the last axis.

    Returns:
      float32 (..., n).

    Raises:
      ValueError: codes, scales and n do not belong together.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> codes, scales = adapprox_jax.quantize(jnp.array([3.0, -3.0, 0.0]), bits=4)
      >>> print(adapprox_jax.dequantize(codes, scales, 3))
      [ 3. -3.  0.]
    """
    require_integer("n", n, 0)
    require_choice("codes.dtype", codes.dtype, (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)))
    given, expected = (codes.shape, scales.shape), {}
    for bits in BITS:
        like = quantized_like((*codes.shape[:-1], n), bits)
        if like[0].dtype == codes.dtype:
            expected[bits] = tuple(x.shape for x in like)
    if given not in expected.values():
        allowed = " or ".join(map(str, expected.values()))
        raise ValueError(f"codes and scales have shapes {given}; allowed for {n=}: {allowed}.")
    bits = bits_of(codes, n)
    signed = {8: lambda x: x, 5: _unpacked_from_5_bits, 4: _unpacked}[bits](codes)
    units = _units(in_blocks(signed[..., :n].astype(jnp.float32)), 2 ** (bits - 1) - 1)
    numbers = units * scales.astype(jnp.float32)[..., None]
    return numbers.reshape(*codes.shape[:-1], numbers.shape[-2] * BLOCK)[..., :n]


def _units(codes: jax.Array, largest: int) -> jax.Array:
    """What float32 codes stand for, in units of their block's scale."""
    return 2 * codes / (3 * largest - jnp.abs(codes))


def quantized_like(
    shape: tuple[int, ...], bits: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and types of the codes and scales of an array of a shape."""
    *batch, n = shape
    blocks = -(-n // BLOCK)
    length = {8: n, 5: 20 * blocks, 4: -(-n // 2)}[bits]
    codes = jax.ShapeDtypeStruct((*batch, length), jnp.int8 if bits == 8 else jnp.uint8)
    return codes, jax.ShapeDtypeStruct((*batch, blocks), _SCALE_DTYPE)


def bits_of(codes: jax.Array, n: int) -> int:
    """The bits of codes of n numbers along the last axis."""
    if codes.dtype == jnp.int8:
        return 8
    return 4 if codes.shape[-1] == -(-n // 2) else 5


def in_blocks(array: jax.Array) -> jax.Array:
    """(..., n) as (..., blocks, 32), with zeros after the last number."""
    missing = -array.shape[-1] % BLOCK
    padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    return padded.reshape(*array.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)


def _packed(codes: jax.Array) -> jax.Array:
    """The lower 4 bits of int8 codes (..., 2 n) as bytes (..., n)."""
    pairs = jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(
        *codes.shape[:-1], codes.shape[-1] // 2, 2
    )
    return (pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)


def _unpacked(packed: jax.Array) -> jax.Array:
    """The int8 codes (..., 2 n) in bytes (..., n)."""
    nibbles = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    nibbles = nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    signed = (nibbles ^ 8).astype(jnp.int8) - 8
    return signed.astype(jnp.int8)


def _packed_in_5_bits(codes: jax.Array) -> jax.Array:
    """int8 codes (..., blocks, 32) as bytes (..., 20 blocks): of each block 16 with the lower 4
    bits, and 4 with the signs.
    """
    signs = (codes < 0).astype(jnp.uint8).reshape(*codes.shape[:-1], 4, 8)
    signs = jnp.sum(signs << _places(signs.ndim), axis=-1, dtype=jnp.uint8)
    parts = _packed(codes), signs
    return jnp.concatenate(parts, axis=-1).reshape(*codes.shape[:-2], 20 * codes.shape[-2])


def _places(ndim: int) -> np.ndarray:
    """The places of the bits of a byte, along the last of some axes."""
    return np.arange(8, dtype=np.uint8).reshape((1,) * (ndim - 1) + (8,))


def _unpacked_from_5_bits(packed: jax.Array) -> jax.Array:
    """The int8 codes (..., 32 blocks) in bytes (..., 20 blocks)."""
    blocks = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 20, 20)
    lower = _unpacked(blocks[..., :16]) & 0xF
    signs = blocks[..., 16:, None]
    signs = (signs >> _places(signs.ndim)) & 1
    negative = signs.astype(jnp.int8).reshape(lower.shape)
    return (lower - 16 * negative).reshape(*packed.shape[:-1], BLOCK * blocks.shape[-2])
