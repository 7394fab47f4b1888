"""An Adam state turned into an Adapprox state, for runs and checkpoints that began with Adam."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    require,
    require_choice,
    require_flag,
    require_transformation,
)
from adapprox_jax.linalg.random_start import require_key
from adapprox_jax.linalg.srsi import frobenius_norm, normalize, relative_error, srsi
from adapprox_jax.params.boxes import is_box, map_unboxed, rebox, unbox
from adapprox_jax.params.matrix_view import (
    WeightDimensionNumbers,
    check_dimension_numbers,
    map_matrices,
    matrix_view,
    resolve_dimension_numbers,
    to_matrices,
    view_shape,
)
from adapprox_jax.params.tree_checks import check_concrete, check_trees, leaf_name
from adapprox_jax.sharding.axes import with_automatic_axes
from adapprox_jax.state.layout import (
    LeafState,
    ScaleByAdapproxState,
    check_leaf,
    leaf_states,
    state_of,
)
from adapprox_jax.state.report import adapprox_states
from adapprox_jax.step.approximation import APPROXIMATIONS, Approximate, Approximation
from adapprox_jax.transforms.guided_ema import GuidedEmaState, stored_average
from adapprox_jax.transforms.matrix_rms import clip_by_matrix_rms
from adapprox_jax.transforms.partitioned import PartitionedState
from adapprox_jax.transforms.weight_decay import CautiousWeightDecayState


def from_adam(
    tx: optax.GradientTransformation,
    adam_state: Any,
    params: optax.Params,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    clipping_threshold: float | None = 1.0,
    bias_correction: bool = False,
    approximate: Approximate = "root",
    weight_dimension_numbers: WeightDimensionNumbers = None,
    key: int | jax.Array = 0,
) -> Any:
    """Turns the state of `optax.adam` or `optax.adamw` into one of `adapprox`, or `adapprox_muon`.

    The second moment is factored by S-RSI at the full width of the buffers. The first moment is an
    average of gradients in Adam and of clipped updates here: it becomes Adam's last update,
    clipped. Of the hidden matrices of `adapprox_muon` it becomes the average as it is, and the
    second moment of directions, which Adam does not know, begins anew. An Adam within `tx`, of
    other leaves, goes on as it is. Step counts, those of schedules too, go on from Adam's; what
    else wrappers and other transformations keep, such as the gradients that `optax.MultiSteps`
    gathers, begins anew. What `tx` was made with cannot be read from it: give
    `approximate` and the rest again where they are not the defaults.

    Args:
      tx: The transformation to go on with, such as `adapprox(...)` or `adapprox_muon(...)`.
      adam_state: Any state that holds one `optax.ScaleByAdamState`.
      params: The parameters.
      b1: Of the Adam that made the state.
      b2: Of the Adam that made the state, and of `tx`.
      eps: Of the Adam that made the state.
      clipping_threshold: Of `tx`, like the rest.
      bias_correction: Whether `tx` corrects the second moment by itself.
      approximate: What q @ u.T stands for.
      weight_dimension_numbers: Which axes of a leaf form a matrix.
      key: Seed or JAX random key of the factorizations.

    Returns:
      A state for `tx.update`.

    Raises:
      ValueError: an argument is out of range, there is not one Adam state, it belongs to other
        parameters, its arrays are traced, or `tx` is no Adapprox.

    Example:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512))}
      >>> adam_state = optax.adamw(1e-3).init(params)  # or from a checkpoint
      >>> tx = adapprox_jax.adapprox(1e-3)
      >>> state = adapprox_jax.from_adam(tx, adam_state, params)
    """
    require_transformation("tx", tx)
    for name, decay in (("b1", b1), ("b2", b2)):
        require(name, decay, lambda x: 0 <= x < 1, "a number in [0, 1)")
    require("eps", eps, lambda x: x >= 0, "a number of at least 0")
    if clipping_threshold is not None:
        allowed = "a number above 0, or None"
        require("clipping_threshold", clipping_threshold, lambda x: x > 0, allowed)
    require_flag("bias_correction", bias_correction)
    require_choice("approximate", approximate, tuple(APPROXIMATIONS))
    check_dimension_numbers(weight_dimension_numbers)
    random_key = require_key(key)
    adam = _only_adam_state(adam_state)
    check_concrete("from_adam", adam)
    state = tx.init(params)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, PartitionedState))
    if len(adapprox_states(state)) > 1 and not any(isinstance(x, PartitionedState) for x in nodes):
        raise ValueError(
            "tx has several second moments; allowed: those of adapprox_muon, or one. Adam's state"
            " does not tell which of them are of directions."
        )
    _check_shapes(adam, params)
    t = int(adam.count)

    def corrected(moment: Any, decay: float) -> Any:
        return optax.tree.scale(1 / (1 - decay**t) if t else 1.0, moment)

    nu_hat, mu_hat = corrected(adam.nu, b2), corrected(adam.mu, b1)

    def second_moment(of: ScaleByAdapproxState) -> ScaleByAdapproxState:
        nu = _masked_as(of.nu, adam.nu if bias_correction else nu_hat)
        numbers = resolve_dimension_numbers(weight_dimension_numbers, nu)
        check_trees(nu, of.nu, "the second moments of adam_state")
        convert_leaf = partial(
            _factored_leaf, approximation=APPROXIMATIONS[approximate], key=random_key
        )
        leaves = jax.tree_util.tree_map_with_path(
            convert_leaf, nu, numbers, leaf_states(of), is_leaf=is_box
        )
        return state_of(of.count, of.key, leaves)

    def first_moment(of: GuidedEmaState) -> GuidedEmaState:
        updates = map_unboxed(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        if clipping_threshold is not None:
            clip = clip_by_matrix_rms(clipping_threshold, weight_dimension_numbers)
            updates, _ = clip.update(updates, optax.EmptyState())
        return stored_average(_masked_as(of.mu, updates), of)

    def hidden(of: Any) -> Any:
        """The state of the directions of hidden matrices."""
        if not isinstance(of, GuidedEmaState):
            return of
        stored = stored_average(_masked_as(of.mu, adam.mu), of)
        return stored if isinstance(of.step, tuple) else stored._replace(step=adam.count)

    def convert(of: Any) -> Any:
        if isinstance(of, PartitionedState):
            return of._replace(
                hidden=jax.tree.map(hidden, of.hidden, is_leaf=is_converted),
                others=jax.tree.map(convert, of.others, is_leaf=is_converted),
            )
        if isinstance(of, ScaleByAdapproxState):
            return second_moment(of)
        if isinstance(of, optax.ScaleByAdamState):
            mu, nu = (_masked_as(of.mu, moment) for moment in (adam.mu, adam.nu))
            return of._replace(mu=optax.tree.cast_like(mu, of.mu), nu=nu)
        return first_moment(of) if isinstance(of, GuidedEmaState) else of

    def is_converted(node: Any) -> bool:
        return isinstance(node, _CONVERTED)

    if not adapprox_states(state):
        raise ValueError("tx keeps no state of Adapprox; allowed: adapprox, alone or wrapped.")
    state = _set_counts(jax.tree.map(convert, state, is_leaf=is_converted), adam.count)
    return jax.tree.map(jnp.array, state)  # arrays of its own: states are donated


def _set_counts(state: Any, count: jax.Array) -> Any:
    """A state whose counts of steps, those of schedules too, are `count`.

    What others call a count may be of something else, as that of `reduce_on_plateau` is.
    """

    def one(node: Any) -> Any:
        if not isinstance(node, _counting()):
            return node
        fields = {name: _set_counts(getattr(node, name), count) for name in node._fields}
        return node._replace(**{**fields, "count": jnp.asarray(count, node.count.dtype)})

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, _counting()))


_CONVERTED = (ScaleByAdapproxState, GuidedEmaState, PartitionedState, optax.ScaleByAdamState)


@cache
def _counting() -> tuple[Any, ...]:
    """States whose `count` is of steps. Two of them Optax does not name in public."""
    return (
        ScaleByAdapproxState,
        optax.ScaleByAdamState,
        optax.ScaleByScheduleState,
        optax.InjectStatefulHyperparamsState,
        CautiousWeightDecayState,
        type(optax.schedules.WrappedSchedule(lambda step: step).init()),
        type(optax.add_decayed_weights(lambda step: step).init(())),
    )


def _check_shapes(adam: optax.ScaleByAdamState, params: optax.Params) -> None:
    """Raises ValueError naming a leaf of which Adam's state has another shape."""
    shapes = {name: x.shape for name, x in _leaves_by_name(params).items()}
    for name, leaf in _leaves_by_name(adam.mu).items():
        if shapes.get(name, leaf.shape) != leaf.shape:
            raise ValueError(
                f"{name}: average and second moment in adam_state have shape {leaf.shape};"
                f" expected {shapes[name]}."
            )


def _leaves_by_name(tree: Any) -> dict[str, Any]:
    """Arrays, without their boxes."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return {leaf_name(path): unbox(leaf) for path, leaf in named}


def _masked_as(like: Any, tree: Any) -> Any:
    """A tree without the leaves that `optax.masked` left out of another."""

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def is_leaf(x: Any) -> bool:
        return is_masked(x) or is_box(x)

    if not any(map(is_masked, jax.tree.leaves(like, is_leaf=is_masked))):
        return tree
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    by_name = {leaf_name(path): leaf for path, leaf in named}

    def of_leaf(path: Any, kept: Any) -> Any:
        if is_masked(kept):
            return kept
        if leaf_name(path) not in by_name:
            raise ValueError(f"{leaf_name(path)}: adam_state has no such leaf.")
        return by_name[leaf_name(path)]

    return jax.tree_util.tree_map_with_path(of_leaf, like, is_leaf=is_leaf)


def _only_adam_state(state: Any) -> optax.ScaleByAdamState:
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    found = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    if len(found) != 1:
        raise ValueError(f"adam_state holds {len(found)} states of Adam; allowed: one.")
    return found[0]


def _factored_leaf(
    path: Any,
    nu_box: Any,
    numbers: Any,
    boxed: LeafState,
    *,
    approximation: Approximation,
    key: jax.Array,
) -> LeafState:
    """The state of one leaf that stands for a dense second moment."""
    check_leaf(leaf_name(path), nu_box, numbers, boxed, "second moment in adam_state")
    nu, state = unbox(nu_box), LeafState(*map(unbox, boxed))
    if not state.is_factored:
        return boxed._replace(nu=rebox(boxed.nu, jnp.asarray(nu, state.nu.dtype)))
    view = matrix_view(nu.shape, numbers)
    batch, _, _ = view_shape(nu.shape, view)
    target = approximation.of_moment(nu)
    *_, capacity = state.q.shape

    def factors(target: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        one = partial(_factors, key=key, capacity=capacity, dtype=state.q.dtype)
        return map_matrices(one, to_matrices(target, view), batch)

    results_like = (state.q, state.u, state.error, state.drift)
    q, u, error, drift = with_automatic_axes(factors, results_like)(target, key)
    return LeafState(
        q=rebox(boxed.q, q),
        u=rebox(boxed.u, u),
        rank=rebox(boxed.rank, jnp.full_like(state.rank, capacity)),
        error=rebox(boxed.error, error.astype(state.error.dtype)),
        drift=rebox(boxed.drift, drift.astype(state.drift.dtype)),
        nu=boxed.nu,
    )


@partial(jax.jit, static_argnames=("capacity", "dtype"))
def _factors(
    matrix: jax.Array, key: jax.Array, capacity: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, ...]:
    """Factors of one matrix, q on the shorter side, with the error and its norm."""
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    q, u = (x.astype(dtype) for x in srsi(matrix, capacity, key))
    unit, scale = normalize(matrix)
    error = relative_error(unit, q.astype(unit.dtype), u.astype(unit.dtype) / scale)
    return q, u, error, error * scale * frobenius_norm(unit)
