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
    graphdef: nnx.GraphDef, tx: optax.GradientTransformation, accumulate: int
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """Returns the jitted step: state and tokens (batch, context + 1) to new state and loss.

    Accumulation is a scan over parts of the batch inside of the step, not `optax.MultiSteps`: no
    gradient is kept between steps, checkpoints do not grow, and the optimizer runs once a batch.
    The old state is donated.
    """

    def loss(params: Any, tokens_BxL: jax.Array) -> jax.Array:
        return gpt.loss(nnx.merge(graphdef, params), tokens_BxL)

    def step(state: TrainState, tokens_BxL: jax.Array) -> tuple[TrainState, jax.Array]:
        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            part = jax.value_and_grad(loss)(state.params, tokens)
            return jax.tree.map(jnp.add, total, part), None

        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(state.params, tokens_BxL)
        else:
            parts = tokens_BxL.reshape(accumulate, -1, tokens_BxL.shape[-1])
            zero = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zero, parts)
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


def evaluation(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the jitted mean loss over batches of tokens (batches, batch, context + 1)."""

    def mean_loss(params: Any, tokens_NxBxL: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return jax.lax.map(lambda tokens_BxL: gpt.loss(model, tokens_BxL), tokens_NxBxL).mean()

    return jax.jit(mean_loss)
