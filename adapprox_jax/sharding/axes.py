"""What a step has to know of meshes: the one in use, explicit axes, `jax.shard_map`.

Under explicit axes the sharding of an array is part of its type. There JAX asks for the sharding of
every result that it cannot derive, and refuses factorizations of sharded matrices. So the linear
algebra runs with automatic axes, where the compiler decides, and what comes out has the types that
the state had.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adapprox_jax.params.boxes import select_axes


def full_along(
    leaf: Any,
    axes: Sequence[int | None],
    shape: tuple[int, ...],
    value: float,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """A constant array, sharded under an explicit mesh as the axes of a leaf that it follows.

    An axis that the devices do not divide evenly is not sharded.

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
    explicit = explicit_sharding(leaf)
    if explicit is None:
        return full
    names = select_axes(explicit.spec, axes)
    spec = PartitionSpec(
        *(
            name if size % _devices_along(explicit, name) == 0 else None
            for name, size in zip(names, shape, strict=True)
        )
    )
    if not isinstance(leaf, jax.core.Tracer) and isinstance(leaf.sharding.mesh, Mesh):
        return jax.device_put(full, NamedSharding(leaf.sharding.mesh, spec))
    return jax.sharding.reshard(full, NamedSharding(explicit.mesh, spec))


def _devices_along(sharding: NamedSharding, names: Any) -> int:
    """Parts that an axis with these names in its spec is cut into."""
    listed = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in listed if name is not None)


def with_automatic_axes(function: Callable[..., Any], results_like: Any) -> Callable[..., Any]:
    """Runs a function with automatic axes under an explicit mesh, and else as it is.

    Args:
      function: Any function of arrays.
      results_like: A tree of arrays with the structure and shardings of its results.

    Returns:
      A function of the same arguments and results.
    """
    shardings = jax.tree.map(explicit_sharding, results_like)
    explicit = [sharding for sharding in jax.tree.leaves(shardings) if sharding is not None]
    if not explicit:
        return function
    replicated = NamedSharding(explicit[0].mesh, PartitionSpec())
    out_sharding = jax.tree.map(
        lambda _, sharding: replicated if sharding is None else sharding, results_like, shardings
    )
    return jax.sharding.auto_axes(function, out_sharding=out_sharding)


def using_mesh_of(arrays: Sequence[jax.Array]) -> AbstractContextManager[Any]:
    """Puts the mesh of traced arrays in use, where none is: their types say on which they lie.

    So `jax.set_mesh` need not be called, which many programs do not do.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            mesh = jax.typeof(array).sharding.mesh
            if mesh.size > 1 and not mesh.explicit_axes:
                return jax.sharding.use_abstract_mesh(mesh)
    return nullcontext()


def devices_in_use() -> int:
    """Over how many devices the compiler may divide an array: those of the mesh in use.

    That is `jax.set_mesh`'s, or that of the arrays (`using_mesh_of`). Under `jax.shard_map` it is
    what is left of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != AxisType.Manual)


def is_compilers_mesh() -> bool:
    """Whether a mesh of several devices is in use and all of its axes are the compiler's."""
    mesh = jax.sharding.get_abstract_mesh()
    return devices_in_use() > 1 and not mesh.manual_axes and not mesh.explicit_axes


def replicated(tree: Any) -> Any:
    """Arrays that serve differently sharded ones, on all devices, if a mesh is in use.

    Else the compiler shards them as suits one of those they serve, and moves them for all others.
    """
    if not is_compilers_mesh():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def on_host(array: Any) -> np.ndarray:
    """The values of an array, of all processes where this one has but a part of them."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def varying_alike(tree: Any) -> Any:
    """The arrays of a tree, as varying over the devices of a `jax.shard_map` as any of them.

    There the type of an array says over which axes of the mesh it varies. The branches of a `cond`
    and the carry of a loop must have one type. Outside of it nothing changes.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    alike = jnp.zeros((), bool)
    for leaf in leaves:
        alike |= jnp.zeros_like(leaf, bool, shape=())
    return jax.tree.map(lambda leaf: jnp.where(alike, leaf, leaf), tree)


def varies_no_more(array: jax.Array, like: jax.Array) -> bool:
    """Whether `array` varies over no axis of a `jax.shard_map` that `like` does not vary over."""
    alone = jnp.zeros_like(like, bool, shape=())
    return bool(jax.typeof(alone) == jax.typeof(alone | jnp.zeros_like(array, bool, shape=())))


def explicit_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding in the type of an array, or of an abstract one; None without explicit axes."""
    sharding = named_sharding(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf))
    if sharding is None or not sharding.mesh.abstract_mesh.explicit_axes:
        return None
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)


def named_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of an array, or of an abstract one, if it is one of a mesh."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None
