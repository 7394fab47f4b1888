"""scale_by_adapprox: divides a gradient by the root of its low-rank second moment.

The way of one gradient: leaf -> matrices -> previous second moment from its factors -> average
with the squared gradient -> factors -> quotient -> leaf. Each arrow is a function of one matrix;
`scale_by_adapprox` applies them to the leaves of a tree.
"""

import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.boxes import is_box, rebox, unbox
from adapprox_jax.leaf_state import LeafState, check_leaf, init_leaf
from adapprox_jax.low_rank import (
    ORTHOGONALIZATIONS,
    Orthogonalization,
    RandomStart,
    contract,
    draw_start,
    outer,
    start_columns,
    tiled_products,
)
from adapprox_jax.matrix_view import (
    MatrixDimensionNumbers,
    WeightDimensionNumbers,
    from_matrices,
    map_matrices,
    matrix_view,
    resolve_dimension_numbers,
    to_matrices,
    view_shape,
)
from adapprox_jax.rank import (
    Factors,
    RankGrowth,
    adaptive_srsi,
    sigmoid_growth,
    size_index,
    warm_start,
    work_sizes,
    work_width,
)
from adapprox_jax.sharding import with_automatic_axes
from adapprox_jax.tiles import sweep, tiling_of
from adapprox_jax.tree_checks import check_state, check_trees, check_types, leaf_name
from adapprox_jax.validation import is_zero, require, require_choice, require_integer

Approximate: TypeAlias = Literal["moment", "root"]
ErrorThreshold: TypeAlias = jax.typing.ArrayLike | Callable[[jax.Array], jax.Array]
APPROXIMATIONS = ("moment", "root")
FACTOR_DTYPES = ("bfloat16", "float32", "float64")  # float16 would overflow


class ScaleByAdapproxState(NamedTuple):
    """State of `scale_by_adapprox`.

    After `count` and `key` come trees with the structure of the parameters. A leaf is factored or
    dense, and the fields of the other kind hold a scalar zero for it. `batch` is the shape of the
    axes that are neither rows nor columns.
    """

    count: jax.Array  # type: ignore[assignment]  # int32 scalar, updates so far
    key: jax.Array  # uint32 data of the random key: typed keys do not survive every checkpoint
    q: Any  # (*batch, shorter side, capacity), columns from `rank` on are zero
    u: Any  # (*batch, longer side, capacity)
    rank: Any  # int32 (*batch), columns in use
    error: Any  # float32 (*batch), the paper's xi when it was measured last
    drift: Any  # float32 (*batch), bounds the distance from the exact second moment
    nu: Any  # second moment of the dense leaves, with the leaf's shape


def scale_by_adapprox(
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    bias_correction: bool = False,
    initial_rank: int | None = None,
    max_rank: int | float = 8,
    error_threshold: ErrorThreshold = 0.01,
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
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the root, at least 0.
      eps_root: Added under the root, at least 0.
      bias_correction: Divide the second moment by 1 - b2^t, as Adam does and the paper does not.
      initial_rank: k_init, the first rank tried, at least 1. None, or `max_rank`: the rank is fixed
        at `max_rank`, the simple, predictable mode.
      max_rank: k_max, the width of the buffers: an int, or a float in (0, 1] as a fraction of
        min(m, n), rounded down, at least 1.
      error_threshold: The rank grows while the relative error is above it, at least 0. With
        `approximate="root"` this is the error of the root. Or a function from the step, from 1, to
        it, as `sampling_threshold` gives.
      rank_interval: Steps between choices of the rank, at least 1. The error, too, is measured at
        these steps alone.
      rank_growth: f: from the error to the columns to add; None for `sigmoid_growth()`.
      rank_margin: Columns kept beyond the rank at which the error is low enough, at least 0. What
        those leave out gathers there over the steps, so that a low rank can be seen to be too low.
      power_iterations: l, passes of Algorithm 1's loop, at least 1.
      oversampling: p, columns worked on beyond the rank, at least 0. With a warm start the columns
        in use turn towards what they lack by themselves, and more did not lower the loss
        (docs/performance.md).
      rotate: Keep the best k of the k + p directions; False is the algorithm as printed.
      warm_start: Start from the last factors in place of a Gaussian matrix.
      approximate: "moment" factors V, "root" its elementwise square root.
      orthogonalization: "qr" or "cholesky" (see `srsi`).
      min_dim_size_to_factor: Leaves with fewer rows or columns than this stay dense.
      weight_dimension_numbers: `MatrixDimensionNumbers` for some or all leaves: a tree that is a
        prefix of the parameters' (None: the default view), or a function from parameters to it.
      factor_dtype: Type of q and u: bfloat16, float32 or float64; None for float32, or float64 for
        float64 parameters.
      key: An int seed or a JAX random key for the Gaussian starts. The same starts serve every
        leaf, so that an update does not depend on the order or the stacking of leaves.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByAdapproxState`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.scale_by_adapprox()
      >>> params = {"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)}
      >>> state = tx.init(params)
      >>> state.q["kernel"].shape, state.u["kernel"].shape, state.nu["bias"].shape
      ((256, 8), (512, 8), (512,))

    Source: paper, Algorithm 3; the deviations are in docs/algorithm.md.
    """
    _check(
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        initial_rank=initial_rank,
        max_rank=max_rank,
        error_threshold=error_threshold,
        rank_interval=rank_interval,
        power_iterations=power_iterations,
        oversampling=oversampling,
        approximate=approximate,
        orthogonalization=orthogonalization,
        min_dim_size_to_factor=min_dim_size_to_factor,
        rank_growth=rank_growth,
        rank_margin=rank_margin,
        factor_dtype=factor_dtype,
    )
    seed_or_key, key_impl = check_key(key)
    width_of = partial(work_width, oversampling=oversampling, rotate=rotate)
    step_matrix = partial(
        update_matrix,
        approximate=approximate,
        initial_rank=initial_rank,
        width_of=width_of,
        warm=warm_start,
        factorize=partial(
            adaptive_srsi,
            rank_interval=rank_interval,
            rank_growth=sigmoid_growth() if rank_growth is None else rank_growth,
            rank_margin=rank_margin,
            power_iterations=power_iterations,
            rotate=rotate,
            orthogonalization=orthogonalization,
        ),
    )
    if initial_rank is not None:  # so that under `jax.vmap`, too, a branch is taken or not
        step_matrix = jax.custom_batching.sequential_vmap(step_matrix)

    start = partial(
        init_leaf,
        initial_rank=initial_rank,
        max_rank=max_rank,
        min_dim_size_to_factor=min_dim_size_to_factor,
        factor_dtype=factor_dtype,
    )

    def init(params: optax.Params) -> ScaleByAdapproxState:
        check_types(params, "parameter")
        numbers = resolve_dimension_numbers(weight_dimension_numbers, params)
        leaf_states = jax.tree.map(start, params, numbers, is_leaf=is_box)
        return ScaleByAdapproxState(
            jnp.zeros([], jnp.int32),
            _key_data(seed_or_key),
            *as_trees(params, leaf_states),
        )

    def update(
        updates: optax.Updates, state: ScaleByAdapproxState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdapproxState]:
        del params
        check_state(state, ScaleByAdapproxState, "scale_by_adapprox")
        check_types(updates, "gradient")
        check_trees(updates, state.nu)
        count = optax.safe_increment(state.count)
        key = jax.random.wrap_key_data(state.key, impl=key_impl)
        longest, widest = _largest_start(
            state,
            lambda capacity, rows: width_of(work_sizes(capacity, rows, initial_rank)[-1], rows),
        )
        dtypes = (unbox(grad).dtype for grad in jax.tree.leaves(updates, is_leaf=is_box))
        dtype = jnp.result_type(jnp.float32, *dtypes)
        threshold = error_threshold(count) if callable(error_threshold) else error_threshold
        scalars = StepScalars(
            step=count,
            drawn=draw_start(jax.random.fold_in(key, count), longest, widest, dtype),
            b2=b2,
            eps=eps,
            eps_root=eps_root,
            correction=1 - b2**count if bias_correction else 1.0,
            error_threshold=threshold,
        )
        after = last_error = jnp.zeros(())

        def update_boxed(
            path: Any, grad: Any, numbers: MatrixDimensionNumbers | None, *fields: Any
        ) -> tuple[Any, LeafState]:
            nonlocal after, last_error
            check_leaf(leaf_name(path), grad, numbers, LeafState(*fields))
            operands = unbox(grad), LeafState(*map(unbox, fields))
            one_step = partial(update_leaf, numbers=numbers, step_matrix=step_matrix)
            scaled, new = with_automatic_axes(one_step, operands)(scalars, after, *operands)
            if new.is_factored:
                # A leaf waits for the quotient of the one before it and the factors of the one
                # before that: the small decompositions run beside the next leaf's products.
                squares = jnp.square(unbox(scaled).astype(jnp.float32))
                after = jnp.minimum(jnp.sum(squares), last_error)
                last_error = jnp.max(new.error)
            return rebox(grad, scaled), LeafState(*map(rebox, fields, new))

        numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)
        fields = (getattr(state, name) for name in LeafState._fields)
        results = jax.tree_util.tree_map_with_path(
            update_boxed, updates, numbers, *fields, is_leaf=is_box
        )
        scaled = jax.tree.map(lambda _, result: result[0], updates, results, is_leaf=is_box)
        leaf_states = jax.tree.map(lambda _, result: result[1], updates, results, is_leaf=is_box)
        return scaled, ScaleByAdapproxState(count, state.key, *as_trees(updates, leaf_states))

    return optax.GradientTransformation(init, update)


class StepScalars(NamedTuple):
    """The numbers of one step, all of which may be traced."""

    step: jax.Array  # t, from 1, int32
    drawn: RandomStart  # random numbers of this step, for all leaves
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    correction: jax.typing.ArrayLike  # what the second moment is divided by: 1, or 1 - b2^t
    error_threshold: jax.typing.ArrayLike


def update_leaf(
    scalars: StepScalars,
    after: jax.Array,
    grad: jax.Array,
    state: LeafState,
    *,
    numbers: MatrixDimensionNumbers | None,
    step_matrix: Callable[..., tuple[jax.Array, Factors, jax.Array]],
) -> tuple[jax.Array, LeafState]:
    """One step for one leaf: of each of its matrices, or of its dense second moment.

    Args:
      scalars: The numbers of this step.
      after: A number that is not negative, of the leaf before: only then does this one begin.
      grad: The gradient, of any shape and real floating-point type.
      state: The leaf's state.
      numbers: Which axes form a matrix.
      step_matrix: `update_matrix` with its settings bound.

    Returns:
      The scaled gradient in the type of the gradient, and the new state.
    """
    if not state.is_factored:
        wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
        nu = average(state.nu, wide, scalars.b2)
        scaled = divide_by_root(wide, nu, scalars).astype(grad.dtype)
        return scaled, state._replace(nu=nu.astype(state.nu.dtype))
    view = matrix_view(grad.shape, numbers)
    batch, _, _ = view_shape(grad.shape, view)
    scaled, factors, drift = map_matrices(
        lambda one: step_matrix(scalars, *one),
        (
            to_matrices(grad, view),
            _begin_after(after, state.q),
            state.u,
            state.rank,
            state.error,
            state.drift,
        ),
        batch,
    )
    scaled = from_matrices(scaled, view, grad.shape)
    return scaled, LeafState(**factors._asdict(), drift=drift, nu=state.nu)


def update_matrix(
    scalars: StepScalars,
    grad: jax.Array,
    q: jax.Array,
    u: jax.Array,
    rank: jax.Array,
    error: jax.Array,
    drift: jax.Array,
    *,
    approximate: Approximate,
    initial_rank: int | None,
    width_of: Callable[[int, int], int],
    warm: bool,
    factorize: Callable[..., tuple[Factors, jax.Array]],
) -> tuple[jax.Array, Factors, jax.Array]:
    """One step of Algorithm 3 for one matrix, up to the quotient.

    Args:
      scalars: The numbers of this step.
      grad: G, (m, n) or (n, m): q belongs to its shorter side, wherever that stands.
      q: (m, capacity), of the last step.
      u: (n, capacity), of the last step.
      rank: Columns in use, int32 scalar.
      error: When it was measured last, float32 scalar.
      drift: Bound of the distance of q @ u.T from the exact second moment (its root, for "root").
      approximate: What q @ u.T stands for.
      initial_rank: k_init, as in `adaptive_srsi`.
      width_of: Columns worked on for a size and the shorter side: `rank.work_width`.
      warm: Whether to start from `u`.
      factorize: `adaptive_srsi` with the rest of its settings bound.

    Returns:
      The scaled gradient in its shape and type, the new factors, the new drift.
    """
    dtype = jnp.promote_types(grad.dtype, jnp.float32)
    tiling = tiling_of(grad.shape)
    axis = tiling.axis
    rows, capacity = q.shape
    sizes = work_sizes(capacity, rows, initial_rank)
    largest_u = jnp.max(jnp.abs(u[:, : sizes[0]]))  # the leading columns: wide buffers take long
    scale = unit_scale(grad, largest_u, approximate)
    factor_scale = scale if approximate == "root" else scale**2
    inverse_scale = 1 / factor_scale

    def unit_grad(tile: jax.typing.ArrayLike) -> jax.Array:
        return tiling.take(grad, 1 - axis, tile).astype(dtype) * (1 / scale)

    @tiling.once
    def target(tile: jax.typing.ArrayLike) -> jax.Array:
        previous = reconstruct(
            q,
            u,
            inverse_scale,
            rank,
            approximate=approximate,
            sizes=sizes,
            axis=axis,
            dtype=dtype,
            rows_of=lambda u: tiling.take(u, 0, tile),
        )
        second_moment = average(previous, unit_grad(tile), scalars.b2)
        return jnp.sqrt(second_moment) if approximate == "root" else second_moment

    def start_of(width: int) -> jax.Array:
        start = start_columns(scalars.drawn, width, dtype, u.shape[0])
        known = jnp.where(largest_u > 0, rank, 0)
        return warm_start(start, u, known, inverse_scale) if warm else start

    start = start_of(width_of(sizes[0], rows))

    def first_pass(tile: jax.typing.ArrayLike) -> tuple[Any, tuple[jax.Array]]:
        part = target(tile)
        image = contract(part, tiling.take(start, 0, tile), 1 - axis)
        scaled = divide_by_root(unit_grad(tile), part, scalars, approximate, scale)
        return image, (scaled.astype(grad.dtype),)

    first_image, (scaled,) = sweep(tiling, first_pass, dims=(1 - axis,), fill=scale)
    factors, norm = factorize(
        tiled_products(target, tiling),
        start_of,
        first_image,
        q.astype(dtype),
        u.astype(dtype),
        rank,
        error,
        scalars.step,
        initial_rank=initial_rank,
        error_threshold=scalars.error_threshold,
        width_of=width_of,
        factor_dtype=q.dtype,
    )
    drift = accumulate_drift(drift, factors.error, factor_scale * norm, scalars.b2, approximate)
    factors = factors._replace(u=(factors.u * factor_scale).astype(u.dtype))
    return scaled, factors, drift


def unit_scale(grad: jax.Array, largest_u: jax.Array, approximate: Approximate) -> jax.Array:
    """A power of two near the largest entries of the root of V, or of G where there is no V yet.

    Divided by it, squares neither overflow nor vanish, and to undo the division rounds nothing. A
    gradient may be 1e19 times as large as all before it; and 1e7 after none but vanishing ones.

    Args:
      grad: G, of any shape.
      largest_u: Largest magnitude in u, a scalar.
      approximate: What q @ u.T stands for.
    """
    dtype = jnp.promote_types(grad.dtype, jnp.float32)
    root = largest_u if approximate == "root" else jnp.sqrt(largest_u)
    largest = jax.lax.cond(
        root > 0,
        lambda grad: root.astype(dtype),
        lambda grad: jnp.max(jnp.abs(grad)).astype(dtype),
        grad,
    )
    _, exponent = jnp.frexp(largest)
    exponent = jnp.where(largest > 0, jnp.clip(exponent, -40, 60), 0)
    return jnp.ldexp(jnp.ones_like(largest), exponent)


def reconstruct(
    q: jax.Array,
    u: jax.Array,
    inverse_scale: jax.typing.ArrayLike,
    rank: jax.Array,
    *,
    approximate: Approximate,
    sizes: tuple[int, ...],
    axis: int,
    dtype: jax.typing.DTypeLike,
    rows_of: Callable[[jax.Array], jax.Array] = lambda u: u,
) -> jax.Array:
    """The second moment that the factors stand for, with the product cut off at zero.

    A low-rank approximation of a positive matrix has negative entries from rank 2 on
    (docs/algorithm.md, 3).

    Args:
      q: (m, capacity).
      u: (n, capacity).
      inverse_scale: What the product is multiplied by, a power of two.
      rank: Columns in use.
      approximate: What q @ u.T stands for.
      sizes: Ranks for which there is code of its own, rising, the last for all columns.
      axis: Along which q stands in the result.
      dtype: Of the result.
      rows_of: The rows of u that are asked for. It is called on the columns in use alone: of a
        large matrix, wide buffers would take longer to copy than all else.

    Returns:
      (m, n), or (n, m) for axis 1; n is the number of rows asked for.
    """

    def product_of(width: int, q: jax.Array, u: jax.Array) -> jax.Array:
        unit_u = rows_of(u[:, :width]).astype(dtype) * inverse_scale
        return outer(q[:, :width].astype(dtype), unit_u, axis)

    branches = [partial(product_of, size) for size in sizes]
    product = jnp.maximum(jax.lax.switch(size_index(sizes, rank), branches, q, u), 0)
    return product**2 if approximate == "root" else product


def average(previous: jax.Array, grad: jax.Array, b2: jax.typing.ArrayLike) -> jax.Array:
    """b2 V + (1 - b2) G^2, elementwise."""
    return previous * b2 + jnp.square(grad) * (1 - b2)


def divide_by_root(
    grad: jax.Array,
    target: jax.Array,
    scalars: StepScalars,
    approximate: Approximate = "moment",
    scale: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """G / (sqrt(V / correction + eps_root) + eps), elementwise.

    Args:
      grad: G / scale.
      target: V / scale^2, or for "root" its root.
      scalars: The numbers of this step.
      approximate: Which of the two `target` is.
      scale: What G was divided by.
    """
    if approximate == "root" and is_zero(scalars.eps_root):
        root = target / jnp.sqrt(scalars.correction)
    else:
        moment = jnp.square(target) if approximate == "root" else target
        eps_root = scalars.eps_root if is_zero(scalars.eps_root) else scalars.eps_root / scale**2
        root = jnp.sqrt(moment / scalars.correction + eps_root)
    return grad / (root + scalars.eps / scale)


def accumulate_drift(
    drift: jax.Array,
    error: jax.Array,
    norm: jax.Array,
    b2: jax.typing.ArrayLike,
    approximate: Approximate,
) -> jax.Array:
    """Carries the bound of the distance from the exact second moment over one step.

    With D the distance in the Frobenius norm, D_t <= b2 D_(t-1) + ||V_t - q u^T||: averaging
    shrinks an old distance by b2, cutting off entries below zero does not grow it, and the
    factorization adds its own. Of the root, x -> sqrt(b2 x^2 + c) shrinks by sqrt(b2) at least.

    Args:
      drift: D_(t-1).
      error: xi. Where it was measured some steps ago, D is an estimate and no bound.
      norm: ||q u^T||, from which with xi follows ||V_t - q u^T||: the two are orthogonal.
      b2: As in `scale_by_adapprox`.
      approximate: As in `scale_by_adapprox`.
    """
    decay = jnp.sqrt(b2) if approximate == "root" else b2
    left_out = error * norm / jnp.sqrt(jnp.maximum(1 - jnp.square(error), 1e-6))
    return (drift * decay + left_out).astype(drift.dtype)


def _begin_after(after: jax.Array, array: jax.Array) -> jax.Array:
    """The array, once `after`, which is never negative, is known.

    Without it XLA works on all leaves at once and holds the intermediates of all of them; it
    ignores `optimization_barrier` there.
    """
    return jnp.where(after < 0, 0, array)


def _largest_start(state: ScaleByAdapproxState, width_of: Callable[..., int]) -> tuple[int, int]:
    """Rows and columns of a random start that serves every leaf."""
    shapes = [
        (unbox(u).shape[-2], width_of(unbox(q).shape[-1], unbox(q).shape[-2]))
        for q, u in zip(
            jax.tree.leaves(state.q, is_leaf=is_box),
            jax.tree.leaves(state.u, is_leaf=is_box),
            strict=True,
        )
        if unbox(q).ndim > 0
    ]
    longest, widest = zip(*shapes, strict=True) if shapes else ((1,), (1,))
    return max(longest), max(widest)


def as_trees(like: Any, leaf_states: Any) -> list[Any]:
    """A tree of `LeafState`s as one tree for each field, with the structure of `like`."""
    return [
        jax.tree.map(
            lambda _, leaf, name=name: getattr(leaf, name), like, leaf_states, is_leaf=is_box
        )
        for name in LeafState._fields
    ]


def _check(
    *,
    b2: Any,
    eps: Any,
    eps_root: Any,
    initial_rank: Any,
    max_rank: Any,
    error_threshold: Any,
    rank_interval: Any,
    power_iterations: Any,
    oversampling: Any,
    approximate: Any,
    orthogonalization: Any,
    min_dim_size_to_factor: Any,
    rank_growth: Any,
    rank_margin: Any,
    factor_dtype: Any,
) -> None:
    """Raises ValueError for the first argument of `scale_by_adapprox` that is out of range."""
    require("b2", b2, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("eps", eps, lambda x: x >= 0, "a number of at least 0")
    require("eps_root", eps_root, lambda x: x >= 0, "a number of at least 0")
    if initial_rank is not None:
        require_integer("initial_rank", initial_rank, 1)
    if isinstance(max_rank, float):
        require("max_rank", max_rank, lambda x: 0 < x <= 1, "as a float, a fraction in (0, 1]")
    else:
        require_integer("max_rank", max_rank, 1)
        if initial_rank is not None:
            allowed = f"an integer of at least initial_rank = {initial_rank}"
            require("max_rank", max_rank, lambda x: x >= initial_rank, allowed)
    if not callable(error_threshold):
        allowed = "a number of at least 0, or a function from the step to one"
        require("error_threshold", error_threshold, lambda x: x >= 0, allowed)
    require_integer("rank_margin", rank_margin, 0)
    require_integer("rank_interval", rank_interval, 1)
    require_integer("power_iterations", power_iterations, 1)
    require_integer("oversampling", oversampling, 0)
    require_integer("min_dim_size_to_factor", min_dim_size_to_factor, 1)
    require_choice("approximate", approximate, APPROXIMATIONS)
    require_choice("orthogonalization", orthogonalization, ORTHOGONALIZATIONS)
    if not (rank_growth is None or callable(rank_growth)):
        raise ValueError(f"rank_growth is {rank_growth!r}; allowed: a function, or None.")
    if factor_dtype is not None:
        require_choice("factor_dtype", jnp.dtype(factor_dtype).name, FACTOR_DTYPES)


def check_key(key: Any) -> tuple[int | jax.Array, Any]:
    """The seed or key, and the implementation of a typed key. Makes no array: no device yet."""
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        return int(key), None
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key, jax.random.key_impl(key)
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32:
        return jnp.asarray(key), None
    raise ValueError(f"key is {key!r}; allowed: an integer seed or a JAX random key.")


def _key_data(key: int | jax.Array) -> jax.Array:
    """The data of a seed's or a key's random key, in an array of its own: states are donated."""
    return jnp.array(jax.random.key_data(jax.random.key(key) if isinstance(key, int) else key))
