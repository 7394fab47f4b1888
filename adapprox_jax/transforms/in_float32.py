"""What a wrapped optimizer does to 16-bit weights, computed in float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.params.leaves import Leaves, fitting


def stepped(
    tx: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    leaves: Leaves,
    weights: Sequence[jax.Array],
    extra_args: dict[str, Any],
) -> tuple[list[jax.Array], optax.OptState]:
    """The weights after a step of an optimizer, float32, and its state.

    Args:
      tx: The optimizer.
      updates: Gradients.
      state: Of the optimizer.
      leaves: The parameters.
      weights: Their values in float32.
      extra_args: Of the optimizer's update.

    Raises:
      ValueError: Gradients or updates do not fit the parameters.
      TypeError: A gradient or an update is no real floating-point array.
    """
    gradients = fitting(updates, leaves, "gradient")
    wide = gradients.filled([x.astype(jnp.float32) for x in gradients.arrays])
    steps, state = tx.update(wide, state, leaves.filled(weights), **extra_args)
    moved = zip(weights, fitting(steps, leaves, "wrapped optimizer's update").arrays, strict=True)
    return [weight + step.astype(jnp.float32) for weight, step in moved], state


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """What takes one 16-bit array to another in `optax.apply_updates`, which adds in float32."""
    # Infinity less infinity is not a number.
    return jnp.where(new == old, 0, new.astype(jnp.float32) - old.astype(jnp.float32))


def weights_of(params: optax.Params, allowed: Sequence[np.dtype]) -> Leaves:
    """The leaves of weights. Raises ValueError unless all have one of the types allowed."""
    leaves = Leaves.of(params, "weight")
    for name, array in zip(leaves.names, leaves.arrays, strict=True):
        if array.dtype not in allowed:
            expected = " or ".join(dtype.name for dtype in allowed)
            raise ValueError(
                f"{name}: the weight has type {array.dtype.name}; expected {expected}. Begin with"
                " adapprox_jax.split or a cast, and add updates by optax.apply_updates."
            )
    return leaves
