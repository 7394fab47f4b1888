"""Functions of the step or of an error that settings may be."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import DECAY, FINITE, POSITIVE, at_step, require

RankGrowth: TypeAlias = Callable[[jax.Array], jax.typing.ArrayLike]


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

    Examples:
      >>> import adapprox_jax
      >>> int(adapprox_jax.sigmoid_growth()(0.5))
      175

    Source: paper, equation of f(xi). As printed it is negative everywhere; this is the form that
    fits the text (docs/algorithm.md, 1).
    """
    require("eta", eta, *POSITIVE)
    require("omega", omega, lambda x: x < 0, "a number below 0")
    require("phi", phi, *FINITE)
    require("tau", tau, *FINITE)

    def growth(error: jax.Array) -> jax.Array:
        sigmoid = jax.nn.sigmoid(phi - omega * jnp.asarray(error))
        return jnp.maximum(jnp.floor(eta * sigmoid + tau), 0).astype(jnp.int32)

    return growth


# One function for all optimizers that name none, so that they share what is compiled.
PAPERS_GROWTH = sigmoid_growth()


def increasing_decay(exponent: float = 0.8) -> Callable[[jax.Array], jax.Array]:
    """A decay of the second moment that begins at 0 and rises towards 1: 1 - t^-exponent.

    The average is over a growing part of the past, about the last t^exponent gradients, and needs
    no bias correction: the first second moment is the first gradient's square. Under
    `optax.inject_hyperparams` name b2 in `static_args`, too: Optax counts schedules from 0.

    Args:
      exponent: Above 0 and below 1.

    Returns:
      A function from the step t, from 1, to the decay: a `b2`.

    Raises:
      ValueError: exponent is out of range.

    Examples:
      >>> import adapprox_jax
      >>> b2 = adapprox_jax.increasing_decay()
      >>> [round(float(b2(t)), 3) for t in (1, 10, 1000, 100000)]
      [0.0, 0.842, 0.996, 1.0]

    Source: Shazeer and Stern, 2018, "Adafactor" (1804.04235), section 7.2.
    """
    require("exponent", exponent, lambda x: 0 < x < 1, "a number above 0 and below 1")

    def decay(step: jax.Array) -> jax.Array:
        # Where Optax counts from 0 the power is infinite.
        return 1 - jnp.maximum(jnp.asarray(step, float), 1) ** -exponent

    return decay


def momentum_by_rate(
    learning_rate: optax.ScalarOrSchedule, highest: float
) -> Callable[[jax.Array], jax.Array]:
    """A decay of the average of gradients that suits a rate: 1 - |rate| / 0.08, within bounds.

    A gradient says something about the next step until the weights have moved some distance. So the
    smaller the steps, the more of the past is worth an average. Peak rates are small in long runs
    and of large models, and every rate is at the end of its schedule.

    Args:
      learning_rate: Of matrices whose updates have a root mean square of 0.2; a number, or a
        schedule from the step, from 0.
      highest: The longest memory, from 0.8 and below 1. The shortest one is 0.8.

    Returns:
      A function from the step t, from 1, to the decay: a `b1`.

    Source: ours (docs/orthogonal.md).
    """

    def decay(step: jax.Array) -> jax.Array:
        rate = at_step("learning_rate", learning_rate, step - 1, *FINITE)
        return jnp.clip(1 - jnp.abs(jnp.asarray(rate, jnp.float32)) / 0.08, 0.8, highest)

    return decay


def begins_at_zero(b2: optax.ScalarOrSchedule) -> bool:
    """Whether the first second moment is the first gradient's square, and so is not too small.

    Of a function that depends on something traced that is assumed.
    """
    if not callable(b2):
        return False
    with jax.ensure_compile_time_eval():
        first = at_step("b2", b2, jnp.asarray(1), *DECAY)
    return isinstance(first, jax.core.Tracer) or abs(float(first)) < 1e-6
