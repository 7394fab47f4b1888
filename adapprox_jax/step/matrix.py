"""What one step does with one matrix: Algorithm 3 with the clip, and within it Algorithms 1 and 2.

The functions stand in the order of the work (`phases` calls them). Shapes: the target A is (m, n)
with m at most n, q is (m, width) and u = A^T q is (n, width). The gradient may hold A's transpose:
then q stands along its axis 1. Nothing loops or branches here, so that `jax.vmap` makes a stack of
matrices of one. What takes a `Matrix` is a pass over it. Each makes the target anew. A pass over
some rows of the gradient gives these rows of the result, or a term of it.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import is_zero
from adapprox_jax.linalg.products import (
    contract,
    contract_in_parts,
    fused_outer,
    matmul,
    outer,
    outer_by_rows,
)
from adapprox_jax.linalg.quantization import CUT, in_blocks
from adapprox_jax.linalg.rounding import round_stochastically, wide_dtype
from adapprox_jax.linalg.srsi import power_of_two_below
from adapprox_jax.settings import Settings
from adapprox_jax.sharding.axes import devices_in_use
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.approximation import APPROXIMATIONS, Approximation, average_of_moments
from adapprox_jax.step.platform import Platform
from adapprox_jax.step.rank_choice import choose_rank
from adapprox_jax.step.scalars import StepScalars

_LANES = 128  # of a TPU; a matrix lies in rows if they divide its length
_TRACE = 1e-3  # of a random column in a start, times the largest entry of the last one
_ROUNDING = 84  # epsilons of the largest entry, 1e-5 in float32: rounding leaves some 1e-6


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scalars"],
    meta_fields=["settings", "platform", "axis", "batch", "width", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """What is the same for all matrices of a leaf: a tree of the numbers of the step."""

    scalars: StepScalars
    settings: Settings
    platform: Platform
    axis: int  # of the gradient of a matrix, along which q stands
    batch: int  # matrices of the leaf
    width: int  # columns that are worked on: those of the buffers, and p more
    capacity: int  # columns of the buffers

    @property
    def approximation(self) -> Approximation:
        """What the factors stand for."""
        return APPROXIMATIONS[self.settings.approximate]


class Matrix(NamedTuple):
    """The gradient of one matrix and what its last factors say of V."""

    grad: jax.Array  # (m, n) or (n, m)
    q: jax.Array
    u: jax.Array
    scale: jax.Array  # what G is divided by, a power of two
    entries: jax.Array | None = None  # without the zeros around them; None: there are none
    target: jax.Array | None = None  # A, where it stays in memory


class Factors(NamedTuple):
    """q u^T, divided by the target's scale. A pass may need one of them alone."""

    q: Any
    u: Any


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

    Columns of u that are zero or rounding beside the largest stand for no direction. There the
    start is random. The others may be linearly dependent, which leaves out what is new. So each of
    them gets a trace of its random column.

    Args:
      plan: Of the leaf.
      u: (n, capacity).
      largest: The number of largest magnitude in each column of u, (capacity,), with its sign. So
        the trace changes its sign with its column.
    """
    start = plan.scalars.draws[: plan.width, : u.shape[0]].T.astype(largest.dtype)
    if not plan.settings.warm_start:
        return start
    inverse_scale = 1 / power_of_two_below(jnp.max(jnp.abs(largest)))  # A u must not be too large
    of_units = (largest * inverse_scale)[None]
    stands = jnp.abs(of_units) > _ROUNDING * float(np.finfo(start.dtype).eps)
    random = start[:, : plan.capacity]
    traced = u.astype(start.dtype) * inverse_scale + _TRACE * of_units * random
    first = jnp.where(stands, traced, random)
    return jnp.concatenate([first, start[:, plan.capacity :]], axis=1)


# Traced once for all passes over a leaf.
@partial(jax.jit, static_argnames="read_once")
def target_of(plan: Plan, matrix: Matrix, *, read_once: bool = False) -> jax.Array:
    """A in the shape of the gradient: b2 V + (1 - b2) G^2 or its root, divided by its scale.

    Args:
      plan: Of the leaf.
      matrix: The matrix.
      read_once: Whether it goes into one pass, and into no other product there. Else platforms
        that do not fuse it write it to memory, rounded to their type of targets.
    """
    if matrix.target is not None:
        return matrix.target
    q, u = (x.astype(matrix.scale.dtype) for x in (matrix.q, matrix.u))
    factors = Factors(q, u / plan.approximation.of_scale(matrix.scale))
    if read_once and plan.platform.fuses_products:
        in_rows = matrix.grad.shape[1] % (_LANES * devices_in_use()) == 0
        last = (outer_by_rows if in_rows else outer)(*factors, plan.axis)
    else:
        last = product_of(plan, factors)
    last = jnp.maximum(last, 0)  # it may have entries below zero (docs/algorithm.md, 3)
    target = plan.approximation.average(last, gradient_of(matrix), plan.scalars.b2)
    dtype = plan.platform.target_dtype
    if read_once or dtype is None or target.dtype == jnp.float64:
        return target
    # Behind a barrier, because XLA would leave the rounding out.
    return jax.lax.optimization_barrier(target.astype(dtype)).astype(target.dtype)


def product_of(plan: Plan, factors: Factors) -> jax.Array:
    """The product q u^T in the shape of the gradient."""
    platform = plan.platform
    if not platform.is_cpu:
        in_order = devices_in_use() == 1
        laid_out = not platform.fuses_products
        return fused_outer(*factors, plan.axis, laid_out=laid_out, in_order=in_order)
    return outer(*factors, plan.axis)


def gradient_of(matrix: Matrix) -> jax.Array:
    """G, divided by its scale."""
    return matrix.grad.astype(matrix.scale.dtype) * (1 / matrix.scale)


def image_of(plan: Plan, matrix: Matrix, start: Factors) -> jax.Array:
    """A times the u of the start, in parts (parts, m, width) that are still to be added."""
    # Several matrices keep all cores busy without more parts.
    most = plan.platform.most_parts if plan.batch == 1 else 1
    return contract_in_parts(target_of(plan, matrix), start.u, 1 - plan.axis, most)


def project(plan: Plan, matrix: Matrix, basis: Factors) -> jax.Array:
    """The other factor, u = A^T q."""
    return contract(target_of(plan, matrix), basis.q, plan.axis)


def quotient_of(plan: Plan, matrix: Matrix, *_: Any) -> jax.Array:
    """The gradient over the root of V, in its type."""
    return wide_quotient_of(plan, matrix).astype(matrix.grad.dtype)


def quotient_in_pieces(plan: Plan, matrix: Matrix, *_: Any) -> jax.Array:
    """The same, made of rows that are cut into pieces, if each device has whole ones."""
    if not has_whole_pieces(matrix.grad.shape[0]):
        return quotient_of(plan, matrix)
    rows = matrix.grad, matrix.q if plan.axis == 0 else matrix.u
    pieces = jax.lax.optimization_barrier([in_blocks(x, 0, CUT) for x in rows])

    def of_piece(grad: jax.Array, factor: jax.Array) -> jax.Array:
        q, u = (factor, matrix.u) if plan.axis == 0 else (matrix.q, factor)
        piece = matrix._replace(grad=grad, q=q, u=u)
        return quotient_of(plan, piece)

    return jax.vmap(of_piece)(*pieces).reshape(matrix.grad.shape)


def has_whole_pieces(size: int) -> bool:
    """Whether each device has whole pieces of `CUT` numbers, however it divides an axis."""
    return size % (CUT * devices_in_use()) == 0


def wide_quotient_of(plan: Plan, matrix: Matrix, *_: Any) -> jax.Array:
    """The gradient over the root of V, in the type that is worked in."""
    target = target_of(plan, matrix, read_once=True)
    if matrix.entries is not None:  # added zeros would be 0 / 0 without eps
        target = jnp.where(matrix.grad == 0, 1, target)
    root = plan.approximation.root(target)
    if plan.approximation.is_square:
        root = at_least_own(root, gradient_of(matrix), plan.scalars)
    return divide_by_root(gradient_of(matrix), root, plan.scalars, matrix.scale)


def at_least_own(root: jax.Array, grad: jax.Array, scalars: StepScalars) -> jax.Array:
    """The root of V, at least the gradient's own part of it, whose square may be out of range."""
    return jnp.maximum(root, jnp.sqrt(1 - scalars.b2) * jnp.abs(grad))


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
    smallest = float(np.finfo(grad.dtype).tiny)  # eps / scale may vanish
    return grad / (root + jnp.maximum(scalars.eps / scale, jnp.minimum(scalars.eps, smallest)))


def gram_of(u: jax.Array, unit: jax.Array) -> jax.Array:
    """The Gram matrix of the columns of u, from which `principal_turn` turns them."""
    columns = u / unit
    return contract(columns, columns, 0)


def turned(columns: jax.Array, turn: jax.Array) -> jax.Array:
    """Columns in order of falling singular value, after a `principal_turn`."""
    return matmul(columns, turn.T)


def residuals_of(plan: Plan, matrix: Matrix, factors: Factors, unit: jax.Array) -> jax.Array:
    """What adds up to ||A - q u^T||^2 in squared units."""
    difference = target_of(plan, matrix, read_once=True) - product_of(plan, factors)
    units = difference / unit
    if not plan.platform.is_cpu and plan.batch == 1:
        return jnp.sum(jnp.square(in_blocks(units, 0)), axis=1)
    return jnp.sum(jnp.square(units))


def residuals_and_squares(
    plan: Plan, matrix: Matrix, factors: Factors, unit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`residuals_of`, and the sum of the squares of the quotient, in one pass."""
    # Of equal products XLA makes one array. This one gives the same numbers as that of the last
    # pass, and is fused here, and that one there.
    matrix = matrix._replace(q=2 * matrix.q, u=matrix.u / 2)
    squares = sum_of_squares(wide_quotient_of(plan, matrix))
    return residuals_of(plan, matrix, factors, unit), squares


def residuals_and_quotient(
    plan: Plan, matrix: Matrix, factors: Factors, unit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same and the quotient, in one pass, the last one: it may overwrite the gradient."""
    quotient = quotient_of(plan, matrix)
    residuals = residuals_of(plan, matrix, factors, unit)
    return residuals, sum_of_squares(quotient), quotient


def sum_of_squares(quotient: jax.Array) -> jax.Array:
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
    return choose_rank(energies, residual, plan.capacity, threshold, plan.settings)


def kept_columns(plan: Plan, last: LeafState, factors: Factors, rank: jax.Array) -> Factors:
    """The first columns, rounded as the state keeps them, in the type that is worked in."""
    q, u = (x[:, : plan.capacity] for x in factors)
    if not plan.settings.is_fixed:
        is_kept = jnp.arange(plan.capacity, dtype=rank.dtype) < rank
        q, u = jnp.where(is_kept, q, 0), jnp.where(is_kept, u, 0)
    kept_q, kept_u = q.astype(last.q.dtype), u.astype(last.u.dtype)
    if plan.scalars.rounding is not None and last.q.dtype == jnp.bfloat16:
        of_q, of_u = plan.scalars.rounding
        kept_q = round_stochastically(q, of_q[: q.shape[0], : plan.capacity])
        kept_u = round_stochastically(u, of_u[: u.shape[0], : plan.capacity])
    return Factors(kept_q.astype(q.dtype), kept_u.astype(u.dtype))


def error_terms(
    plan: Plan,
    last: LeafState,
    scale: jax.Array,
    residual: jax.Array,
    energy: jax.Array,
    unit: jax.Array,
) -> tuple[jax.Array, ...]:
    """What `errors_of` needs: ||A - q u^T||^2 and ||q u^T||^2 in squared units, and the rest."""
    unit = unit * plan.approximation.of_scale(scale)
    # x -> b2 x + c shrinks a distance by b2, and x -> sqrt(b2 x^2 + c) by its root at least.
    decay = jnp.asarray(plan.approximation.of_moment(plan.scalars.b2), last.drift.dtype)
    return residual, energy, unit, last.drift, decay


def errors_of(terms: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The paper's xi and the drift, an estimate of the distance from the exact target.

    With D that distance in the Frobenius norm, D_t <= decay D_(t-1) + ||A - q u^T||, up to
    rounding. Averaging shrinks an old distance, cutting off entries below zero does not grow it,
    and the factorization adds its own. ||A - q u^T|| follows from xi and ||q u^T||, since q u^T and
    A - q u^T are orthogonal.
    """
    residual, energy, unit, last_drift, decay = terms
    norm_squared = residual + energy
    error = jnp.sqrt(residual / jnp.where(norm_squared == 0, 1, norm_squared))
    error = error.astype(last_drift.dtype)
    norm = (unit * jnp.sqrt(energy)).astype(last_drift.dtype)
    left_out = error * norm / jnp.sqrt(jnp.maximum(1 - jnp.square(error), 1e-6))
    return error, last_drift * decay + left_out


def new_state(
    plan: Plan,
    last: LeafState,
    scale: jax.Array,
    factors: Factors,
    rank: jax.Array,
    errors: tuple[jax.Array, jax.Array],
) -> LeafState:
    """The state that keeps new factors, or the last one where a number was out of range.

    It waits for the error: until the old factors have been read for the last time, the new ones
    cannot take their memory, and would have to be copied there.
    """
    u = within_range(factors.u * plan.approximation.of_scale(scale), last.u.dtype)
    new = LeafState(factors.q, u, rank, *errors)
    is_finite = jnp.isfinite(new.error) & jnp.isfinite(new.drift)
    return jax.tree.map(lambda x, old: jnp.where(is_finite, x.astype(old.dtype), old), new, last)


def step_dense(
    scalars: StepScalars, grad: jax.Array, state: LeafState
) -> tuple[jax.Array, LeafState]:
    """One step for a leaf that keeps its second moment as it is."""
    wide = grad.astype(wide_dtype(grad.dtype))
    scalars = scalars.in_type(wide.dtype)
    nu = average_of_moments(state.nu, wide, scalars.b2)
    nu = jnp.where(jnp.isfinite(wide), within_range(nu, nu.dtype), nu)
    root = at_least_own(jnp.sqrt(nu), wide, scalars)
    scaled = divide_by_root(wide, root, scalars)
    return scaled.astype(grad.dtype), state._replace(nu=nu.astype(state.nu.dtype))


def within_range(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Numbers, none beyond the largest of a type; NaN stays.

    An infinite second moment of finite gradients would never fall again, and
    `optax.apply_if_finite`, which looks at gradients alone, would not see it.
    """
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(x, -largest, largest)
