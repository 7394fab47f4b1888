"""Starts of the subspace iteration: random columns, and the last factors over them."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GENERATORS = {2: "threefry2x32", 4: "rbg"}  # by how many numbers the data of a key have
_TRACE = 1e-3  # of the random column, times the largest entry of the last one
_ROUNDING = 84  # epsilons of the largest entry, 1e-5 in float32: rounding leaves some 1e-6


def check_key(key: Any) -> int | jax.Array:
    """The seed, or the data of the key. A seed makes no array yet.

    Raises:
      ValueError: it is neither.
    """
    is_integer = isinstance(key, numbers.Integral) and not isinstance(key, bool)
    if is_integer and -(2**63) <= int(key) < 2**63:
        return int(key)
    is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    is_array = isinstance(data, jax.Array | np.ndarray) and data.dtype == jnp.uint32
    if is_array and data.ndim == 1 and len(data) in _GENERATORS:
        return jnp.asarray(data)
    allowed = "an integer seed or a JAX random key"
    if is_integer:
        allowed = "an integer seed of at most 64 bits"
    raise ValueError(f"key is {key!r}; allowed: {allowed}.")


def key_data(seed_or_data: int | jax.Array) -> jax.Array:
    """The data of a key, as a new array; of a seed that of the default generator's."""
    if isinstance(seed_or_data, int):
        return jax.random.key_data(jax.random.key(seed_or_data))
    return jnp.array(seed_or_data)


def require_key(key: Any) -> jax.Array:
    """The random key of a seed, or the key that is one."""
    return wrapped_key(key_data(check_key(key)))


def wrapped_key(data: jax.Array) -> jax.Array:
    """The random key of data, also if another generator was the default when they were made."""
    return jax.random.wrap_key_data(data, impl=_GENERATORS.get(len(data)))


def warm_start(
    start: jax.Array,
    previous_u: jax.Array,
    largest: jax.Array,
    inverse_scale: jax.typing.ArrayLike,
) -> jax.Array:
    """A start (n, width) with the columns of `previous_u` over its first.

    Columns of `previous_u` that are zero or rounding beside the largest stand for no direction.
    There the start stays as it is. The others may be linearly dependent, which leaves out what is
    new. So each of them gets a trace of its random column.

    Args:
      start: (n, width).
      previous_u: (n, capacity).
      largest: The number of largest magnitude in each of its columns, (capacity,), with its sign.
        So the trace changes its sign with its column.
      inverse_scale: What `previous_u` is multiplied by, so that A times it is not too large.
    """
    covered = min(start.shape[1], previous_u.shape[1])
    unit_u = previous_u[:, :covered].astype(start.dtype) * inverse_scale
    of_units = (largest[:covered] * inverse_scale)[None]
    stands = jnp.abs(of_units) > _ROUNDING * float(np.finfo(start.dtype).eps)
    random = start[:, :covered]
    first = jnp.where(stands, unit_u + _TRACE * of_units * random, random)
    return jnp.concatenate([first, start[:, covered:]], axis=1)
