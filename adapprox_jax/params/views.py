"""Which axes of each leaf of a tree form matrices: as given, by known names, or by shape."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from adapprox_jax.argument_checks import require_function
from adapprox_jax.params.boxes import is_node, unbox
from adapprox_jax.params.known_axes import known_axes
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers, MatrixView, matrix_view

# A tree of MatrixDimensionNumbers that is a prefix of the parameters' (None: the default view),
# or a function from the parameters to it.
WeightDimensionNumbers: TypeAlias = Any | Callable[[Any], Any] | None

_ALLOWED = (
    "None, MatrixDimensionNumbers, a tree of them that is a prefix of the parameters, or a function"
    " of the parameters to such a tree"
)


def views_of(
    weight_dimension_numbers: WeightDimensionNumbers, leaves: Leaves
) -> tuple[MatrixView, ...]:
    """The view of each leaf: as given, else as `known_axes` says, else by shape."""
    if not leaves.boxed:  # Optax initializes a state on a placeholder to label its fields.
        return ()
    given = weight_dimension_numbers
    check_dimension_numbers(given)
    if callable(given):
        given = given(leaves.tree)
        check_dimension_numbers(given)
    spread = leaves.spread("weight_dimension_numbers", given, _is_numbers, _ALLOWED)
    numbers = list(map(unbox, spread))
    if isinstance(given, MatrixDimensionNumbers):  # of all matrices: vectors have none
        numbers = [given if len(leaf.shape) > 1 else None for leaf in leaves.arrays]
    return tuple(
        matrix_view(leaf.shape, known.numbers if of_leaf is None else of_leaf)
        for leaf, of_leaf, known in zip(leaves.arrays, numbers, known_axes(leaves), strict=True)
    )


def check_dimension_numbers(given: WeightDimensionNumbers) -> None:
    """Raises ValueError where `weight_dimension_numbers` is neither a function nor a fit tree."""
    if callable(given) and not is_node(given):
        require_function("weight_dimension_numbers", given, _ALLOWED)
        return
    # A function mapped over boxed parameters leaves its results in the boxes.
    for number in map(unbox, jax.tree.leaves(given, is_leaf=_is_numbers)):
        if not (number is None or isinstance(number, MatrixDimensionNumbers)):
            raise ValueError(f"weight_dimension_numbers has {number!r}; allowed: {_ALLOWED}.")


def _is_numbers(x: Any) -> bool:
    return x is None or is_node(x) or isinstance(x, MatrixDimensionNumbers)
