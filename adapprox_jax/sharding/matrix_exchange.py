"""each_on_one_device: matrices that are divided over a mesh, each made whole on one device."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def each_on_one_device(
    work: Callable[[jax.Array], jax.Array],
    stacks: Sequence[jax.Array],
    batch_is_divided: bool = False,
) -> list[jax.Array]:
    """Works on matrices that are divided over the mesh in use, each of them on one device.

    All devices get as many matrices, filled up with zeros. The axes of the mesh are moved to the
    axis of the matrices one by one, and back, so that the compiler makes one all-to-all exchange of
    each. Asked for all axes at once, it would give every device every matrix.

    Args:
      work: From matrices (batch, m, n) to as many of the same shape and type, each by itself.
      stacks: Each (batch, m, n) with the same m, n and type, each divided in its own way
        over a mesh whose axes are all automatic.
      batch_is_divided: Whether an axis of the mesh divides the batch, as of experts. If one does
        and this is False, the matrices are gathered first.

    Returns:
      The results, divided as suits what follows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The last axis first: what divides the matrices already, such as an axis of experts, and the
    # minor one of two axes that divide one side mostly come after others.
    names = tuple(name for name in reversed(mesh.axis_names) if mesh.shape[name] > 1)
    free = PartitionSpec.UNCONSTRAINED
    # From no axis on: else what comes before would be divided as the first step is.
    counts = range(batch_is_divided, len(names))
    steps = [PartitionSpec(names[:count], free, free) for count in counts]
    whole = PartitionSpec(names, None, None)
    ends = list(itertools.accumulate(map(len, stacks)))
    slots = -(-ends[-1] // mesh.size) * mesh.size

    def moved(stack: jax.Array, end: int) -> jax.Array:
        # Not put together before: stacks may be divided in different ways.
        filled = jnp.pad(stack, ((end - len(stack), slots - end), (0, 0), (0, 0)))
        return functools.reduce(jax.lax.with_sharding_constraint, (*steps, whole), filled)

    together = functools.reduce(operator.add, map(moved, stacks, ends))
    results = jax.shard_map(work, in_specs=whole, out_specs=whole)(together)
    return [
        functools.reduce(jax.lax.with_sharding_constraint, reversed(steps), results)[
            end - len(stack) : end
        ]
        for stack, end in zip(stacks, ends, strict=True)
    ]
