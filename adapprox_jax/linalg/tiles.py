"""Functions of a large array worked on a few of its rows at a time: intermediates are small."""

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
    # From an eighth to eight times as many as wanted.
    divisors = [d for d in range(2, rows + 1) if rows % d == 0 and d <= 8 * wanted <= 64 * d]
    return min(divisors, key=lambda d: max(d / wanted, wanted / d), default=1)


def in_tiles(function: Callable[..., Any], tiles: int, cut: Any, whole: Any) -> Any:
    """Calls a function for each tile, and puts together what it gives, or adds it up.

    Args:
      function: Of trees like `cut` and `whole` to a tree of arrays. What has as many rows as a tile
        is put together; what does not depend on how many rows there are is a term of a sum.
      tiles: How many, a divisor of the rows.
      cut: A tree of arrays with the same number of rows, of which each tile has its own. A result
        of the first one's shape and type takes its memory, if nothing reads it later.
      whole: A tree of arrays that each tile has as they are.

    Returns:
      What the function would give of all rows.
    """
    if tiles == 1:
        return function(cut, whole)
    in_parts = jax.tree.map(lambda x: x.reshape(tiles, x.shape[0] // tiles, *x.shape[1:]), cut)
    of_one = jax.tree.leaves(
        jax.eval_shape(function, jax.tree.map(lambda x: x[0], in_parts), whole)
    )
    structure: Any
    of_all, structure = jax.tree.flatten(jax.eval_shape(function, cut, whole))
    structure_of_cut: Any
    (first, *others), structure_of_cut = jax.tree.flatten(in_parts)
    like = jax.tree.leaves(cut)[0]  # under `jax.shard_map` what is carried varies as this does
    zeros = {
        i: jnp.zeros_like(like, x.dtype, shape=x.shape)
        for i, x in enumerate(of_all)
        if x.shape == of_one[i].shape
    }
    parts = [i for i in range(len(of_all)) if i not in zeros]
    in_place = [i for i in parts if (of_all[i].shape, of_all[i].dtype) == (like.shape, like.dtype)][
        :1
    ]

    def one_tile(carried: Any, given: Any) -> Any:
        sums, overwritten = carried
        index, rest = given
        own = jax.lax.dynamic_index_in_dim(overwritten, index, keepdims=False)
        results = jax.tree.leaves(function(structure_of_cut.unflatten([own, *rest]), whole))
        for i in in_place:
            overwritten = jax.lax.dynamic_update_index_in_dim(overwritten, results[i], index, 0)
        sums = {i: x + results[i] for i, x in sums.items()}
        return (sums, overwritten), {i: results[i] for i in parts if i not in in_place}

    of_tiles = jnp.arange(tiles), others
    (sums, overwritten), joined = jax.lax.scan(one_tile, (zeros, first), of_tiles)
    joined |= sums | dict.fromkeys(in_place, overwritten)
    return structure.unflatten(joined[i].reshape(x.shape) for i, x in enumerate(of_all))
