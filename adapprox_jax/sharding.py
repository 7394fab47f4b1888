"""Meshes with explicit axes, where the sharding of an array is part of its type.

There JAX asks for the sharding of every result that it cannot derive, and refuses factorizations
of sharded matrices. So the linear algebra runs with automatic axes, where the compiler decides,
and what comes out has the types that the state had.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from adapprox_jax.boxes import select_axes


def full_along(
    leaf: Any,
    axes: Sequence[int | None],
    shape: tuple[int, ...],
    value: float,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """A constant array, sharded under an explicit mesh as the axes of a leaf that it follows.

    Args:
      leaf: An array, or a `jax.ShapeDtypeStruct`.
      axes: For each axis of the result the axis of `leaf` that it follows; None for a new one.
      shape: Shape of the result.
      value: What it is filled with.
      dtype: Its type.

    Returns:
      The array.
    """
    full = jnp.full(shape, value, dtype)
    if not _is_explicit():
        return full
    return jax.sharding.reshard(full, PartitionSpec(*select_axes(_spec(leaf), axes)))


def with_automatic_axes(function: Callable[..., Any], results_like: Any) -> Callable[..., Any]:
    """Runs a function with automatic axes under an explicit mesh, and as it is elsewhere.

    Args:
      function: Any function of arrays.
      results_like: A tree of arrays with the structure and shardings of its results.

    Returns:
      A function of the same arguments and results.
    """
    if not _is_explicit():
        return function
    out_sharding = jax.tree.map(_spec, results_like)
    return jax.sharding.auto_axes(function, out_sharding=out_sharding)


def _is_explicit() -> bool:
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def _spec(leaf: Any) -> PartitionSpec:
    sharding = (
        leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).sharding
    )
    return PartitionSpec() if sharding is None else sharding.spec
