"""The numbers of one step.

A number that is known before anything is traced becomes a part of the compiled code. So an
`eps_root` of zero costs nothing, and 1 - b2 is not worked out in float32.
"""

import dataclasses
import numbers
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StepScalars:
    """The numbers of one step, for all leaves: a tree of arrays, in which Python numbers are fixed.

    `jax.jit` compiles anew for other Python numbers, and not for other arrays.
    """

    step: jax.Array  # t, from 1, int32
    draws: jax.Array  # (width, n), standard normal: the columns of all random starts
    rounding: jax.Array | None  # uint16 (2, rows, columns): random bits for factors in bfloat16
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    correction: jax.typing.ArrayLike  # what the second moment is divided by: 1, or 1 - b2^t
    error_threshold: jax.typing.ArrayLike
    clipping_threshold: jax.typing.ArrayLike | None = None  # d; None: no clip

    def in_type(self, dtype: jax.typing.DTypeLike) -> "StepScalars":
        """The same with hyperparameters that are arrays in the type that is worked in."""
        arrays, known = self.tree_flatten()
        wide = [x if x is None else x.astype(dtype) for x in arrays[3:]]
        return self.tree_unflatten(known, [*arrays[:3], *wide])

    def tree_flatten(self) -> tuple[list[Any], tuple[float | None, ...]]:
        """Arrays, with None for the numbers, and the numbers, with None for the arrays."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        arrays = [None if isinstance(x, numbers.Real) else x for x in fields]
        # Plain floats: NumPy's have their own type, which arithmetic would widen to.
        return arrays, tuple(float(x) if isinstance(x, numbers.Real) else None for x in fields)

    @classmethod
    def tree_unflatten(cls, known: tuple[float | None, ...], arrays: list[Any]) -> "StepScalars":
        """Undoes `tree_flatten`."""
        pairs: Any = zip(known, arrays, strict=True)
        return cls(*(array if number is None else number for number, array in pairs))
