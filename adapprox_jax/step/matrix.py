"""What one step does with one matrix in each of the phases (`phases`).

Nothing here branches or loops, so that `jax.vmap` makes it work of a stack of matrices. To choose a
scale by the state alone would need a branch at the first step: here the average of roots holds at
any scale (`Approximation.average`), and where V itself is factored the scale follows the gradient.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from adapprox_jax.argument_checks import is_zero
from adapprox_jax.linalg.products import column_energies, contract, contract_in_parts, fused_outer
from adapprox_jax.linalg.quantization import in_blocks
from adapprox_jax.linalg.random_start import start_columns, warm_start
from adapprox_jax.linalg.rounding import rounded
from adapprox_jax.linalg.srsi import mask_columns, normalize, power_of_two_below
from adapprox_jax.settings import Settings
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.factorize import accumulate_drift, rounding_bits, within_range
from adapprox_jax.step.matrix_step import divide_by_root, unit_scale
from adapprox_jax.step.rank_choice import choose_rank_by_table, fit_columns
from adapprox_jax.step.scalars import StepScalars


class Plan(NamedTuple):
    """What is the same for all matrices of a leaf, and known but for the numbers of the step."""

    scalars: StepScalars
    settings: Settings
    axis: int  # of a matrix of the gradient, along which q stands
    batch: int  # matrices
    shorter_side: int
    capacity: int  # columns of the buffers

    @property
    def is_fixed(self) -> bool:
        """Whether the rank is that of the buffers."""
        return self.settings.rank.is_fixed(self.capacity)

    @property
    def most_parts(self) -> int:
        """Of a long sum: several matrices keep all cores busy without."""
        return 64 if self.batch == 1 else 1

    @property
    def width(self) -> int:
        """Columns worked on: those of the buffers, and p more."""
        return self.settings.subspace.width(self.capacity, self.shorter_side)


class Matrices(NamedTuple):
    """The matrices of a leaf as a stack: each array has a leading axis; or one of them, without."""

    grad: jax.Array  # (m, n) or (n, m)
    state: LeafState
    largest_u: jax.Array  # magnitude
    scale: jax.Array  # what G is divided by, a power of two


ThinFactors: TypeAlias = tuple[jax.Array, jax.Array]  # q and u in units of the target's scale


class Choice(NamedTuple):
    """Which columns of the factors of a stack are kept."""

    turn: jax.Array | None  # that puts the best first
    rank: jax.Array  # how many then stay
    residual: jax.Array  # ||A - q u^T||^2 of those, in squared units; NaN where it is not measured


class ErrorParts(NamedTuple):
    """What tells the errors of a stack of matrices, an array (batch,) each."""

    residual: jax.Array  # ||A - q u^T||^2 in squared units, if it is new
    norm: jax.Array  # ||q u^T|| in units
    unit: jax.Array
    is_new: jax.Array
    last_error: jax.Array
    last_drift: jax.Array
    decay: jax.Array  # of the drift


class Errors(NamedTuple):
    """Of a stack of matrices, an array (batch,) each."""

    error: jax.Array
    drift: jax.Array
    false_once_known: jax.Array


def scale_of(plan: Plan, grad: jax.Array, largest_u: jax.Array) -> jax.Array:
    """What G is divided by: 1 for the root, whose average and quotient hold at any scale."""
    approximation = plan.settings.approximation
    if not approximation.scale_follows_gradient:
        return jnp.ones_like(largest_u)
    return unit_scale(grad, largest_u, approximation)


def target_of(plan: Plan, of: Matrices) -> jax.Array:
    """The target, divided by its scale, in the shape of the gradient."""
    approximation = plan.settings.approximation
    q, u = (x.astype(of.scale.dtype) for x in (of.state.q, of.state.u))
    product = fused_outer(q, u / approximation.of_scale(of.scale), plan.axis)
    return approximation.average(jnp.maximum(product, 0), gradient_of(of), plan.scalars.b2)


def gradient_of(of: Matrices) -> jax.Array:
    """G, divided by its scale."""
    return of.grad.astype(of.scale.dtype) / of.scale


def image_of(plan: Plan, of: Matrices) -> tuple[jax.Array, jax.Array]:
    """The target times the start, which has more columns where an adaptive rank is chosen.

    In parts, (parts, m, width), which are still to be added, as in `normal_image_of`; and the
    largest entries of the target along its last axis.
    """
    start = start_columns(plan.scalars.draws, plan.width, of.scale.dtype, of.state.u.shape[0])
    if plan.settings.subspace.warm_start:
        # A rank that is not read needs no copy before its memory is given to the new one.
        in_use = plan.capacity if plan.is_fixed else of.state.rank
        known = jnp.where(of.largest_u > 0, in_use, 0)
        start = warm_start(start, of.state.u, known, 1 / power_of_two_below(of.largest_u))
    if not plan.is_fixed:
        measured = plan.settings.rank.is_measured(plan.scalars.step)
        start = mask_columns(start, jnp.where(measured, plan.width, of.state.rank))
    target = target_of(plan, of)
    return contract_in_parts(target, start, 1 - plan.axis, plan.most_parts), jnp.max(
        target, axis=-1
    )


def normal_image_of(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    """The target times A^T q, for one more iteration."""
    target = target_of(plan, of)
    unit_u, _ = normalize(contract(target, q, plan.axis))
    return contract_in_parts(target, unit_u, 1 - plan.axis, plan.most_parts)


def project(plan: Plan, of: Matrices, q: jax.Array) -> jax.Array:
    """U = A^T q."""
    return contract(target_of(plan, of), q, plan.axis)


def residuals_of(plan: Plan, of: Matrices, factors: ThinFactors, unit: jax.Array) -> jax.Array:
    """What adds up to ||A - q u^T||^2 in squared units.

    One number of each block that `quantize` gives a scale: sums of one shape share a kernel.
    """
    difference = target_of(plan, of) - fused_outer(*factors, plan.axis)
    return jnp.sum(jnp.square(in_blocks(difference / unit)), axis=-1)


def error_parts(
    plan: Plan, of: Matrices, residual: jax.Array, norm: jax.Array, unit: jax.Array
) -> ErrorParts:
    """What `errors_of` is asked for."""
    step, settings = plan.scalars.step, plan.settings
    unit = unit * settings.approximation.of_scale(of.scale)
    is_new = jnp.asarray(True) if plan.is_fixed else settings.rank.is_measured(step)
    decay = jnp.asarray(settings.approximation.drift_decay(plan.scalars.b2), of.state.drift.dtype)
    return ErrorParts(residual, norm, unit, is_new, of.state.error, of.state.drift, decay)


def errors_of(parts: ErrorParts) -> Errors:
    """Xi, measured or the last one known, and the estimate of the distance from exact targets."""
    norm_squared = parts.residual + jnp.square(parts.norm)
    error = jnp.sqrt(parts.residual / jnp.where(norm_squared == 0, 1, norm_squared))
    error = jnp.where(parts.is_new, error.astype(parts.last_error.dtype), parts.last_error)
    drift = accumulate_drift(parts.last_drift, error, parts.unit * parts.norm, parts.decay)
    # Never true, and not known before the error is.
    return Errors(error, drift, error < 0)


def rank_of(plan: Plan, factors: ThinFactors, unit: jax.Array, residual: jax.Array) -> jax.Array:
    """The first rank that will do."""
    energies = column_energies(factors[1] / unit)
    threshold = plan.scalars.error_threshold
    return choose_rank_by_table(energies, residual, plan.capacity, threshold, plan.settings.rank)


def kept_columns(plan: Plan, of: Matrices, factors: ThinFactors, rank: jax.Array) -> ThinFactors:
    """The first columns, rounded as the state keeps them, in the type that is worked in."""
    q, u = (fit_columns(x, plan.capacity) for x in factors)
    if not plan.is_fixed:
        q, u = mask_columns(q, rank), mask_columns(u, rank)
    of_q, of_u = rounding_bits(plan.scalars.rounding, of.state.q, of.state.u)
    kept_q = rounded(q, of.state.q.dtype, of_q)
    kept_u = rounded(u, of.state.u.dtype, of_u)
    return kept_q.astype(q.dtype), kept_u.astype(u.dtype)


def quotient_of(plan: Plan, of: Matrices) -> jax.Array:
    """The gradient over the root of V, in its type."""
    approximation, scalars = plan.settings.approximation, plan.scalars
    gradient, target = gradient_of(of), target_of(plan, of)
    if approximation.scale_follows_gradient or is_zero(scalars.eps_root):
        scaled = divide_by_root(gradient, target, scalars, approximation, of.scale)
    else:  # not through the square of the root, which may overflow
        root = jnp.hypot(target / jnp.sqrt(scalars.correction), jnp.sqrt(scalars.eps_root))
        scaled = gradient / (root + scalars.eps)
    return scaled.astype(of.grad.dtype)


def new_state(
    plan: Plan, of: Matrices, factors: ThinFactors, rank: jax.Array, errors: Errors
) -> LeafState:
    """The state that is kept of new factors.

    Until the old factors have been read for the last time, for the residual, the new ones cannot
    take their memory, and would have to be copied there.
    """
    q, u = factors
    u = within_range(u * plan.settings.approximation.of_scale(of.scale), of.state.u.dtype)
    new = LeafState(q, u, rank, errors.error, errors.drift, ())
    return jax.tree.map(
        lambda x, last: jnp.where(errors.false_once_known, 0, x).astype(last.dtype), new, of.state
    )
