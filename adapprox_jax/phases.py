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
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from adapprox_jax.low_rank import mask_columns, normalize, power_of_two_below, principal_turn
from adapprox_jax.matrix_step import accumulate_drift, divide_by_root, rounding_bits, unit_scale
from adapprox_jax.matrix_view import MatrixView, from_matrices, to_matrices, view_shape
from adapprox_jax.orthonormalize import ORTHONORMALIZE, unit_columns
from adapprox_jax.products import column_energies, contract, fused_outer, matmul
from adapprox_jax.quantization import in_blocks
from adapprox_jax.random_start import start_columns, warm_start
from adapprox_jax.rank import choose_rank_by_table, fit_columns
from adapprox_jax.rounding import round_stochastically
from adapprox_jax.settings import Settings
from adapprox_jax.sharding import varying_alike, with_automatic_axes
from adapprox_jax.state import LeafState
from adapprox_jax.step_scalars import StepScalars, merge_known
from adapprox_jax.together import sums_of, together

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
    largest_u: jax.Array | None = None  # magnitude
    scale: jax.Array | None = None  # what G is divided by, a power of two


Factors: TypeAlias = tuple[jax.Array, jax.Array]  # q and u in units of the target's scale


class Factored(NamedTuple):
    """What a stack is factored as: the columns to keep."""

    factors: Factors
    rank: jax.Array
    error: jax.Array
    norm: jax.Array  # ||q u^T||


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
        # Not of one leaf, which may vary over devices where others do not.
        measured = (traced.step - 1) % settings.rank.rank_interval == 0
        plans, stacks = [], []
        for given, of_leaf, view in zip(grads, states, views, strict=True):
            own, grad, state = varying_alike((traced, given, of_leaf._replace(nu=())))
            scalars = merge_known(known, own, jnp.promote_types(grad.dtype, jnp.float32))
            _, rows, columns = view_shape(grad.shape, view)
            axis = 0 if rows <= columns else 1
            plans.append(Plan(scalars, settings, axis, min(rows, columns), state.q.shape[-1]))
            operands = to_matrices(grad, view), state
            depth = len(view.batch)
            flat = jax.tree.map(lambda x, d=depth: x.reshape(-1, *x.shape[d:]), operands)
            stacks.append(Matrices(*flat))
        results = []
        leaves = zip(_step_stacks(plans, stacks, measured), grads, states, views, strict=True)
        for result, grad, state, view in leaves:
            batch = state.rank.shape
            scaled, new = jax.tree.map(lambda x, b=batch: x.reshape(*b, *x.shape[1:]), result)
            results.append((from_matrices(scaled, view, grad.shape), new._replace(nu=state.nu)))
        return results

    like = list(zip(grads, states, strict=True))
    return with_automatic_axes(all_leaves, like)(traced, list(grads), list(states))


def _step_stacks(
    plans: Sequence[Plan], stacks: Sequence[Matrices], measured: jax.Array
) -> list[tuple[jax.Array, LeafState]]:
    """The phases, for leaves as stacks of matrices."""
    if not plans:
        return []
    subspace, rule = plans[0].settings.subspace, plans[0].settings.rank
    rounds = max(subspace.rounds(plan.width, plan.capacity, rule) for plan in plans)
    orthonormalize = partial(ORTHONORMALIZE[subspace.orthogonalization], rounds=rounds)

    stacks = _with_scales(plans, stacks)
    bases = together(orthonormalize, _sweep(partial(_image, measured), plans, stacks))
    for _ in range(1, subspace.power_iterations):
        stacks, bases = _made_anew(stacks, bases)
        bases = together(orthonormalize, _sweep(_normal_image, plans, stacks, bases))
    stacks, bases = _made_anew(stacks, bases)
    found = list(zip(bases, _sweep(_project, plans, stacks, bases), strict=True))

    factored = _factor(plans, stacks, found, measured)
    states = _each(_new_state, plans, stacks, factored)
    return list(zip(_each(_quotient, plans, stacks), states, strict=True))


def _with_scales(plans: Sequence[Plan], stacks: Sequence[Matrices]) -> list[Matrices]:
    """The stacks with what tells how large their targets are."""
    wide = [jnp.promote_types(stack.grad.dtype, jnp.float32) for stack in stacks]
    us = [stack.state.u.astype(dtype) for stack, dtype in zip(stacks, wide, strict=True)]
    stacks = [
        stack._replace(largest_u=largest)
        for stack, largest in zip(stacks, together(_largest, us), strict=True)
    ]
    scales = _each(_scale, plans, stacks)
    return [stack._replace(scale=scale) for stack, scale in zip(stacks, scales, strict=True)]


def _factor(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[Factors],
    measured: jax.Array,
) -> list[Factored]:
    """From the factors of all columns worked on those to keep.

    Those of a fixed rank are measured at every step, which costs less than to ask. Where there are
    others, one branch decides for all of them whether their ranks are chosen.
    """
    factored: dict[int, Factored] = {}
    for is_fixed in (True, False):
        indices = [i for i, plan in enumerate(plans) if plan.is_fixed == is_fixed]
        leaves = [[x[i] for i in indices] for x in (plans, stacks, found)]
        if not indices:
            continue
        if is_fixed:
            new = _cut(*leaves)
        else:
            new = jax.lax.cond(measured, partial(_choose, *leaves), partial(_keep, *leaves))
        factored.update(zip(indices, new, strict=True))
    return [factored[i] for i in range(len(plans))]


def _cut(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """The columns of a fixed rank: of more than those the best."""
    if any(plan.width > plan.capacity for plan in plans):
        found = _turn(found)
    ranks = [
        jnp.full_like(stack.state.rank, plan.capacity)
        for plan, stack in zip(plans, stacks, strict=True)
    ]
    return _measure(plans, stacks, found, ranks)


def _choose(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """Algorithm 2 for all leaves: the columns of the first ranks that will do."""
    units = _units(found)
    residuals = sums_of(_sweep(_residuals, plans, stacks, found, units))
    if plans[0].settings.subspace.rotate:
        found = _turn(found)
    ranks = _each(_rank, plans, found, units, residuals)
    return _measure(plans, stacks, found, ranks)


def _keep(
    plans: Sequence[Plan], stacks: Sequence[Matrices], found: Sequence[Factors]
) -> list[Factored]:
    """The columns of the ranks in use."""
    ranks = [stack.state.rank for stack in stacks]
    kept = _each(_kept, plans, stacks, found, ranks)
    norms = _norms(kept, _units(kept))
    return [
        Factored(factors, stack.state.rank, stack.state.error, norm)
        for factors, stack, norm in zip(kept, stacks, norms, strict=True)
    ]


def _measure(
    plans: Sequence[Plan],
    stacks: Sequence[Matrices],
    found: Sequence[Factors],
    ranks: Sequence[jax.Array],
) -> list[Factored]:
    """The first columns, and what they leave out."""
    kept = _each(_kept, plans, stacks, found, ranks)
    units = _units(kept)
    norms = _norms(kept, units)
    residuals = sums_of(_sweep(_residuals, plans, stacks, kept, units))
    errors = _each(_error, plans, residuals, units, norms)
    return list(map(Factored, kept, ranks, errors, norms))


def _turn(found: Sequence[Factors]) -> list[Factors]:
    """Factors turned so that their columns stand in order of falling singular value."""

    def unit_gram(u: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = unit_columns(u)
        return contract(columns, columns, 0), jnp.sqrt(column_energies(u / unit))

    grams = [
        jax.vmap(unit_gram)(u, unit) for (_, u), unit in zip(found, _units(found), strict=True)
    ]
    turns = together(lambda groups: [principal_turn(*group) for group in groups], grams)
    turned = jax.vmap(lambda x, turn: matmul(x, turn.T))
    return [(turned(q, turn), turned(u, turn)) for (q, u), turn in zip(found, turns, strict=True)]


def _units(factors: Sequence[Factors]) -> list[jax.Array]:
    """Powers of two near the largest entries of each u: divided by them, squares are numbers."""
    return [power_of_two_below(x) for x in together(_largest, [u for _, u in factors])]


def _norms(factors: Sequence[Factors], units: Sequence[jax.Array]) -> list[jax.Array]:
    """||q u^T|| of each matrix."""
    squares = [
        jnp.square(u / unit[:, None, None]) for (_, u), unit in zip(factors, units, strict=True)
    ]
    return [unit * jnp.sqrt(x) for unit, x in zip(units, sums_of(squares), strict=True)]


def _largest(groups: list[jax.Array]) -> list[jax.Array]:
    """Largest magnitude in each matrix of stacks."""
    return [jnp.max(jnp.abs(x), axis=(1, 2)) for x in groups]


def _made_anew(
    stacks: Sequence[Matrices], after: list[jax.Array]
) -> tuple[list[Matrices], list[jax.Array]]:
    """The stacks once `after` is there: their targets are made once more, and not kept."""
    # Leaf by leaf, because under `jax.shard_map` what leaves a barrier varies as all that enters.
    pairs = [
        jax.lax.optimization_barrier((stack.state.q, x))
        for stack, x in zip(stacks, after, strict=True)
    ]
    return [
        stack._replace(state=stack.state._replace(q=q))
        for stack, (q, _) in zip(stacks, pairs, strict=True)
    ], [x for _, x in pairs]


def _each(function: Callable[..., Any], plans: Sequence[Plan], *operands: Any) -> list[Any]:
    """A function of a plan and one matrix for all matrices of all leaves."""
    leaves = zip(plans, *operands, strict=True)
    return [jax.vmap(partial(function, plan))(*leaf) for plan, *leaf in leaves]


def _sweep(
    function: Callable[..., Any], plans: Sequence[Plan], stacks: Sequence[Matrices], *more: Any
) -> list[Any]:
    """`_each`, with as many matrices of a stack at once as there may be targets in memory."""

    def of_leaf(plan: Plan, stack: Matrices, *more: Any) -> Any:
        batch, rows, columns = stack.grad.shape
        at_once = max(_LARGEST_SLICE // max(rows * columns, 1), 1)
        of_matrix = partial(function, plan)
        if batch <= at_once:
            return jax.vmap(of_matrix)(stack, *more)
        return jax.lax.map(lambda x: of_matrix(*x), (stack, *more), batch_size=at_once)

    return [of_leaf(*leaf) for leaf in zip(plans, stacks, *more, strict=True)]


# What follows is of one matrix.


def _scale(plan: Plan, of: Matrices) -> jax.Array:
    """What G is divided by: 1 where no square of it is taken by itself."""
    approximation = plan.settings.approximation
    if not approximation.scale_follows_gradient:
        return jnp.ones_like(of.largest_u)
    return unit_scale(of.grad, of.largest_u, approximation)


def _target(plan: Plan, of: Matrices) -> jax.Array:
    """The target, divided by its scale, in the shape of the gradient."""
    approximation = plan.settings.approximation
    q, u = (x.astype(of.scale.dtype) for x in (of.state.q, of.state.u))
    product = fused_outer(q, u / approximation.of_scale(of.scale), plan.axis)
    return approximation.average(jnp.maximum(product, 0), _gradient(of), plan.scalars.b2)


def _gradient(of: Matrices) -> jax.Array:
    return of.grad.astype(of.scale.dtype) / of.scale


def _image(measured: jax.Array, plan: Plan, of: Matrices) -> jax.Array:
    """The target times the start, which has more columns where an adaptive rank is chosen."""
    start = start_columns(plan.scalars.draws, plan.width, of.scale.dtype, of.state.u.shape[0])
    if plan.settings.subspace.warm_start:
        # A rank that is not read needs no copy before its memory is given to the new one.
        in_use = plan.capacity if plan.is_fixed else of.state.rank
        known = jnp.where(of.largest_u > 0, in_use, 0)
        start = warm_start(start, of.state.u, known, 1 / power_of_two_below(of.largest_u))
    if not plan.is_fixed:
        start = mask_columns(start, jnp.where(measured, plan.width, of.state.rank))
    return contract(_target(plan, of), start, 1 - plan.axis)


def _normal_image(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    target = _target(plan, of)
    unit_u, _ = normalize(contract(target, q, plan.axis))
    return contract(target, unit_u, 1 - plan.axis)


def _project(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    return contract(_target(plan, of), q, plan.axis)


def _residuals(plan: Plan, of: Matrices, factors: Factors, unit: jax.Array) -> jax.Array:
    """What adds up to ||A - q u^T||^2 in squared units.

    One number of each block that `quantize` gives a scale: sums of one shape share a kernel.
    """
    difference = _target(plan, of) - fused_outer(*factors, plan.axis)
    return jnp.sum(jnp.square(in_blocks(difference / unit)), axis=-1)


def _error(plan: Plan, residual: jax.Array, unit: jax.Array, norm: jax.Array) -> jax.Array:
    """Xi from ||A - q u^T||^2 in squared units and ||q u^T||."""
    del plan
    norm_squared = residual + jnp.square(norm / unit)
    error = jnp.sqrt(residual / jnp.where(norm_squared == 0, 1, norm_squared))
    return error.astype(jnp.float32)


def _rank(plan: Plan, factors: Factors, unit: jax.Array, residual: jax.Array) -> jax.Array:
    energies = column_energies(factors[1] / unit)
    threshold = plan.scalars.error_threshold
    return choose_rank_by_table(energies, residual, plan.capacity, threshold, plan.settings.rank)


def _kept(plan: Plan, of: Matrices, factors: Factors, rank: jax.Array) -> Factors:
    """The first columns, rounded as the state keeps them, in the type that is worked in."""
    q, u = (fit_columns(x, plan.capacity) for x in factors)
    if not plan.is_fixed:
        q, u = mask_columns(q, rank), mask_columns(u, rank)
    rounding = rounding_bits(plan.scalars.rounding, of.state.q, of.state.u)
    if rounding is not None:
        kept_q, kept_u = map(round_stochastically, (q, u), rounding)
    else:
        kept_q, kept_u = q.astype(of.state.q.dtype), u.astype(of.state.u.dtype)
    return kept_q.astype(q.dtype), kept_u.astype(u.dtype)


def _quotient(plan: Plan, of: Matrices) -> jax.Array:
    approximation = plan.settings.approximation
    scaled = divide_by_root(_gradient(of), _target(plan, of), plan.scalars, approximation, of.scale)
    return scaled.astype(of.grad.dtype)


def _new_state(plan: Plan, of: Matrices, new: Factored) -> LeafState:
    (q, u), rank, error, norm = new
    target_scale = plan.settings.approximation.of_scale(of.scale)
    decay = plan.settings.approximation.drift_decay(plan.scalars.b2)
    return LeafState(
        q.astype(of.state.q.dtype),
        (u * target_scale).astype(of.state.u.dtype),
        rank,
        error,
        accumulate_drift(of.state.drift, error, target_scale * norm, decay),
        (),
    )
