"""The numbers of one step, and which of them are known before anything is traced.

A number that is known becomes a part of the compiled code: an `eps_root` of zero costs nothing, and
1 - b2 is not worked out in float32.
"""

import numbers
from typing import Any, NamedTuple

import jax

from adapprox_jax.linalg.random_start import RandomStart


class StepScalars(NamedTuple):
    """The numbers of one step, for all leaves. Those known beforehand are numbers, not arrays."""

    step: jax.Array  # t, from 1, int32
    draws: RandomStart  # what random starts are made of
    rounding: jax.Array | None  # uint16 (2, rows, columns): random bits for factors in bfloat16
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    correction: jax.typing.ArrayLike  # what the second moment is divided by: 1, or 1 - b2^t
    error_threshold: jax.typing.ArrayLike


def split_known(scalars: StepScalars) -> tuple[StepScalars, StepScalars]:
    """Numbers that are known beforehand, and those that are arrays; None stands for the others."""
    # Plain floats: NumPy's have a type of their own, which arithmetic would widen to.
    known: list[Any] = [float(x) if isinstance(x, numbers.Real) else None for x in scalars]
    traced: list[Any] = [None if isinstance(x, numbers.Real) else x for x in scalars]
    return StepScalars(*known), StepScalars(*traced)


def merge_known(
    known: StepScalars, traced: StepScalars, dtype: jax.typing.DTypeLike
) -> StepScalars:
    """Undoes `split_known`; hyperparameters that are arrays get the type that is worked in."""
    merged = join_known(known, traced)
    names = ("b2", "eps", "eps_root", "correction", "error_threshold")
    arrays = {name: x for name in names if isinstance(x := getattr(merged, name), jax.Array)}
    changes: Any = {name: x.astype(dtype) for name, x in arrays.items()}
    return merged._replace(**changes)


def join_known(known: StepScalars, traced: StepScalars) -> StepScalars:
    """Undoes `split_known`."""
    pairs: Any = zip(known, traced, strict=True)
    return StepScalars(*(array if number is None else number for number, array in pairs))
