"""One-line errors for parameters, gradients and states that do not fit together."""

from typing import Any

import jax
import jax.numpy as jnp

from adapprox_jax.boxes import is_box, unbox


def check_types(tree: Any, what: str) -> None:
    """Raises TypeError for the first leaf that is not of a real floating-point type."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        dtype = jnp.result_type(unbox(leaf))
        if not jnp.issubdtype(dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"{name}: the {what} has type {dtype}; allowed: real floating-point types. Leave"
                " other leaves out with optax.masked or optax.partition."
            )


def check_state(state: Any, expected: type, transformation: str) -> None:
    """Raises ValueError where a transformation is given the state of another one."""
    if not isinstance(state, expected):
        raise ValueError(
            f"{transformation} got a state of type {type(state).__name__}; expected"
            f" {expected.__name__}. Was the state made with other settings?"
        )


def check_trees(updates: Any, state_tree: Any) -> None:
    """Raises ValueError naming the first leaf that gradients have and a state has not, or v.v."""
    given, expected = (
        {
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
        }
        for tree in (updates, state_tree)
    )
    for name in sorted(given ^ expected):
        got, wanted = ("a leaf", "none") if name in given else ("none", "a leaf")
        raise ValueError(
            f"{name}: got {got} in the gradients; expected {wanted}, as in the parameters that the"
            " state was made for."
        )


def check_shapes(updates: Any, state_tree: Any) -> None:
    """Raises ValueError naming the first leaf whose update has another shape than its state."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, update), kept in zip(leaves, jax.tree.leaves(state_tree), strict=True):
        if update.shape != kept.shape:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"{name}: got shape {update.shape}; expected {kept.shape}.")
