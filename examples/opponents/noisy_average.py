"""The running average in full precision with the rounding noise of codes: a control of codes.

It tells whether an average in few bits ends at another loss because of the noise, or because of
something else that the codes do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adapprox_jax


class NoisyAverageState(NamedTuple):
    """The step and the averages, float32 in the parameters' shapes."""

    count: jax.Array
    mu: Any


def noisy_ema(decay: float, bits: int, seed: int = 0) -> optax.GradientTransformation:
    """`optax.ema` without debiasing, whose stored average of a matrix is as noisy as in codes.

    What is added is the error that stochastic rounding to codes would make, with a random sign of
    its own for each number: as large everywhere, but not on the codes' lattice.

    Args:
      decay: Of the average, in [0, 1).
      bits: Of the codes, as in `adapprox_jax.quantize`.
      seed: Of the noise.

    Returns:
      An `optax.GradientTransformation`.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = noisy_ema(0.9, 4)
      >>> grads = jnp.ones((64, 64))
      >>> updates, state = tx.update(grads, tx.init(grads))
    """

    def init(params: optax.Params) -> NoisyAverageState:
        mu = optax.tree.zeros_like(params, dtype=jnp.float32)
        return NoisyAverageState(jnp.zeros([], jnp.int32), mu)

    def update(
        updates: optax.Updates, state: NoisyAverageState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NoisyAverageState]:
        del params
        average = optax.tree.update_moment(updates, state.mu, decay, 1)
        leaves, treedef = jax.tree.flatten(average)
        step = jax.random.fold_in(jax.random.key(seed), state.count)
        keys = treedef.unflatten(list(jax.random.split(step, len(leaves))))
        mu = jax.tree.map(
            lambda x, key: x + _rounding_noise(x, bits, key) if x.ndim > 1 else x, average, keys
        )
        return average, NoisyAverageState(optax.safe_increment(state.count), mu)

    return optax.GradientTransformation(init, update)


def _rounding_noise(x: jax.Array, bits: int, key: jax.Array) -> jax.Array:
    """The error of rounding an array (..., n) stochastically to codes, with random signs."""
    of_rounding, of_sign = jax.random.split(key)
    codes = adapprox_jax.quantize(x, bits, jax.random.uniform(of_rounding, x.shape))
    error = adapprox_jax.dequantize(*codes, x.shape[-1]) - x
    return error * jax.random.rademacher(of_sign, x.shape, x.dtype)
