"""CAME as an Optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class _Leaf(NamedTuple):
    """State of one leaf. A factored leaf has no `nu`; a dense one has nothing but `mu` and `nu`."""

    mu: jax.Array  # running average of the clipped updates, with the leaf's shape
    row: jax.Array | None = None  # second moment: means over the last axis
    column: jax.Array | None = None  # second moment: means over the last axis but one
    instability_row: jax.Array | None = None  # the same of an update's squared distance from mu
    instability_column: jax.Array | None = None
    nu: jax.Array | None = None  # second moment with the leaf's shape


class ScaleByCameState(NamedTuple):
    """State of `scale_by_came`: float32, or float64 for float64 parameters."""

    leaves: Any  # a tree like the parameters, with a `_Leaf` for each


def scale_by_came(
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    eps: float = 1e-30,
    eps_instability: float = 1e-16,
    clipping_threshold: float = 1.0,
) -> optax.GradientTransformation:
    """Scales gradients by a rank-1 second moment, and their average by its rank-1 instability.

    Leaves of two or more axes are factored over the last two. The second moment of others is dense,
    and their average is the update. There is no bias correction. A leaf is clipped as a whole.

    Args:
      b1: Decay of the running average of updates.
      b2: Decay of the second moment.
      b3: Decay of the instability.
      eps: Added to the squared gradient.
      eps_instability: Added to the squared distance of an update from the average.
      clipping_threshold: Largest root mean square of an update before it is averaged.

    Source: Luo et al. (2023), CAME: Confidence-guided Adaptive Memory Efficient Optimization,
    Algorithm 2; where it leaves something open, the authors' package `came-pytorch`.
    """

    def start(param: jax.Array) -> _Leaf:
        dtype = jnp.promote_types(param.dtype, jnp.float32)
        mu = jnp.zeros(param.shape, dtype)
        if param.ndim < 2:
            return _Leaf(mu, nu=mu)
        row = jnp.zeros(param.shape[:-1], dtype)
        column = jnp.zeros((*param.shape[:-2], *param.shape[-1:]), dtype)
        return _Leaf(mu, row, column, row, column)

    def step(grad: jax.Array, state: _Leaf) -> tuple[jax.Array, _Leaf]:
        dtype = grad.dtype
        grad = grad.astype(state.mu.dtype)
        square = grad**2 + eps
        if state.nu is not None:
            nu = _average(state.nu, square, b2)
            mu = _average(state.mu, _clip(grad * nu**-0.5, clipping_threshold), b1)
            return mu.astype(dtype), _Leaf(mu, nu=nu)
        row = _average(state.row, square.mean(axis=-1), b2)
        column = _average(state.column, square.mean(axis=-2), b2)
        update = _clip(_divide_by_root(grad, row, column), clipping_threshold)
        mu = _average(state.mu, update, b1)
        instability = (update - mu) ** 2 + eps_instability
        instability_row = _average(state.instability_row, instability.mean(axis=-1), b3)
        instability_column = _average(state.instability_column, instability.mean(axis=-2), b3)
        scaled = _divide_by_root(mu, instability_row, instability_column)
        return scaled.astype(dtype), _Leaf(mu, row, column, instability_row, instability_column)

    def init(params: optax.Params) -> ScaleByCameState:
        return ScaleByCameState(jax.tree.map(start, params))

    def update(
        grads: optax.Updates, state: ScaleByCameState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCameState]:
        del params
        leaves, treedef = jax.tree.flatten(grads)
        stepped = [
            step(grad, leaf)
            for grad, leaf in zip(leaves, treedef.flatten_up_to(state.leaves), strict=True)
        ]
        updates, new = zip(*stepped, strict=True)
        return treedef.unflatten(updates), ScaleByCameState(treedef.unflatten(new))

    return optax.GradientTransformation(init, update)


def _average(old: jax.Array, new: jax.Array, decay: float) -> jax.Array:
    return (decay * old + (1 - decay) * new).astype(old.dtype)


def _clip(update: jax.Array, threshold: float) -> jax.Array:
    return update / jnp.maximum(1, jnp.sqrt(jnp.mean(update**2)) / threshold)


def _divide_by_root(x: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Divides by the root of the rank-1 matrix with these means of rows and of columns."""
    relative = row / row.mean(axis=-1, keepdims=True)
    return x * relative[..., :, None] ** -0.5 * column[..., None, :] ** -0.5
