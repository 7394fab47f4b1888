"""each_on_one_device: matrices that are divided over a mesh, each made whole on one device."""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

_EXPERTS = re.compile("expert|moe", re.IGNORECASE)  # names of what a mesh divides by matrices


def by_kind(names: Sequence[str], members: Iterable[int]) -> list[list[int]]:
    """Leaves whose names differ in numbers alone: those of different layers are divided alike."""
    kinds: dict[str, list[int]] = {}
    for i in members:
        kinds.setdefault(re.sub(r"\d+", "", names[i]), []).append(i)
    return list(kinds.values())


def each_on_one_device(
    work: Callable[[jax.Array], jax.Array], names: Sequence[str], stacks: Sequence[jax.Array]
) -> list[jax.Array]:
    """Works on matrices that are divided over the mesh in use, each of them on one device.

    All devices get as many matrices, filled up with zeros. The axes of the mesh are moved to the
    axis of the matrices one by one, and back, so that the compiler makes one all-to-all exchange of
    each. Asked for all axes at once, it would give every device every matrix.

    Args:
      work: From matrices (batch, m, n) to as many of the same shape and type, each by itself.
      names: Of the stacks. An axis of the mesh may divide the batch of experts; of others, they are
        gathered first where one does.
      stacks: Each (batch, m, n) with the same m, n and type, each divided in its own way over a
        mesh whose axes are all automatic.

    Returns:
      The results, divided as suits what follows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The last axis first: what divides the matrices already, such as an axis of experts, and the
    # minor one of two axes that divide one side mostly come after others.
    axes = tuple(name for name in reversed(mesh.axis_names) if mesh.shape[name] > 1)
    free = PartitionSpec.UNCONSTRAINED
    # From no axis on: else what comes before would be divided as the first step is.
    first = 1 if any(map(_EXPERTS.search, names)) else 0
    steps = [PartitionSpec(axes[:count], free, free) for count in range(first, len(axes))]
    whole = PartitionSpec(axes, None, None)
    kinds = by_kind(names, range(len(stacks)))
    joined = [jnp.concatenate([stacks[i] for i in kind]) for kind in kinds]
    ends = list(itertools.accumulate(map(len, joined)))
    slots = -(-ends[-1] // mesh.size) * mesh.size

    def moved(stack: jax.Array, end: int) -> jax.Array:
        # Kinds are not put together before: they may be divided in different ways.
        filled = jnp.pad(stack, ((end - len(stack), slots - end), (0, 0), (0, 0)))
        return functools.reduce(jax.lax.with_sharding_constraint, (*steps, whole), filled)

    all_kinds = functools.reduce(operator.add, map(moved, joined, ends))
    done = jax.shard_map(work, in_specs=whole, out_specs=whole)(all_kinds)
    results: dict[int, jax.Array] = {}
    for kind, stack, end in zip(kinds, joined, ends, strict=True):
        back = functools.reduce(jax.lax.with_sharding_constraint, reversed(steps), done)
        of_kind = back[end - len(stack) : end]
        cuts = list(itertools.accumulate(len(stacks[i]) for i in kind))[:-1]
        results.update(zip(kind, jnp.split(of_kind, cuts), strict=True))
    return [results[i] for i in range(len(stacks))]
