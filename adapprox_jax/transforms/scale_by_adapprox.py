"""scale_by_adapprox: divides a gradient by the root of its low-rank second moment.

One gradient goes from tree to leaves here, from leaves to matrices in `step.schedule`, through the
phases of `step.phases`, where `step.matrix` says what is done to one matrix, and back.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    at_step,
    require,
    require_flag,
    require_or_schedule,
    require_precise,
)
from adapprox_jax.growth import PAPERS_GROWTH
from adapprox_jax.linalg.random_start import RandomStart, check_key, draw_start, require_key
from adapprox_jax.params.boxes import is_box, rebox, unbox
from adapprox_jax.params.matrix_view import (
    WeightDimensionNumbers,
    check_dimension_numbers,
    matrix_view,
    resolve_dimension_numbers,
)
from adapprox_jax.params.tree_checks import check_state, check_trees, check_types, leaf_name
from adapprox_jax.settings import (
    Orthogonalization,
    RankGrowth,
    RankRule,
    Settings,
    Storage,
    Subspace,
)
from adapprox_jax.sharding.axes import replicated
from adapprox_jax.state.layout import (
    LeafState,
    ScaleByAdapproxState,
    check_leaf,
    init_leaf,
    leaf_states,
    state_of,
)
from adapprox_jax.step.approximation import Approximate
from adapprox_jax.step.scalars import StepScalars
from adapprox_jax.step.schedule import step_leaves


def scale_by_adapprox(
    b2: optax.ScalarOrSchedule = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    initial_rank: int | None = None,
    max_rank: int | float = 8,
    error_threshold: optax.ScalarOrSchedule = 0.01,
    rank_interval: int = 10,
    rank_growth: RankGrowth | None = None,
    rank_margin: int = 0,
    power_iterations: int = 1,
    oversampling: int = 0,
    rotate: bool = True,
    warm_start: bool = True,
    approximate: Approximate = "root",
    orthogonalization: Orthogonalization = "cholesky",
    min_dim_size_to_factor: int = 64,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    factor_dtype: jax.typing.DTypeLike | None = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformation:
    """Scales gradients by the root of a second moment kept as low-rank factors.

    Matrices keep q (m, k) and u (n, k) in place of V (m, n); vectors, scalars and leaves whose
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
        min(m, n), rounded down, at least 1. Cut to the widest that are smaller than the matrix.
      error_threshold: The rank grows while the relative error is above it, at least 0. With
        `approximate="root"` this is the error of the root. Or a function from the step, from 1, to
        it, as `sampling_threshold` gives.
      rank_interval: Steps between choices of the rank, at least 1. The error, too, is measured at
        these steps alone; of a fixed rank on accelerators at every step.
      rank_growth: f: from the error to the columns to add; None for `sigmoid_growth()`.
      rank_margin: Columns kept beyond the rank at which the error is low enough, at least 0. What
        those leave out gathers there over the steps, so that a low rank can be seen to be too low.
      power_iterations: l, passes of Algorithm 1's loop, at least 1.
      oversampling: p, columns worked on beyond the rank, at least 0; no effect without `rotate`.
        With a warm start the columns in use turn towards what they lack by themselves, and more did
        not lower the loss (docs/design.md).
      rotate: Keep the best k of the k + p directions; False is the algorithm as printed.
      warm_start: Start from the last factors in place of a Gaussian matrix.
      approximate: "moment" factors V, "root" its elementwise square root.
      orthogonalization: "qr" or "cholesky" (see `srsi`).
      min_dim_size_to_factor: Leaves with fewer rows or columns than this stay dense.
      weight_dimension_numbers: `MatrixDimensionNumbers` for some or all leaves: a tree that is a
        prefix of the parameters' (None: the default view), or a function from parameters to it.
      factor_dtype: Type of q and u: bfloat16 (rounded stochastically, so that slow changes are not
        lost), float32 or float64; None for float32, or float64 for float64 parameters.
      key: An int seed or a JAX random key for the Gaussian starts. The same starts serve every
        leaf, so that an update does not depend on the order or the stacking of leaves.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByAdapproxState`. Its update can be
      differentiated; NaN where a gradient is exactly 0, as of any square root.

    Raises:
      ValueError: an argument is out of range, or a function gives what it must not.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_by_adapprox()
      >>> params = {"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)}
      >>> state = tx.init(params)
      >>> state.q["kernel"].shape, state.u["kernel"].shape, state.nu["bias"].shape
      ((256, 8), (512, 8), (512,))

    Source: paper, Algorithm 3; the deviations are in docs/algorithm.md.
    """
    allowed = "a number in [0, 1), or a function from the step to one"
    require_precise("b2", b2)
    require_or_schedule("b2", b2, lambda x: 0 <= x < 1, allowed)
    require("eps", eps, lambda x: x >= 0, "a number of at least 0")
    require("eps_root", eps_root, lambda x: x >= 0, "a number of at least 0")
    require_flag("bias_correction", bias_correction)
    if bias_correction and callable(b2):
        raise ValueError(
            "bias_correction is True and b2 a function; allowed: with a number. A function that"
            " begins at 0, as increasing_decay() does, leaves no bias."
        )
    allowed = "a number of at least 0, or a function from the step to one"
    require_or_schedule("error_threshold", error_threshold, lambda x: x >= 0, allowed)
    growth = PAPERS_GROWTH if rank_growth is None else rank_growth
    settings = Settings(
        RankRule(initial_rank, max_rank, rank_interval, growth, rank_margin),
        Subspace(power_iterations, oversampling, rotate, warm_start, orthogonalization),
        Storage(min_dim_size_to_factor, factor_dtype),
        approximate,
    )
    check_dimension_numbers(weight_dimension_numbers)
    seed_or_key, key_impl = check_key(key)

    def init(params: optax.Params) -> ScaleByAdapproxState:
        check_types(params, "parameter")
        dimension_numbers = resolve_dimension_numbers(weight_dimension_numbers, params)
        start = partial(init_leaf, rule=settings.rank, storage=settings.storage)
        leaves = jax.tree.map(start, params, dimension_numbers, is_leaf=is_box)
        # An array of its own: states are donated.
        data = jnp.array(jax.random.key_data(require_key(seed_or_key)))
        return state_of(jnp.zeros([], jnp.int32), data, leaves)

    def update(
        updates: optax.Updates, state: ScaleByAdapproxState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdapproxState]:
        del params
        check_state(state, ScaleByAdapproxState, "scale_by_adapprox")
        check_types(updates, "gradient")
        check_trees(updates, state.nu)
        count = optax.safe_increment(state.count)
        leaves = leaf_states(state)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl=key_impl), count)
        decay = at_step("b2", b2, count)
        scalars = StepScalars(
            step=count,
            **draw_for_all(key, updates, leaves, settings)._asdict(),
            b2=decay,
            eps=eps,
            eps_root=eps_root,
            correction=1 - decay**count if bias_correction else 1.0,
            error_threshold=at_step("error_threshold", error_threshold, count),
        )
        dimension_numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)
        scaled, leaves = step_tree(scalars, updates, leaves, dimension_numbers, settings)
        return scaled, state_of(count, state.key, leaves)

    return optax.GradientTransformation(init, update)


def step_tree(
    scalars: StepScalars, updates: Any, leaves: Any, dimension_numbers: Any, settings: Settings
) -> tuple[Any, Any]:
    """One step for every leaf.

    Args:
      scalars: The numbers of this step.
      updates: The gradients.
      leaves: A tree like theirs with a `LeafState` at each leaf.
      dimension_numbers: Likewise, which axes form a matrix.
      settings: Of the optimizer.

    Returns:
      The scaled gradients, and the new leaves.
    """
    structure: Any
    named, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_box)
    columns = [structure.flatten_up_to(tree) for tree in (dimension_numbers, leaves)]
    for (path, grad), numbers, boxed in zip(named, *columns, strict=True):
        check_leaf(leaf_name(path), grad, numbers, boxed)
    grads, boxes = [grad for _, grad in named], columns[1]
    arrays = [unbox(grad) for grad in grads]
    states = [LeafState(*map(unbox, boxed)) for boxed in boxes]
    views = [matrix_view(x.shape, n) for x, n in zip(arrays, columns[0], strict=True)]
    results = step_leaves(scalars, arrays, states, tuple(views), settings)
    scaled = [rebox(grad, x) for grad, (x, _) in zip(grads, results, strict=True)]
    new = [
        LeafState(*map(rebox, boxed, state))
        for boxed, (_, state) in zip(boxes, results, strict=True)
    ]
    return structure.unflatten(scaled), structure.unflatten(new)


class Draws(NamedTuple):
    """The random numbers of a step, the same for all leaves."""

    draws: RandomStart
    rounding: jax.Array | None  # where a leaf has factors in bfloat16


def draw_for_all(key: jax.Array, updates: Any, leaves: Any, settings: Settings) -> Draws:
    """Draws what serves every leaf.

    Args:
      key: Of this step.
      updates: The gradients, whose widest type the starts have.
      leaves: A tree with a `LeafState` at each leaf.
      settings: Of the optimizer.
    """
    of_leaves = jax.tree.leaves(leaves, is_leaf=lambda x: isinstance(x, LeafState))
    factors = [(unbox(leaf.q), unbox(leaf.u)) for leaf in of_leaves if leaf.is_factored]
    longest = max((u.shape[-2] for _, u in factors), default=1)
    widest = max(
        (settings.subspace.width(q.shape[-1], q.shape[-2]) for q, _ in factors),
        default=1,
    )
    dtypes = (unbox(grad).dtype for grad in jax.tree.leaves(updates, is_leaf=is_box))
    dtype = jnp.result_type(jnp.float32, *dtypes)
    rounding = None
    rounded = [q.shape[-1] for q, _ in factors if q.dtype == jnp.bfloat16]
    if rounded:
        # Not one of the keys that the starts are drawn with.
        shape = (2, longest, max(rounded))
        rounding = jax.random.bits(jax.random.fold_in(key, 2), shape, jnp.uint16)
    return replicated(Draws(draw_start(key, longest, widest, dtype), rounding))
