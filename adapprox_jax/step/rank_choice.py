"""The rank of one matrix: Algorithm 2 on what one factorization says of every rank."""

import jax
import jax.numpy as jnp

from adapprox_jax.argument_checks import require_scalar
from adapprox_jax.linalg.srsi import tail_error
from adapprox_jax.settings import Settings


def choose_rank(
    energies: jax.Array,
    residual: jax.Array,
    capacity: int,
    error_threshold: jax.typing.ArrayLike,
    settings: Settings,
) -> jax.Array:
    """Algorithm 2's loop: the first rank that will do, without a loop.

    One factorization tells the error at every rank, so a table leads from every rank to the next
    one that would be tried. Following it from a rank to the next, then to the one after that, and
    then four further, takes as many lookups as the capacity has bits.

    Args:
      energies: Squared norms of all columns, (width,), those of the largest singular values first.
      residual: ||A - q u^T||^2 of all columns.
      capacity: The largest rank.
      error_threshold: xi_thresh: the rank grows while the error is above it. NaN: to the largest.
      settings: With the first rank and the growth.

    Returns:
      An int32 scalar of at most `capacity`.

    Raises:
      ValueError: the growth is not one number.

    Source: paper, Algorithm 2 (AS-RSI), with the deviations of docs/algorithm.md, 2 and 7.
    """

    def next_rank(rank: jax.Array) -> jax.Array:
        error = tail_error(energies, residual, jnp.maximum(rank, 1))
        above = (error > error_threshold) | jnp.isnan(error_threshold)
        given = settings.rank_growth(error)
        require_scalar("rank_growth", given)
        growth = jnp.asarray(given, jnp.float32)
        growth = jnp.where(growth >= 1, jnp.minimum(growth, capacity), 1)  # 1 also where it is NaN
        grown = jnp.minimum(rank + growth.astype(jnp.int32), capacity)
        return jnp.where(above, grown, rank)

    table = jax.vmap(next_rank)(jnp.arange(capacity + 1, dtype=jnp.int32))
    for _ in range(capacity.bit_length()):
        table = table[table]
    return table[settings.first_rank(capacity)]
