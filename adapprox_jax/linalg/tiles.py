"""Matrices worked on in tiles of their longer side, so that no intermediate is as large as they."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tiling(NamedTuple):
    """How the longer side of a matrix is cut.

    Columns are cut into blocks. Rows are first cut into up to 64 groups, of which each tile gets an
    equal share: of rows that are sharded every device then works on its own. The rows of a share
    lie side by side: single ones, far apart in memory, take longer to read.
    """

    tiles: int  # how many, a divisor of the longer side
    axis: int  # the shorter side's axis, which is not cut: 0 for (m, n), 1 for (n, m), m <= n

    def take(self, array: jax.Array, dim: int, index: jax.typing.ArrayLike) -> jax.Array:
        """One tile of an array that has the longer side along `dim`."""
        if self.tiles == 1:
            return array
        before, size, after = self._sides(array.shape, dim)
        split = array.reshape(*before, *self._cut(size), *after)
        tile = jax.lax.dynamic_index_in_dim(split, index, dim + 1, keepdims=False)
        return tile.reshape(*before, size // self.tiles, *after)

    def put(
        self, array: jax.Array, dim: int, index: jax.typing.ArrayLike, tile: jax.Array
    ) -> jax.Array:
        """The array with one tile replaced."""
        before, size, after = self._sides(array.shape, dim)
        groups, _, share = self._cut(size)
        split = jax.lax.dynamic_update_index_in_dim(
            array.reshape(*before, *self._cut(size), *after),
            tile.reshape(*before, groups, share, *after),
            index,
            dim + 1,
        )
        return split.reshape(array.shape)

    def cache_if_whole(
        self, tile_of: Callable[[jax.typing.ArrayLike], jax.Array]
    ) -> Callable[[jax.typing.ArrayLike], jax.Array]:
        """A function of a tile's index, called at once where there is one tile only."""
        if self.tiles > 1:
            return tile_of
        whole = tile_of(0)
        return lambda _: whole

    def _cut(self, size: int) -> tuple[int, int, int]:
        """Groups, tiles, and how much of a group is a tile's."""
        of_tile = size // self.tiles
        groups = math.gcd(of_tile, _MOST_GROUPS) if self.axis == 1 else 1
        return groups, self.tiles, of_tile // groups

    @staticmethod
    def _sides(shape: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        return shape[:dim], shape[dim], shape[dim + 1 :]


_MOST_GROUPS = 64  # a power of two, which suits a mesh
_LARGEST_WHOLE = 2**23  # entries: 32 MiB in float32
_TILE = 2**20  # entries of a tile; from 2**17 to 2**22 there was no difference in time


def tiling_of(shape: tuple[int, ...]) -> Tiling:
    """The tiling of a matrix: one tile, or for a large one many, to keep its intermediates small.

    Args:
      shape: (m, n).

    Returns:
      The tiling, of one tile where the matrix is small or its longer side has no fitting divisor.
    """
    axis = 0 if shape[0] <= shape[1] else 1
    longer, size = max(shape), shape[0] * shape[1]
    if size <= _LARGEST_WHOLE:
        return Tiling(1, axis)
    wanted = size / _TILE
    divisors = [d for d in range(1, longer + 1) if longer % d == 0 and d <= 8 * wanted <= 64 * d]
    closest = min(divisors, key=lambda d: max(d / wanted, wanted / d), default=1)
    return Tiling(closest, axis)


def sweep(
    tiling: Tiling,
    function: Callable[..., tuple[Any, Any]],
    like: jax.Array,
    dims: tuple[int, ...] = (),
    into: tuple[jax.Array, ...] | None = None,
) -> tuple[Any, Any]:
    """Calls a function for each tile, adds up its sums and puts its parts together.

    Args:
      tiling: The tiles.
      function: From the index of a tile, and the tiles of `into` if that is given, to a tree of
        sums and a tuple of tiles of arrays.
      like: An array that the results vary with over devices, under `jax.shard_map`.
      dims: Where each of those arrays has the longer side.
      into: Arrays of their shapes and types that they take the place of, tile by tile; None for new
        ones. Where those are large they should be of this matrix's own: equal ones XLA makes once
        for all matrices, and copies.

    Returns:
      The tree of sums and the tuple of arrays.
    """
    if tiling.tiles == 1:
        return function(0, *(into or ()))

    def of_tile(index: jax.typing.ArrayLike, held: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        given = held if into else ()
        tiles = (tiling.take(array, dim, index) for array, dim in zip(given, dims, strict=False))
        return function(index, *tiles)

    sums_like, parts_like = jax.eval_shape(of_tile, 0, into)

    def whole(part: Any, dim: int) -> jax.Array:
        shape = (*part.shape[:dim], part.shape[dim] * tiling.tiles, *part.shape[dim + 1 :])
        return jnp.zeros_like(like, part.dtype, shape=shape)

    def one_tile(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, wholes = carry
        more, parts = of_tile(index, wholes)
        sums = jax.tree.map(jnp.add, sums, more)
        put = [
            tiling.put(array, dim, index, part)
            for array, dim, part in zip(wholes, dims, parts, strict=True)
        ]
        return sums, tuple(put)

    zeros = jax.tree.map(lambda x: jnp.zeros_like(like, x.dtype, shape=x.shape), sums_like)
    new = (whole(part, dim) for part, dim in zip(parts_like, dims, strict=True))
    wholes = into or tuple(new)
    return jax.lax.fori_loop(0, tiling.tiles, one_tile, (zeros, wholes))
