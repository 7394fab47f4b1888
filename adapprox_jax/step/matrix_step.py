"""One step of Algorithm 3 for matrices, up to the clip.

The way of the gradient: the second moment of the last step from its factors, averaged with the
squared gradient (`second_moment_of`) -> its image and the quotient, in one pass
(`image_and_quotient`) -> its factors (`factorize`). The target is what is factored: the second
moment V, or its root.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import is_zero
from adapprox_jax.linalg.products import MatrixProducts, contract, outer, tiled_products
from adapprox_jax.linalg.tiles import Tiling, sweep, tiling_of
from adapprox_jax.settings import Settings
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step.approximation import Approximation, average_of_moments
from adapprox_jax.step.factorize import Begun, factorize, factorize_in_turn, start_of
from adapprox_jax.step.rank_choice import size_index
from adapprox_jax.step.scalars import StepScalars
from adapprox_jax.step.xla_order import begin_after


class SecondMoment(NamedTuple):
    """V_t of one matrix, tile by tile and divided by a scale at which squares are numbers."""

    tiling: Tiling
    scale: jax.Array  # what G is divided by, a power of two
    target_scale: jax.Array  # and what the target is divided by
    gradient: Callable[[jax.typing.ArrayLike], jax.Array]  # a tile of G / scale
    product: Callable[[], jax.Array]  # the whole of q u^T / target_scale
    average: Callable[[jax.Array, jax.typing.ArrayLike], jax.Array]  # the target from a tile of it
    target: Callable[[jax.typing.ArrayLike], jax.Array]  # a tile of the target / target_scale


def step_matrix(
    scalars: StepScalars, grad: jax.Array, state: LeafState, settings: Settings
) -> tuple[jax.Array, LeafState]:
    """One step of Algorithm 3 for one matrix of fixed rank, up to the quotient.

    Args:
      scalars: The numbers of this step.
      grad: G, (m, n) or (n, m): q belongs to its shorter side, wherever that stands.
      state: Of this matrix: q (m, capacity), u (n, capacity), and scalars.
      settings: Of the optimizer.

    Returns:
      The scaled gradient in its shape and type, and the new state.
    """
    products, begun, scaled = begin_step(scalars, grad, state, settings)
    return scaled, factorize(scalars, products, begun, state, settings)


def step_matrices(
    scalars: StepScalars,
    grads: Sequence[jax.Array],
    states: Sequence[LeafState],
    settings: Settings,
) -> list[tuple[jax.Array, LeafState]]:
    """`step_matrix` of matrices of one shape whose ranks are chosen, one after the other.

    What is done with the gradients is code of each; the factorizations share theirs.
    """
    begun: list[tuple[MatrixProducts, Begun, jax.Array]] = []
    for grad, state in zip(grads, states, strict=True):
        if begun:  # so that quotients are used up one by one
            ready = jnp.sum(jnp.square(begun[-1][2].astype(jnp.float32)))
            state = state._replace(q=begin_after(ready, state.q))
        begun.append(begin_step(scalars, grad, state, settings))
    products, of_first_pass, scaled = zip(*begun, strict=True)
    new = factorize_in_turn(scalars, products, of_first_pass, states, settings)
    return list(zip(scaled, new, strict=True))


def begin_step(
    scalars: StepScalars, grad: jax.Array, state: LeafState, settings: Settings
) -> tuple[MatrixProducts, Begun, jax.Array]:
    """The pass over the gradient of one matrix: everything but its new factors.

    Args:
      scalars: The numbers of this step.
      grad: G, (m, n) or (n, m).
      state: Of this matrix.
      settings: Of the optimizer.

    Returns:
      The products of the target, what its factorization starts from, and the quotient.
    """
    moment, largest_u = second_moment_of(scalars, grad, state, settings)
    rows, capacity = state.q.shape
    known = jnp.where(largest_u > 0, state.rank, 0)
    width = settings.subspace.width(settings.rank.sizes(capacity, rows)[0], rows)
    start = start_of(scalars, state.u, known, moment.target_scale, width, settings.subspace)
    image, scaled = image_and_quotient(moment, start, scalars, settings.approximation, grad)
    products = tiled_products(moment.target, moment.tiling)
    return products, Begun(image, moment.target_scale, known), scaled


def second_moment_of(
    scalars: StepScalars, grad: jax.Array, state: LeafState, settings: Settings
) -> tuple[SecondMoment, jax.Array]:
    """V_t = b2 V_(t-1) + (1 - b2) G^2 of one matrix.

    Args:
      scalars: The numbers of this step.
      grad: G, (m, n) or (n, m).
      state: Of this matrix.
      settings: Of the optimizer.

    Returns:
      V_t, and the largest magnitude in u, which is 0 where there is no V_(t-1) yet.
    """
    approximation, tiling = settings.approximation, tiling_of(grad.shape)
    dtype = jnp.promote_types(grad.dtype, jnp.float32)
    rows, capacity = state.q.shape
    sizes = settings.rank.sizes(capacity, rows)
    # Of the leading columns: wide buffers take long to read.
    largest_u = jnp.max(jnp.abs(state.u[:, : sizes[0]]))
    scale = unit_scale(grad, largest_u, approximation)
    target_scale = approximation.of_scale(scale)
    inverse_scale = 1 / target_scale

    def gradient(tile: jax.typing.ArrayLike) -> jax.Array:
        return tiling.take(grad, 1 - tiling.axis, tile).astype(dtype) * (1 / scale)

    product_of = partial(product_in_use, state, inverse_scale, sizes, axis=tiling.axis, dtype=dtype)

    def product() -> jax.Array:
        return product_of(rows_of=lambda u: u)

    def average(product: jax.Array, tile: jax.typing.ArrayLike) -> jax.Array:
        previous = approximation.to_moment(jnp.maximum(product, 0))
        return approximation.of_moment(average_of_moments(previous, gradient(tile), scalars.b2))

    @tiling.cache_if_whole
    def target(tile: jax.typing.ArrayLike) -> jax.Array:
        return average(product_of(rows_of=lambda u: tiling.take(u, 0, tile)), tile)

    moment = SecondMoment(tiling, scale, target_scale, gradient, product, average, target)
    return moment, largest_u


def image_and_quotient(
    moment: SecondMoment,
    start: jax.Array,
    scalars: StepScalars,
    approximation: Approximation,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The target times a start, and the gradient over the root of V: both in one pass.

    Args:
      moment: V_t of one matrix.
      start: (n, width).
      scalars: The numbers of this step.
      approximation: What the target is.
      grad: G, whose shape and type the quotient has.

    Returns:
      (m, width), and the quotient.
    """
    tiling, axis = moment.tiling, moment.tiling.axis
    in_place = tiling.tiles > 1 and grad.dtype == start.dtype
    into = None
    if in_place:  # of the product: to fill an array first takes as long as to make that
        into = (moment.product(),)
    elif tiling.tiles > 1:
        into = (jnp.full_like(moment.scale, moment.scale, grad.dtype, shape=grad.shape),)

    def part(tile: jax.typing.ArrayLike, *held: jax.Array) -> tuple[jax.Array, tuple[jax.Array]]:
        target = moment.average(held[0], tile) if in_place else moment.target(tile)
        image = contract(target, tiling.take(start, 0, tile), 1 - axis)
        gradient = moment.gradient(tile)
        scaled = divide_by_root(gradient, target, scalars, approximation, moment.scale)
        if in_place:  # what reads the product goes first, else XLA copies the whole for each tile
            scaled = begin_after(jnp.sum(jnp.square(image)), scaled)
        return image, (scaled.astype(grad.dtype),)

    image, (scaled,) = sweep(tiling, part, moment.scale, dims=(1 - axis,), into=into)
    return image, scaled


def unit_scale(grad: jax.Array, largest_u: jax.Array, approximation: Approximation) -> jax.Array:
    """A power of two about as large as the entries of the root of V, or of G where V is 0.

    Divided by it, squares neither overflow nor vanish, and to undo the division rounds nothing. A
    gradient may be 1e18 times as large as all before it, and as large as 1e7 where all before it
    were below 1e-12.

    Args:
      grad: G, of any shape.
      largest_u: Largest magnitude in u, a scalar.
      approximation: What q @ u.T stands for.
    """
    dtype = jnp.promote_types(grad.dtype, jnp.float32)
    root = approximation.root(largest_u).astype(dtype)

    def largest_gradient(grad: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(grad)).astype(dtype)

    if approximation.scale_follows_gradient:
        largest = jnp.maximum(root, largest_gradient(grad))
    else:
        largest = jax.lax.cond(root > 0, lambda _: root, largest_gradient, grad)
    # With no bits of a fraction left: rounded to a power of two, from 4/3 to 8/3 of the largest. A
    # step does not depend on it, but a derivative through it may overflow.
    largest = jax.lax.stop_gradient(largest)
    power = 2 * jax.lax.reduce_precision(largest, np.finfo(dtype).nexp, 0)
    return jnp.where(largest > 0, jnp.clip(power, 2.0**-40, 2.0**60), 1)


def product_in_use(
    state: LeafState,
    inverse_scale: jax.typing.ArrayLike,
    sizes: tuple[int, ...],
    *,
    axis: int,
    dtype: jax.typing.DTypeLike,
    rows_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Q u^T of the columns in use, which may have entries below zero (docs/algorithm.md, 3).

    Args:
      state: Of one matrix.
      inverse_scale: What the product is multiplied by, a power of two.
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
    return jax.lax.switch(size_index(sizes, state.rank), branches, state.q, state.u)


def divide_by_root(
    grad: jax.Array,
    target: jax.Array,
    scalars: StepScalars,
    approximation: Approximation,
    scale: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """G / (sqrt(V / correction + eps_root) + eps), elementwise.

    Args:
      grad: G / scale.
      target: V / scale^2, or what stands for it.
      scalars: The numbers of this step.
      approximation: What the target is.
      scale: What G was divided by.
    """
    if is_zero(scalars.eps_root):
        root = approximation.root(target / approximation.of_moment(scalars.correction))
    else:
        moment = approximation.to_moment(target) / scalars.correction
        root = jnp.sqrt(moment + scalars.eps_root / scale**2)
    return grad / (root + scalars.eps / scale)
