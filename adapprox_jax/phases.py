"""One step of all factored leaves in phases, as accelerators like it.

There a small decomposition costs the same for one matrix as for a hundred, and a branch or a loop
of unknown length is a round trip to the host. So what is small is done for all leaves together, and
what is large leaf by leaf:

1. each leaf: the target from its factors and its gradient, and its image of the start;
2. together: orthonormal bases of the images;
3. each leaf: the target once more, A^T q, the error, the quotient.

The target is never kept from one phase to another, and nothing waits for the host but one branch
of adaptive ranks, for the steps that choose them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.low_rank import mask_columns, normalize, principal_turn, unit_columns
from adapprox_jax.matrix_step import accumulate_drift, divide_by_root, rounding_bits, unit_scale
from adapprox_jax.matrix_view import MatrixView, from_matrices, to_matrices, view_shape
from adapprox_jax.orthonormalize import ORTHONORMALIZE
from adapprox_jax.products import column_energies, contract, fused_outer, matmul
from adapprox_jax.random_start import start_columns, warm_start
from adapprox_jax.rank import choose_rank_by_table, fit_columns
from adapprox_jax.rounding import round_stochastically
from adapprox_jax.settings import Settings
from adapprox_jax.sharding import with_automatic_axes
from adapprox_jax.state import LeafState
from adapprox_jax.step_scalars import StepScalars, merge_known

_LARGEST_SLICE = 2**25  # entries of a stack that are worked on at once: 128 MiB in float32


class Plan(NamedTuple):
    """What is the same for all matrices of a leaf."""

    scalars: StepScalars
    settings: Settings
    axis: int  # of a matrix of the gradient, along which q stands
    rows: int  # the shorter side
    capacity: int  # columns of the buffers

    @property
    def is_fixed(self) -> bool:
        """Whether the rank is that of the buffers."""
        return self.settings.rank.is_fixed(self.capacity)

    @property
    def width(self) -> int:
        """Columns worked on: those of the buffers, and p more."""
        return self.settings.subspace.width(self.capacity, self.rows)


class Matrices(NamedTuple):
    """The matrices of a leaf as a stack: each array has a leading axis; or one of them, without."""

    grad: jax.Array  # (m, n) or (n, m)
    state: LeafState
    scale: jax.Array  # what G is divided by, a power of two


class Factored(NamedTuple):
    """New factors of a stack as the state has them, but for u in units of the target's scale."""

    q: jax.Array
    u: jax.Array
    rank: jax.Array
    error: jax.Array


def step_in_phases(
    traced: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    *,
    known: StepScalars,
    views: Sequence[MatrixView],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """One step for all factored leaves.

    Args:
      traced: The numbers of this step that are arrays; None for the others.
      grads: The gradients of the factored leaves.
      states: Their states.
      known: The numbers of this step that are known beforehand; None for the others.
      views: Which of their axes form matrices.
      settings: Of the optimizer.

    Returns:
      For each leaf the scaled gradient in its type, and the new state.
    """

    def all_leaves(
        traced: StepScalars, grads: Sequence[jax.Array], states: Sequence[LeafState]
    ) -> list[tuple[jax.Array, LeafState]]:
        plans, stacks = [], []
        for grad, state, view in zip(grads, states, views, strict=True):
            scalars = merge_known(known, traced, jnp.promote_types(grad.dtype, jnp.float32))
            _, rows, columns = view_shape(grad.shape, view)
            axis = 0 if rows <= columns else 1
            plans.append(Plan(scalars, settings, axis, min(rows, columns), state.q.shape[-1]))
            operands = to_matrices(grad, view), state._replace(nu=())
            depth = len(view.batch)
            flat = jax.tree.map(lambda x, d=depth: x.reshape(-1, *x.shape[d:]), operands)
            scale = jax.vmap(partial(_scale, plans[-1]))(*flat)
            stacks.append(Matrices(*flat, scale))
        results = []
        leaves = zip(_step_stacks(plans, stacks), grads, states, views, strict=True)
        for result, grad, state, view in leaves:
            batch = state.rank.shape
            scaled, new = jax.tree.map(lambda x, b=batch: x.reshape(*b, *x.shape[1:]), result)
            results.append((from_matrices(scaled, view, grad.shape), new._replace(nu=state.nu)))
        return results

    like = list(zip(grads, states, strict=True))
    return with_automatic_axes(all_leaves, like)(traced, list(grads), list(states))


def _step_stacks(
    plans: Sequence[Plan], stacks: Sequence[Matrices]
) -> list[tuple[jax.Array, LeafState]]:
    """The phases, for leaves as stacks of matrices."""
    subspace, rule = plans[0].settings.subspace, plans[0].settings.rank
    orthonormalize = partial(ORTHONORMALIZE[subspace.orthogonalization], rounds=subspace.rounds)
    measured = (plans[0].scalars.step - 1) % rule.rank_interval == 0
    images = [
        _in_slices(partial(_image, plan, measured), stack)
        for plan, stack in zip(plans, stacks, strict=True)
    ]
    bases = _together(orthonormalize, images)
    for _ in range(1, subspace.power_iterations):
        stacks, bases = _made_anew(stacks, bases)
        images = [
            _in_slices(partial(_normal_image, plan), stack, q)
            for plan, stack, q in zip(plans, stacks, bases, strict=True)
        ]
        bases = _together(orthonormalize, images)
    stacks, bases = _made_anew(stacks, bases)
    leaves = list(zip(plans, stacks, bases, strict=True))
    found = [(q, _in_slices(partial(_project, plan), stack, q)) for plan, stack, q in leaves]
    factored = _factor(plans, stacks, found, measured)
    return [
        (jax.vmap(partial(_quotient, plan))(stack), jax.vmap(partial(_state, plan))(stack, new))
        for plan, stack, new in zip(plans, stacks, factored, strict=True)
    ]


def _factor(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[tuple[jax.Array, jax.Array]],
    measured: jax.Array,
) -> list[Factored]:
    """Factors of all columns worked on as those to keep.

    Those of a fixed rank are measured at every step, which costs less than to ask. Where there are
    others, one branch decides for all of them whether the rank is chosen.
    """
    of_kind = {True: [], False: []}
    for i, plan in enumerate(plans):
        of_kind[plan.is_fixed].append(i)
    factored = {}
    for is_fixed, indices in of_kind.items():
        arguments = [[x[i] for i in indices] for x in (plans, stacks, found)]
        if not indices:
            continue
        if is_fixed:
            new = _cut(*arguments)
        else:
            choose, keep = (partial(f, *arguments) for f in (_choose, _keep))
            new = jax.lax.cond(measured, choose, keep)
        factored.update(zip(indices, new, strict=True))
    return [factored[i] for i in range(len(plans))]


def _cut(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[tuple[jax.Array, jax.Array]],
) -> list[Factored]:
    """The best columns of a fixed rank."""
    if plans[0].settings.subspace.rotate and any(p.width > p.capacity for p in plans):
        found = _turn(found)
    full = [
        jnp.full_like(stack.state.rank, p.capacity) for p, stack in zip(plans, stacks, strict=True)
    ]
    return [
        jax.vmap(partial(_measure, plan))(stack, *factors, rank)
        for plan, stack, factors, rank in zip(plans, stacks, found, full, strict=True)
    ]


def _choose(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[tuple[jax.Array, jax.Array]],
) -> list[Factored]:
    """Algorithm 2 for all leaves: the columns of the first ranks that will do."""
    leaves = zip(plans, stacks, found, strict=True)
    residuals = [jax.vmap(partial(_residual, plan))(stack, q, u) for plan, stack, (q, u) in leaves]
    if plans[0].settings.subspace.rotate:
        found = _turn(found)
    results = []
    for plan, stack, (q, u), residual in zip(plans, stacks, found, residuals, strict=True):
        rank = jax.vmap(partial(_rank, plan))(u, residual)
        results.append(jax.vmap(partial(_measure, plan))(stack, q, u, rank))
    return results


def _keep(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[tuple[jax.Array, jax.Array]],
) -> list[Factored]:
    """The columns of the ranks in use."""

    def keep(plan: Plan, of: Matrices, q: jax.Array, u: jax.Array) -> Factored:
        return Factored(*_stored(plan, of, q, u, of.state.rank), of.state.rank, of.state.error)

    return [
        jax.vmap(partial(keep, plan))(stack, *factors)
        for plan, stack, factors in zip(plans, stacks, found, strict=True)
    ]


def _turn(found: Sequence[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
    """Factors turned so that their columns stand in order of falling singular value."""

    def unit_gram(u: jax.Array) -> tuple[jax.Array, jax.Array]:
        u, _ = normalize(u)
        unit = unit_columns(u)
        return contract(unit, unit, 0), jnp.sqrt(column_energies(u))

    grams = [jax.vmap(unit_gram)(u) for _, u in found]
    turns = _together(lambda groups: [principal_turn(*group) for group in groups], grams)
    turned = jax.vmap(lambda x, turn: matmul(x, turn.T))
    return [(turned(q, turn), turned(u, turn)) for (q, u), turn in zip(found, turns, strict=True)]


# From here on one matrix, of its leaf's plan.


def _scale(plan: Plan, grad: jax.Array, state: LeafState) -> jax.Array:
    """What G is divided by: 1 where no square of it is taken."""
    approximation = plan.settings.approximation
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    if not approximation.scale_follows_gradient:
        return jnp.ones_like(grad, wide, shape=())
    return unit_scale(grad, jnp.max(jnp.abs(state.u)), approximation)


def _target(plan: Plan, of: Matrices) -> jax.Array:
    """The target in units of its scale, in the shape of the gradient."""
    approximation = plan.settings.approximation
    dtype = of.scale.dtype
    q, u = of.state.q.astype(dtype), of.state.u.astype(dtype)
    product = fused_outer(q, u / approximation.of_scale(of.scale), plan.axis)
    gradient = of.grad.astype(dtype) / of.scale
    return approximation.average(jnp.maximum(product, 0), gradient, plan.scalars.b2)


def _image(plan: Plan, measured: jax.Array, of: Matrices) -> jax.Array:
    """The target times the start; of an adaptive rank more columns where it is chosen."""
    dtype = of.scale.dtype
    start = start_columns(plan.scalars.draws, plan.width, dtype, of.state.u.shape[0])
    if plan.settings.subspace.warm_start:
        unit_u, _ = normalize(of.state.u)
        known = jnp.where(jnp.any(unit_u != 0), of.state.rank, 0)
        start = warm_start(start, unit_u, known, 1)
    if not plan.is_fixed:
        start = mask_columns(start, jnp.where(measured, plan.width, of.state.rank))
    return contract(_target(plan, of), start, 1 - plan.axis)


def _normal_image(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    target = _target(plan, of)
    unit_u, _ = normalize(contract(target, q, plan.axis))
    return contract(target, unit_u, 1 - plan.axis)


def _project(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    return contract(_target(plan, of), q, plan.axis)


def _residual(plan: Plan, of: Matrices, q: jax.Array, u: jax.Array) -> jax.Array:
    """||A - q u^T||^2 in units of u."""
    _, unit = normalize(u)
    difference = _target(plan, of) - fused_outer(q, u, plan.axis)
    return jnp.sum(jnp.square(difference / unit))


def _rank(plan: Plan, u: jax.Array, residual: jax.Array) -> jax.Array:
    unit_u, _ = normalize(u)
    return choose_rank_by_table(
        column_energies(unit_u),
        residual,
        plan.capacity,
        plan.scalars.error_threshold,
        plan.settings.rank,
    )


def _stored(
    plan: Plan, of: Matrices, q: jax.Array, u: jax.Array, rank: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first columns as the state keeps them."""
    q, u = (fit_columns(mask_columns(x, rank), plan.capacity) for x in (q, u))
    u = u * plan.settings.approximation.of_scale(of.scale)
    like = of.state.q, of.state.u
    rounding = rounding_bits(plan.scalars.rounding, *like)
    if rounding is None:
        return q.astype(like[0].dtype), u.astype(like[1].dtype)
    return round_stochastically(q, rounding[0]), round_stochastically(u, rounding[1])


def _measure(plan: Plan, of: Matrices, q: jax.Array, u: jax.Array, rank: jax.Array) -> Factored:
    """The first columns, and what they leave out."""
    kept_q, kept_u = _stored(plan, of, q, u, rank)
    target_scale = plan.settings.approximation.of_scale(of.scale)
    wide_q, wide_u = kept_q.astype(q.dtype), kept_u.astype(u.dtype) / target_scale
    residual = _residual(plan, of, wide_q, wide_u)
    unit_u, _ = normalize(wide_u)
    norm_squared = residual + jnp.sum(jnp.square(unit_u))
    error = jnp.sqrt(residual / jnp.where(norm_squared == 0, 1, norm_squared))
    return Factored(kept_q, kept_u, rank, error.astype(jnp.float32))


def _quotient(plan: Plan, of: Matrices) -> jax.Array:
    approximation = plan.settings.approximation
    gradient = of.grad.astype(of.scale.dtype) / of.scale
    scaled = divide_by_root(gradient, _target(plan, of), plan.scalars, approximation, of.scale)
    return scaled.astype(of.grad.dtype)


def _state(plan: Plan, of: Matrices, new: Factored) -> LeafState:
    unit_u, unit = normalize(new.u)
    norm = unit * jnp.sqrt(jnp.sum(jnp.square(unit_u)))
    decay = plan.settings.approximation.drift_decay(plan.scalars.b2)
    drift = accumulate_drift(of.state.drift, new.error, norm, decay)
    return of.state._replace(**new._asdict(), drift=drift)


# And from here on what says in which order.


def _made_anew(
    stacks: Sequence[Matrices], after: list[jax.Array]
) -> tuple[list[Matrices], list[jax.Array]]:
    """The stacks once `after` is there: their targets are made once more, and not kept."""
    factors, after = jax.lax.optimization_barrier(([s.state.q for s in stacks], after))
    return [
        stack._replace(state=stack.state._replace(q=q))
        for stack, q in zip(stacks, factors, strict=True)
    ], after


def _in_slices(function: Callable[..., Any], of: Matrices, *more: jax.Array) -> Any:
    """A function of one matrix for all of a stack, as many at once as there may be in memory."""
    batch, *matrix = of.grad.shape
    at_once = max(_LARGEST_SLICE // max(matrix[0] * matrix[1], 1), 1)
    if batch <= at_once:
        return jax.vmap(function)(of, *more)
    return jax.lax.map(lambda operands: function(*operands), (of, *more), batch_size=at_once)


def _together(function: Callable[[list[Any]], list[Any]], trees: Sequence[Any]) -> list[Any]:
    """Calls a function of a list of stacks with those of one shape put together as one.

    Args:
      function: Of stacks of one type, to as many of the same leading sizes.
      trees: Stacks, each an array or a tuple of arrays with one leading axis.

    Returns:
      The results in the order of the trees.
    """
    kinds: dict[Any, dict[Any, list[int]]] = {}
    for i, tree in enumerate(trees):
        arrays = jax.tree.leaves(tree)
        kind = tuple(jax.typeof(jnp.zeros_like(x, shape=())) for x in arrays)
        shape = tuple(x.shape[1:] for x in arrays)
        kinds.setdefault(kind, {}).setdefault(shape, []).append(i)
    results: dict[int, Any] = {}
    for groups in kinds.values():
        joined = [
            jax.tree.map(lambda *x: jnp.concatenate(x), *(trees[i] for i in group))
            for group in groups.values()
        ]
        for group, result in zip(groups.values(), function(joined), strict=True):
            start = 0
            for i in group:
                end = start + jax.tree.leaves(trees[i])[0].shape[0]
                results[i] = result[start:end]
                start = end
    return [results[i] for i in range(len(trees))]
