"""The steps that benchmarks compile."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from examples.gpt2.model import loss


def update_step(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """An optimizer's step: from parameters, state and gradients to new parameters and state."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def training_step(
    graph: nnx.GraphDef, tx: optax.GradientTransformation
) -> Callable[[Any, Any, jax.Array], tuple[Any, Any]]:
    """A step of training: from parameters, state and tokens to new parameters and state.

    Args:
      graph: The structure of a GPT-2, as of `nnx.split`.
      tx: The optimizer.
    """
    update = update_step(tx)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        return update(params, state, grads)

    return step


def lowered_step(
    step: Callable[..., Any], tx: optax.GradientTransformation, params: Any, operands: Any
) -> jax.stages.Lowered:
    """A step over donated parameters and state; they and operands are arrays or shapes."""
    state = jax.eval_shape(tx.init, params)
    return jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, operands)


def placed(shapes: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes of arrays that each device of a mesh has as a whole."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
