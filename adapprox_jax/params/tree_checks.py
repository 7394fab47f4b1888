"""One-line errors for parameters, gradients and states that do not fit together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.params.boxes import is_box, unbox


def leaf_name(path: Any) -> str:
    """A leaf's path for a message; parameters may be a single array, which has none."""
    return jax.tree_util.keystr(path) or "the only leaf"


def check_types(tree: Any, what: str) -> None:
    """Raises TypeError for the first leaf that is not of a real floating-point type."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        dtype = getattr(unbox(leaf), "dtype", None)
        if dtype is None:
            raise TypeError(
                f"{leaf_name(path)}: the {what} is a Python {type(leaf).__name__}; allowed: arrays,"
                " as jnp.asarray makes them."
            )
        is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
        if not (is_float and dtype.itemsize >= 2):
            raise TypeError(
                f"{leaf_name(path)}: the {what} has type {dtype}; allowed: real floating-point"
                " types of 16 bits or more. Leave other leaves out with optax.masked or"
                " optax.partition."
            )


def check_concrete(function: str, tree: Any) -> None:
    """Raises ValueError where a function that works on the host is given traced arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"{function} got a traced array at {leaf_name(path)}; allowed: concrete arrays."
                f" Call {function} between two steps, outside of jax.jit and the like."
            )


def check_state(state: Any, expected: type, transformation: str) -> None:
    """Raises ValueError where a transformation is given the state of another one."""
    if not isinstance(state, expected):
        raise ValueError(
            f"{transformation} got a state of type {type(state).__name__}; expected"
            f" {expected.__name__}. Was the state made with other settings?"
        )


def check_trees(updates: Any, state_tree: Any, what: str = "the gradients") -> None:
    """Raises ValueError naming the first place where gradients and a state differ in structure."""
    given, expected = (
        {
            leaf_name(path): "an array in a Flax box" if is_box(leaf) else "an array"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
        }
        for tree in (updates, state_tree)
    )
    for name in sorted(given.keys() | expected.keys()):
        got, wanted = given.get(name, "none"), expected.get(name, "none")
        if got != wanted:
            raise ValueError(
                f"{name}: got {got} in {what}; expected {wanted}, as in the parameters that"
                " the state was made for."
            )
    structures: list[Any] = [
        jax.tree.structure(tree, is_leaf=is_box) for tree in (updates, state_tree)
    ]
    if structures[0] != structures[1]:
        raise ValueError(
            f"{what} are a tree {structures[0]}; expected {structures[1]}, as in the"
            " parameters that the state was made for."
        )
