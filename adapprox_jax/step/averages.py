"""One step of the running averages of all leaves, some of which are kept in codes."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.quantization import (
    CUT,
    block_axis,
    codes_of,
    dequantize,
    dequantize_cut,
    in_blocks,
    scales_of,
    scales_of_cut,
)
from adapprox_jax.linalg.rounding import uniform_noise, wide_dtype
from adapprox_jax.sharding.axes import devices_in_use, with_automatic_axes
from adapprox_jax.step.alike import each_alike
from adapprox_jax.step.matrix import has_whole_pieces
from adapprox_jax.step.platform import Platform
from adapprox_jax.step.xla_order import begin_after, first_two

_SMALL = 2**26  # numbers of a leaf that does not wait, if its update is in memory in any case


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["b1", "rest", "step", "left"],
    meta_fields=["bits", "has_noise", "nesterov", "twice"],
)
@dataclasses.dataclass(frozen=True)
class AverageStep:
    """What a step does with all averages: a tree of its numbers."""

    b1: Any
    rest: Any  # 1 - b1
    step: jax.Array  # from 1
    left: jax.Array  # product of all decays so far
    bits: int  # of codes; 0 if there are none
    has_noise: bool  # codes are rounded at random
    nesterov: bool
    twice: bool  # updates come as `Scaled`

    def terms(self, update: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is left of the last average and what is new, in float32 or wider."""
        dtype = wide_dtype(update.dtype)
        b1, rest = (jnp.asarray(x, dtype) for x in (self.b1, self.rest))
        return b1 * last.astype(dtype), rest * update.astype(dtype)

    def emitted(self, average: jax.Array, new: jax.Array) -> jax.Array:
        """The average, or with Nesterov's momentum what both come to, corrected for the start."""
        if not self.nesterov:
            return average
        b1 = jnp.asarray(self.b1, self.left.dtype)
        factors = b1 / (1 - b1 * self.left), 1 / (1 - self.left)
        older, newer = (jnp.asarray(x, average.dtype) for x in factors)
        return older * average + newer * new


def average_leaves(
    now: AverageStep,
    updates: Sequence[jax.Array],
    averages: Sequence[jax.Array],
    scales: Sequence[jax.Array | None],
    again: Sequence[jax.Array] | None,
) -> list[tuple[jax.Array, jax.Array, jax.Array | None]]:
    """What each leaf emits and stores.

    Args:
      now: The step.
      updates: Of the leaves.
      averages: The last ones, or their codes.
      scales: Of codes; None for a leaf that has none.
      again: The updates made anew, or None (`Scaled`).

    Returns:
      For each leaf what it emits, float32 or wider, the new average or its codes, and scales.
    """
    results: dict[int, Any] = {}
    in_codes = {}
    unmade: Sequence[Any] = [None] * len(updates)
    leaves = zip(updates, averages, scales, again or unmade, strict=True)
    for i, (update, average, scale, anew) in enumerate(leaves):
        if scale is not None:
            in_codes[i] = update, average, scale, *([] if anew is None else [anew])
        else:
            older, new = now.terms(update, average)
            results[i] = now.emitted(older + new, new), (older + new).astype(average.dtype), None

    def of_leaf(platform: Platform, operands: tuple[jax.Array, ...]) -> Any:
        step = with_automatic_axes(partial(_average_in_codes, platform), operands[:3])
        return step(now, *operands)

    kinds = [block_axis(update.shape) for update, *_ in in_codes.values()]
    # Codes wait, or XLA makes those of leaves of one size in one kernel, of averages in memory.
    most = _SMALL if again is None else 0
    averaged = each_alike(of_leaf, list(in_codes.values()), kinds, waits=1, most=most)
    results.update(zip(in_codes, averaged, strict=True))
    return [results[i] for i in range(len(updates))]


def _average_in_codes(
    platform: Platform,
    now: AverageStep,
    update: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    again: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one leaf emits, its new codes and their scales."""
    if platform.is_cpu and devices_in_use() == 1:
        # Else XLA decodes the averages of all leaves before it works on the first leaf.
        codes = begin_after(platform, first_two(update), codes)
    older, new = now.terms(update, dequantize(codes, scales, update.shape))
    average, scales_now = older + new, partial(scales_of, bits=now.bits, rounded_up=now.has_noise)
    in_pieces = platform.fuses_in_pieces
    can_be_twice = not in_pieces or has_whole_pieces(update.shape[block_axis(update.shape)])
    is_twice = now.twice and platform.makes_averages_twice and can_be_twice
    if is_twice:
        if in_pieces:
            new_scales = _scales_in_pieces(now, update, codes, scales, is_kept=again is None)
        else:
            new_scales = scales_now(average, is_fused=True)
        # Of the same arrays XLA would make one average, and keep it.
        if again is None:
            later = jax.lax.optimization_barrier((update, codes, new_scales))
            again, codes, new_scales = later
        else:
            codes, new_scales = jax.lax.optimization_barrier((codes, new_scales))
        older, new = now.terms(again, dequantize(codes, scales, update.shape))
        average = older + new
    else:
        # In memory, so that updates are made once: what is emitted is made from both averages.
        average = jax.lax.optimization_barrier(average)
        new_scales = scales_now(average)
    emitted = now.emitted(average, average - older)
    noise = uniform_noise(update.shape, now.step) if now.has_noise else None
    new_codes = codes_of(average, new_scales, now.bits, noise)
    if is_twice and in_pieces and new_codes.shape == emitted.shape:
        # No code is as large. XLA would make the two in two passes.
        emitted = jnp.where(new_codes.astype(jnp.int32) == 2**now.bits, 0, emitted)
    return emitted, new_codes, new_scales


def _scales_in_pieces(
    now: AverageStep, update: jax.Array, codes: jax.Array, scales: jax.Array, *, is_kept: bool
) -> jax.Array:
    """The scales of a new average, which is made in pieces of whole blocks and not kept.

    Args:
      now: The step.
      update: Of the leaf.
      codes: Of its last average.
      scales: Of these codes.
      is_kept: Whether the update is in memory, and not made in such pieces itself.
    """
    axis = block_axis(update.shape)
    cut = in_blocks(update, axis, CUT)
    cut = jax.lax.optimization_barrier(cut) if is_kept else cut
    older, new = now.terms(cut, dequantize_cut(codes, scales, update.shape, now.bits))
    return scales_of_cut(older + new, axis, now.bits, rounded_up=now.has_noise)
