"""CAME as an Optax transformation: one of the optimizers of the memory table."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.validation import require


class ScaleByCameState(NamedTuple):
    """State of `scale_by_came`: trees with the structure of the parameters.

    A leaf is factored or dense, and the fields of the other kind hold one zero for it, as in
    Optax's `FactoredState`. All are float32, or float64 for float64 parameters.
    """

    mu: Any  # running average of the clipped updates, with the leaf's shape
    row: Any  # second moment: means over the last axis
    column: Any  # second moment: means over the last axis but one
    instability_row: Any  # the same of the squared distance of an update from the average
    instability_column: Any
    nu: Any  # second moment of the dense leaves, with the leaf's shape


class _LeafState(NamedTuple):
    mu: jax.Array
    row: jax.Array
    column: jax.Array
    instability_row: jax.Array
    instability_column: jax.Array
    nu: jax.Array


def scale_by_came(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.9999,
    eps: jax.typing.ArrayLike = 1e-30,
    eps_instability: jax.typing.ArrayLike = 1e-16,
    clipping_threshold: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformation:
    """Scales gradients by a rank-1 second moment, and their average by its rank-1 instability.

    Leaves of two or more axes are factored over the last two; of others the second moment is dense
    and the average is emitted as it is. There is no bias correction. A leaf is clipped as a whole.

    Args:
      b1: Decay of the running average of updates, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      b3: Decay of the instability, in [0, 1).
      eps: Added to the squared gradient, above 0.
      eps_instability: Added to the squared distance of an update from the average, above 0.
      clipping_threshold: Largest root mean square of an update before it is averaged, above 0.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByCameState`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from examples.opponents.came import scale_by_came
      >>> state = scale_by_came().init({"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)})
      >>> state.row["kernel"].shape, state.column["kernel"].shape, state.nu["bias"].shape
      ((256,), (512,), (512,))

    Source: Luo et al. (2023), CAME: Confidence-guided Adaptive Memory Efficient Optimization,
    Algorithm 2; where it leaves something open, the authors' package `came-pytorch`.
    """
    for name, decay in (("b1", b1), ("b2", b2), ("b3", b3)):
        require(name, decay, lambda x: 0 <= x < 1, "a number in [0, 1)")
    for name, value in (
        ("eps", eps),
        ("eps_instability", eps_instability),
        ("clipping_threshold", clipping_threshold),
    ):
        require(name, value, lambda x: x > 0, "a number above 0")

    def start(param: jax.Array) -> _LeafState:
        dtype = jnp.promote_types(param.dtype, jnp.float32)
        whole, none = param.shape, (1,)
        row, column = param.shape[:-1], (*param.shape[:-2], *param.shape[-1:])
        dense = (whole, none, none, none, none, whole)
        factored = (whole, row, column, row, column, none)
        shapes = factored if param.ndim >= 2 else dense
        return _LeafState(*(jnp.zeros(shape, dtype) for shape in shapes))

    def step(grad: jax.Array, state: _LeafState) -> tuple[jax.Array, _LeafState]:
        dtype = grad.dtype
        grad = grad.astype(state.mu.dtype)
        square = grad**2 + eps
        if grad.ndim < 2:
            nu = _average(state.nu, square, b2)
            mu = _average(state.mu, _clip(grad * nu**-0.5, clipping_threshold), b1)
            return mu.astype(dtype), state._replace(mu=mu, nu=nu)
        row = _average(state.row, square.mean(axis=-1), b2)
        column = _average(state.column, square.mean(axis=-2), b2)
        update = _clip(_divide_by_root(grad, row, column), clipping_threshold)
        mu = _average(state.mu, update, b1)
        instability = (update - mu) ** 2 + eps_instability
        instability_row = _average(state.instability_row, instability.mean(axis=-1), b3)
        instability_column = _average(state.instability_column, instability.mean(axis=-2), b3)
        scaled = _divide_by_root(mu, instability_row, instability_column)
        return scaled.astype(dtype), _LeafState(
            mu, row, column, instability_row, instability_column, state.nu
        )

    def init(params: optax.Params) -> ScaleByCameState:
        leaves, treedef = jax.tree.flatten(params)
        columns = _columns([start(leaf) for leaf in leaves])
        return ScaleByCameState(*map(treedef.unflatten, columns))

    def update(
        updates: optax.Updates, state: ScaleByCameState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCameState]:
        del params
        grads, treedef = jax.tree.flatten(updates)
        fields = zip(*map(treedef.flatten_up_to, state), strict=True)
        results = [step(g, _LeafState(*f)) for g, f in zip(grads, fields, strict=True)]
        columns = _columns([new for _, new in results])
        scaled = treedef.unflatten([scaled for scaled, _ in results])
        return scaled, ScaleByCameState(*map(treedef.unflatten, columns))

    return optax.GradientTransformation(init, update)


def came(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.9999,
    eps: jax.typing.ArrayLike = 1e-30,
    eps_instability: jax.typing.ArrayLike = 1e-16,
    clipping_threshold: jax.typing.ArrayLike = 1.0,
    weight_decay: jax.typing.ArrayLike = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """CAME with decoupled weight decay: `scale_by_came`, decay, learning rate.

    Args:
      learning_rate: A number or a schedule.
      b1: This and what follows is explained at `scale_by_came`.
      b2: Decay of the second moment.
      b3: Decay of the instability.
      eps: Added to the squared gradient.
      eps_instability: Added to the squared distance of an update from the average.
      clipping_threshold: Largest root mean square of an update before it is averaged.
      weight_decay: Decoupled weight decay, multiplied by the learning rate; at least 0.
      mask: Which leaves decay: a tree of booleans, or a function from the parameters to it.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: an argument is out of range.

    Source: as of `scale_by_came`.
    """
    require("weight_decay", weight_decay, lambda x: x >= 0, "a number of at least 0")
    return optax.chain(
        scale_by_came(b1, b2, b3, eps, eps_instability, clipping_threshold),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _average(old: jax.Array, new: jax.Array, decay: jax.typing.ArrayLike) -> jax.Array:
    return (decay * old + (1 - decay) * new).astype(old.dtype)


def _clip(update: jax.Array, threshold: jax.typing.ArrayLike) -> jax.Array:
    return update / jnp.maximum(1, jnp.sqrt(jnp.mean(update**2)) / threshold)


def _divide_by_root(x: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Divides by the root of the matrix of rank 1 with these means of rows and of columns."""
    relative = row / row.mean(axis=-1, keepdims=True)
    return x * relative[..., :, None] ** -0.5 * column[..., None, :] ** -0.5


def _columns(states: list[_LeafState]) -> list[list[jax.Array]]:
    return [[getattr(state, name) for state in states] for name in _LeafState._fields]
