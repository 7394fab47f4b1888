"""What a rank follows: how many columns an error asks for, and which error is low enough."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from adapprox_jax.argument_checks import require
from adapprox_jax.settings import RankGrowth


def sigmoid_growth(
    eta: float = 200.0, omega: float = -10.0, phi: float = -2.5, tau: float = -9.0
) -> RankGrowth:
    """The paper's f: how many columns to add at an approximation error.

    f(xi) = floor(eta / (1 + exp(omega xi - phi)) + tau): slow at first, then faster, then flat.
    With the defaults 6 at an error of 0, 175 at 0.5 and 190 at 1.

    Args:
      eta: Upper bound of the range, above 0.
      omega: Rate of change, below 0.
      phi: Offset along the error.
      tau: Offset of the value.

    Returns:
      A function from the error (scalar array) to an int32 number of columns, never negative.

    Raises:
      ValueError: eta or omega has the wrong sign.

    Example:
      >>> import adapprox_jax
      >>> int(adapprox_jax.sigmoid_growth()(0.5))
      175

    Source: paper, equation of f(xi). As printed it is negative everywhere; this is the form that
    fits the text (docs/algorithm.md, 1).
    """
    require("eta", eta, lambda x: x > 0, "a number above 0")
    require("omega", omega, lambda x: x < 0, "a number below 0")

    def growth(error: jax.Array) -> jax.Array:
        sigmoid = jax.nn.sigmoid(phi - omega * jnp.asarray(error))
        return jnp.maximum(jnp.floor(eta * sigmoid + tau), 0).astype(jnp.int32)

    return growth


# One function for all optimizers that name none, so that they share what is compiled.
PAPERS_GROWTH = sigmoid_growth()


def sampling_threshold(b2: float, at_least: float) -> Callable[[jax.Array], jax.Array]:
    """An error threshold that asks for no more than an average over the steps so far can know.

    max(at_least, h^(-1/2)) with h = (1 - b2^t) / (1 - b2), the gradients that the average at step t
    is made of: as an estimate of the expected squared gradient it is that far off itself. The first
    second moment is one squared gradient, of nearly full rank, and forgotten soon; with this its
    rank stays low. With `rank_margin` at 0 it would stay low ever after: see docs/memory.md.

    Args:
      b2: Decay of the second moment, in [0, 1).
      at_least: The threshold late in training, at least 0.

    Returns:
      A function from the step t, from 1, to the threshold: an `error_threshold`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import adapprox_jax
      >>> threshold = adapprox_jax.sampling_threshold(b2=0.999, at_least=0.05)
      >>> [round(float(threshold(t)), 2) for t in (1, 10, 100, 10000)]
      [1.0, 0.32, 0.1, 0.05]

    Source: ours (docs/memory.md).
    """
    require("b2", b2, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("at_least", at_least, lambda x: x >= 0, "a number of at least 0")

    def threshold(step: jax.Array) -> jax.Array:
        # From 1: `optax.inject_hyperparams` counts from 0.
        t = jnp.maximum(jnp.asarray(step, jnp.float32), 1)
        gradients = (1 - jnp.power(b2, t)) / (1 - b2)
        return jnp.maximum(at_least, gradients**-0.5)

    return threshold
