"""What `scale_by_adapprox` keeps for one leaf: how it begins, and which leaves it can belong to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.boxes import rebox_axes, unbox
from adapprox_jax.matrix_view import MatrixDimensionNumbers, matrix_view, view_shape
from adapprox_jax.rank import first_rank, resolve_capacity
from adapprox_jax.sharding import full_along


class LeafState(NamedTuple):
    """The trees of `ScaleByAdapproxState` for one leaf, in their order."""

    q: Any
    u: Any
    rank: Any
    error: Any
    drift: Any
    nu: Any

    @property
    def is_factored(self) -> bool:
        """Whether q and u hold the second moment, and not nu."""
        return unbox(self.q).ndim > 0


def init_leaf(
    param: Any,
    numbers: MatrixDimensionNumbers | None,
    *,
    initial_rank: int | None,
    max_rank: int | float,
    min_dim_size_to_factor: int,
    factor_dtype: jax.typing.DTypeLike | None,
) -> LeafState:
    """The state of one leaf before the first step: factored where that is asked for and saves.

    Args:
      param: The parameter, anything with its shape and dtype, or a box around one.
      numbers: Which of its axes form a matrix; None for the default view.
      initial_rank: As in `scale_by_adapprox`, like the rest.
      max_rank: Width of the buffers.
      min_dim_size_to_factor: Fewest rows and columns of a factored leaf.
      factor_dtype: Type of the factors.

    Returns:
      Zeros of the shapes that `ScaleByAdapproxState` names, no two of them one array, sharded and
      boxed like the axes of the parameter that they follow.
    """
    leaf = unbox(param)
    dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(leaf.dtype), jnp.float32)
    view = matrix_view(leaf.shape, numbers)
    batch, rows, columns = view_shape(leaf.shape, view)
    capacity = resolve_capacity(max_rank, rows, columns)

    def full(
        shape: tuple[int, ...],
        axes: Sequence[int | None],
        dtype: jax.typing.DTypeLike,
        value: int = 0,
    ) -> Any:
        return rebox_axes(param, full_along(leaf, axes, shape, value, dtype), axes)

    saves = (rows + columns) * capacity < rows * columns and 0 not in batch
    if not (view.is_matrix and min(rows, columns) >= min_dim_size_to_factor and saves):
        return LeafState(
            q=full((), (), factor_dtype or dtype),
            u=full((), (), factor_dtype or dtype),
            rank=full((), (), jnp.int32),
            error=full((), (), jnp.float32),
            drift=full((), (), jnp.float32),
            nu=full(leaf.shape, range(len(leaf.shape)), dtype),
        )
    (short, short_axes), (long, long_axes) = sorted(
        [(rows, view.rows), (columns, view.columns)], key=lambda side: side[0]
    )
    # Of merged axes the first leads: a sharding of it is one of the merged axis.
    q_axes, u_axes = (*view.batch, short_axes[0], None), (*view.batch, long_axes[0], None)
    return LeafState(
        q=full((*batch, short, capacity), q_axes, factor_dtype or dtype),
        u=full((*batch, long, capacity), u_axes, factor_dtype or dtype),
        rank=full(batch, view.batch, jnp.int32, first_rank(initial_rank, capacity)),
        error=full(batch, view.batch, jnp.float32),
        drift=full(batch, view.batch, jnp.float32),
        nu=full((), (), dtype),
    )


def check_leaf(
    path: str, grad: Any, numbers: MatrixDimensionNumbers | None, state: LeafState
) -> None:
    """Raises ValueError where a gradient is not of the shape that a leaf's state was made for.

    Args:
      path: Path of the leaf, for the message.
      grad: Its gradient.
      numbers: Which axes form a matrix.
      state: Its state.
    """
    shape = unbox(grad).shape
    if state.is_factored:
        batch, rows, columns = view_shape(shape, matrix_view(shape, numbers))
        given = (*batch, min(rows, columns), max(rows, columns))
        q_shape, u_shape = unbox(state.q).shape, unbox(state.u).shape
        expected = (*q_shape[:-1], u_shape[-2])
        what = f" is seen as matrices {given} (shorter side first); its state has factors of"
    else:
        given, expected, what = shape, unbox(state.nu).shape, "; its state was made for"
    if given != expected:
        raise ValueError(
            f"{path}: the gradient of shape {shape}{what} {expected}. Was the state made for other"
            " parameters or with other weight_dimension_numbers?"
        )
