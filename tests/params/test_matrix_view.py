"""Leaves as matrices and back."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import (
    MatrixDimensionNumbers,
    from_matrices,
    matrix_view,
    to_matrices,
    view_shape,
)
from adapprox_jax.params.views import views_of


@pytest.mark.parametrize(
    ("shape", "numbers", "expected"),
    [
        ((30, 20), None, ((), 30, 20)),  # as they stand
        ((4, 30, 20), None, ((4,), 30, 20)),  # a stack
        ((3, 3, 16, 32), None, ((3, 3), 16, 32)),  # a convolution
        ((768, 12, 64), None, ((12,), 768, 64)),  # DenseGeneral (model, heads, head_dim)
        ((12, 64, 768), None, ((12,), 64, 768)),  # and (heads, head_dim, model)
        ((24, 768, 12, 64), None, ((24, 12), 768, 64)),  # stacked
        ((512, 48, 2048), None, ((48,), 512, 2048)),  # layers scanned along axis 1
        ((64, 32, 3, 3), None, ((3, 3), 64, 32)),  # a convolution (out, in, height, width)
        ((3, 3, 1, 64), None, ((3, 3), 1, 64)),  # a depthwise convolution
        ((197, 1, 64), None, ((1,), 197, 64)),  # axes of size 1
        ((8, 0, 4), None, ((0,), 8, 4)),
        ((64, 4, 16), MatrixDimensionNumbers(0, (1, 2)), ((), 64, 64)),
        ((5, 64, 4, 8), MatrixDimensionNumbers(1, (-2, -1)), ((5,), 64, 32)),
        ((5, 64, 8), MatrixDimensionNumbers(2, 1), ((5,), 64, 8)),  # no axes change places
    ],
)
def test_view_and_back(shape, numbers, expected):
    view = matrix_view(shape, numbers)
    assert view_shape(shape, view) == expected
    leaf = np.resize(np.arange(251, dtype=np.uint8), shape)  # some leaves are large
    matrices = to_matrices(leaf, view)
    assert matrices.shape == (math.prod(expected[0]), *expected[1:])
    np.testing.assert_array_equal(from_matrices(matrices, view, shape), leaf)
    if len(expected[0]) == 1 and numbers is None:  # a stack
        axis = shape.index(expected[0][0])
        np.testing.assert_array_equal(matrices, np.moveaxis(leaf, axis, 0))


@pytest.mark.parametrize(
    ("shape", "numbers", "axes"),
    [
        ((), None, ()),
        ((7,), None, (0,)),
        ((4, 7), MatrixDimensionNumbers(rows=(), columns=-1), (1,)),  # stacked biases
    ],
)
def test_vectors_are_no_matrices(shape, numbers, axes):
    view = matrix_view(shape, numbers)
    assert (view.is_matrix, view.axes) == (False, axes)


@pytest.mark.parametrize("parts", [0, 5, -3, 1.5])
def test_parts_divide_their_side(parts):
    with pytest.raises(
        ValueError, match=rf"parts={parts} .*\(4, 12\); allowed: divisors of its 12"
    ):
        matrix_view((4, 12), MatrixDimensionNumbers(0, 1, parts=parts))


def test_dimension_numbers_are_a_prefix_or_a_function():
    numbers = MatrixDimensionNumbers(1, 0)
    tree = {"a": {"b": jnp.ones((2, 3)), "c": jnp.ones((2, 3))}, "d": jnp.ones(3)}
    leaves = Leaves.of(tree)
    given, dense = matrix_view((2, 3), numbers), matrix_view((3,))
    assert given.inputs == (1,)
    assert views_of({"a": numbers, "d": None}, leaves) == (given, given, dense)
    assert views_of(lambda t: {"a": numbers, "d": None}, leaves) == (given, given, dense)
    assert views_of(None, leaves) == (matrix_view((2, 3)), matrix_view((2, 3)), dense)
