"""clip_by_matrix_rms: the paper's update clipping, for stacks of matrices too."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.boxes import map_unboxed
from adapprox_jax.matrix_view import (
    MatrixDimensionNumbers,
    WeightDimensionNumbers,
    check_dimension_numbers,
    matrix_axes,
    resolve_dimension_numbers,
)
from adapprox_jax.validation import require


def clip_by_matrix_rms(
    threshold: jax.typing.ArrayLike, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    """Scales each matrix of each leaf down to a root mean square of at most `threshold`.

    On leaves that are no stack of matrices this is `optax.clip_by_block_rms`; in a stack each
    matrix is clipped as it would be by itself.

    Args:
      threshold: The paper's d, above 0.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: threshold is not above 0.

    Example:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.clip_by_matrix_rms(1.0)
      >>> updates, _ = tx.update(jnp.full(4, 5.0), tx.init(jnp.zeros(4)))
      >>> print(updates)
      [1. 1. 1. 1.]

    Source: paper, Algorithm 3, the line with RMS(M_t) / d.
    """
    require("threshold", threshold, lambda x: x > 0, "a number above 0")
    check_dimension_numbers(weight_dimension_numbers)

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)
        return map_unboxed(partial(_clip, threshold=threshold), updates, numbers), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _clip(
    leaf: jax.Array,
    dimension_numbers: MatrixDimensionNumbers | None,
    threshold: jax.typing.ArrayLike,
) -> jax.Array:
    axes = matrix_axes(leaf.shape, dimension_numbers)
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    rms = jnp.sqrt(jnp.mean(wide**2, axis=axes, keepdims=True))
    return (wide / jnp.maximum(1, rms / threshold)).astype(leaf.dtype)
