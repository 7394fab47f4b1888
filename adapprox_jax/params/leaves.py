"""The leaves of a tree of parameters: one walk over trees and boxes, for all transformations."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import require_same, takes_one_argument
from adapprox_jax.params.boxes import is_box, rebox, unbox


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaves of a tree, in order. A leaf is an array, or a box around one."""

    keys: list[Any]  # paths as JAX has them
    boxed: list[Any]
    structure: Any

    @classmethod
    def of(cls, tree: Any, what: str | None = None) -> "Leaves":
        """The leaves of a tree.

        Args:
          tree: Of arrays and boxes.
          what: What a leaf is, for messages. Then all leaves must be floating-point arrays.

        Raises:
          TypeError: A leaf is of another type.
        """
        structure: Any
        named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
        leaves = cls([path for path, _ in named], [leaf for _, leaf in named], structure)
        if what is not None:
            for name, array in zip(leaves.names, leaves.arrays, strict=True):
                _check_type(name, array, what)
        return leaves

    @property
    def paths(self) -> list[str]:
        """Paths as `jax.tree_util.keystr` writes them; that of a single array is empty."""
        return [jax.tree_util.keystr(path) for path in self.keys]

    @property
    def names(self) -> list[str]:
        """Paths for messages."""
        return [leaf_name(path) for path in self.keys]

    @property
    def words(self) -> list[list[str]]:
        """The names in each path, in snake case: 'mlp/~/LayerNorm_0' has two."""
        return [[word for key in path for word in _words(key)] for path in self.keys]

    @property
    def tree(self) -> Any:
        """What the leaves are of."""
        return self.structure.unflatten(self.boxed)

    @property
    def arrays(self) -> list[Any]:
        """The leaves without their boxes."""
        return [unbox(leaf) for leaf in self.boxed]

    def filled(self, arrays: Sequence[Any]) -> Any:
        """The tree with other arrays in its boxes."""
        boxed = [rebox(box, array) for box, array in zip(self.boxed, arrays, strict=True)]
        return self.structure.unflatten(boxed)

    def spread(
        self, name: str, prefix: Any, is_leaf: Callable[[Any], bool], allowed: str
    ) -> list[Any]:
        """For each leaf its entry in a tree that is a prefix of this one.

        Args:
          name: Of the argument, for the message.
          prefix: A tree of entries, or a single entry for all leaves.
          is_leaf: Whether something is an entry.
          allowed: What is allowed, in words.

        Raises:
          ValueError: It is no prefix.
        """
        entries: list[Any] = []

        def add(entry: Any, subtree: Any) -> None:
            count = len(jax.tree.leaves(subtree, is_leaf=is_box))
            entries.extend([entry] * count)

        try:
            jax.tree.map(add, prefix, self.tree, is_leaf=is_leaf)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name} is {prefix!r:.200}; allowed: {allowed}.") from error
        return entries

    def matching(self, tree: Any, what: str = "the updates") -> "Leaves":
        """The leaves of a state's tree, which must have the structure of this tree.

        Args:
          tree: Of the state.
          what: What this tree is, for messages.

        Raises:
          ValueError: It has another structure. Names the first place.
        """
        state = Leaves.of(tree)
        given, expected = (
            {
                name: "an array in a box" if is_box(leaf) else "an array"
                for name, leaf in zip(leaves.names, leaves.boxed, strict=True)
            }
            for leaves in (self, state)
        )
        for name in sorted(given.keys() | expected.keys()):
            got, wanted = given.get(name, "none"), expected.get(name, "none")
            if got != wanted:
                raise ValueError(
                    f"{name}: got {got} in {what}; expected {wanted}, as in the parameters that"
                    " the state was made for."
                )
        if self.structure != state.structure:
            raise ValueError(
                f"{what} are a tree {self.structure}; expected {state.structure}, as in the"
                " parameters that the state was made for."
            )
        return state


def fitting(tree: Any, leaves: Leaves, what: str) -> Leaves:
    """The leaves of a tree with the structure and the shapes of the parameters.

    Args:
      tree: Of arrays, abstract or not.
      leaves: The parameters.
      what: What a leaf of the tree is, for messages.

    Raises:
      ValueError: The structure or a shape is another one.
      TypeError: A leaf is no real floating-point array.
    """
    found = Leaves.of(tree, what)
    found.matching(leaves.tree, f"the {what}s")
    for name, array, weight in zip(leaves.names, found.arrays, leaves.arrays, strict=True):
        require_same(f"{name}: the {what} has shape", array.shape, weight.shape)
    return found


_BOOLEANS = (
    "None, a tree of booleans that is a prefix of the parameters, or a function of the parameters"
    " to such a tree"
)


def require_booleans(name: str, tree: Any) -> None:
    """Raises ValueError where a leaf of a tree, in a box or not, is no boolean that is known."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_flag = isinstance(leaf, bool) or getattr(leaf, "dtype", None) == np.bool_
        if not is_flag or np.shape(leaf) or isinstance(leaf, jax.core.Tracer):
            raise ValueError(f"{name} has {leaf!r:.60} at {leaf_name(path)}; allowed: {_BOOLEANS}.")


def spread_booleans(name: str, given: Any, params: Any) -> Any:
    """A tree like the parameters with a boolean for each leaf.

    Args:
      name: Of the argument, for messages.
      given: A tree of booleans that is a prefix of the parameters, or a function to such a tree.
      params: The parameters, boxed or not.

    Raises:
      ValueError: It is something else.
    """
    leaves = Leaves.of(params)
    if callable(given):
        if not takes_one_argument(given):
            raise ValueError(f"{name} is {given!r}; allowed: {_BOOLEANS}.")
        name, given = f"{name}(params)", given(params)
    require_booleans(name, given)
    flags = leaves.spread(name, given, is_box, _BOOLEANS)
    return leaves.structure.unflatten([bool(unbox(flag)) for flag in flags])


def as_tuple(arrays: Iterable[Any], has_leaves: bool) -> tuple[Any, ...] | jax.Array:
    """Arrays of leaves as a tuple, which does not have the structure of the parameters.

    Without leaves a scalar: `optax.tree_map_params` makes a state for a placeholder without leaves,
    and a scalar there matches a tuple of any length.
    """
    return tuple(arrays) if has_leaves else jnp.zeros(())


def from_tuple(kept: Any, count: int, what: str) -> list[Any]:
    """The arrays of `as_tuple`.

    Args:
      kept: The tuple, or a list, as some checkpoints give it back.
      count: How many leaves it is for.
      what: What it holds, for the message.

    Raises:
      ValueError: It is something else, or of another length.
    """
    is_sequence = isinstance(kept, tuple | list)
    if not is_sequence or len(kept) != count:
        found = len(kept) if is_sequence else f"a {type(kept).__name__}"
        raise ValueError(
            f"the state's {what}: got {found}; expected a tuple of {count}. Was the state made for"
            " other parameters, or by another version?"
        )
    return list(kept)


def unzipped(tuples: Sequence[tuple[Any, ...]], length: int) -> list[list[Any]]:
    """Tuples of a length, of which there may be none, as lists."""
    return [[one[i] for one in tuples] for i in range(length)]


def leaf_name(path: Any) -> str:
    """A leaf's path for a message; parameters may be a single array, which has none."""
    return jax.tree_util.keystr(path) or "the only leaf"


def _check_type(name: str, array: Any, what: str) -> None:
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise TypeError(
            f"{name}: the {what} is a Python {type(array).__name__}; allowed: arrays, as"
            " jnp.asarray makes them."
        )
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    if not (is_float and dtype.itemsize >= 2):
        advice = " Leave other leaves out with optax.masked or optax.partition."
        raise TypeError(
            f"{name}: the {what} has type {dtype}; allowed: real floating-point types of 16 bits or"
            f" more.{advice if what == 'parameter' else ''}"
        )


def _words(key: Any) -> list[str]:
    text = getattr(key, "key", getattr(key, "name", ""))
    parts = re.split(r"[/.~]+", text) if isinstance(text, str) else []
    return [
        re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", part).lower()
        for part in parts
        if part
    ]
