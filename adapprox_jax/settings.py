"""The settings of `scale_by_adapprox` that decide shapes or code, as objects that check themselves.

Their fields have the names of the public keywords. They can be hashed, so that what is compiled for
one optimizer serves every other one with equal settings.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    DECAY,
    NOT_NEGATIVE,
    at_step,
    require,
    require_choice,
    require_dtype,
    require_flag,
    require_function,
    require_integer,
    require_or_schedule,
    require_precise,
)
from adapprox_jax.linalg.orthonormalize import (
    ORTHONORMALIZE,
    ROUNDS,
    WARM_ROUNDS,
    Orthogonalization,
)
from adapprox_jax.schedules import PAPERS_GROWTH, RankGrowth
from adapprox_jax.step.approximation import APPROXIMATIONS, Approximate
from adapprox_jax.step.scalars import StepScalars

FACTOR_DTYPES = ("bfloat16", "float32", "float64")  # float16 would overflow


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of `scale_by_adapprox` that decide shapes or code."""

    initial_rank: int | None = None  # k_init; None: the rank is fixed at the buffers' width
    max_rank: int | float = 8  # k_max
    rank_interval: int = 10  # Delta s
    rank_growth: RankGrowth = PAPERS_GROWTH  # f
    power_iterations: int = 1  # l
    oversampling: int = 0  # p
    rotate: bool = True
    warm_start: bool = True
    approximate: Approximate = "root"
    orthogonalization: Orthogonalization = "cholesky"
    min_dim_size_to_factor: int = 64
    factor_dtype: Any = None  # None: float32, or float64 for float64 parameters

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> "Settings":
        """Settings from the public keywords, as `locals()` has them. What is None has its default.

        The defaults stand here because `optax.inject_hyperparams` makes arrays of those integers
        that stand in a signature, and nothing that decides shapes can be one.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: keywords[name] for name in names if keywords[name] is not None})

    def __post_init__(self) -> None:
        """Raises ValueError for the first field that is out of range."""
        if self.initial_rank is not None:
            require_integer("initial_rank", self.initial_rank, 1)
        require_max_rank("max_rank", self.max_rank)
        if self.initial_rank is not None and not isinstance(self.max_rank, float):
            least = self.initial_rank
            allowed = f"an integer of at least initial_rank = {least}"
            require("max_rank", self.max_rank, lambda x: x >= least, allowed)
        require_integer("rank_interval", self.rank_interval, 1, 2**31 - 1)
        require_function("rank_growth", self.rank_growth, "a function, or None")
        if type(self.rank_growth).__hash__ is None:
            raise ValueError(f"rank_growth is {self.rank_growth!r}; allowed: what can be hashed.")
        require_integer("power_iterations", self.power_iterations, 1)
        require_integer("oversampling", self.oversampling, 0)
        require_flag("rotate", self.rotate)
        require_flag("warm_start", self.warm_start)
        require_choice("approximate", self.approximate, tuple(APPROXIMATIONS))
        require_choice("orthogonalization", self.orthogonalization, tuple(ORTHONORMALIZE))
        require_integer("min_dim_size_to_factor", self.min_dim_size_to_factor, 1)
        if self.factor_dtype is not None:
            require_dtype("factor_dtype", self.factor_dtype, FACTOR_DTYPES)
            object.__setattr__(self, "factor_dtype", jnp.dtype(self.factor_dtype))

    @property
    def is_fixed(self) -> bool:
        """Whether the rank is always the width of the buffers."""
        if isinstance(self.max_rank, float):  # 1.0 is a fraction, and not a rank of 1
            return self.initial_rank is None
        return self.initial_rank in (None, self.max_rank)

    def first_rank(self, capacity: int) -> int:
        """k_init cut to buffers of `capacity` columns; all of them where the rank is fixed."""
        if self.initial_rank is None or self.is_fixed:
            return capacity
        return min(self.initial_rank, capacity)

    def chooses_at(self, step: jax.Array) -> jax.Array:
        """Whether ranks are chosen at a step."""
        return jax.lax.rem(step - 1, jnp.asarray(self.rank_interval, step.dtype)) == 0

    def width(self, capacity: int, rows: int) -> int:
        """Columns worked on in buffers of `capacity`: p more, at most `rows` in all.

        As printed, oversampling changes nothing: without the rotation the columns beyond need not
        exist.
        """
        return min(capacity + (self.oversampling if self.rotate else 0), rows)

    @property
    def rounds(self) -> int:
        """Rounds of Cholesky QR for an orthonormal basis."""
        return WARM_ROUNDS if self.warm_start and self.power_iterations == 1 else ROUNDS


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The numbers of `scale_by_adapprox` that may be arrays, or functions from the step to one."""

    b2: optax.ScalarOrSchedule
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    bias_correction: bool
    error_threshold: optax.ScalarOrSchedule
    clipping_threshold: jax.typing.ArrayLike | None = None  # d; None: no clip

    def __post_init__(self) -> None:
        """Raises ValueError for the first field that is out of range."""
        require_precise("b2", self.b2)
        require_or_schedule("b2", self.b2, *DECAY)
        require("eps", self.eps, *NOT_NEGATIVE)
        require("eps_root", self.eps_root, *NOT_NEGATIVE)
        require_flag("bias_correction", self.bias_correction)
        if self.bias_correction and callable(self.b2):
            raise ValueError(
                "bias_correction is True and b2 a function; allowed: with a number. A function that"
                " begins at 0, as increasing_decay() does, leaves no bias."
            )
        require_or_schedule("error_threshold", self.error_threshold, *NOT_NEGATIVE)
        if self.clipping_threshold is not None:
            clip = self.clipping_threshold
            require("clipping_threshold", clip, lambda x: x > 0, "a number above 0, or None")

    def at(self, step: jax.Array, draws: jax.Array, rounding: jax.Array | None) -> "StepScalars":
        """The numbers of a step, from 1."""
        b2 = at_step("b2", self.b2, step, *DECAY)
        threshold = at_step("error_threshold", self.error_threshold, step, *NOT_NEGATIVE)
        # Not with an integer exponent, for each of which JAX would compile a program.
        bias = jnp.power(b2, jnp.asarray(step, float)) if self.bias_correction else 0.0
        numbers = b2, self.eps, self.eps_root, 1 - bias, threshold, self.clipping_threshold
        return StepScalars(step, draws, rounding, *numbers)


# What `optax.inject_hyperparams` must leave alone: arguments that decide shapes or code, b1 among
# them because with 0 no average is kept, and what can be called without being a schedule. The first
# tuple is for `adapprox`, the second for `adapprox_muon`.
STATIC_ARGS: tuple[str, ...] = (
    *("b1", "mu_dtype", "mask", "cosine_guidance", "nesterov", "bias_correction"),
    "cautious_weight_decay",
    *(field.name for field in dataclasses.fields(Settings)),
    *("weight_dimension_numbers", "key"),
)

MUON_STATIC_ARGS: tuple[str, ...] = (
    *(name for name in STATIC_ARGS if name not in ("cosine_guidance", "bias_correction")),
    *("orthogonalized", "newton_schulz_steps", "second_moment", "adapprox_b1"),
)


def require_max_rank(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a width of buffers: an integer or a fraction."""
    if isinstance(value, jax.Array):
        require_integer(name, value, 1)  # whose message says what to do
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (value >= 1 if is_integer else isinstance(value, float) and 0 < value <= 1):
        allowed = "an integer of at least 1, or a float in (0, 1], a fraction of the shorter side"
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


def resolve_capacity(max_rank: int | float, rows: int, columns: int) -> int:
    """Columns of the factor buffers of a (rows, columns) matrix.

    Args:
      max_rank: The paper's k_max: an int, or a float as a fraction of min(rows, columns), rounded
        down.
      rows: Rows of the matrix.
      columns: Columns of the matrix.

    Returns:
      At least 1 and at most min(rows, columns), and cut to the widest buffers that are smaller than
      the matrix; 0 where none are.
    """
    short = min(rows, columns)
    rank = math.floor(max_rank * short) if isinstance(max_rank, float) else max_rank
    widest = max(rows * columns - 1, 0) // max(rows + columns, 1)
    return min(max(1, rank), short, widest)
