"""Random keys: checked, and kept as their data."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GENERATORS = {2: "threefry2x32", 4: "rbg"}  # by how many numbers the data of a key have


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
