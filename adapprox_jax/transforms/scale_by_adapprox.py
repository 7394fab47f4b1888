"""scale_by_adapprox: divides a gradient by the root of its low-rank second moment.

One gradient goes from tree to leaves here, from leaves to matrices in `step.schedule`, through the
phases of `step.phases`, where `step.matrix` says what is done to one matrix, and back.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import check_state
from adapprox_jax.linalg.orthonormalize import Orthogonalization
from adapprox_jax.linalg.random_keys import check_key, key_data, wrapped_key
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.leaves import Leaves, unzipped
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.schedules import RankGrowth
from adapprox_jax.settings import Hyperparameters, Settings
from adapprox_jax.sharding.axes import replicated, using_mesh_of
from adapprox_jax.state.layout import (
    LeafState,
    ScaleByAdapproxState,
    check_leaf,
    init_state,
    leaf_states,
    second_moments,
    with_leaf_states,
)
from adapprox_jax.step.approximation import Approximate
from adapprox_jax.step.phases import Scaled
from adapprox_jax.step.schedule import step_leaves
from adapprox_jax.transforms.matrix_rms import clipped


def scale_by_adapprox(
    b2: optax.ScalarOrSchedule = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    initial_rank: int | None = None,
    max_rank: int | float | None = None,
    error_threshold: optax.ScalarOrSchedule = 0.01,
    rank_interval: int | None = None,
    rank_growth: RankGrowth | None = None,
    power_iterations: int | None = None,
    oversampling: int | None = None,
    rotate: bool = True,
    warm_start: bool = True,
    approximate: Approximate = "root",
    orthogonalization: Orthogonalization = "cholesky",
    min_dim_size_to_factor: int | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    factor_dtype: jax.typing.DTypeLike | None = None,
    key: int | jax.Array | None = None,
) -> optax.GradientTransformation:
    """Scales gradients by the root of a second moment kept as low-rank factors.

    Matrices keep q (m, k) and u (n, k) instead of V (m, n); vectors, scalars and leaves whose
    factors would not be smaller keep a dense second moment. Without bias correction the first
    updates are about 1 / sqrt(1 - b2) in size: follow this with clipping, as `adapprox` does.

    Args:
      b2: Decay of the second moment, in [0, 1), or a function from the step, from 1, to it, as
        `increasing_decay` gives.
      eps: Added to the root, at least 0.
      eps_root: Added under the root, at least 0.
      bias_correction: Divide the second moment by 1 - b2^t, as Adam does and the paper does not;
        for a b2 that is a number.
      initial_rank: k_init, the first rank tried, at least 1. None, or `max_rank`: the rank is fixed
        at `max_rank`, the simple, predictable mode.
      max_rank: k_max, the width of the buffers: an int, or a float in (0, 1] as a fraction of
        min(m, n), rounded down, at least 1; None for 8. Cut to the widest that are smaller than the
        matrix.
      error_threshold: The rank grows while the relative error is above it, at least 0. With
        `approximate="root"` this is the error of the root. Or a function from the step, from 1, to
        it.
      rank_interval: Steps between choices of the rank, at least 1; None for 10.
      rank_growth: f: from the error to the columns to add; None for `sigmoid_growth()`.
      power_iterations: l, passes of Algorithm 1's loop, at least 1; None for 1.
      oversampling: p, columns worked on beyond the rank, at least 0; None for 0. No effect without
        `rotate`. With a warm start the columns in use turn towards what they lack by themselves,
        and more did not lower the loss.
      rotate: Keep the best k of the k + p directions; False is the algorithm as printed.
      warm_start: Start from the last factors instead of a Gaussian matrix.
      approximate: "moment" factors V, "root" its elementwise square root.
      orthogonalization: "qr" or "cholesky" (see `srsi`).
      min_dim_size_to_factor: Leaves with fewer rows or columns than this stay dense; None for 64.
      weight_dimension_numbers: `MatrixDimensionNumbers` for some or all leaves: a tree that is a
        prefix of the parameters' (None: the default view), or a function from parameters to it.
      factor_dtype: Type of q and u: bfloat16 (rounded stochastically, so that slow changes are not
        lost), float32 or float64; None for float32, or float64 for float64 parameters.
      key: An int seed or a JAX random key for the Gaussian starts; None for 0. The same starts
        serve every leaf, so that an update does not depend on the order or the stacking of leaves.
        They change with the largest rank and the longest side among all leaves.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByAdapproxState`. Its update can be
      differentiated; NaN where a gradient is exactly 0, as of any square root.

    Raises:
      ValueError: an argument is out of range, or a function gives what it must not.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_by_adapprox()
      >>> params = {"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)}
      >>> state = tx.init(params)
      >>> state.q["kernel"].shape, state.u["kernel"].shape, state.nu["bias"].shape
      ((256, 8), (512, 8), (512,))

    Source: paper, Algorithm 3; the deviations are in docs/algorithm.md.
    """
    settings = Settings.of(locals())
    hyperparameters = Hyperparameters(b2, eps, eps_root, bias_correction, error_threshold)
    return scale_with(settings, hyperparameters, weight_dimension_numbers, key)


def scale_with(
    settings: Settings,
    hyperparameters: Hyperparameters,
    weight_dimension_numbers: WeightDimensionNumbers,
    key: int | jax.Array | None,
    *,
    twice: bool = False,
) -> optax.GradientTransformation:
    """`scale_by_adapprox` with its arguments put together, and with the clip.

    If `twice`, what it gives is `Scaled`, for `guided_ema`.
    """
    check_dimension_numbers(weight_dimension_numbers)
    seed_or_data = check_key(0 if key is None else key)

    def init(params: optax.Params) -> ScaleByAdapproxState:
        leaves = Leaves.of(params, "parameter")
        views = views_of(weight_dimension_numbers, leaves)
        # A new array: states are donated.
        data = key_data(seed_or_data)
        return init_state(leaves, views, data, settings)

    def update(
        updates: optax.Updates, state: ScaleByAdapproxState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdapproxState]:
        del params
        check_state(state, ScaleByAdapproxState, "scale_by_adapprox")
        leaves = Leaves.of(updates, "gradient")
        leaves.matching(second_moments(state).tree, "the gradients")
        views = views_of(weight_dimension_numbers, leaves)
        grads, lasts = leaves.arrays, leaf_states(state)
        for name, grad, view, last in zip(leaves.names, grads, views, lasts, strict=True):
            check_leaf(name, grad, view, last)
        count = optax.safe_increment(state.count)
        key = jax.random.fold_in(wrapped_key(state.key), count)
        with using_mesh_of(grads):
            draws, rounding = replicated(_draw_for_all(key, grads, lasts, settings))
            scalars = hyperparameters.at(count, draws, rounding)
            results = step_leaves(scalars, grads, lasts, views, settings, twice=twice)
        scaled, again = unzipped([x for x, _ in results], 2)
        if hyperparameters.clipping_threshold is not None:
            dense = [i for i, last in enumerate(lasts) if not last.is_factored]
            some = [scaled[i] for i in dense], [views[i].axes for i in dense]
            for i, x in zip(dense, clipped(*some, hyperparameters.clipping_threshold), strict=True):
                scaled[i] = again[i] = x
        states = [new for _, new in results]
        first: Any = leaves.filled(scaled)
        given = Scaled(first, leaves.filled(again)) if twice else first
        return given, with_leaf_states(state, count, states)

    return optax.GradientTransformation(init, update)


def _draw_for_all(
    key: jax.Array, grads: Sequence[jax.Array], leaves: Sequence[LeafState], settings: Settings
) -> tuple[jax.Array, jax.Array | None]:
    """The random numbers of a step, the same for all leaves.

    Normal numbers (width, n) for starts, in the widest type of the gradients. And bits, if a leaf
    has factors in bfloat16.
    """
    factors = [(leaf.q, leaf.u) for leaf in leaves if leaf.is_factored]
    longest = max((u.shape[-2] for _, u in factors), default=1)
    widths = (settings.width(q.shape[-1], q.shape[-2]) for q, _ in factors)
    dtype = wide_dtype(*(grad.dtype for grad in grads))
    normals = jax.random.normal(key, (max(widths, default=1), longest), dtype)
    rounded = [q.shape[-1] for q, _ in factors if q.dtype == jnp.bfloat16]
    if not rounded:
        return normals, None
    shape = (2, longest, max(rounded))
    return normals, jax.random.bits(jax.random.fold_in(key, 2), shape, jnp.uint16)
