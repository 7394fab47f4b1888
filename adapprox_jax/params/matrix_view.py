"""An n-d leaf as a batch of matrices, and back."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

_LARGEST_WINDOW = 32


class MatrixDimensionNumbers(NamedTuple):
    """Which axes of a leaf form the rows and which the columns of its matrices.

    All other axes are batch: each index is one matrix with its own rank. The idea is that of
    `optax.contrib.MuonDimensionNumbers`.

    Attributes:
      rows: One axis or several; none, (), keeps a dense second moment of the leaf.
      columns: Likewise.
      parts: Fused matrices of one size, side by side along the columns: 3 for queries, keys and
        values. Each becomes orthogonal by itself; second moments are of all of them together.
    """

    rows: int | Sequence[int] = 0
    columns: int | Sequence[int] = 1
    parts: int = 1


class MatrixView(NamedTuple):
    """Axes of one leaf, as non-negative integers; rows come before columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inputs_are_rows: bool = True  # else what was given as rows came later than the columns
    parts: int = 1  # along what was given as columns

    def stacked(self) -> "MatrixView":
        """The view of leaves that are stacked along a new first axis."""
        batch, rows, columns = (tuple(axis + 1 for axis in axes) for axes in self[:3])
        return self._replace(batch=(0, *batch), rows=rows, columns=columns)

    @property
    def is_matrix(self) -> bool:
        """Whether there are both rows and columns."""
        return bool(self.rows and self.columns)

    @property
    def parts_of_sides(self) -> tuple[int, int]:
        """Into how many parts the rows and the columns are cut."""
        return (1, self.parts) if self.inputs_are_rows else (self.parts, 1)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes within one matrix: all of them for a leaf that is no stack of matrices."""
        return self.rows + self.columns or self.batch

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that were given as rows: a linear layer sums over these."""
        if not self.is_matrix:
            return ()
        return self.rows if self.inputs_are_rows else self.columns


def matrix_view(
    shape: tuple[int, ...], dimension_numbers: MatrixDimensionNumbers | None = None
) -> MatrixView:
    """The view of a leaf as matrices, with rows and columns in the order of its axes.

    By default the last two axes are rows and columns and all others are batch, as in `jnp.linalg`:
    stacked layers (L, m, n), experts and convolution kernels. But an axis more than four times the
    smaller of the two takes its place: layers stacked along a middle axis (m, L, n). The window of
    a convolution does not, however large. Axes are
    merged only where dimension numbers say so, as those of `known_axes` do. A leaf of fewer
    than two axes has no matrices.

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
        dimension_numbers = MatrixDimensionNumbers(*default_axes(shape))
    rows, columns = (_axes(side, shape) for side in dimension_numbers[:2])
    named, parts = rows + columns, dimension_numbers.parts
    if not named:
        raise ValueError("weight_dimension_numbers names no axis; allowed: rows or columns.")
    if len(set(named)) != len(named):
        raise ValueError(f"weight_dimension_numbers names an axis twice: {dimension_numbers}.")
    outputs = _size(shape, columns)
    if not isinstance(parts, int | np.integer) or parts < 1 or outputs % parts:
        raise ValueError(
            f"weight_dimension_numbers has parts={parts!r} for a leaf of shape {shape}; allowed:"
            f" divisors of its {outputs} columns."
        )
    batch = tuple(axis for axis in range(ndim) if axis not in named)
    if rows and columns and min(rows) > min(columns):
        return MatrixView(batch, columns, rows, False, parts)
    return MatrixView(batch, rows, columns, True, parts)


def view_shape(shape: tuple[int, ...], view: MatrixView) -> tuple[tuple[int, ...], int, int]:
    """Batch shape, rows and columns of a leaf of this shape."""
    batch = tuple(shape[axis] for axis in view.batch)
    return batch, _size(shape, view.rows), _size(shape, view.columns)


def fused_shape(shape: tuple[int, ...], view: MatrixView) -> tuple[tuple[int, ...], int, int]:
    """Batch shape, rows and columns of each of the matrices that are fused in a leaf."""
    batch, rows, columns = view_shape(shape, view)
    row_parts, column_parts = view.parts_of_sides
    stacked = (view.parts,) if view.parts > 1 else ()
    return (*batch, *stacked), rows // row_parts, columns // column_parts


def to_matrices(leaf: jax.Array, view: MatrixView) -> jax.Array:
    """A leaf as a stack of all of its matrices (matrices, rows, columns)."""
    batch, rows, columns = view_shape(leaf.shape, view)
    return leaf.transpose(_order(view)).reshape(math.prod(batch), rows, columns)


def from_matrices(matrices: jax.Array, view: MatrixView, shape: tuple[int, ...]) -> jax.Array:
    """A stack of matrices as a leaf of the given shape; undoes `to_matrices`."""
    order = _order(view)
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return matrices.reshape([shape[axis] for axis in order]).transpose(inverse)


def default_axes(shape: Sequence[int]) -> list[int]:
    """The axes of rows and columns where nothing is said of a leaf of two axes or more."""
    pair = [len(shape) - 2, len(shape) - 1]
    # A window over pixels is no side of a matrix, however large: first in Flax, last in PyTorch.
    is_window = len(shape) > 3 and shape[-4] == shape[-3] <= _LARGEST_WINDOW
    if is_window and shape[-2] < 8 and shape[-2] != shape[-1]:
        return pair
    if len(shape) > 3 and shape[-2] == shape[-1] <= min(_LARGEST_WINDOW, shape[-4] - 1):
        return [len(shape) - 4, len(shape) - 3]
    while True:
        smaller = min(pair, key=lambda axis: shape[axis])
        others = [axis for axis in range(len(shape)) if axis not in pair]
        largest = max(others, key=lambda axis: (shape[axis], axis), default=smaller)
        if shape[largest] <= 4 * shape[smaller]:
            return sorted(pair)
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
