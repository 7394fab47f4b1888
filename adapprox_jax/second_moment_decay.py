"""How the decay of a second moment may change over the steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import at_step, require


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

    Example:
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


def begins_at_zero(b2: optax.ScalarOrSchedule) -> bool:
    """Whether the first second moment is the first gradient's square, and so is not too small."""
    if not callable(b2):
        return False
    with jax.ensure_compile_time_eval():
        return abs(float(at_step("b2", b2, jnp.asarray(1)))) < 1e-6
