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
    of_scale: Callable[[jax.Array], jax.Array]  # s, where G is divided by it -> what the target is
    drift_decay: Callable[[Any], Any]  # b2 -> how a distance of targets shrinks over one average
    # Whether squares of targets overflow at gradients that are merely 1e9 times those before, so
    # that the scale has to follow the gradient too, which is one more reading of it.
    scale_follows_gradient: bool


def _identity(x: Any) -> Any:
    return x


APPROXIMATIONS: dict[str, Approximation] = {
    "moment": Approximation(
        of_moment=_identity,
        to_moment=_identity,
        root=jnp.sqrt,
        of_scale=jnp.square,
        drift_decay=_identity,
        scale_follows_gradient=True,
    ),
    "root": Approximation(
        of_moment=jnp.sqrt,
        to_moment=jnp.square,
        root=_identity,
        of_scale=_identity,
        drift_decay=jnp.sqrt,  # x -> sqrt(b2 x^2 + c) shrinks a distance by that at least
        scale_follows_gradient=False,
    ),
}
