"""The state of `scale_by_adapprox`: its layout, and its parts leaf by leaf."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.boxes import rebox_axes, unbox
from adapprox_jax.params.leaves import Leaves, unzipped
from adapprox_jax.params.matrix_view import MatrixView, view_shape
from adapprox_jax.settings import RankRule, Storage, resolve_capacity
from adapprox_jax.sharding.axes import full_along


class ScaleByAdapproxState(NamedTuple):
    """State of `scale_by_adapprox`.

    After `count` and `key` come trees with the structure of the parameters. A leaf is factored or
    dense, and the fields of the other kind hold a scalar zero for it. `batch` is the shape of the
    axes that are neither rows nor columns.

    Attributes:
      count: int32 scalar, updates so far.
      key: uint32 data of the random key: typed keys do not survive every checkpoint.
      q: (*batch, shorter side, capacity), columns from `rank` on are zero.
      u: (*batch, longer side, capacity).
      rank: int32 (*batch), columns in use.
      error: float32 (*batch), the paper's xi when it was measured last.
      drift: float32 (*batch), estimates the distance from the exact second moment.
      nu: Second moment of the dense leaves, with the leaf's shape.
    """

    count: jax.Array  # type: ignore[assignment]
    key: jax.Array
    q: Any
    u: Any
    rank: Any
    error: Any
    drift: Any
    nu: Any


class LeafState(NamedTuple):
    """The trees of `ScaleByAdapproxState` for one leaf, or for one of its matrices."""

    q: Any
    u: Any
    rank: Any
    error: Any
    drift: Any
    nu: Any

    @property
    def is_factored(self) -> bool:
        """Whether q and u hold the second moment, and not nu; also where `jax.vmap` has stacked."""
        return bool(self.q.ndim > self.rank.ndim)


def leaf_states(state: ScaleByAdapproxState) -> list[LeafState]:
    """The arrays of a state, leaf by leaf."""
    return [LeafState(*fields) for fields in zip(*(x.arrays for x in _trees(state)), strict=True)]


def with_leaf_states(
    state: ScaleByAdapproxState, count: jax.Array, leaves: Sequence[LeafState]
) -> ScaleByAdapproxState:
    """The state with other arrays, as `leaf_states` gives them, and another count."""
    trees = zip(_trees(state), unzipped(leaves, len(LeafState._fields)), strict=True)
    return ScaleByAdapproxState(count, state.key, *(tree.filled(x) for tree, x in trees))


def _trees(state: ScaleByAdapproxState) -> list[Leaves]:
    return [Leaves.of(getattr(state, name)) for name in LeafState._fields]


def init_state(
    params: Leaves,
    views: Sequence[MatrixView],
    key: jax.Array,
    rule: RankRule,
    storage: Storage,
) -> ScaleByAdapproxState:
    """The state before the first step.

    Args:
      params: The parameters, or anything with their shapes and types.
      views: Which axes of each form a matrix.
      key: Data of the random key.
      rule: The first rank and the width of the buffers.
      storage: Which leaves are factored, and the type of the factors.
    """
    leaves = [
        _init_leaf(leaf, view, rule, storage)
        for leaf, view in zip(params.boxed, views, strict=True)
    ]
    trees = map(params.structure.unflatten, unzipped(leaves, len(LeafState._fields)))
    return ScaleByAdapproxState(jnp.zeros([], jnp.int32), key, *trees)


def _init_leaf(param: Any, view: MatrixView, rule: RankRule, storage: Storage) -> LeafState:
    """Zeros, sharded and boxed like the axes of the parameter that they follow.

    Factored where that is asked for and saves. No two are one array: states are donated.
    """
    leaf = unbox(param)
    dtype = wide_dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    factor_dtype = storage.factor_dtype or dtype
    batch, rows, columns = view_shape(leaf.shape, view)
    capacity = resolve_capacity(rule.max_rank, rows, columns)

    def full(
        shape: tuple[int, ...],
        axes: Sequence[int | None],
        dtype: jax.typing.DTypeLike,
        value: int = 0,
    ) -> Any:
        return rebox_axes(param, full_along(leaf, axes, shape, value, dtype), axes)

    saves = capacity > 0 and 0 not in batch
    large = min(rows, columns) >= storage.min_dim_size_to_factor
    if not (view.is_matrix and large and saves):
        return LeafState(
            q=full((), (), factor_dtype),
            u=full((), (), factor_dtype),
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
        q=full((*batch, short, capacity), q_axes, factor_dtype),
        u=full((*batch, long, capacity), u_axes, factor_dtype),
        rank=full(batch, view.batch, jnp.int32, rule.first(capacity)),
        error=full(batch, view.batch, jnp.float32),
        drift=full(batch, view.batch, jnp.float32),
        nu=full((), (), dtype),
    )


def check_leaf(
    path: str,
    array: Any,
    view: MatrixView,
    state: LeafState,
    what: str = "gradient",
) -> None:
    """Raises ValueError where an array is not of the shape that a leaf's state was made for.

    Args:
      path: Path of the leaf, for the message.
      array: Its gradient, say.
      view: Which axes form a matrix.
      state: Its state.
      what: What the array is, for the message.
    """
    shape = array.shape
    if state.is_factored:
        batch, rows, columns = view_shape(shape, view)
        given = (*batch, min(rows, columns), max(rows, columns))
        expected = (*state.q.shape[:-1], state.u.shape[-2])
        seen = f" is seen as matrices {given} (shorter side first); its state has factors of"
    else:
        given, expected, seen = shape, state.nu.shape, "; its state was made for"
    if given != expected:
        raise ValueError(
            f"{path}: the {what} of shape {shape}{seen} {expected}. Was the state made for other"
            " parameters or with other weight_dimension_numbers?"
        )
