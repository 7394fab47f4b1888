"""Boxes: parameters that carry metadata of their axes, as Flax and haliax wrap them.

A box is a pytree node around one array with a name for each of its axes: Linen's `nn.Partitioned`,
nnx's `Variable` and haliax' `NamedArray`. They are known by their methods, so that none need be
installed. What is put into a box for the state of an optimizer must have metadata that describes
it. Under `optax.masked` a box may be empty: then it is none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

# Entries of an nnx Variable's metadata with one name for each axis; that for states comes first.
_NNX_AXIS_ENTRIES = ("optimizer_sharding", "out_sharding", "sharding", "sharding_names")


def is_node(x: Any) -> bool:
    """Whether `x` is one of the boxes, whatever is in it."""
    return _is_linen(x) or _is_nnx(x) or _is_named_array(x)


def is_box(x: Any) -> bool:
    """Whether `x` is one of the boxes around an array."""
    return is_node(x) and bool(jax.tree.leaves(x))


def unbox(x: Any) -> Any:
    """What is in one of the boxes, an array or not; anything else as it is."""
    return jax.tree.leaves(x, is_leaf=lambda inner: inner is not x)[0] if is_node(x) else x


def rebox(box: Any, value: Any) -> Any:
    """`value` in a box like `box`; as it is where `box` is none."""
    return jax.tree.unflatten(jax.tree.structure(box), [value]) if is_box(box) else value


def rebox_axes(box: Any, value: Any, axes: Sequence[int | None]) -> Any:
    """`value` in a box like `box`, with metadata for the axes that it has.

    Args:
      box: A box, or an array.
      value: What to put into it.
      axes: For each axis of `value` the axis of the boxed array that it is; None for a new one.

    Returns:
      The new box, or `value` where `box` is none.
    """
    if _is_linen(box):
        return box.replace(value=value, names=select_axes(box.names, axes))
    if _is_nnx(box):
        metadata = box.get_metadata()
        named = [entry for entry in _NNX_AXIS_ENTRIES if metadata.get(entry) is not None]
        return box.replace(value, **{e: select_axes(metadata[e], axes) for e in named})
    if _is_named_array(box):
        # Axes of one array have different names; those that follow an axis may be of another size.
        kept = [f"adapprox_{i}" if a is None else box.axes[a].name for i, a in enumerate(axes)]
        sizes = zip(kept, value.shape, strict=True)
        made = [dataclasses.replace(box.axes[0], name=name, size=size) for name, size in sizes]
        return type(box)(value, tuple(made))
    return value


def named_axes(box: Any) -> tuple[Any, ...]:
    """The names that a box has for the axes of its array, of the mesh where it knows rules."""
    if _is_linen(box):
        return tuple(box.get_partition_spec())
    if _is_named_array(box):  # its names are not the mesh's
        return ()
    metadata = box.get_metadata()
    found = [metadata[entry] for entry in _NNX_AXIS_ENTRIES if metadata.get(entry) is not None]
    rules = dict(metadata.get("sharding_rules") or ())
    names = getattr(found[0], "spec", found[0]) if found else ()
    return tuple(rules.get(name, name) for name in names)


def has_axes_for_states(box: Any) -> bool:
    """Whether a box names axes for an optimizer's state, as Flax' `optimizer_sharding` does."""
    return _is_nnx(box) and box.get_metadata().get("optimizer_sharding") is not None


def haliax_names(box: Any) -> tuple[str, ...]:
    """The names that haliax has for the axes of an array; none for all that is no `NamedArray`."""
    return tuple(axis.name for axis in box.axes) if _is_named_array(box) else ()


def select_axes(names: Any, axes: Sequence[int | None]) -> tuple[Any, ...]:
    """The entries of `names`, one for each axis or fewer, at `axes`; None for a new axis."""
    names = tuple(getattr(names, "spec", names))  # a NamedSharding has its names in its spec
    return tuple(None if a is None or a >= len(names) else names[a] for a in axes)


def _is_linen(x: Any) -> bool:
    return hasattr(type(x), "replace_boxed") and hasattr(x, "names")


def _is_nnx(x: Any) -> bool:
    return hasattr(type(x), "get_metadata") and hasattr(type(x), "replace")


def _is_named_array(x: Any) -> bool:
    return hasattr(type(x), "resolve_axis") and hasattr(x, "axes")
