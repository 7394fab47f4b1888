"""The root mean square of each matrix: clipped as in the paper, or set."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import POSITIVE, require
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.step.batching import sums_of


def clip_by_matrix_rms(
    threshold: jax.typing.ArrayLike, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    """Scales each matrix of each leaf down to a root mean square of at most `threshold`.

    On leaves that are no stack of matrices this is `optax.clip_by_block_rms`; in a stack each
    matrix is clipped as it would be by itself. Squares are taken as they are: entries above 1e19
    overflow.

    Args:
      threshold: The paper's d, above 0.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: threshold is not above 0.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.clip_by_matrix_rms(1.0)
      >>> updates, _ = tx.update(jnp.full(4, 5.0), tx.init(jnp.zeros(4)))
      >>> print(updates)
      [1. 1. 1. 1.]

    Source: paper, Algorithm 3, the line with RMS(M_t) / d.
    """
    require("threshold", threshold, *POSITIVE)
    check_dimension_numbers(weight_dimension_numbers)

    return _transformation(partial(_excess, threshold), weight_dimension_numbers)


def clipped(
    arrays: Sequence[jax.Array], axes: Sequence[tuple[int, ...]], threshold: jax.typing.ArrayLike
) -> list[jax.Array]:
    """What `clip_by_matrix_rms` does with arrays whose matrices lie along some axes."""
    return _divided(arrays, axes, partial(_excess, threshold))


def _excess(threshold: jax.typing.ArrayLike, mean_square: jax.Array) -> jax.Array:
    return jnp.maximum(1, jnp.sqrt(mean_square) / threshold)


def scale_to_matrix_rms(
    target: jax.typing.ArrayLike, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    """Scales each matrix of each leaf, up or down, to a root mean square of `target`.

    Squares are taken as they are: entries above 1e19 overflow, and those below 1e-19 count as zero.

    Args:
      target: Above 0.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` without state. Zero matrices stay zero.

    Raises:
      ValueError: target is not above 0.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_to_matrix_rms(0.25)
      >>> updates, _ = tx.update(jnp.full(4, 5.0), tx.init(jnp.zeros(4)))
      >>> print(updates)
      [0.25 0.25 0.25 0.25]

    Source: the scale of AdaMuon (Si et al., 2025, 2507.11005), with which rates are AdamW's.
    """
    require("target", target, *POSITIVE)
    check_dimension_numbers(weight_dimension_numbers)

    def divisor(mean_square: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.where(mean_square == 0, 1, mean_square)) / target

    return _transformation(divisor, weight_dimension_numbers)


def _transformation(
    divisor: Callable[[jax.Array], jax.Array], weight_dimension_numbers: WeightDimensionNumbers
) -> optax.GradientTransformation:
    """Divides each matrix by a function of the mean of its squares."""

    def divided(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        leaves = Leaves.of(updates, "update")
        axes = [view.axes for view in views_of(weight_dimension_numbers, leaves)]
        return leaves.filled(_divided(leaves.arrays, axes, divisor))

    return optax.stateless(divided)


def _divided(
    arrays: Sequence[jax.Array],
    axes: Sequence[tuple[int, ...]],
    divisor: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    wide = [x.astype(wide_dtype(x.dtype)) for x in arrays]
    # Whole leaves together, so that a hundred vectors do not cost a hundred kernels.
    whole = [i for i, x in enumerate(wide) if x.size and len(axes[i]) == x.ndim]
    sums = dict(zip(whole, sums_of([jnp.square(wide[i])[None] for i in whole]), strict=True))
    results = []
    for i, x in enumerate(wide):
        if i in sums:
            total = sums[i].reshape((1,) * x.ndim)
        else:
            total = jnp.sum(jnp.square(x), axis=axes[i], keepdims=True)
        mean_square = total / max(math.prod(x.shape[axis] for axis in axes[i]), 1)
        results.append((x / divisor(mean_square)).astype(arrays[i].dtype))
    return results
