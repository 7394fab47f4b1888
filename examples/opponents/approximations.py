"""Adapprox with its second moment kept whole: what a way to approximate it would be worth.

At each step every matrix of the second moment is replaced by its best approximation of a kind and
a rank. This saves no memory. It tells what a factorization of that kind could reach, before anyone
writes one that is small and fast.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

Name = Literal["moment", "root", "fourth-root", "whitened-moment", "whitened-root"]
WHITENED_FLOOR = 0.05  # of a whitened second moment, where 1 is the mean of its row and column


class Kind(NamedTuple):
    """An elementwise function of V, which is approximated in its place, and the way back."""

    of_moment: Callable[[jax.Array], jax.Array]
    to_moment: Callable[[jax.Array], jax.Array]
    whitened: bool = False
    floor: float = 0.0  # of what is approximated


_MOMENT = Kind(lambda moment: moment, lambda target: target)
_ROOT = Kind(jnp.sqrt, jnp.square)
KINDS: dict[Name, Kind] = {
    "moment": _MOMENT,
    "root": _ROOT,
    "fourth-root": Kind(lambda moment: jnp.sqrt(jnp.sqrt(moment)), lambda target: target**4),
    "whitened-moment": _MOMENT._replace(whitened=True, floor=WHITENED_FLOOR),
    "whitened-root": _ROOT._replace(whitened=True),
}


class ApproximatedState(NamedTuple):
    """The step and the second moments, in the parameters' shapes."""

    count: jax.Array
    nu: Any


def scale_by_approximated_moment(
    b2: float, eps: float, approximate: Name, max_rank: int, min_dim_size_to_factor: int
) -> optax.GradientTransformation:
    """Divides gradients by the root of a second moment that is approximated at every step.

    Args:
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the root.
      approximate: Of `KINDS`: what is factored. The whitened ones are divided by the means of their
        rows and columns, which count as one of the ranks.
      max_rank: Rank of the approximation, at least 1, of a whitened one at least 2.
      min_dim_size_to_factor: Leaves with fewer rows or columns, or with other than two axes, are
        not approximated.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: There is no such kind, or the rank is too low.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_approximated_moment(0.999, 1e-8, "root", 8, 64)
      >>> grads = jnp.ones((64, 128))
      >>> updates, state = tx.update(grads, tx.init(grads))
    """
    if approximate not in KINDS:
        raise ValueError(f"approximate is {approximate!r}; allowed: {', '.join(get_args(Name))}.")
    kind = KINDS[approximate]
    if not isinstance(max_rank, int) or max_rank < 1 + kind.whitened:
        raise ValueError(
            f"max_rank is {max_rank}; allowed: an integer of at least {1 + kind.whitened}."
        )

    def approximated(moment: jax.Array) -> jax.Array:
        if moment.ndim != 2 or min(moment.shape) < min_dim_size_to_factor:
            return moment
        return approximate_moment(moment, kind, max_rank)

    def init(params: Any) -> ApproximatedState:
        return ApproximatedState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: ApproximatedState, params: Any = None) -> Any:
        del params
        moments = jax.tree.map(
            lambda nu, grad: b2 * nu + (1 - b2) * jnp.square(grad), state.nu, updates
        )
        scaled = jax.tree.map(lambda grad, nu: grad / (jnp.sqrt(nu) + eps), updates, moments)
        return scaled, ApproximatedState(state.count + 1, jax.tree.map(approximated, moments))

    return optax.GradientTransformation(init, update)


def approximate_moment(moment: jax.Array, kind: Kind, rank: int) -> jax.Array:
    """The best approximation of a second moment (m, n) of a kind and a rank, as a matrix (m, n)."""
    target = kind.of_moment(moment)
    if not kind.whitened:
        return kind.to_moment(jnp.maximum(truncated(target, rank), kind.floor))
    rows, columns = target.mean(axis=1, keepdims=True), target.mean(axis=0, keepdims=True)
    rank_one = rows * columns / jnp.maximum(target.mean(), jnp.finfo(target.dtype).tiny)
    known = rank_one > 0
    whitened = jnp.where(known, target / jnp.where(known, rank_one, 1), 0)
    return kind.to_moment(rank_one * jnp.maximum(truncated(whitened, rank - 1), kind.floor))


def truncated(matrix: jax.Array, rank: int) -> jax.Array:
    """The best approximation of a matrix in the Frobenius norm, by the smaller Gram matrix."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    unit = jnp.maximum(jnp.max(jnp.abs(short)), jnp.finfo(short.dtype).tiny)
    _, vectors = jnp.linalg.eigh((short / unit) @ (short / unit).T)
    best = vectors[:, -rank:]
    product = best @ (best.T @ short)
    return product if short is matrix else product.T
