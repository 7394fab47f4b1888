"""Arrays in 8, 5 or 4 bits a number, with one scale for each block of 32.

A block is 32 rows of one column. Blocks along the last axis would be parts of a TPU's lanes, and an
array would be moved to work on them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.argument_checks import require, require_choice
from adapprox_jax.linalg.rounding import LARGEST_BFLOAT16, round_stochastically

BLOCK = 32
_SCALE_DTYPE = jnp.bfloat16
BITS = (8, 5, 4)
CUT = 2 * BLOCK  # rows of a tile of int4 in a TPU's memory; pieces of others would be copied
_ADDED = {True: 0xFFFF, False: 0x7FFF}  # before the lower half of a float32 is cut off
_UPPER = 0x7FFF0000  # half of an int32, without its sign
_INFINITY = 0x7F800000  # the bits of a float32
# Numbers on a device beyond which a TPU's compiler may end in a failed check, where it makes their
# scales from blocks within a larger pass, and four do not divide how many blocks a device has.
_LARGE = 2**24


def quantize(
    array: jax.Array, bits: int = 8, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds an array to signed codes of 8, 5 or 4 bits.

    A code k, from -c to c - 1 with c = 128, 16 or 8, stands for 2 s k / (3 c - |k|), where s is the
    scale of the block. Its sign is such that -c stands for the number of largest magnitude. Steps
    are two thirds of equal ones at zero and three halves at s, about as fine as numbers are dense.

    Args:
      array: Real, of at least one axis.
      bits: 8, 5 or 4.
      noise: Random numbers in [0, 1) of the shape of the array. Numbers are then rounded up or
        down, with the odds at which the codes are right on average. An average that is stored again
        and again needs that. None: to the nearest code.

    Returns:
      Codes and scales, with the array's shape but for the axis of the blocks: that of the rows, or
      the last where no other axis has 32 numbers. Along n numbers there are n / 32 blocks, rounded
      up, each with a scale in bfloat16. There are n codes, int8 or int4; in 5 bits there are 40
      int4 for each block. A number costs 1.06, 0.69 or 0.56 bytes of a device's memory, where JAX
      packs two int4 into a byte.

    Raises:
      ValueError: bits is none of these, or the array is a scalar.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> codes, scales = adapprox_jax.quantize(jnp.array([-1.0, -0.5, 0.0, 0.5]))
      >>> codes, scales
      (Array([-128,  -77,    0,   77], dtype=int8), Array([1], dtype=bfloat16))

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
    scales = scales_of(array, bits, rounded_up=noise is not None)
    return codes_of(array, scales, bits, noise), scales


@functools.partial(jax.jit, static_argnames=("bits", "rounded_up", "is_fused"))
def scales_of(
    array: jax.Array, bits: int, *, rounded_up: bool, is_fused: bool = False
) -> jax.Array:
    """Scales with which all numbers of a block are between the codes at the ends, hardly larger.

    Args:
      array: As in `quantize`.
      bits: As there.
      rounded_up: As noise needs. Else to the nearest, where a number may be cut off a little.
      is_fused: Whether a maximum fuses with what makes the array. Else that is in memory.
    """
    axis, added = block_axis(array.shape), _ADDED[rounded_up]
    wide = array.astype(jnp.float32)
    blocks = in_blocks(_words(wide, added) if is_fused else wide, axis)
    # Of quarters first: to look along rows within 8 of them is slow on TPUs.
    quarters = jnp.split(blocks, 4, axis + 1)
    words = quarters if is_fused else [_words(part, added) for part in quarters]
    largest = functools.reduce(_larger_halves, words)
    # Plain maxima, which a mesh that divides blocks can take over its devices.
    up, down = (jnp.max(x, axis + 1) for x in (largest & _UPPER, largest << 16))
    return _scales(up, down, bits, added)


@functools.partial(jax.jit, static_argnames=("axis", "bits", "rounded_up"))
def scales_of_cut(array: jax.Array, axis: int, bits: int, *, rounded_up: bool) -> jax.Array:
    """`scales_of` an array that is cut along an axis, (..., pieces, CUT, ...), by plain maxima."""
    wide, added = array.astype(jnp.float32), _ADDED[rounded_up]
    block = jax.lax.broadcasted_iota(jnp.int32, wide.shape, axis + 1) // BLOCK
    scales = []
    for i in range(CUT // BLOCK):
        # Without the others' numbers, because what is cut out of a pass does not fuse.
        own = jnp.where(block == i, wide, 0)
        up, down = (_rounded(jnp.max(x, axis + 1), added) & _UPPER for x in (own, -own))
        scales.append(_scales(up, down, bits, added))
    # Made before they are stacked: of a tile of 8 rows two would be used.
    return _joined(jnp.stack(jax.lax.optimization_barrier(scales), axis + 1), axis)


def _scales(up: jax.Array, down: jax.Array, bits: int, added: int) -> jax.Array:
    """Scales from the largest sizes of both signs: the bits of float32 that bfloat16 holds."""
    up, down = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in (up, down))
    longer, shorter = jnp.maximum(up, down), jnp.minimum(up, down)
    reach = _units(2 ** (bits - 1) - 1, bits)  # of the last code on the shorter side
    scale = jnp.maximum(longer, jnp.minimum(shorter / reach, LARGEST_BFLOAT16))
    signed = jnp.where(down >= up, scale, -scale)
    return round_stochastically(signed, jnp.full(signed.shape, added, jnp.uint16))


def _words(array: jax.Array, added: int) -> jax.Array:
    """The size of each number as a bfloat16, in the upper half of an int32, or lower if negative.

    So that one pass finds the largest of each sign: with two XLA fuses nothing.
    """
    rounded = _rounded(array, added)
    return jnp.where(array < 0, rounded >> 16, rounded & _UPPER)


def _rounded(array: jax.Array, added: int) -> jax.Array:
    """The bits of the size of each number. Its upper half is that of a bfloat16."""
    size = jax.lax.bitcast_convert_type(jnp.abs(array), jnp.int32)
    return jnp.where(size < _INFINITY, jnp.minimum(size + added, _INFINITY - 1), size)


def _larger_halves(x: jax.Array, y: jax.Array) -> jax.Array:
    """The larger upper and the larger lower half of two words."""
    return jnp.maximum(x & _UPPER, y & _UPPER) | jnp.maximum(x & 0xFFFF, y & 0xFFFF)


def _of_each(scales: jax.Array, axis: int, length: int) -> jax.Array:
    """For each of so many numbers the scale of its block, float32."""
    blocks = jnp.expand_dims(scales, axis + 1)
    shape = (*blocks.shape[: axis + 1], BLOCK, *blocks.shape[axis + 2 :])
    blocks = jnp.broadcast_to(blocks, shape)
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[x] for x in mesh.axis_names if x not in mesh.manual_axes)
    if blocks.size > devices * _LARGE and scales.shape[axis] % (4 * devices):
        blocks = jax.lax.optimization_barrier(blocks)
    each = jax.lax.slice_in_dim(_joined(blocks, axis), 0, length, axis=axis)
    return each.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="bits")
def codes_of(
    array: jax.Array, scales: jax.Array, bits: int, noise: jax.Array | None = None
) -> jax.Array:
    """The codes of numbers whose blocks have some scales, as `quantize` gives them."""
    axis = block_axis(array.shape)
    each = _of_each(scales, axis, array.shape[axis])
    codes = _codes(array.astype(jnp.float32), noise, each, bits)
    return (_with_signs_apart(codes, axis) if bits == 5 else codes).astype(_DTYPES[bits])


def _codes(x: jax.Array, noise: jax.Array | None, scale: jax.Array, bits: int) -> jax.Array:
    """The codes of numbers with the scale of each, as int32."""
    # An eighth of both: the reciprocal of the largest numbers would count as zero. The choice keeps
    # XLA from moving the eighth of a single block's numbers to that reciprocal.
    wide = scale / 8
    unit = jnp.where(wide == 0, 0, x / 8) / jnp.where(wide == 0, 1, wide)
    count = 2 ** (bits - 1)
    exact = 3 * count * unit / (2 + jnp.abs(unit))
    if noise is None:
        return jnp.clip(jnp.round(exact), -count, count - 1).astype(jnp.int32)
    below = jnp.clip(jnp.floor(exact), -count, count - 2)
    # Up where noise < (unit - f(below)) / (f(below + 1) - f(below)) with f(k) = 2 k / (3 c - |k|),
    # whose difference is 6 c / (here above).
    here, above = 3 * count - jnp.abs(below), 3 * count - jnp.abs(below + 1)
    goes_up = noise * (6 * count) < (unit * here - 2 * below) * above
    codes = jnp.where(goes_up, below + 1, below)
    return codes.astype(jnp.int32)


def dequantize(codes: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The numbers that codes stand for.

    Args:
      codes: From `quantize`; their type and number tell the bits.
      scales: From `quantize`.
      shape: Of the array that was given to `quantize`.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: codes, scales and shape do not belong together.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> codes, scales = adapprox_jax.quantize(jnp.array([-3.0, 1.5, 0.0]), bits=4)
      >>> print(adapprox_jax.dequantize(codes, scales, (3,)))
      [-3.         1.5789474  0.       ]
    """
    if not isinstance(shape, tuple) or not shape:
        raise ValueError(f"shape is {shape!r}; allowed: a tuple of at least one integer.")
    for name, x in {"codes": codes, "scales": scales}.items():
        if not hasattr(x, "dtype"):
            raise ValueError(f"{name} is a {type(x).__name__}; allowed: an array.")
    require_choice("codes.dtype", codes.dtype, list(map(jnp.dtype, (jnp.int8, jnp.int4))))
    bits = bits_of(codes, shape)
    like = [x.shape for x in quantized_like(shape, bits)]
    if [codes.shape, scales.shape] != like:
        raise ValueError(
            f"codes and scales are {codes.dtype} {codes.shape}, {scales.shape};"
            f" allowed for shape {shape}: {like[0]}, {like[1]}."
        )
    return _numbers_of(codes, scales, shape, bits)


@functools.partial(jax.jit, static_argnames=("shape", "bits"))
def _numbers_of(
    codes: jax.Array, scales: jax.Array, shape: tuple[int, ...], bits: int
) -> jax.Array:
    axis = block_axis(shape)
    signed = _with_signs(codes, axis, shape[axis]) if bits == 5 else codes
    return _units(signed.astype(jnp.float32), bits) * _of_each(scales, axis, shape[axis])


def dequantize_cut(
    codes: jax.Array, scales: jax.Array, shape: tuple[int, ...], bits: int
) -> jax.Array:
    """`dequantize`, to numbers that are cut along the axis of the blocks, (..., pieces, CUT, ...).

    The codes are cut first: XLA would keep numbers that are made before.
    """
    axis = block_axis(shape)
    signed = _with_signs(codes, axis, shape[axis]) if bits == 5 else codes
    cut = jax.lax.optimization_barrier(in_blocks(signed, axis, CUT)).astype(jnp.float32)
    # In other shapes than `_of_each` has: XLA would keep what both have in common.
    each = jnp.expand_dims(in_blocks(scales, axis, CUT // BLOCK), axis + 2)
    each = jnp.broadcast_to(each, (*each.shape[: axis + 2], BLOCK, *each.shape[axis + 3 :]))
    return _units(cut, bits) * _joined(each, axis + 1).astype(jnp.float32)


def _units(codes: Any, bits: int) -> Any:
    """What codes stand for, in units of their block's scale."""
    return 2 * codes / (3 * 2 ** (bits - 1) - abs(codes))


def quantized_like(
    shape: tuple[int, ...], bits: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and types of the codes and scales of an array of a shape."""
    axis = block_axis(shape)

    def of(length: int) -> tuple[int, ...]:
        return (*shape[:axis], length, *shape[axis + 1 :])

    length = -(-shape[axis] // BLOCK) * _WITH_SIGNS if bits == 5 else shape[axis]
    codes = jax.ShapeDtypeStruct(of(length), _DTYPES[bits])
    return codes, jax.ShapeDtypeStruct(of(-(-shape[axis] // BLOCK)), _SCALE_DTYPE)


def bits_of(codes: jax.Array, shape: tuple[int, ...]) -> int:
    """The bits of the codes of an array of a shape."""
    if codes.dtype == jnp.int8:
        return 8
    return 4 if codes.shape == quantized_like(shape, 4)[0].shape else 5


def block_axis(shape: tuple[int, ...]) -> int:
    """The axis along which blocks lie: the last but one, or before it, that has at least a block.

    The last one where there is none, as of vectors.
    """
    axes = range(len(shape) - 2, -1, -1)
    return next((axis for axis in axes if shape[axis] >= BLOCK), len(shape) - 1)


def in_blocks(array: jax.Array, axis: int, size: int = BLOCK) -> jax.Array:
    """(..., n, ...) as (..., blocks, size, ...), with zeros after the last number."""
    missing = -array.shape[axis] % size
    padded = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    blocks = padded.shape[axis] // size
    return padded.reshape(*array.shape[:axis], blocks, size, *array.shape[axis + 1 :])


def _joined(blocks: jax.Array, axis: int) -> jax.Array:
    """Undoes `in_blocks`, but for the zeros."""
    shape = blocks.shape
    return blocks.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _with_signs_apart(codes: jax.Array, axis: int) -> jax.Array:
    """The lower 4 bits of the 32 codes of each block, and their signs, four in a number."""
    blocks = in_blocks(codes, axis)
    negative = jnp.split(blocks < 0, 4, axis + 1)
    signs = functools.reduce(
        jnp.bitwise_or, [part.astype(jnp.int32) << i for i, part in enumerate(negative)]
    )
    low = jnp.concatenate([blocks & 15, signs], axis + 1)
    return _joined((low ^ 8) - 8, axis)  # as signed numbers of 4 bits


def _with_signs(parts: jax.Array, axis: int, length: int) -> jax.Array:
    """Undoes `_with_signs_apart` of so many codes."""
    blocks = in_blocks(parts.astype(jnp.int32), axis, _WITH_SIGNS)
    low, signs = jnp.split(blocks, [BLOCK], axis + 1)
    high = jnp.concatenate([signs >> i & 1 for i in range(4)], axis + 1)
    return jax.lax.slice_in_dim(_joined((low & 15) - 16 * high, axis), 0, length, axis=axis)


_WITH_SIGNS = 40  # numbers of 4 bits for the codes of a block in 5 bits
_DTYPES = {8: jnp.int8, 5: jnp.int4, 4: jnp.int4}
