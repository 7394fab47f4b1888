"""stochastic_rounding: weights in bfloat16 that keep slow changes without further bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.argument_checks import check_state, require_integer, require_transformation
from adapprox_jax.linalg.rounding import random_words, round_stochastically
from adapprox_jax.transforms.in_float32 import difference, stepped, weights_of

_BFLOAT16 = np.dtype(jnp.bfloat16)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      step: Updates so far, int32 scalar.
      inner_state: Of the wrapped optimizer.
    """

    step: jax.Array
    inner_state: optax.OptState


def stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 weights with any optimizer, rounding each new weight up or down by chance.

    Rounded to the nearest, a weight that a step changes by less than a 512th stands still. Here the
    odds of up and down are such that the expected weight is the exact one. `split_weights` has no
    such noise, for one byte more.

    Under `jax.vmap` over states all members are rounded alike.

    Args:
      tx: Any Optax transformation. It sees float32 weights and gradients.
      seed: Of the rounding, of 32 bits: the same seed gives the same run.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `StochasticRoundingState`. Its updates
      are float32 and must be added by `optax.apply_updates`, unchanged.

    Raises:
      ValueError: an argument is out of range, or, from `update`, weights are not bfloat16 or `tx`
        changes shapes.
      TypeError: a weight or a gradient is no real floating-point array.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.stochastic_rounding(optax.sgd(1e-3))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> updates, state = tx.update(jnp.ones_like(params), tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> round(float(params.astype(jnp.float32).mean()), 3)
      0.999

    Source: "Revisiting BFloat16 Training" (2010.06192).
    """
    require_transformation("tx", tx)
    require_integer("seed", seed, 0, 2**32 - 1)
    inner = optax.with_extra_args_support(tx)
    spread = jnp.uint32(seed * 0x9E3779B1 % 2**32)  # seeds in a row must not share their noise

    def init(params: optax.Params) -> StochasticRoundingState:
        leaves = weights_of(params, (_BFLOAT16, np.dtype(np.float32)))
        weights = [array.astype(jnp.float32) for array in leaves.arrays]
        return StochasticRoundingState(jnp.zeros([], jnp.int32), inner.init(leaves.filled(weights)))

    def update(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        if params is None:
            raise ValueError("params is None; allowed: the weights, in bfloat16.")
        check_state(state, StochasticRoundingState, "stochastic_rounding")
        leaves = weights_of(params, (_BFLOAT16,))
        weights = [array.astype(jnp.float32) for array in leaves.arrays]
        new, inner_state = stepped(inner, updates, state.inner_state, leaves, weights, extra_args)
        first = state.step.astype(jnp.uint32) * jnp.uint32(len(new)) + spread
        steps = []
        for i, (wide, array) in enumerate(zip(new, leaves.arrays, strict=True)):
            words = random_words(wide.shape, first + jnp.uint32(i))
            bits = (words >> 16).astype(jnp.uint16)
            steps.append(difference(round_stochastically(wide, bits), array))
        step = optax.safe_increment(state.step)
        return leaves.filled(steps), StochasticRoundingState(step, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
