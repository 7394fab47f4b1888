"""Where parameters and batches of a run lie on its mesh.

Along "data" and "fsdp" a batch is divided. Along "fsdp" parameters are, too, and are gathered where
they are used. Along "tensor" each device works with its own part of a layer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.gpt2.command import InputError
from examples.gpt2.config import MESH_AXES, Config, mesh_sizes
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
}


def make_mesh(config: Config) -> Mesh | None:
    """The mesh that resolved settings ask for; None where they ask for none.

    Raises:
      InputError: If it is not one of all devices, or does not divide the batches.
    """
    if config.mesh is None:
        if jax.process_count() > 1:
            example = f"--mesh data={jax.device_count()}"
            raise InputError(f"several processes need a mesh: {example}, for example")
        return None
    sizes = mesh_sizes(config.mesh)
    asked = math.prod(sizes.values())
    if asked != jax.device_count():
        there = f"{jax.process_count()} with {jax.local_device_count()} each"
        raise InputError(
            f"--mesh {config.mesh} is of {asked} devices, and must be of the"
            f" {jax.device_count()} that are there (processes: {there})"
        )
    rows, parts = config.batch_size // config.accumulate, sizes["data"] * sizes["fsdp"]
    if rows % parts:
        raise InputError(
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
            name if size % mesh.shape[name] == 0 else None
            for name, size in zip(names, leaf.shape, strict=False)
        )
        return NamedSharding(mesh, PartitionSpec(*divided))

    shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings)()


def place(tokens: np.ndarray, mesh: Mesh | None) -> np.ndarray | jax.Array:
    """Tokens (..., batch, length), which every process has whole, divided along the batch.

    They are on all devices if those do not divide the batch evenly.
    """
    if mesh is None:
        return tokens
    even = tokens.shape[-2] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    spec = PartitionSpec(*[None] * (tokens.ndim - 2), BATCH_AXES) if even else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
