"""An n-d leaf as a batch of matrices, and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from adapprox_jax.argument_checks import require_function
from adapprox_jax.params.boxes import content, is_flax_node
from adapprox_jax.params.leaves import Leaves


class MatrixDimensionNumbers(NamedTuple):
    """Which axes of a leaf form the rows and which the columns of its matrices.

    All other axes are batch: each index is one matrix with its own rank. No
    rows or no columns: the leaf keeps a dense second moment. The idea is that of
    `optax.contrib.MuonDimensionNumbers`.
    """

    rows: int | Sequence[int] = 0
    columns: int | Sequence[int] = 1


# A tree of MatrixDimensionNumbers that is a prefix of the parameters' (None: the default view),
# or a function from the parameters to it.
WeightDimensionNumbers: TypeAlias = Any | Callable[[Any], Any] | None


class MatrixView(NamedTuple):
    """Axes of one leaf, as non-negative integers; rows come before columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether there are both rows and columns."""
        return bool(self.rows and self.columns)


def matrix_view(
    shape: tuple[int, ...], dimension_numbers: MatrixDimensionNumbers | None = None
) -> MatrixView:
    """The view of a leaf as matrices, with rows and columns in the order of its axes.

    By default the last two axes are rows and columns and all others are batch, as in `jnp.linalg`:
    stacked layers (L, m, n), experts and convolution kernels. But an axis more than four times the
    smaller of the two takes its place: attention kernels (model, heads, head_dim), layers stacked
    along a middle axis (m, L, n). No two axes are ever merged. A leaf of fewer than two axes has
    no matrices.

    Args:
      shape: Shape of the leaf.
      dimension_numbers: Rows and columns where they are given.

    Returns:
      The view.

    Raises:
      ValueError: an axis is out of range or named twice.

    Source: documented deviation (docs/algorithm.md, 9); the paper has matrices only.
    """
    ndim = len(shape)
    if dimension_numbers is None:
        if ndim < 2:
            return MatrixView(tuple(range(ndim)), (), ())
        rows, columns = (_axes(axis, shape) for axis in _default_axes(shape))
    else:
        rows, columns = (_axes(side, shape) for side in dimension_numbers)
        named = rows + columns
        if not named:
            raise ValueError("weight_dimension_numbers names no axis; allowed: rows or columns.")
        if len(set(named)) != len(named):
            raise ValueError(f"weight_dimension_numbers names an axis twice: {dimension_numbers}.")
    if rows and columns and min(rows) > min(columns):
        rows, columns = columns, rows
    batch = tuple(axis for axis in range(ndim) if axis not in rows + columns)
    return MatrixView(batch, rows, columns)


def view_shape(shape: tuple[int, ...], view: MatrixView) -> tuple[tuple[int, ...], int, int]:
    """Batch shape, rows and columns of a leaf of this shape."""
    batch = tuple(shape[axis] for axis in view.batch)
    return batch, _size(shape, view.rows), _size(shape, view.columns)


def to_matrices(leaf: jax.Array, view: MatrixView) -> jax.Array:
    """A leaf as an array (*batch, rows, columns)."""
    batch, rows, columns = view_shape(leaf.shape, view)
    return leaf.transpose(_order(view)).reshape(*batch, rows, columns)


def from_matrices(matrices: jax.Array, view: MatrixView, shape: tuple[int, ...]) -> jax.Array:
    """An array (*batch, rows, columns) as a leaf of the given shape; undoes `to_matrices`."""
    order = _order(view)
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return matrices.reshape([shape[axis] for axis in order]).transpose(inverse)


def matrix_axes(
    shape: tuple[int, ...], dimension_numbers: MatrixDimensionNumbers | None
) -> tuple[int, ...]:
    """The axes within one matrix of a leaf: all of them for a leaf that is no stack of matrices."""
    view = matrix_view(shape, dimension_numbers)
    if dimension_numbers is None and not view.is_matrix:
        return tuple(range(len(shape)))
    return view.rows + view.columns


def dimension_numbers_of(
    weight_dimension_numbers: WeightDimensionNumbers, leaves: Leaves
) -> list[MatrixDimensionNumbers | None]:
    """The dimension numbers of each leaf; None for the default view."""
    if not leaves.boxed:  # Optax initializes a state on a placeholder to label its fields.
        return []
    given = weight_dimension_numbers
    if callable(given):
        given = given(leaves.tree)
        check_dimension_numbers(given)
    try:
        spread = leaves.spread(given, _is_numbers)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"weight_dimension_numbers is {given!r}; allowed: None, MatrixDimensionNumbers, a tree"
            " of them that is a prefix of the parameters, or a function to such a tree."
        ) from error
    # A function mapped over boxed parameters leaves its results in the boxes.
    return [content(x) if is_flax_node(x) else x for x in spread]


def check_dimension_numbers(given: WeightDimensionNumbers) -> None:
    """Raises ValueError where `weight_dimension_numbers` is neither a function nor a fit tree."""
    allowed = "a function of the parameters, None, or MatrixDimensionNumbers, alone or in a tree"
    if callable(given) and not is_flax_node(given):
        require_function("weight_dimension_numbers", given, allowed)
        return
    for leaf in jax.tree.leaves(given, is_leaf=_is_numbers):
        number = content(leaf) if is_flax_node(leaf) else leaf
        if not (number is None or isinstance(number, MatrixDimensionNumbers)):
            raise ValueError(f"weight_dimension_numbers has {number!r}; allowed: {allowed}.")


def _is_numbers(x: Any) -> bool:
    return x is None or is_flax_node(x) or isinstance(x, MatrixDimensionNumbers)


def _default_axes(shape: tuple[int, ...]) -> list[int]:
    """The axes of rows and columns where nothing is said of a leaf of two axes or more."""
    pair = [len(shape) - 2, len(shape) - 1]
    while True:
        smaller = min(pair, key=lambda axis: shape[axis])
        others = [axis for axis in range(len(shape)) if axis not in pair]
        largest = max(others, key=lambda axis: (shape[axis], axis), default=smaller)
        if shape[largest] <= 4 * shape[smaller]:
            return pair
        pair[pair.index(smaller)] = largest


def _axes(axes: int | Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    listed = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    for axis in listed:
        if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
            kind = type(axis).__name__
            raise ValueError(f"weight_dimension_numbers names an axis by a {kind}; allowed: int.")
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"weight_dimension_numbers names axis {axis}; a leaf of shape {shape} has"
                f" {len(shape)} axes."
            )
    return tuple(int(axis) % len(shape) for axis in listed)


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _order(view: MatrixView) -> tuple[int, ...]:
    return view.batch + view.rows + view.columns
