"""Starts of the subspace iteration: random columns, and the last factors over them."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NORMALS = 8  # Gaussian columns that a random start is made of
_ROUNDING = 84  # epsilons of the largest entry, 1e-5 in float32: rounding leaves some 1e-6


def check_key(key: Any) -> tuple[int | jax.Array, Any]:
    """The seed or key, and the implementation of a typed key. A seed makes no array yet.

    Raises:
      ValueError: it is neither.
    """
    is_integer = isinstance(key, numbers.Integral) and not isinstance(key, bool)
    if is_integer and -(2**63) <= int(key) < 2**63:
        return int(key), None
    is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if is_typed and key.ndim == 0:
        return key, jax.random.key_impl(key)
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and key.dtype == jnp.uint32 and key.shape == (_words_of_default(),):
        return jnp.asarray(key), None
    allowed = "an integer seed or a JAX random key"
    if is_integer:
        allowed = "an integer seed of at most 64 bits"
    raise ValueError(f"key is {key!r}; allowed: {allowed}.")


def require_key(key: Any) -> jax.Array:
    """The random key of a seed, or the key that is one."""
    seed_or_key, _ = check_key(key)
    return jax.random.key(seed_or_key) if isinstance(seed_or_key, int) else seed_or_key


def _words_of_default() -> int:
    """Numbers in the data of a key of the default generator, which may change at any time."""
    default = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    known = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}.get(default)
    return known or jax.random.key_data(jax.random.key(0)).shape[-1]


def wrapped_key(data: jax.Array, implementation: Any) -> jax.Array:
    """The random key of data, also where another generator was the default when they were made.

    Args:
      data: uint32, from `jax.random.key_data`.
      implementation: Of a typed key that was given; None for one that follows from the data.
    """
    if implementation is None and data.shape[-1] != _words_of_default():
        implementation = {2: "threefry2x32", 4: "rbg"}.get(data.shape[-1])
    return jax.random.wrap_key_data(data, impl=implementation)


class RandomStart(NamedTuple):
    """What the columns of a random start are made of, for matrices of up to n columns."""

    normals: jax.Array  # (8, n), standard normal
    signs: jax.Array  # (blocks, n), 1 or -1 with even odds


def draw_start(
    key: jax.Array, n: int, width: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> RandomStart:
    """Draws what a random start of up to `width` columns and n rows needs: once for many matrices.

    Args:
      key: JAX random key.
      n: Rows of the start.
      width: Most columns.
      dtype: float32 or float64, the widest type of the matrices.

    Returns:
      The draws. More columns leave the first ones as they were.
    """
    normal_key, sign_key = jax.random.split(key)
    blocks = np.arange(-(-width // _NORMALS))
    words, bits = np.divmod(blocks, 32)
    drawn = jax.random.bits(sign_key, (words[-1] + 1, n), jnp.uint32)
    is_set = (drawn[words] >> bits[:, None].astype(np.uint32)) & 1
    normals = jax.random.normal(normal_key, (_NORMALS, n), dtype)
    return RandomStart(normals, 1 - 2 * is_set.astype(dtype))


def start_columns(
    draws: RandomStart, width: int, dtype: jax.typing.DTypeLike, n: int | None = None
) -> jax.Array:
    """A random start (n, width), whose first columns do not depend on `width`.

    Eight independent Gaussian columns, then the same eight with independent random signs, and so
    on: every two columns are uncorrelated, and a column costs no further random numbers.

    Args:
      draws: From `draw_start`.
      width: Columns.
      dtype: Type of the result.
      n: Rows, at most as many as were drawn; None for all.
    """
    blocks = -(-width // _NORMALS)
    columns = draws.signs[:blocks, None, :n] * draws.normals[None, :, :n]
    return columns.reshape(-1, columns.shape[-1])[:width].T.astype(dtype)


def warm_start(
    start: jax.Array,
    previous_u: jax.Array,
    sizes: jax.Array,
    inverse_scale: jax.typing.ArrayLike,
) -> jax.Array:
    """A start (n, width) with the columns of `previous_u` over its first.

    Columns of `previous_u` that are zero or rounding beside the largest stand for no direction.
    There the start stays as it is.

    Args:
      start: (n, width).
      previous_u: (n, capacity).
      sizes: The largest magnitude in each of its columns, (capacity,).
      inverse_scale: What `previous_u` is multiplied by, so that A times it is not too large.
    """
    covered = min(start.shape[1], previous_u.shape[1])
    unit_u = previous_u[:, :covered].astype(start.dtype) * inverse_scale
    least = _ROUNDING * float(np.finfo(start.dtype).eps)
    stands = (sizes[:covered] * inverse_scale > least)[None]
    first = jnp.where(stands, unit_u, start[:, :covered])
    return jnp.concatenate([first, start[:, covered:]], axis=1)
