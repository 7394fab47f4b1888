"""What the product q u^T stands for: the second moment V, or an elementwise function of it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Approximate: TypeAlias = Literal["moment", "root"]


class Approximation(NamedTuple):
    """How V and the target, an elementwise function of V that is factored in its place, relate."""

    of_moment: Callable[[Any], Any]  # V -> target
    to_moment: Callable[[jax.Array], jax.Array]  # target -> V
    root: Callable[[jax.Array], jax.Array]  # target -> sqrt(V)
    of_scale: Callable[[jax.Array], jax.Array]  # divisor of G -> divisor of the target
    # target, G, b2 -> the target of b2 V + (1 - b2) G^2; of the root at any scale of the two
    average: Callable[[jax.Array, jax.Array, Any], jax.Array]
    drift_decay: Callable[[Any], Any]  # b2 -> how a distance of targets shrinks over one average
    # Whether squares of targets overflow at gradients that are merely 1e9 times those before, so
    # that the scale has to follow the gradient too, which is one more reading of it.
    scale_follows_gradient: bool


def _identity(x: Any) -> Any:
    return x


def average_of_moments(moment: jax.Array, grad: jax.Array, b2: Any) -> jax.Array:
    """b2 V + (1 - b2) G^2, elementwise."""
    return moment * b2 + jnp.square(grad) * (1 - b2)


def _average_of_roots(root: jax.Array, grad: jax.Array, b2: Any) -> jax.Array:
    largest = jnp.maximum(root, jnp.abs(grad))
    unit = jnp.where(largest == 0, 1, largest)
    return largest * jnp.sqrt(average_of_moments(jnp.square(root / unit), grad / unit, b2))


APPROXIMATIONS: dict[str, Approximation] = {
    "moment": Approximation(
        of_moment=_identity,
        to_moment=_identity,
        root=jnp.sqrt,
        of_scale=jnp.square,
        average=average_of_moments,
        drift_decay=_identity,
        scale_follows_gradient=True,
    ),
    "root": Approximation(
        of_moment=jnp.sqrt,
        to_moment=jnp.square,
        root=_identity,
        of_scale=_identity,
        average=_average_of_roots,
        drift_decay=jnp.sqrt,  # x -> sqrt(b2 x^2 + c) shrinks a distance by that at least
        scale_follows_gradient=False,
    ),
}
