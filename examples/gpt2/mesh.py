"""Where parameters and batches of a run lie on its mesh.

Along "data" and "fsdp" a batch is divided. Along "fsdp" parameters are, too, and are gathered where
they are used; along "tensor" each device works with its own part of a layer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.gpt2.config import MESH_AXES, Config, UsageError, mesh_sizes
from examples.gpt2.model import BATCH_AXES

# Rows and columns. What widens is divided by columns, and what narrows again by rows: between
# "expand" and "contract" a device needs nothing of the others. "qkv" is not cut by heads: the
# compiler moves its output to where the heads are worked on.
_WIDENS, _NARROWS = ("fsdp", "tensor"), ("tensor", "fsdp")
_SPECS = {
    "qkv": {"kernel": _WIDENS, "bias": ("tensor",)},
    "expand": {"kernel": _WIDENS, "bias": ("tensor",)},
    "projection": {"kernel": _NARROWS},
    "contract": {"kernel": _NARROWS},
    "tokens": {"embedding": _NARROWS},
    "head": {"embedding": _NARROWS},
}


def make_mesh(config: Config) -> Mesh | None:
    """The mesh that a run asks for; None where it asks for none.

    Args:
      config: The resolved settings.

    Raises:
      UsageError: If it is not one of all devices, or does not divide the batches.
    """
    if config.mesh is None:
        if jax.process_count() > 1:
            example = f"--mesh data={jax.device_count()}"
            raise UsageError(f"several processes need to be told a mesh: {example}, say")
        return None
    sizes = mesh_sizes(config.mesh)
    asked = math.prod(sizes.values())
    if asked != jax.device_count():
        there = f"{jax.process_count()} with {jax.local_device_count()} each"
        raise UsageError(
            f"--mesh {config.mesh} is of {asked} devices, and must be of the"
            f" {jax.device_count()} that are there (processes: {there})"
        )
    rows, parts = config.batch_size // config.accumulate, sizes["data"] * sizes["fsdp"]
    if rows % parts:
        raise UsageError(
            f"--mesh {config.mesh} divides batches into {parts}, and {parts} must divide"
            f" --batch-size {config.batch_size} / --accumulate {config.accumulate}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def make_params(make: Callable[[], Any], mesh: Mesh | None) -> Any:
    """Parameters, made where they belong: no device ever holds all of them.

    Args:
      make: Makes the parameters of a GPT-2, in nested dictionaries.
      mesh: Where; None for the first device.
    """
    if mesh is None:
        return make()

    def sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        layer, kind = (key.key for key in path[-2:])
        names = _SPECS.get(layer, {}).get(kind, ())
        divided = (  # an axis that the devices do not divide evenly is on all of them
            name if name is not None and size % mesh.shape[name] == 0 else None
            for name, size in zip(names, leaf.shape, strict=False)
        )
        return NamedSharding(mesh, PartitionSpec(*divided))

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings)()


def share(mesh: Mesh | None, rows: int) -> tuple[int, int]:
    """Which of how many equal parts of each batch this process reads.

    Processes whose devices hold the same rows read the same part.

    Args:
      mesh: Where batches lie; None for one device.
      rows: Those of a batch.

    Raises:
      UsageError: If the devices of two processes have some rows in common, and others not.
    """
    if mesh is None:
        return 0, 1
    wanted: dict[int, set[int]] = {}
    lie = _batch_sharding(mesh).devices_indices_map((rows,))
    for device, (part,) in lie.items():
        wanted.setdefault(device.process_index, set()).add(part.indices(rows)[0])
    parts = sorted({tuple(sorted(starts)) for starts in wanted.values()})
    starts = [start for part in parts for start in part]
    if len(starts) > len(set(starts)) or len({len(part) for part in parts}) > 1:
        raise UsageError("--mesh: processes share some rows of a batch; give a multiple of theirs")
    return parts.index(tuple(sorted(wanted[jax.process_index()]))), len(parts)


def place_batch(batch: np.ndarray, mesh: Mesh | None) -> np.ndarray | jax.Array:
    """A batch of which each process has read its `share`, as one array on the mesh."""
    if mesh is None:
        return batch
    return jax.make_array_from_process_local_data(_batch_sharding(mesh), batch)


def place_batches(batches: np.ndarray, mesh: Mesh | None) -> np.ndarray | jax.Array:
    """Stacked batches that every process has whole, divided as a batch is, or else on all."""
    if mesh is None:
        return batches
    even = batches.shape[1] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    spec = PartitionSpec(None, BATCH_AXES) if even else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(batches.shape, sharding, lambda index: batches[index])


def _batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def bytes_on_device(tree: Any) -> int:
    """Bytes of a tree's arrays on one device, the same on each."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
