"""guided_ema: the running average of updates, with optional cosine-similarity guidance."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    DECAY,
    NOT_NEGATIVE,
    at_step,
    check_state,
    dtype_name,
    is_zero,
    require,
    require_choice,
    require_flag,
    require_or_schedule,
    require_precise,
    require_same,
)
from adapprox_jax.linalg.newton_schulz import of_norm_one
from adapprox_jax.linalg.quantization import BLOCK, bits_of, block_axis, quantize, quantized_like
from adapprox_jax.params.boxes import rebox_axes, unbox
from adapprox_jax.params.leaves import Leaves, unzipped
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.sharding.axes import full_along, using_mesh_of
from adapprox_jax.step.averages import AverageStep, average_leaves
from adapprox_jax.step.phases import Scaled

Rounding: TypeAlias = Literal["stochastic", "nearest"]

_SMALLEST_QUANTIZED = 4096  # numbers of a leaf; smaller ones cost nothing and may matter


class GuidedEmaState(NamedTuple):
    """State of `guided_ema`.

    Attributes:
      mu: Running average of the updates, with the structure and shapes of the parameters.
      scale: The bfloat16 scales of the blocks of each leaf that `mu` keeps in codes, and
        `optax.MaskedNode()` for all other leaves.
      step: Updates so far, int32 scalar.
      left: Product of all decays so far, a scalar. So much is missing in the average because it
        began at zero.
    """

    mu: Any
    scale: Any
    step: jax.Array
    left: jax.Array


def guided_ema(
    b1: optax.ScalarOrSchedule = 0.9,
    *,
    cosine_guidance: bool = False,
    eps: jax.typing.ArrayLike = 1e-8,
    max_scale: jax.typing.ArrayLike = 10.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    rounding: Rounding = "stochastic",
    nesterov: bool = False,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    """Running average of updates, scaled up where the update agrees with it, in 4 to 32 bits.

    M <- b1 M + (1 - b1) u is stored and emitted; there is no bias correction. With guidance what
    is emitted is M times min(1 / (1 - cos + eps), max_scale), where cos is the cosine of the
    angle between u and M, of each matrix by itself. The factor is left out of what is stored: it
    would be averaged into every later step and, being above 1 at most steps, grow without bound.

    Args:
      b1: Decay of the average, in [0, 1), or a function from the step, from 1, to it. Under
        `optax.inject_hyperparams` name b1 in `static_args` then: Optax counts schedules from 0.
      cosine_guidance: Whether to scale by the cosine similarity.
      eps: Added to 1 - cos, at least 0.
      max_scale: Largest factor, at least 1. Without a cap the first step, where u and M are
        parallel, would be multiplied by 1 / eps.
      mu_dtype: Type of the stored average: None for that of the parameters, or a floating-point
        type of 16 bits or more. Or "int8", "int5" or "int4" for codes with a scale for each block
        of 32 (`quantize`), 1.06, 0.69 or 0.56 bytes per parameter. Leaves of fewer than 4096
        numbers, or with no axis of 32, are then kept as with None. Floating-point types are
        rounded to the nearest: bfloat16 loses changes of less than a 512th a step, as with
        b1 = 0.999.
      rounding: Of codes: "stochastic", so that slow changes are not lost, or "nearest", with half
        the noise, which counts where an orthogonalization follows and makes more of it.
      nesterov: Emit b1 M / (1 - b1^(t+1)) + (1 - b1) u / (1 - b1^t) instead of M, as Optax's Muon
        does. The average that is stored is the same. Not with guidance.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` with state `GuidedEmaState`.

    Raises:
      ValueError: an argument is out of range, or guidance is asked for with b1 = 0.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.guided_ema(b1=0.9)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.ones(3), tx.init(params))
      >>> print(updates)
      [0.1 0.1 0.1]

    Source: paper, section "Cosine-Similarity Guidance Strategy", with the deviations of
    docs/algorithm.md, 4 and 6.
    """
    bits = code_bits(mu_dtype)
    require_precise("b1", b1)
    require_or_schedule("b1", b1, *DECAY)
    require_choice("rounding", rounding, get_args(Rounding))
    require_flag("nesterov", nesterov)
    require_flag("cosine_guidance", cosine_guidance)
    check_dimension_numbers(weight_dimension_numbers)
    require("eps", eps, *NOT_NEGATIVE)
    require("max_scale", max_scale, lambda x: x >= 1, "a number of at least 1")
    if cosine_guidance:
        require_or_schedule("b1", b1, lambda x: x > 0, "above 0 where cosine_guidance is on")
    if cosine_guidance and nesterov:
        raise ValueError("cosine_guidance and nesterov are True; allowed: one of them.")

    def init(params: optax.Params) -> GuidedEmaState:
        leaves = Leaves.of(params, "parameter")
        zeros = [_zero_average(leaf, mu_dtype, bits) for leaf in leaves.boxed]
        mu, scale = map(leaves.structure.unflatten, unzipped(zeros, 2))
        return GuidedEmaState(mu, scale, jnp.zeros([], jnp.int32), jnp.ones([]))

    def update(
        updates: optax.Updates, state: GuidedEmaState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, GuidedEmaState]:
        del params
        check_state(state, GuidedEmaState, "guided_ema")
        twice = isinstance(updates, Scaled)
        first, again = updates if isinstance(updates, Scaled) else (updates, None)
        leaves = Leaves.of(first, "update")
        mu, scales = leaves.matching(state.mu), Leaves.of(state.scale)
        kept = leaves.arrays, mu.arrays, _scale_of_each(scales, leaves)
        _check_averages(state, leaves.names, *kept, bits)
        step = optax.safe_increment(state.step)
        decay = jnp.asarray(at_step("b1", b1, step, *DECAY), jnp.float32) if callable(b1) else b1
        left = state.left * jnp.asarray(decay, state.left.dtype)
        has_noise = rounding == "stochastic"
        now = AverageStep(decay, 1 - decay, step, left, bits or 0, has_noise, nesterov, twice)
        with using_mesh_of(leaves.arrays):
            anew = None if again is None else Leaves.of(again).arrays
            results = average_leaves(now, *kept, anew)
        averages, new_mu, new_scales = unzipped(results, 3)
        if cosine_guidance:
            axes = [view.axes for view in views_of(weight_dimension_numbers, leaves)]
            guided = partial(_guided, eps=eps, max_scale=max_scale)
            averages = list(map(guided, leaves.arrays, averages, axes))
        emitted = [x.astype(u.dtype) for x, u in zip(averages, leaves.arrays, strict=True)]
        new_scale = scales.filled([scale for scale in new_scales if scale is not None])
        return leaves.filled(emitted), GuidedEmaState(mu.filled(new_mu), new_scale, step, left)

    return optax.GradientTransformation(init, update)


def stored_average(average: Any, like: GuidedEmaState) -> GuidedEmaState:
    """A state that holds an average in the form in which another state holds one.

    Args:
      average: With the structure and shapes of the parameters.
      like: A state of `guided_ema` for these parameters.
    """
    leaves = Leaves.of(average)
    mu, scales = leaves.matching(like.mu), Leaves.of(like.scale)

    def store(average: Any, kept: Any, scale: Any) -> tuple[Any, Any]:
        if scale is None:
            return jnp.asarray(average, kept.dtype), scale
        return quantize(average, bits_of(kept, average.shape))

    stored = list(map(store, leaves.arrays, mu.arrays, _scale_of_each(scales, leaves)))
    new_mu, new_scales = unzipped(stored, 2)
    scale = scales.filled([scale for scale in new_scales if scale is not None])
    return like._replace(mu=mu.filled(new_mu), scale=scale)


def average_unless_zero(
    b1: optax.ScalarOrSchedule, *, of_gradients: bool = False, **settings: Any
) -> optax.GradientTransformation:
    """`guided_ema`, or nothing where b1 is known to be 0.

    Gradients are in memory, so an average of them may read them twice.
    """
    average = guided_ema(b1, **settings)  # made in any case: it checks its arguments
    if is_zero(b1):
        return optax.identity()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return average.update(Scaled(updates, None), state, params)

    return average._replace(update=update) if of_gradients else average


def reads_twice(b1: optax.ScalarOrSchedule, mu_dtype: jax.typing.DTypeLike | None) -> bool:
    """Whether an average may read its updates twice, so that they come as `Scaled`."""
    return code_bits(mu_dtype) is not None and not is_zero(b1)


def _scale_of_each(scales: Leaves, leaves: Leaves) -> list[Any]:
    """The scales of each leaf; None for one that is not kept in codes."""
    by_path = dict(zip(scales.paths, scales.arrays, strict=True))
    return [by_path.get(path) for path in leaves.paths]


def code_bits(mu_dtype: jax.typing.DTypeLike | None) -> int | None:
    """Bits of the codes that a type asks for; None for a type that the average itself can have."""
    if mu_dtype is None:
        return None
    name = dtype_name(mu_dtype)
    if name in ("int8", "int5", "int4"):
        return int(name.removeprefix("int"))
    if name.startswith(("float", "bfloat")) and jnp.dtype(mu_dtype).itemsize >= 2:
        return None
    allowed = "None, floating-point types of 16 bits or more, 'int8', 'int5', 'int4'"
    raise ValueError(f"mu_dtype is {name}; allowed: {allowed}.")


def _has_codes(shape: tuple[int, ...], bits: int | None) -> bool:
    """Whether an average of a shape is kept in codes."""
    is_small = math.prod(shape) < _SMALLEST_QUANTIZED or shape[block_axis(shape)] < BLOCK
    return bits is not None and not is_small


def _zero_average(
    param: Any, dtype: jax.typing.DTypeLike | None, bits: int | None
) -> tuple[Any, Any]:
    """A zero average of one leaf and no scales, or codes and their scales."""
    leaf = unbox(param)
    if bits is None or not _has_codes(leaf.shape, bits):
        kept = None if bits else dtype
        return jax.tree.map(partial(jnp.zeros_like, dtype=kept), param), optax.MaskedNode()
    axes: list[int | None] = list(range(leaf.ndim))
    of_blocks = [None if axis == block_axis(leaf.shape) else axis for axis in axes]
    # Names in a box are taken as they are, where the blocks may not be divisible by the devices.
    named = (axes, of_blocks)
    codes, scales = (
        rebox_axes(param, full_along(leaf, axes, x.shape, 0, x.dtype), of)
        for x, of in zip(quantized_like(leaf.shape, bits), named, strict=True)
    )
    return codes, scales


def _check_averages(
    state: GuidedEmaState,
    names: Sequence[str],
    updates: Sequence[jax.Array],
    averages: Sequence[Any],
    scales: Sequence[Any],
    bits: int | None,
) -> None:
    """Raises ValueError where a state keeps an average of another shape, or in other bits."""
    if state.left.dtype.itemsize < 4:
        raise ValueError(
            f"guided_ema: the state's left has type {state.left.dtype}; allowed: float32 or"
            " float64, in which a product of decays near 1 is kept. Averages may be bfloat16."
        )
    for name, update, mu, scale in zip(names, updates, averages, scales, strict=True):
        is_coded = not jnp.issubdtype(mu.dtype, jnp.floating)
        if is_coded and scale is None:
            raise ValueError(f"{name}: the state has codes without scales. Was it loaded in part?")
        kept = bits_of(mu, update.shape) if is_coded else None
        like = quantized_like(update.shape, kept)[0].shape if kept else update.shape
        require_same(f"{name}: the state's average has shape", mu.shape, like)
        expected = bits if _has_codes(update.shape, bits) else None
        if kept != expected:
            has, asked = (f"codes of {x} bits" if x else "no codes" for x in (kept, expected))
            raise ValueError(f"{name}: the state has {has}; mu_dtype asks for {asked}.")


def _guided(
    update: jax.Array,
    average: jax.Array,
    axes: tuple[int, ...],
    eps: jax.typing.ArrayLike,
    max_scale: jax.typing.ArrayLike,
) -> jax.Array:
    """The average times min(1 / (1 - cos(update, average) + eps), max_scale), by matrices.

    Args:
      update: Clipped update, any shape.
      average: Running average that contains it, the same shape.
      axes: Those within a matrix.
      eps: Added to 1 - cos.
      max_scale: Cap of the factor, which is 1 where the cosine is 0, as of zeros.
    """
    update = update.astype(average.dtype)
    product = of_norm_one(update, axes) * of_norm_one(average, axes)
    cosine = jnp.sum(product, axis=axes, keepdims=True)
    # The bound also covers cosines that rounding takes past 1.
    scale = 1 / jnp.maximum(1 - cosine + eps, 1 / max_scale)
    return average * jnp.where(cosine == 0, 1, scale)
