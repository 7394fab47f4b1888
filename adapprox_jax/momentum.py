"""guided_ema: the running average of updates, with optional cosine-similarity guidance."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.boxes import map_unboxed
from adapprox_jax.matrix_view import (
    MatrixDimensionNumbers,
    WeightDimensionNumbers,
    matrix_axes,
    resolve_dimension_numbers,
)
from adapprox_jax.tree_checks import check_shapes, check_state, check_trees
from adapprox_jax.validation import require


class GuidedEmaState(NamedTuple):
    """State of `guided_ema`."""

    mu: Any  # running average of the updates, with the structure and shapes of the parameters


def guided_ema(
    b1: jax.typing.ArrayLike = 0.9,
    *,
    cosine_guidance: bool = False,
    eps: jax.typing.ArrayLike = 1e-8,
    max_scale: jax.typing.ArrayLike = 10.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    """Running average of updates, scaled up where the update agrees with it.

    M <- b1 M + (1 - b1) u is stored and emitted; there is no bias correction. With guidance what
    is emitted is M times min(1 / (1 - cos + eps), max_scale), where cos is the cosine of the
    angle between u and M, of each matrix by itself. The factor is left out of what is stored: it
    would be averaged into every later step and, being above 1 at most steps, grow without bound.

    Args:
      b1: Decay of the average, in [0, 1).
      cosine_guidance: Whether to scale by the cosine similarity.
      eps: Added to 1 - cos, at least 0.
      max_scale: Largest factor, at least 1. Without a cap the first step, where u and M are
        parallel, would be multiplied by 1 / eps.
      mu_dtype: Type of the stored average; None for that of the parameters.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` with state `GuidedEmaState`.

    Raises:
      ValueError: an argument is out of range, or guidance is asked for with b1 = 0.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.guided_ema(b1=0.9)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.ones(3), tx.init(params))
      >>> print(updates)
      [0.1 0.1 0.1]

    Source: paper, section "Cosine-Similarity Guidance Strategy", with the deviations of
    docs/algorithm.md, 4 and 6.
    """
    require("b1", b1, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("eps", eps, lambda x: x >= 0, "a number of at least 0")
    require("max_scale", max_scale, lambda x: x >= 1, "a number of at least 1")
    if cosine_guidance:
        require("b1", b1, lambda x: x > 0, "above 0 where cosine_guidance is on")

    def init(params: optax.Params) -> GuidedEmaState:
        return GuidedEmaState(optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(
        updates: optax.Updates, state: GuidedEmaState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, GuidedEmaState]:
        del params
        check_state(state, GuidedEmaState, "guided_ema")
        check_trees(updates, state.mu)
        check_shapes(updates, state.mu)
        averages = jax.tree.map(
            lambda u, m: b1 * m.astype(jnp.promote_types(u.dtype, jnp.float32)) + (1 - b1) * u,
            updates,
            state.mu,
        )
        mu = jax.tree.map(lambda average, m: average.astype(m.dtype), averages, state.mu)
        if cosine_guidance:
            scale = partial(guidance_scale, eps=eps, max_scale=max_scale)
            numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)
            averages = map_unboxed(lambda a, u, n: a * scale(u, a, n), averages, updates, numbers)
        return optax.tree.cast_like(averages, updates), GuidedEmaState(mu)

    return optax.GradientTransformation(init, update)


def guidance_scale(
    update: jax.Array,
    average: jax.Array,
    dimension_numbers: MatrixDimensionNumbers | None,
    eps: jax.typing.ArrayLike,
    max_scale: jax.typing.ArrayLike,
) -> jax.Array:
    """min(1 / (1 - cos(update, average) + eps), max_scale) for each matrix of a leaf.

    Args:
      update: Clipped update, any shape.
      average: Running average that contains it, the same shape.
      dimension_numbers: Which axes form a matrix.
      eps: Added to 1 - cos.
      max_scale: Cap of the factor.

    Returns:
      The factor, with axes of size 1 where a matrix lies. 1 where update or average is zero.
    """
    axes = matrix_axes(update.shape, dimension_numbers)
    update = update.astype(average.dtype)

    def unit(x: jax.Array) -> jax.Array:
        # Largest entry first: the squares of small updates vanish in float32.
        x = x / _nonzero(jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0))
        return x / _nonzero(jnp.sqrt(jnp.sum(x**2, axis=axes, keepdims=True)))

    cosine = jnp.sum(unit(update) * unit(average), axis=axes, keepdims=True)
    # The bound also covers cosines that rounding takes past 1.
    scale = 1 / jnp.maximum(1 - cosine + eps, 1 / max_scale)
    idle = ~jnp.any(update != 0, axis=axes, keepdims=True)
    return jnp.where(idle | ~jnp.any(average != 0, axis=axes, keepdims=True), 1, scale)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)
