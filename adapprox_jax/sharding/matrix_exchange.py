"""each_on_one_device: matrices that are divided over a mesh, each made whole on one device.

A device sends its part of every matrix to the one that works on it, all in one exchange, and the
results come back in another. GSPMD would give every device every matrix.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Work = Callable[[jax.Array], jax.Array]  # of (batch, m, n), each matrix by itself


def each_on_one_device(work: Work, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Works on stacks of matrices of one shape, each matrix on one device of the mesh in use.

    The matrices that some devices share go to these in equal numbers, filled up with zeros.

    Args:
      work: From matrices (batch, m, n) to as many of the same shape and type, each by itself.
      stacks: Arrays (batch, m, n) with the same m, n and type.

    Returns:
      The results, as the stacks are divided.
    """
    return list(_partitioned(work, len(stacks))(*stacks))


def concatenated(work: Work, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Works on stacks that are put together as one."""
    whole = work(jnp.concatenate(stacks)) if len(stacks) > 1 else work(stacks[0])
    ends = [0]
    for stack in stacks:
        ends.append(ends[-1] + len(stack))
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


def _partitioned(work: Work, number: int) -> Callable[..., Any]:
    """`concatenated` for so many stacks, with what a device does with its parts."""

    def plain(*stacks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(concatenated(work, stacks))

    def partition(mesh: Mesh, arguments: Any, _: Any) -> Any:
        lies = [_lie(mesh, argument) for argument in arguments]

        def lower(*stacks: jax.Array) -> tuple[jax.Array, ...]:
            # Traced where a mesh with explicit axes may be in use, of which parts know nothing.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return tuple(_of_parts(work, mesh, lies, stacks))

        shardings = tuple(NamedSharding(mesh, PartitionSpec(*lie)) for lie in lies)
        return mesh, lower, shardings, shardings

    divided = custom_partitioning(plain)
    axes = ", ".join(f"batch{i} rows{i} columns{i}" for i in range(number))
    divided.def_partition(
        partition,
        infer_sharding_from_operands=lambda _, arguments, __: tuple(x.sharding for x in arguments),
        sharding_rule=f"{axes} -> {axes}",  # the same for Shardy
    )

    # A transformation that the exchange has no rule for is applied to what it stands for.
    @jax.custom_jvp
    def differentiable(*stacks: jax.Array) -> tuple[jax.Array, ...]:
        return batched(*stacks)

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(plain, primals, tangents)

    @jax.custom_batching.custom_vmap
    def batched(*stacks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(divided(*stacks))

    @batched.def_vmap
    def _(_: int, in_batched: Any, *stacks: jax.Array) -> Any:
        in_axes = [0 if is_batched else None for is_batched in in_batched]
        return jax.vmap(plain, in_axes)(*stacks), (True,) * number

    return differentiable


class _Lie(NamedTuple):
    """The axes of the mesh that divide a stack's batch, rows and columns."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


def _lie(mesh: Mesh, argument: Any) -> _Lie:
    """How a stack is to be divided: as it is, but for axes that are not divided evenly.

    Whole on every device where no names of axes say how it is: the devices share the work then.
    """
    if not isinstance(argument.sharding, NamedSharding):
        return _Lie((), (), ())

    def names(entry: Any, size: int) -> tuple[str, ...]:
        listed = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        return listed if size % _extent(mesh, listed) == 0 else ()

    return _Lie(*map(names, argument.sharding.spec, argument.shape))


def _extent(mesh: Mesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _of_parts(
    work: Work, mesh: Mesh, lies: Sequence[_Lie], stacks: Sequence[jax.Array]
) -> list[jax.Array]:
    """What a device does with its parts of the stacks: all that lie alike in one exchange."""
    results = list(stacks)
    alike: dict[_Lie, list[int]] = {}
    for i, lie in enumerate(lies):
        alike.setdefault(lie, []).append(i)
    for lie, members in alike.items():
        exchanged = functools.partial(_exchanged, work, mesh, lie)
        done = concatenated(exchanged, [stacks[i] for i in members])
        for i, part in zip(members, done, strict=True):
            results[i] = part
    return results


def _exchanged(work: Work, mesh: Mesh, lie: _Lie, parts: jax.Array) -> jax.Array:
    """Parts (batch, m / R, n / C) of matrices to whole ones, through `work`, and back."""
    of_tiles = lie.rows + lie.columns
    copies = tuple(x for x in mesh.axis_names if x not in lie.batch + of_tiles)
    R, C, D = (_extent(mesh, names) for names in (lie.rows, lie.columns, copies))
    B, m, n = parts.shape
    each = -(-B // (R * C * D))
    filled = jnp.pad(parts, ((0, each * R * C * D - B), (0, 0), (0, 0)))
    if D > 1:  # of equal copies each is for a share of the matrices
        share = jax.lax.axis_index(copies) * (each * R * C)
        filled = jax.lax.dynamic_slice_in_dim(filled, share, each * R * C)
    tiles = _exchange(filled.reshape(R * C, each, m, n), of_tiles)
    wholes = jnp.moveaxis(tiles.reshape(R, C, each, m, n), 2, 0)
    wholes = work(jnp.swapaxes(wholes, 2, 3).reshape(each, R * m, C * n))
    tiles = jnp.swapaxes(wholes.reshape(each, R, m, C, n), 2, 3)
    tiles = jnp.moveaxis(tiles, 0, 2).reshape(R * C, each, m, n)
    done = _exchange(tiles, of_tiles).reshape(R * C * each, m, n)
    if D > 1:
        done = jax.lax.all_gather(_as_bits(done), copies, tiled=True).view(done.dtype)
    return done[:B]


def _exchange(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """Sends x[i] to the i-th device along the axes `over`, and receives as many."""
    return jax.lax.all_to_all(_as_bits(x), over, 0, 0).view(x.dtype) if over else x


def _as_bits(x: jax.Array) -> jax.Array:
    """16 bits as integers, which no compiler widens on the way."""
    return x.view(jnp.uint16) if x.dtype.itemsize == 2 else x
