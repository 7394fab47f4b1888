"""One-line errors for arguments out of range."""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def require(name: str, value: Any, holds: Callable[[Any], bool], allowed: str) -> None:
    """Raises ValueError naming the argument, its value and what is allowed.

    JAX arrays pass: they may be traced (under `optax.inject_hyperparams`, say), and then there is
    nothing to compare.

    Args:
      name: The argument's name.
      value: Its value, a real number.
      holds: Whether a concrete value is allowed. NaN must not be.
      allowed: What is allowed, in words.
    """
    if isinstance(value, jax.Array):
        return
    is_scalar_array = isinstance(value, np.ndarray) and value.ndim == 0
    is_number = isinstance(value, numbers.Real) or is_scalar_array
    if not (is_number and holds(value)):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


def require_integer(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is a concrete integer of at least `least`."""
    if isinstance(value, jax.Array):
        what = "traced" if isinstance(value, jax.core.Tracer) else "an array"
        raise ValueError(
            f"{name} is {what}; allowed: an integer known when the optimizer is made. Under"
            " optax.inject_hyperparams give static_args=adapprox_jax.STATIC_ARGS."
        )
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and value >= least):
        raise ValueError(f"{name} is {value!r}; allowed: an integer of at least {least}.")


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, choices))}.")


def is_zero(value: Any) -> bool:
    """Whether a hyperparameter is known to be zero: a concrete number, not an array."""
    return isinstance(value, numbers.Real) and value == 0
