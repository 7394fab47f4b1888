"""What the product q u^T stands for: the second moment V, or its elementwise root."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Approximate: TypeAlias = Literal["moment", "root"]


class Approximation(NamedTuple):
    """How V and the target, the function of V that is factored, relate."""

    of_moment: Callable[[Any], Any]  # V -> target
    root: Callable[[jax.Array], jax.Array]  # target -> sqrt(V)
    of_scale: Callable[[jax.Array], jax.Array]  # divisor of G -> divisor of the target
    # target, G, b2 -> the target of b2 V + (1 - b2) G^2
    average: Callable[[jax.Array, jax.Array, Any], jax.Array]
    # Whether entries of the target are squares of gradients: to be divided by a scale that follows
    # the gradient, which is one more reading of it.
    is_square: bool


def _identity(x: Any) -> Any:
    return x


def average_of_moments(moment: jax.Array, grad: jax.Array, b2: Any) -> jax.Array:
    """b2 V + (1 - b2) G^2, elementwise."""
    return moment * b2 + jnp.square(grad) * (1 - b2)


def _average_of_roots(root: jax.Array, grad: jax.Array, b2: Any) -> jax.Array:
    """sqrt(b2 V + (1 - b2) G^2) from the root of V, which is not negative."""
    return hypotenuse(jnp.sqrt(b2) * root, jnp.sqrt(1 - b2) * jnp.abs(grad)).astype(root.dtype)


def hypotenuse(x: jax.Array, y: jax.Array) -> jax.Array:
    """sqrt(x^2 + y^2) of numbers that are not negative; no square overflows or vanishes."""
    larger, smaller = jnp.maximum(x, y), jnp.minimum(x, y)
    ratio = smaller / jnp.where(larger == 0, 1, larger)
    return larger * jnp.sqrt(1 + jnp.square(ratio))


APPROXIMATIONS: dict[str, Approximation] = {
    "moment": Approximation(
        of_moment=_identity,
        root=jnp.sqrt,
        of_scale=jnp.square,
        average=average_of_moments,
        is_square=True,
    ),
    "root": Approximation(
        of_moment=jnp.sqrt,
        root=_identity,
        of_scale=_identity,
        average=_average_of_roots,
        is_square=False,
    ),
}
