"""rank_report and state_nbytes: what an optimizer state holds, on the host."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.argument_checks import check_concrete, require_transformation
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.sharding.axes import on_host
from adapprox_jax.state.layout import ScaleByAdapproxState, leaf_states, second_moments


class RankInfo(NamedTuple):
    """What is kept for one factored leaf. Stacked leaves have arrays with a number per matrix.

    Attributes:
      shape: Of the parameter.
      matrices: As which it is seen: (*batch, shorter side, longer side).
      rank: Columns in use.
      capacity: Columns of the buffers.
      error: The paper's xi: error of the last factorization, relative.
      nbytes: Bytes of q and u.
      dense_nbytes: Bytes of a dense second moment in the parameter's dtype.
      drift: Estimate of the relative distance from the exact second moment.
    """

    shape: tuple[int, ...]
    matrices: tuple[int, ...]
    rank: int | np.ndarray
    capacity: int
    error: float | np.ndarray
    nbytes: int
    dense_nbytes: int
    drift: float | np.ndarray

    def is_full(self, error_threshold: float | None = None) -> bool:
        """Whether a rank is the buffers' width, and its error above a threshold if one is given."""
        above = True if error_threshold is None else np.asarray(self.error) > error_threshold
        return bool(np.any((np.asarray(self.rank) == self.capacity) & above))


def rank_report(opt_state: Any, params: optax.Params) -> dict[str, RankInfo]:
    """Rank, error and memory of every factored leaf of an optimizer state.

    Args:
      opt_state: Any state that holds a `ScaleByAdapproxState` somewhere, with concrete arrays: of
        Optax's wrappers, of a Flax optimizer or train state, of a population under `jax.vmap`.
      params: The parameters that it was made for; only paths, shapes and dtypes are read.

    Returns:
      A dict from the path of the parameter, as `jax.tree_util.keystr` writes it, to `RankInfo`.
      Dense leaves are left out; of a state of another optimizer nothing is in it.

    Raises:
      ValueError: the arrays are traced, the state is of other parameters, or the two arguments
        were given in the other order.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}
      >>> tx = adapprox_jax.adapprox(1e-3, initial_rank=4, max_rank=4)
      >>> report = adapprox_jax.rank_report(tx.init(params), params)
      >>> report["['kernel']"].rank, report["['kernel']"].nbytes
      (4, 12288)
    """
    if adapprox_states(params):
        raise ValueError("params holds a state of Adapprox; allowed: rank_report(state, params).")
    check_concrete("rank_report", opt_state)
    params_of_state = Leaves.of(params)
    by_name = dict(zip(params_of_state.paths, params_of_state.arrays, strict=True))
    report = {}
    for state in adapprox_states(opt_state):
        for name, leaf in zip(second_moments(state).paths, leaf_states(state), strict=True):
            if not leaf.is_factored:
                continue
            if name not in by_name:
                raise ValueError(f"{name}: the state has this leaf; the parameters given have not.")
            if name in report:
                raise ValueError(f"{name} has factors in two states; allowed: one state at a time.")
            param = by_name[name]
            shape, matrices = np.shape(param), (*leaf.q.shape[:-1], leaf.u.shape[-2])
            if not _can_be_seen_as(shape, matrices):
                raise ValueError(
                    f"{name} has shape {shape}; its state has factors of {matrices} (shorter side"
                    " first); allowed: the parameters that the state was made for."
                )
            norm = _matrix_norms(leaf.u)
            report[name] = RankInfo(
                shape=shape,
                matrices=matrices,
                rank=_number(leaf.rank),
                capacity=leaf.q.shape[-1],
                error=_number(leaf.error),
                nbytes=leaf.q.nbytes + leaf.u.nbytes,
                dense_nbytes=math.prod(shape) * param.dtype.itemsize,
                drift=_number(on_host(leaf.drift).astype(float) / np.where(norm == 0, 1, norm)),
            )
    return report


def adapprox_states(tree: Any) -> list[ScaleByAdapproxState]:
    """The states of `scale_by_adapprox` that a tree holds."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ScaleByAdapproxState))
    return [node for node in nodes if isinstance(node, ScaleByAdapproxState)]


def state_nbytes(tx: optax.GradientTransformation, params: optax.Params) -> int:
    """Bytes of an optimizer's state, without allocating it.

    Args:
      tx: Any Optax transformation.
      params: Parameters, or `jax.ShapeDtypeStruct`s in their place.

    Returns:
      The bytes of all arrays of the state.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, adapprox_jax
      >>> params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
      >>> adapprox_jax.state_nbytes(optax.adamw(1e-3), params)
      33554436
    """
    require_transformation("tx", tx)
    state = jax.eval_shape(tx.init, params)
    return tree_nbytes(state)


def tree_nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of their descriptions, in the memory of a device.

    There two int4 share a byte, which `nbytes` of an array does not know.
    """
    return sum(shaped_nbytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def shaped_nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array of a shape in the memory of a device."""
    bits = 4 if dtype == jnp.int4 else 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)


def _can_be_seen_as(shape: tuple[int, ...], matrices: tuple[int, ...]) -> bool:
    """Whether axes of a shape, of some view of it, make a batch, a shorter and a longer side."""
    *batch, short, long = matrices
    for sides in itertools.product(range(3), repeat=len(shape)):
        axes: tuple[list[int], ...] = ([], [], [])
        for side, size in zip(sides, shape, strict=True):
            axes[side].append(size)
        # Members of a population may lie along any axis; in the state it is the first.
        if sorted(axes[0]) == sorted(batch) and (*map(math.prod, axes[1:]),) == (short, long):
            return True
    return False


def _matrix_norms(x: jax.Array) -> np.ndarray:
    """Frobenius norm of each matrix, float64: taken where the array is, which may be large."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1)).astype(wide_dtype(x.dtype))
    scale = jnp.where(largest == 0, 1, largest)[..., None, None]
    norm = jnp.linalg.norm(x / scale, axis=(-2, -1))  # squares of numbers up to 1
    return on_host(norm).astype(np.float64) * on_host(largest).astype(np.float64)


def _number(x: Any) -> Any:
    array = on_host(x)
    return array.item() if array.ndim == 0 else array
