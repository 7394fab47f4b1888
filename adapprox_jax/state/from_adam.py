"""An Adam state turned into an Adapprox state, for runs and checkpoints that began with Adam."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    DECAY,
    NOT_NEGATIVE,
    check_concrete,
    require,
    require_choice,
    require_flag,
    require_same,
    require_transformation,
)
from adapprox_jax.linalg.products import outer
from adapprox_jax.linalg.random_keys import require_key
from adapprox_jax.linalg.srsi import normalize, srsi
from adapprox_jax.params.hidden_matrices import HIDDEN, OTHERS
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixView, to_matrices
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.sharding.axes import with_automatic_axes
from adapprox_jax.state.layout import (
    LeafState,
    ScaleByAdapproxState,
    check_leaf,
    leaf_states,
    second_moments,
    with_leaf_states,
)
from adapprox_jax.state.report import adapprox_states
from adapprox_jax.step.approximation import APPROXIMATIONS, Approximate
from adapprox_jax.transforms.guided_ema import GuidedEmaState, stored_average
from adapprox_jax.transforms.matrix_rms import clip_by_matrix_rms

# Types of states whose `count` is of steps. Two of them Optax does not name in public.
_COUNTING = (
    *("ScaleByAdapproxState", "ScaleByAdamState"),
    *("ScaleByScheduleState", "InjectStatefulHyperparamsState"),
    *("WrappedScheduleState", "WeightDecaySchedule"),
)


def from_adam(
    tx: optax.GradientTransformation,
    adam_state: Any,
    params: optax.Params,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    clipping_threshold: float | None = 1.0,
    nesterov: bool = True,
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
      adam_state: Any state that holds one `optax.ScaleByAdamState`. Adamax has one, too, but no
        second moment in it: do not give that.
      params: The parameters.
      b1: Of the Adam that made the state.
      b2: Of the Adam that made the state, and of `tx`.
      eps: Of the Adam that made the state.
      clipping_threshold: Of `tx`, like the rest.
      nesterov: Whether `tx` has Nesterov's momentum, which corrects the average by itself.
      bias_correction: Whether `tx` corrects the second moment by itself.
      approximate: What q @ u.T stands for.
      weight_dimension_numbers: Which axes of a leaf form a matrix.
      key: Seed or JAX random key of the factorizations.

    Returns:
      A state for `tx.update`.

    Raises:
      ValueError: an argument is out of range, there is not one Adam state, it belongs to other
        parameters, its arrays are traced, or `tx` is no Adapprox.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512))}
      >>> adam_state = optax.adamw(1e-3).init(params)  # or from a checkpoint
      >>> tx = adapprox_jax.adapprox(1e-3)
      >>> state = adapprox_jax.from_adam(tx, adam_state, params)
    """
    require_transformation("tx", tx)
    clip = optax.identity()
    if clipping_threshold is not None:
        allowed = "a number above 0, or None"
        require("clipping_threshold", clipping_threshold, lambda x: x > 0, allowed)
        clip = clip_by_matrix_rms(clipping_threshold, weight_dimension_numbers)
    require_flag("nesterov", nesterov)
    require_flag("bias_correction", bias_correction)
    require_choice("approximate", approximate, tuple(APPROXIMATIONS))
    check_dimension_numbers(weight_dimension_numbers)
    for name, decay in (("b1", b1), ("b2", b2)):
        require(name, decay, *DECAY)
    require("eps", eps, *NOT_NEGATIVE)
    start = require_key(key)
    adam = _adam_of(adam_state, params)
    steps = int(adam.count)

    def unbiased(moment: dict[str, jax.Array], decay: float) -> Any:
        return optax.tree.scale(1 / (1 - decay ** max(steps, 1)), moment)

    mu, nu = unbiased(adam.mu, b1), unbiased(adam.nu, b2)
    last_update = {name: mu[name] / (jnp.sqrt(nu[name]) + eps) for name in mu}
    share = 1 - b1**steps if nesterov else 1.0

    def averaged(like: Any) -> Any:
        clipped, _ = clip.update(_taken(last_update, like), optax.EmptyState())
        return optax.tree.scale(share, clipped)

    second = adam.nu if bias_correction else nu
    factored = partial(
        _factored,
        second=second,
        approximate=approximate,
        weight_dimension_numbers=weight_dimension_numbers,
        key=start,
    )
    state = tx.init(params)
    _check_state(state)
    found = _Found(adam, b1**steps, averaged, factored)
    # New arrays: states are donated.
    return jax.tree.map(jnp.array, _converted(state, found))


class _Found(NamedTuple):
    """What a state of Adam comes to."""

    adam: optax.ScaleByAdamState  # with averages by the paths of their leaves
    left: float  # what its average lacks, because it began at zero
    averaged: Callable[[Any], Any]  # the average of updates, for a tree like another one
    factored: Callable[[ScaleByAdapproxState], ScaleByAdapproxState]  # for a state like it


def _converted(state: Any, found: _Found, is_hidden: bool = False) -> Any:
    """A state like another one, with what was found of Adam's."""
    adam = found.adam

    def convert(node: Any) -> Any:
        if _is_muon(node):
            parts = {
                part: _converted(inner, found, is_hidden=part == HIDDEN)
                for part, inner in node.inner_states.items()
            }
            return optax.PartitionState(parts)
        if isinstance(node, GuidedEmaState):
            average = _taken(adam.mu, node.mu) if is_hidden else found.averaged(node.mu)
            left = jnp.asarray(found.left, node.left.dtype)
            return stored_average(average, node)._replace(step=adam.count, left=left)
        if not _counts_steps(node):
            return node
        fields = {name: _converted(getattr(node, name), found, is_hidden) for name in node._fields}
        node = node._replace(**fields | {"count": jnp.asarray(adam.count, node.count.dtype)})
        if is_hidden:  # their second moments are of directions
            return node
        if isinstance(node, ScaleByAdapproxState):
            return found.factored(node)
        if isinstance(node, optax.ScaleByAdamState):
            average = optax.tree.cast_like(_taken(adam.mu, node.mu), node.mu)
            return node._replace(mu=average, nu=_taken(adam.nu, node.nu))
        return node

    return jax.tree.map(convert, state, is_leaf=_is_converted)


def _is_muon(node: Any) -> bool:
    """Whether this is the state of `adapprox_muon`'s two parts."""
    return isinstance(node, optax.PartitionState) and set(node.inner_states) == {HIDDEN, OTHERS}


def _counts_steps(node: Any) -> bool:
    """Whether a state's `count` is of steps. What others call a count may be of something else."""
    return type(node).__name__ in _COUNTING


def _is_converted(node: Any) -> bool:
    return isinstance(node, GuidedEmaState) or _counts_steps(node) or _is_muon(node)


def _check_state(state: Any) -> None:
    """Raises ValueError where it is not clear what a state has second moments of."""
    count = len(adapprox_states(state))
    if count == 0:
        raise ValueError("tx keeps no state of Adapprox; allowed: adapprox, alone or wrapped.")
    if count > 1 and not any(map(_is_muon, jax.tree.leaves(state, is_leaf=_is_muon))):
        raise ValueError(
            "tx has several second moments; allowed: one, or those of adapprox_muon. Of others"
            " Adam's state does not tell which are of gradients. Convert each part by itself."
        )


def _adam_of(state: Any, params: optax.Params) -> optax.ScaleByAdamState:
    """The one state of Adam in a state, with its averages by the paths of their leaves.

    Raises:
      ValueError: There is not one, its arrays are traced, or of other shapes than the parameters.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    found = [node for node in nodes if isinstance(node, optax.ScaleByAdamState)]
    if len(found) != 1:
        raise ValueError(
            f"adam_state holds {len(found)} states of Adam; allowed: one, as in"
            " from_adam(tx, adam_state, params)."
        )
    [adam] = found
    check_concrete("from_adam", adam)
    mu, nu, of_params = (
        dict(zip(leaves.names, leaves.arrays, strict=True))
        for leaves in map(Leaves.of, (adam.mu, adam.nu, params))
    )
    for name, leaf in mu.items():
        expected = getattr(of_params.get(name), "shape", "none")
        what = f"{name}: average and second moment in adam_state have shape"
        require_same(what, leaf.shape, expected)
    return adam._replace(mu=mu, nu=nu)


def _taken(moments: dict[str, jax.Array], like: Any) -> Any:
    """A tree like another one, which may lack leaves, with what was found of its leaves."""
    leaves = Leaves.of(like)
    for name in leaves.names:
        if name not in moments:
            raise ValueError(f"{name}: adam_state has no such leaf.")
    return leaves.filled([moments[name] for name in leaves.names])


def _factored(
    state: ScaleByAdapproxState,
    second: dict[str, jax.Array],
    approximate: Approximate,
    weight_dimension_numbers: WeightDimensionNumbers,
    key: jax.Array,
) -> ScaleByAdapproxState:
    """A state that stands for dense second moments, given by the paths of their leaves."""
    leaves = Leaves.of(_taken(second, second_moments(state).tree))
    views = views_of(weight_dimension_numbers, leaves)
    lasts = leaf_states(state)
    for name, nu, view, last in zip(leaves.names, leaves.arrays, views, lasts, strict=True):
        check_leaf(name, nu, view, last, "second moment in adam_state")

    def factored(nu: jax.Array, view: MatrixView, last: LeafState) -> LeafState:
        if not last.is_factored:
            return last._replace(nu=jnp.asarray(nu, last.nu.dtype))
        batch, capacity = last.rank.shape, last.q.shape[-1]

        def factors(target: jax.Array, key: jax.Array) -> Sequence[jax.Array]:
            one = partial(_factors, key=key, capacity=capacity, dtype=last.q.dtype)
            # One after the other: each takes memory.
            results = jax.lax.map(one, to_matrices(target, view))
            return [x.reshape(*batch, *x.shape[1:]) for x in results]

        like = [last.q, last.u, last.error, last.drift]
        target = APPROXIMATIONS[approximate].of_moment(nu)
        q, u, error, drift = with_automatic_axes(factors, like)(target, key)
        error, drift = error.astype(last.error.dtype), drift.astype(last.drift.dtype)
        return LeafState(q, u, jnp.full_like(last.rank, capacity), error, drift)

    return with_leaf_states(state, state.count, list(map(factored, leaves.arrays, views, lasts)))


@partial(jax.jit, static_argnames=("capacity", "dtype"))
def _factors(
    matrix: jax.Array, key: jax.Array, capacity: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, ...]:
    """Factors of one matrix, q on the shorter side, with the error and its norm."""
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    q, u = (x.astype(dtype) for x in srsi(matrix, capacity, key))
    unit, scale = normalize(matrix)
    product = outer(q.astype(unit.dtype), u.astype(unit.dtype) / scale, 0)
    left_out, norm = jnp.linalg.norm(unit - product), jnp.linalg.norm(unit)
    return q, u, left_out / jnp.where(norm == 0, 1, norm), scale * left_out
