"""What one step does with one matrix: Algorithm 3 with the clip, and within it Algorithms 1 and 2.

The functions stand in the order of the work (`phases` calls them). Shapes: the target A is (m, n)
with m at most n, q is (m, width) and u = A^T q is (n, width). The gradient may hold A's transpose:
then q stands along its axis 1. Nothing loops or branches here, so that `jax.vmap` makes a stack of
matrices of one. What takes a `Matrix` is a pass over it. Each makes the target anew. A pass over
some rows of the gradient gives these rows of the result, or a term of it.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.argument_checks import is_zero
from adapprox_jax.linalg.products import (
    contract,
    contract_in_parts,
    fused_outer,
    matmul,
    outer,
    outer_by_rows,
)
from adapprox_jax.linalg.quantization import in_blocks
from adapprox_jax.linalg.random_start import warm_start
from adapprox_jax.linalg.rounding import rounded, wide_dtype
from adapprox_jax.linalg.srsi import fit_columns, mask_columns, power_of_two_below
from adapprox_jax.settings import Settings
from adapprox_jax.sharding.axes import devices_in_use
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.approximation import Approximation, average_of_moments
from adapprox_jax.step.platform import Platform
from adapprox_jax.step.rank_choice import choose_rank
from adapprox_jax.step.scalars import StepScalars


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scalars"],
    meta_fields=["settings", "platform", "axis", "batch", "shorter_side", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """What is the same for all matrices of a leaf: a tree of the numbers of the step."""

    scalars: StepScalars
    settings: Settings
    platform: Platform
    axis: int  # of the gradient of a matrix, along which q stands
    batch: int  # matrices of the leaf
    shorter_side: int
    capacity: int  # columns of the buffers

    @property
    def approximation(self) -> Approximation:
        """What the factors stand for."""
        return self.settings.approximation

    @property
    def width(self) -> int:
        """Columns that are worked on: those of the buffers, and p more."""
        return self.settings.subspace.width(self.capacity, self.shorter_side)


class Matrix(NamedTuple):
    """The gradient of one matrix and what its last factors say of V."""

    grad: jax.Array  # (m, n) or (n, m)
    q: jax.Array
    u: jax.Array
    scale: jax.Array  # what G is divided by, a power of two
    entries: jax.Array | None = None  # without the zeros around them; None: there are none
    target: jax.Array | None = None  # A, where it stays in memory


class Factors(NamedTuple):
    """q u^T, divided by the target's scale."""

    q: jax.Array
    u: jax.Array


class Choice(NamedTuple):
    """Which columns of some factors are kept."""

    turn: jax.Array | None  # puts the best columns first
    rank: jax.Array  # how many stay then


class ErrorTerms(NamedTuple):
    """What the errors of a matrix are made of, all scalars."""

    residual: jax.Array  # ||A - q u^T||^2 in squared units
    norm: jax.Array  # ||q u^T|| in units
    unit: jax.Array
    last_drift: jax.Array
    decay: jax.Array  # of the drift


class Errors(NamedTuple):
    """What is known of the new factors, all scalars."""

    error: jax.Array  # xi
    drift: jax.Array


def scale_of(plan: Plan, grad: jax.Array, largest_u: jax.Array) -> jax.Array:
    """What G is divided by: a power of two about as large as the root of V, or as G where V is 0.

    Squares of what is divided by it neither overflow nor vanish, and to undo the division rounds
    nothing. 1 where no square is kept.
    """
    if not plan.approximation.is_square:
        return jnp.ones_like(largest_u)
    root = plan.approximation.root(largest_u)
    largest = jnp.maximum(root, jnp.max(jnp.abs(grad)).astype(root.dtype))
    # A step does not depend on the scale, but a derivative through it may overflow.
    scale = 2 * power_of_two_below(jax.lax.stop_gradient(largest))
    return jnp.where(largest > 0, jnp.clip(scale, 2.0**-40, 2.0**60), 1)


def start_of(plan: Plan, u: jax.Array, largest: jax.Array) -> jax.Array:
    """The start of the subspace iteration, (n, width): the last u, and random columns.

    The largest are the numbers of largest magnitude in the columns of u.
    """
    start = plan.scalars.draws[: plan.width, : u.shape[0]].T.astype(largest.dtype)
    if plan.settings.subspace.warm_start:
        scale = power_of_two_below(jnp.max(jnp.abs(largest)))
        start = warm_start(start, u, largest, 1 / scale)
    return start


def target_of(plan: Plan, matrix: Matrix, *, read_once: bool = False) -> jax.Array:
    """A in the shape of the gradient: b2 V + (1 - b2) G^2 or its root, divided by its scale.

    Args:
      plan: Of the leaf.
      matrix: The matrix.
      read_once: Whether it goes into one pass, and into no other product there. Else it would be
        written to memory if q u^T were a product of matrices.
    """
    if matrix.target is not None:
        return matrix.target
    q, u = (x.astype(matrix.scale.dtype) for x in (matrix.q, matrix.u))
    factors = Factors(q, u / plan.approximation.of_scale(matrix.scale))
    if read_once and plan.platform.fuses_products:
        in_rows = matrix.grad.shape[1] % (plan.platform.lanes * devices_in_use()) == 0
        last = (outer_by_rows if in_rows else outer)(*factors, plan.axis)
    else:
        last = product_of(plan, factors)
    last = jnp.maximum(last, 0)  # it may have entries below zero (docs/algorithm.md, 3)
    return plan.approximation.average(last, gradient_of(matrix), plan.scalars.b2)


def product_of(plan: Plan, factors: Factors) -> jax.Array:
    """The product q u^T in the shape of the gradient."""
    platform = plan.platform
    if platform.fuses_outer_products:
        in_order = devices_in_use() == 1
        laid_out = not platform.fuses_products
        return fused_outer(*factors, plan.axis, laid_out=laid_out, in_order=in_order)
    return outer(*factors, plan.axis)


def gradient_of(matrix: Matrix) -> jax.Array:
    """G, divided by its scale."""
    return matrix.grad.astype(matrix.scale.dtype) * (1 / matrix.scale)


def image_of(plan: Plan, matrix: Matrix, start: jax.Array) -> jax.Array:
    """A times the start, in parts (parts, m, width) that are still to be added."""
    # Several matrices keep all cores busy without more parts.
    most = plan.platform.most_parts if plan.batch == 1 else 1
    return contract_in_parts(target_of(plan, matrix), start, 1 - plan.axis, most)


def project(plan: Plan, matrix: Matrix, q: jax.Array) -> jax.Array:
    """The other factor, u = A^T q."""
    return contract(target_of(plan, matrix), q, plan.axis)


def quotient_of(plan: Plan, matrix: Matrix, *, read_once: bool = False) -> jax.Array:
    """The gradient over the root of V, in its type."""
    target = target_of(plan, matrix, read_once=read_once)
    if matrix.entries is not None:  # added zeros would be 0 / 0 without eps
        target = jnp.where(matrix.grad == 0, 1, target)
    root = plan.approximation.root(target)
    scaled = divide_by_root(gradient_of(matrix), root, plan.scalars, matrix.scale)
    return scaled.astype(matrix.grad.dtype)


def divide_by_root(
    grad: jax.Array,
    root: jax.Array,
    scalars: StepScalars,
    scale: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """G / (sqrt(V / correction + eps_root) + eps), elementwise.

    Args:
      grad: G / scale.
      root: sqrt(V) / scale.
      scalars: The numbers of this step.
      scale: What G and the root were divided by.
    """
    root = root / jnp.sqrt(scalars.correction)
    if not is_zero(scalars.eps_root):
        root = jnp.hypot(root, jnp.sqrt(scalars.eps_root) / scale)
    return grad / (root + scalars.eps / scale)


def gram_of(u: jax.Array, unit: jax.Array) -> jax.Array:
    """The Gram matrix of the columns of u, from which `principal_turn` turns them."""
    columns = u / unit
    return contract(columns, columns, 0)


def turned(columns: jax.Array, turn: jax.Array) -> jax.Array:
    """Columns in order of falling singular value, after a `principal_turn`."""
    return matmul(columns, turn.T)


def residuals_of(
    plan: Plan, matrix: Matrix, q: jax.Array, u: jax.Array, unit: jax.Array
) -> jax.Array:
    """What adds up to ||A - q u^T||^2 in squared units."""
    difference = target_of(plan, matrix, read_once=True) - product_of(plan, Factors(q, u))
    units = difference / unit
    if plan.platform.sums_in_blocks and plan.batch == 1:
        return jnp.sum(jnp.square(in_blocks(units, 0)), axis=1)
    return jnp.sum(jnp.square(units))


def residuals_and_squares(
    plan: Plan, matrix: Matrix, q: jax.Array, u: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`residuals_of`, and the sum of the squares of the quotient, in one pass."""
    # Of equal products XLA makes one array. This one gives the same numbers as that of the last
    # pass, and is fused here, and that one there.
    matrix = matrix._replace(q=2 * matrix.q, u=matrix.u / 2)
    quotient = quotient_of(plan, matrix, read_once=True)
    return residuals_of(plan, matrix, q, u, unit), sum_of_squares(plan, quotient)


def residuals_and_quotient(
    plan: Plan, matrix: Matrix, q: jax.Array, u: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same and the quotient, in one pass, the last one: it may overwrite the gradient."""
    quotient = quotient_of(plan, matrix)
    residuals = residuals_of(plan, matrix, q, u, unit)
    return residuals, sum_of_squares(plan, quotient), quotient


def sum_of_squares(plan: Plan, quotient: jax.Array) -> jax.Array:
    """Of all entries, in the type that is worked in."""
    return jnp.sum(jnp.square(quotient.astype(wide_dtype(quotient.dtype))))


def clipped(
    plan: Plan, quotient: jax.Array, squares: jax.Array, entries: jax.Array | None
) -> jax.Array:
    """The quotient with a root mean square of d at most, in its type."""
    threshold = plan.scalars.clipping_threshold
    if threshold is None:
        return quotient
    mean = squares / (quotient.size if entries is None else entries)
    excess = jnp.maximum(1, jnp.sqrt(mean) / threshold)
    return (quotient.astype(squares.dtype) / excess).astype(quotient.dtype)


def rank_of(plan: Plan, factors: Factors, unit: jax.Array, residual: jax.Array) -> jax.Array:
    """The first rank that will do, from what all columns leave out."""
    energies = jnp.sum(jnp.square(factors.u / unit), axis=0)
    threshold = plan.scalars.error_threshold
    return choose_rank(energies, residual, plan.capacity, threshold, plan.settings.rank)


def kept_columns(plan: Plan, last: LeafState, factors: Factors, rank: jax.Array) -> Factors:
    """The first columns, rounded as the state keeps them, in the type that is worked in."""
    q, u = (fit_columns(x, plan.capacity) for x in factors)
    if not plan.settings.rank.is_fixed:
        q, u = mask_columns(q, rank), mask_columns(u, rank)
    bits: tuple[jax.Array | None, jax.Array | None] = None, None
    if plan.scalars.rounding is not None and last.q.dtype == jnp.bfloat16:
        of_q, of_u = plan.scalars.rounding
        bits = of_q[: q.shape[0], : q.shape[1]], of_u[: u.shape[0], : u.shape[1]]
    kept_q, kept_u = rounded(q, last.q.dtype, bits[0]), rounded(u, last.u.dtype, bits[1])
    return Factors(kept_q.astype(q.dtype), kept_u.astype(u.dtype))


def error_terms(
    plan: Plan,
    last: LeafState,
    scale: jax.Array,
    residual: jax.Array,
    norm: jax.Array,
    unit: jax.Array,
) -> ErrorTerms:
    """Collects what `errors_of` needs."""
    unit = unit * plan.approximation.of_scale(scale)
    decay = jnp.asarray(plan.approximation.drift_decay(plan.scalars.b2), last.drift.dtype)
    return ErrorTerms(residual, norm, unit, last.drift, decay)


def errors_of(terms: ErrorTerms) -> Errors:
    """The paper's xi and the drift, an estimate of the distance from the exact target.

    With D that distance in the Frobenius norm, D_t <= decay D_(t-1) + ||A - q u^T||, up to
    rounding. Averaging shrinks an old distance, cutting off entries below zero does not grow it,
    and the factorization adds its own. ||A - q u^T|| follows from xi and ||q u^T||, since q u^T and
    A - q u^T are orthogonal.
    """
    norm_squared = terms.residual + jnp.square(terms.norm)
    error = jnp.sqrt(terms.residual / jnp.where(norm_squared == 0, 1, norm_squared))
    error = error.astype(terms.last_drift.dtype)
    norm = (terms.unit * terms.norm).astype(terms.last_drift.dtype)
    left_out = error * norm / jnp.sqrt(jnp.maximum(1 - jnp.square(error), 1e-6))
    return Errors(error, terms.last_drift * terms.decay + left_out)


def new_state(
    plan: Plan,
    last: LeafState,
    scale: jax.Array,
    factors: Factors,
    rank: jax.Array,
    errors: Errors,
) -> LeafState:
    """The state that keeps new factors, or the last one where a number was out of range.

    It waits for the error: until the old factors have been read for the last time, the new ones
    cannot take their memory, and would have to be copied there.
    """
    u = within_range(factors.u * plan.approximation.of_scale(scale), last.u.dtype)
    new = LeafState(factors.q, u, rank, errors.error, errors.drift)
    is_finite = jnp.isfinite(errors.error) & jnp.isfinite(errors.drift)
    return jax.tree.map(lambda x, old: jnp.where(is_finite, x.astype(old.dtype), old), new, last)


def step_dense(
    scalars: StepScalars, grad: jax.Array, state: LeafState
) -> tuple[jax.Array, LeafState]:
    """One step for a leaf that keeps its second moment as it is."""
    wide = grad.astype(wide_dtype(grad.dtype))
    scalars = scalars.in_type(wide.dtype)
    nu = average_of_moments(state.nu, wide, scalars.b2)
    nu = jnp.where(jnp.isfinite(wide), within_range(nu, nu.dtype), nu)
    scaled = divide_by_root(wide, jnp.sqrt(nu), scalars)
    return scaled.astype(grad.dtype), state._replace(nu=nu.astype(state.nu.dtype))


def within_range(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Numbers, none beyond the largest of a type; NaN stays.

    An infinite second moment of finite gradients would never fall again, and
    `optax.apply_if_finite`, which looks at gradients alone, would not see it.
    """
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(x, -largest, largest)
