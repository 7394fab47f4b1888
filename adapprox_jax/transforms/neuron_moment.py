"""scale_by_neuron_moment: a second moment of one number for each output of a matrix."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    DECAY,
    NOT_NEGATIVE,
    POSITIVE,
    check_state,
    require,
    require_precise,
    require_same,
)
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.leaves import Leaves, as_tuple, from_tuple, unzipped
from adapprox_jax.params.matrix_view import MatrixView
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.sharding.axes import full_along


class ScaleByNeuronMomentState(NamedTuple):
    """State of `scale_by_neuron_moment`.

    Attributes:
      nu: Averages of squares, an array for each parameter in the order of their tree: shaped like
        it, with rows of size 1, float32 or wider. A tuple, so that rules for the paths of
        parameters do not match; without parameters a scalar.
    """

    nu: tuple[Any, ...] | jax.Array


def scale_by_neuron_moment(
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    matrix_rms: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformation:
    """Divides each column of each matrix by the root of the running average of its mean square.

    A column holds what leads to one output of a layer, as in the kernels of Flax and Haiku. Of a
    parameter called "weight" it is a row. Where dimension numbers are given, rows and columns are
    those that they name: rows=1, columns=0 where outputs come first. A convolution is seen as a
    matrix for each place, with a number for each output of each. A leaf without matrices is divided
    entry by entry. Made for directions, with entries of size one: squares may overflow. There is no
    bias correction, so that the first updates are 1 / sqrt(1 - b2) in size, unless `matrix_rms` is
    given.

    Args:
      b2: Decay of the averages, in [0, 1).
      eps: Added to the root, at least 0.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.
      matrix_rms: Root mean square that each matrix is then scaled to, above 0, as by
        `scale_to_matrix_rms`, which would read the matrix once more. None for none.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByNeuronMomentState`.

    Raises:
      ValueError: an argument is out of range, or, from `update`, the state is of other leaves.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_by_neuron_moment(b2=0.0)
      >>> updates, _ = tx.update(jnp.array([[3.0, 0.5], [3.0, 0.5]]), tx.init(jnp.zeros((2, 2))))
      >>> bool(jnp.allclose(updates, 1.0))
      True

    Source: NorMuon (2510.05491), the second moment of its directions.
    """
    require_precise("b2", b2)
    require("b2", b2, *DECAY)
    require("eps", eps, *NOT_NEGATIVE)
    if matrix_rms is not None:
        require("matrix_rms", matrix_rms, *POSITIVE)
    check_dimension_numbers(weight_dimension_numbers)

    def zeros(leaf: Any, view: MatrixView) -> jax.Array:
        axes = [None if axis in view.inputs else axis for axis in range(leaf.ndim)]
        shape = _shape_of_means(leaf.shape, view.inputs)
        dtype = wide_dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        return full_along(leaf, axes, shape, 0, dtype)

    def init(params: optax.Params) -> ScaleByNeuronMomentState:
        leaves = Leaves.of(params, "parameter")
        views = views_of(weight_dimension_numbers, leaves)
        return ScaleByNeuronMomentState(
            as_tuple(map(zeros, leaves.arrays, views), bool(leaves.boxed))
        )

    def step(name: str, leaf: jax.Array, kept: jax.Array, view: MatrixView) -> Any:
        shape = _shape_of_means(leaf.shape, view.inputs)
        require_same(f"{name}: the update has means of shape", shape, kept.shape)
        wide = leaf.astype(kept.dtype)
        squares = jnp.sum(jnp.square(wide), axis=view.inputs, keepdims=True)
        nu = jnp.asarray(b2 * kept + (1 - b2) * squares / _count(leaf, view.inputs), kept.dtype)
        divisor = jnp.sqrt(nu) + eps
        if matrix_rms is not None:
            of_columns = jnp.square(jnp.sqrt(squares) / divisor)
            total = jnp.sum(of_columns, axis=view.axes, keepdims=True)
            rms = jnp.sqrt(jnp.where(total == 0, 1, total) / _count(leaf, view.axes))
            divisor *= rms / matrix_rms
        return (wide / divisor).astype(leaf.dtype), nu

    def update(
        updates: optax.Updates, state: ScaleByNeuronMomentState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByNeuronMomentState]:
        del params
        check_state(state, ScaleByNeuronMomentState, "scale_by_neuron_moment")
        leaves = Leaves.of(updates, "update")
        arrays = leaves.arrays
        if not arrays:
            return updates, state
        kept = from_tuple(state.nu, len(arrays), "means of neurons")
        views = views_of(weight_dimension_numbers, leaves)
        scaled, nu = unzipped(list(map(step, leaves.names, arrays, kept, views)), 2)
        return leaves.filled(scaled), ScaleByNeuronMomentState(tuple(nu))

    return optax.GradientTransformation(init, update)


def _shape_of_means(shape: tuple[int, ...], inputs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis in inputs else size for axis, size in enumerate(shape))


def _count(leaf: jax.Array, axes: tuple[int, ...]) -> int:
    return max(math.prod(leaf.shape[axis] for axis in axes), 1)
