"""The state of `scale_by_adapprox`: its layout, and its parts leaf by leaf."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.boxes import is_box, rebox_axes, unbox
from adapprox_jax.params.leaves import Leaves, as_tuple, from_tuple, unzipped
from adapprox_jax.params.matrix_view import MatrixView, view_shape
from adapprox_jax.settings import Settings, resolve_capacity
from adapprox_jax.sharding.axes import full_along


class ScaleByAdapproxState(NamedTuple):
    """State of `scale_by_adapprox`.

    `q`, `u` and `nu` are trees with the structure of the parameters. A leaf is factored or dense,
    and the fields of the other kind hold `optax.MaskedNode()` for it. `rank`, `error` and `drift`
    are tuples with an array for each factored leaf, in the order of the leaves of `q`: so rules for
    the paths of parameters meet no scalars. Without parameters they are a scalar. `batch` is the
    shape of the axes that are neither rows nor columns.

    Attributes:
      count: int32 scalar, updates so far.
      key: uint32 data of the random key: typed keys do not survive every checkpoint.
      q: (*batch, shorter side, capacity), columns from `rank` on are zero.
      u: (*batch, longer side, capacity).
      rank: Of each factored leaf, int32 (*batch): columns in use.
      error: Likewise, float32: the paper's xi when it was measured last.
      drift: Likewise, float32: estimates the distance from the exact second moment.
      nu: Second moment of the dense leaves, with the leaf's shape.
    """

    count: jax.Array  # type: ignore[assignment]
    key: jax.Array
    q: Any
    u: Any
    rank: tuple[Any, ...] | jax.Array
    error: tuple[Any, ...] | jax.Array
    drift: tuple[Any, ...] | jax.Array
    nu: Any


class LeafState(NamedTuple):
    """The fields of `ScaleByAdapproxState` for one leaf, or for one of its matrices."""

    q: Any = optax.MaskedNode()
    u: Any = optax.MaskedNode()
    rank: Any = optax.MaskedNode()
    error: Any = optax.MaskedNode()
    drift: Any = optax.MaskedNode()
    nu: Any = optax.MaskedNode()

    @property
    def is_factored(self) -> bool:
        """Whether q and u hold the second moment, and not nu."""
        return isinstance(self.nu, optax.MaskedNode)


def second_moments(state: ScaleByAdapproxState) -> Leaves:
    """The leaves of the parameters, each as its q or as its nu."""
    return Leaves.of(
        jax.tree.map(
            lambda q, nu: nu if _is_masked(q) else q,
            *(state.q, state.nu),
            is_leaf=lambda x: is_box(x) or _is_masked(x),
        )
    )


def leaf_states(state: ScaleByAdapproxState) -> list[LeafState]:
    """The arrays of a state, leaf by leaf."""
    moments, factored = second_moments(state), Leaves.of(state.q)
    if not moments.boxed:
        return []
    count = len(factored.boxed)
    numbers = (from_tuple(getattr(state, x), count, x) for x in ("rank", "error", "drift"))
    fields = factored.arrays, Leaves.of(state.u).arrays, *numbers
    by_path = dict(zip(factored.paths, map(LeafState, *fields), strict=True))
    return [
        by_path.get(path) or LeafState(nu=array)
        for path, array in zip(moments.paths, moments.arrays, strict=True)
    ]


def with_leaf_states(
    state: ScaleByAdapproxState, count: jax.Array, leaves: Sequence[LeafState]
) -> ScaleByAdapproxState:
    """The state with other arrays, as `leaf_states` gives them, and another count."""
    factored = [leaf for leaf in leaves if leaf.is_factored]
    q, u, *numbers, _ = unzipped(factored, len(LeafState._fields))
    rank, error, drift = (as_tuple(arrays, bool(leaves)) for arrays in numbers)
    dense = [leaf.nu for leaf in leaves if not leaf.is_factored]
    trees = ((state.q, q), (state.u, u), (state.nu, dense))
    q, u, nu = (Leaves.of(tree).filled(arrays) for tree, arrays in trees)
    return ScaleByAdapproxState(count, state.key, q, u, rank, error, drift, nu)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def init_state(
    params: Leaves,
    views: Sequence[MatrixView],
    key: jax.Array,
    settings: Settings,
) -> ScaleByAdapproxState:
    """The state before the first step.

    Args:
      params: The parameters, or anything with their shapes and types.
      views: Which axes of each form a matrix.
      key: Data of the random key.
      settings: Which leaves are factored, and how.
    """
    leaves = [
        _init_leaf(leaf, view, settings) for leaf, view in zip(params.boxed, views, strict=True)
    ]
    q, u, *numbers, nu = unzipped(leaves, len(LeafState._fields))
    rank, error, drift = (
        as_tuple([x for x in field if not _is_masked(x)], bool(leaves)) for field in numbers
    )
    q, u, nu = map(params.structure.unflatten, (q, u, nu))
    return ScaleByAdapproxState(jnp.zeros([], jnp.int32), key, q, u, rank, error, drift, nu)


def _init_leaf(param: Any, view: MatrixView, settings: Settings) -> LeafState:
    """Zeros, sharded and boxed like the axes of the parameter that they follow.

    Factored where that is asked for and saves. No two are one array: states are donated.
    """
    leaf = unbox(param)
    dtype = wide_dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    factor_dtype = settings.factor_dtype or dtype
    batch, rows, columns = view_shape(leaf.shape, view)
    capacity = resolve_capacity(settings.max_rank, rows, columns)

    def full(
        shape: tuple[int, ...], axes: Sequence[int | None], dtype: jax.typing.DTypeLike
    ) -> Any:
        return rebox_axes(param, full_along(leaf, axes, shape, 0, dtype), axes)

    def number(value: int, dtype: jax.typing.DTypeLike) -> Any:
        return full_along(leaf, view.batch, batch, value, dtype)

    saves = capacity > 0 and 0 not in batch
    large = min(rows, columns) >= settings.min_dim_size_to_factor
    if not (view.is_matrix and large and saves):
        return LeafState(nu=full(leaf.shape, range(len(leaf.shape)), dtype))
    (short, short_axes), (long, long_axes) = sorted(
        [(rows, view.rows), (columns, view.columns)], key=lambda side: side[0]
    )
    # Of merged axes the first leads: a sharding of it is one of the merged axis.
    q_axes, u_axes = (*view.batch, short_axes[0], None), (*view.batch, long_axes[0], None)
    return LeafState(
        q=full((*batch, short, capacity), q_axes, factor_dtype),
        u=full((*batch, long, capacity), u_axes, factor_dtype),
        rank=number(settings.first_rank(capacity), jnp.int32),
        error=number(0, jnp.float32),
        drift=number(0, jnp.float32),
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
