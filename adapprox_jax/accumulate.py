"""accumulate: the mean gradient of several micro-batches, of 16 bits in three bytes a number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.linalg.split_floats import REMAINDERS, joined, parts
from adapprox_jax.params.leaves import Leaves, fitting


def accumulate(
    function: Callable[[Any, Any], tuple[Any, Any]], params: Any, batches: Any
) -> tuple[Any, Any]:
    """The value and gradients of a large batch, from micro-batches one after the other.

    `optax.MultiSteps` keeps a float32 gradient between micro-batches. Here a `jax.lax.scan` in one
    step keeps nothing after the step. Within it, gradients of 16 bits are added up in bfloat16 with
    remainders of 8 bits, so that each addition is rounded to 16 significant bits. Gradients of
    float32 are added up in float32. Call it inside `jax.jit`.

    Args:
      function: From parameters and a micro-batch to a value and gradients, as
        `jax.value_and_grad(loss)` gives them. The value may be a tree of floating-point arrays,
        as with `has_aux`.
      params: Parameters, real, of 16 bits or more.
      batches: A tree of arrays with the micro-batches along a first axis. Put a list of them
        together by `jax.tree.map(lambda *x: jnp.stack(x), *batches)`.

    Returns:
      The means of value and gradients over the micro-batches, of the types that `function` gives.

    Raises:
      ValueError: the arrays of `batches` have first axes of different lengths, or of none, or
        `function` is none, or gives no such pair.
      TypeError: a part of the value, or a gradient, is no real floating-point array.

    Examples:
      >>> import jax, jax.numpy as jnp, adapprox_jax
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.square(x @ w))
      >>> batches = jnp.ones((4, 2, 3))  # four micro-batches of two
      >>> value, gradients = adapprox_jax.accumulate(jax.value_and_grad(loss), jnp.ones(3), batches)
      >>> print(value, gradients)
      9.0 [6. 6. 6.]

    Source: FlashOptim (2602.23349) for the remainders.
    """
    if not callable(function):
        raise ValueError(
            f"function is {function!r}; allowed: a function of parameters and a batch."
        )
    count = _count_of(batches)
    one = jax.tree.map(lambda x: x[0], batches)
    of_params = Leaves.of(params, "parameter")
    found = jax.eval_shape(function, params, one)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(
            f"function gave a {type(found).__name__}; allowed: a pair of value and gradients, as"
            " jax.value_and_grad(loss) gives it."
        )
    value_like, gradients_like = found
    Leaves.of(value_like, "value")
    like = fitting(gradients_like, of_params, "gradient")

    def add(sums: Any, batch: Any) -> tuple[Any, None]:
        total, kept = sums
        value, gradients = function(params, batch)
        total = jax.tree.map(lambda x, new: x + jnp.asarray(new, x.dtype) / count, total, value)
        kept = [
            _stored(_sum_of(pair) + x.astype(wide_dtype(x.dtype)) / count, x.dtype)
            for pair, x in zip(kept, Leaves.of(gradients).arrays, strict=True)
        ]
        return (total, kept), None

    # Like what is added to them, so that under `jax.shard_map` they vary where that does.
    total = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x.dtype)), value_like)
    kept = [_stored(jnp.zeros_like(x, wide_dtype(x.dtype)), x.dtype) for x in like.arrays]
    (total, kept), _ = jax.lax.scan(add, (total, kept), batches)
    value = jax.tree.map(lambda x, like: x.astype(like.dtype), total, value_like)
    means = [_sum_of(pair).astype(x.dtype) for pair, x in zip(kept, like.arrays, strict=True)]
    return value, like.filled(means)


def _stored(total: jax.Array, dtype: np.dtype) -> tuple[jax.Array, ...]:
    """A sum of gradients of a type, as it is kept: in two parts where they have 16 bits."""
    return parts(total, jnp.bfloat16, REMAINDERS[24]) if dtype.itemsize == 2 else (total,)


def _sum_of(kept: tuple[jax.Array, ...]) -> jax.Array:
    return joined(*kept) if len(kept) == 2 else kept[0]


def _count_of(batches: Any) -> int:
    """The number of micro-batches. Raises ValueError where arrays disagree, or there is none."""
    leaves = Leaves.of(batches)
    lengths = [np.shape(x)[0] if np.ndim(x) else "none" for x in leaves.arrays]
    if len(set(lengths)) != 1 or lengths[0] in (0, "none"):
        given = [f"{length} at {name}" for name, length in zip(leaves.names, lengths, strict=True)]
        raise ValueError(
            f"batches have first axes of lengths {', '.join(given) or 'none'}; allowed: one length"
            " of at least 1, the number of micro-batches."
        )
    return int(lengths[0])
