"""What a step changes, one step of training, and the validation loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.gpt2 import model as gpt


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


def train_step(
    loss: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    accumulate: int,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, jax.Array]]:
    """Returns the jitted step: state and batch to new state and loss.

    A batch is an array or a tree of them, the batch's axis first; the loss is a mean over it, of
    parameters and batch. Accumulation is a scan over parts of the batch inside of the step, not
    `optax.MultiSteps`: no gradient is kept between steps, checkpoints do not grow, and the
    optimizer runs once a batch. The old state is donated. The new one lies as `shardings` say, None
    for one device.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss)(state.params, part)
            return jax.tree.map(jnp.add, total, found), None

        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(state.params, batch)
        else:
            # Each part has rows of every device.
            parts = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0), batch
            )
            zero = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zero, parts)
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    out_shardings = None if shardings is None else (shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=out_shardings)


def token_loss(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the mean loss of the parameters of a model, over tokens (batch, context + 1)."""
    return lambda params, tokens_BxL: gpt.loss(nnx.merge(graphdef, params), tokens_BxL)


def evaluation(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the jitted mean loss over batches of tokens (batches, batch, context + 1)."""
    loss = token_loss(graphdef)

    def mean_loss(params: Any, tokens_NxBxL: jax.Array) -> jax.Array:
        return jax.lax.map(lambda tokens_BxL: loss(params, tokens_BxL), tokens_NxBxL).mean()

    return jax.jit(mean_loss)
