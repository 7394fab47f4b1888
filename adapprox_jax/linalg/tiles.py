"""Functions of a large matrix worked on a few rows at a time, so that no intermediate is large."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_TILE = 2**20  # entries of a tile; from 2**17 to 2**22 there was no difference in time


def tile_count(shape: tuple[int, ...], largest_whole: int | None) -> int:
    """Into how many tiles the rows of a matrix are cut.

    Args:
      shape: Of the array.
      largest_whole: Entries that a matrix may have without tiles; None: any number.

    Returns:
      A divisor of the rows; 1 where the matrix is small or there is no fitting divisor.
    """
    rows, columns = shape
    if largest_whole is None or rows * columns <= largest_whole:
        return 1
    wanted = rows * columns / _TILE
    divisors = [d for d in range(1, rows + 1) if rows % d == 0 and d <= 8 * wanted <= 64 * d]
    return min(divisors, key=lambda d: max(d / wanted, wanted / d), default=1)


def in_tiles(function: Callable[..., Any], tiles: int, cut: Any, whole: Any) -> Any:
    """Calls a function for each tile, and puts together what it gives, or adds it up.

    Args:
      function: Of trees like `cut` and `whole` to a tree of arrays. What has as many rows as a tile
        is put together; what does not depend on how many rows there are is a term of a sum.
      tiles: How many, a divisor of the rows.
      cut: A tree of arrays with the same number of rows, of which each tile has its own.
      whole: A tree of arrays that each tile has as they are.

    Returns:
      What the function would give of all rows.
    """
    if tiles == 1:
        return function(cut, whole)
    in_parts = jax.tree.map(lambda x: x.reshape(tiles, x.shape[0] // tiles, *x.shape[1:]), cut)
    of_one = jax.eval_shape(function, jax.tree.map(lambda x: x[0], in_parts), whole)
    structure: Any
    of_all, structure = jax.tree.flatten(jax.eval_shape(function, cut, whole))
    is_sum = [x.shape == y.shape for x, y in zip(of_all, jax.tree.leaves(of_one), strict=True)]
    like = jax.tree.leaves(cut)[0]  # under `jax.shard_map` what is carried varies as this does
    zeros = [jnp.zeros_like(like, x.dtype, shape=x.shape) for x in of_all]

    def one_tile(sums: list[Any], tile: Any) -> tuple[list[Any], list[Any]]:
        results = jax.tree.leaves(function(tile, whole))
        terms, parts = _divided(results, is_sum)
        return [x + y for x, y in zip(sums, terms, strict=True)], parts

    sums, parts = jax.lax.scan(one_tile, _divided(zeros, is_sum)[0], in_parts)
    left = iter(sums), iter(parts)
    joined = [next(left[0] if of_sum else left[1]) for of_sum in is_sum]
    return structure.unflatten(x.reshape(y.shape) for x, y in zip(joined, of_all, strict=True))


def _divided(values: list[Any], chosen: list[bool]) -> tuple[list[Any], list[Any]]:
    """Those that are chosen, and the others."""
    pairs = list(zip(values, chosen, strict=True))
    return [x for x, of_kind in pairs if of_kind], [x for x, of_kind in pairs if not of_kind]
