"""One-line errors for arguments out of range."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def require(name: str, value: Any, holds: Callable[[Any], bool], allowed: str) -> None:
    """Raises ValueError naming the argument, its value and what is allowed.

    Only concrete Python and NumPy numbers are looked at: a JAX array may be traced (under
    `optax.inject_hyperparams`, say), and then there is nothing to compare.

    Args:
      name: The argument's name.
      value: Its value; None is out of range.
      holds: Whether a concrete value is allowed. NaN must not be.
      allowed: What is allowed, in words.
    """
    concrete = isinstance(value, bool | int | float | np.number | np.ndarray)
    if value is None or (concrete and not holds(value)):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, choices))}.")
