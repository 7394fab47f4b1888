"""scale_by_neuron_moment: a second moment of one number for each output of a matrix."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.argument_checks import require, require_precise
from adapprox_jax.params.boxes import is_box, rebox, rebox_axes, unbox
from adapprox_jax.params.matrix_view import (
    MatrixDimensionNumbers,
    WeightDimensionNumbers,
    check_dimension_numbers,
    matrix_view,
    resolve_dimension_numbers,
)
from adapprox_jax.params.tree_checks import check_state, check_trees, check_types, leaf_name
from adapprox_jax.sharding.axes import full_along


class ScaleByNeuronMomentState(NamedTuple):
    """State of `scale_by_neuron_moment`."""

    nu: Any  # averages of squares, like the parameters with rows of size 1, float32 or wider


def scale_by_neuron_moment(
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    """Divides each column of each matrix by the root of the running average of its mean square.

    A column holds what leads to one output of a layer, as in the kernels of Flax and Haiku; where
    dimension numbers are given, rows and columns are those that they name: rows=1, columns=0 where
    outputs come first. Of a kernel (heads, size, outputs) or of a convolution the default view is
    of a matrix a head or place, with a number for each output of each. A leaf without matrices is
    divided entry by entry. Made for directions, with entries of size one: squares may overflow.
    There is no bias correction, so that the first updates are 1 / sqrt(1 - b2) in size: set the
    size after it, as `scale_to_matrix_rms` does.

    Args:
      b2: Decay of the averages, in [0, 1).
      eps: Added to the root, at least 0.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByNeuronMomentState`.

    Raises:
      ValueError: an argument is out of range, or, from `update`, the state is of other leaves.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_by_neuron_moment(b2=0.0)
      >>> updates, _ = tx.update(jnp.array([[3.0, 0.5], [3.0, 0.5]]), tx.init(jnp.zeros((2, 2))))
      >>> bool(jnp.allclose(updates, 1.0))
      True

    Source: NorMuon (2510.05491), the second moment of its directions.
    """
    require_precise("b2", b2)
    require("b2", b2, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("eps", eps, lambda x: x >= 0, "a number of at least 0")
    check_dimension_numbers(weight_dimension_numbers)

    def zeros(param: Any, numbers: Any) -> Any:
        leaf = unbox(param)
        rows = _inputs(leaf.shape, numbers)
        axes = [None if axis in rows else axis for axis in range(leaf.ndim)]
        shape = _shape_of_means(leaf.shape, rows)
        dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(leaf.dtype), jnp.float32)
        return rebox_axes(param, full_along(leaf, axes, shape, 0, dtype), axes)

    def init(params: optax.Params) -> ScaleByNeuronMomentState:
        check_types(params, "parameter")
        numbers = resolve_dimension_numbers(weight_dimension_numbers, params)
        return ScaleByNeuronMomentState(jax.tree.map(zeros, params, numbers, is_leaf=is_box))

    def update(
        updates: optax.Updates, state: ScaleByNeuronMomentState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByNeuronMomentState]:
        del params
        check_state(state, ScaleByNeuronMomentState, "scale_by_neuron_moment")
        check_types(updates, "update")
        check_trees(updates, state.nu)
        numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)

        def average(path: Any, update: Any, nu: Any, of_leaf: Any) -> Any:
            leaf, kept = unbox(update), unbox(nu)
            inputs = _inputs(leaf.shape, of_leaf)
            if kept.shape != _shape_of_means(leaf.shape, inputs):
                raise ValueError(
                    f"{leaf_name(path)}: the update of shape {leaf.shape} has means of shape"
                    f" {_shape_of_means(leaf.shape, inputs)}; the state has {kept.shape}. Was it"
                    " made for other parameters or with other weight_dimension_numbers?"
                )
            total = jnp.sum(jnp.square(leaf.astype(kept.dtype)), axis=inputs, keepdims=True)
            mean = total / max(math.prod(leaf.shape[axis] for axis in inputs), 1)
            return rebox(nu, jnp.asarray(b2 * kept + (1 - b2) * mean, kept.dtype))

        def scale(update: Any, nu: Any) -> Any:
            leaf, kept = unbox(update), unbox(nu)
            return rebox(update, (leaf / (jnp.sqrt(kept) + eps)).astype(leaf.dtype))

        nu = jax.tree_util.tree_map_with_path(average, updates, state.nu, numbers, is_leaf=is_box)
        scaled = jax.tree.map(scale, updates, nu, is_leaf=is_box)
        return scaled, ScaleByNeuronMomentState(nu)

    return optax.GradientTransformation(init, update)


def _shape_of_means(shape: tuple[int, ...], inputs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis in inputs else size for axis, size in enumerate(shape))


def _inputs(shape: tuple[int, ...], numbers: MatrixDimensionNumbers | None) -> tuple[int, ...]:
    """The axes within a matrix that are not outputs: a view's rows, or its columns if so named."""
    view = matrix_view(shape, numbers)
    if not view.is_matrix:
        return ()
    named = view.rows if numbers is None else numbers.rows
    first = named if isinstance(named, int | np.integer) else named[0]
    return view.columns if first % len(shape) in view.columns else view.rows
