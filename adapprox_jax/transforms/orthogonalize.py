"""orthogonalize: matrices made nearly orthogonal, those of one shape together."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import require_integer
from adapprox_jax.linalg.newton_schulz import newton_schulz
from adapprox_jax.params.boxes import is_box, rebox, unbox
from adapprox_jax.params.matrix_view import (
    MatrixView,
    WeightDimensionNumbers,
    check_dimension_numbers,
    from_matrices,
    matrix_view,
    resolve_dimension_numbers,
    to_matrices,
)
from adapprox_jax.params.tree_checks import check_types, leaf_name
from adapprox_jax.sharding.axes import is_compilers_mesh, with_automatic_axes
from adapprox_jax.sharding.matrix_exchange import each_on_one_device
from adapprox_jax.step.batching import grouping_of
from adapprox_jax.step.platform import Platform, on_platform
from adapprox_jax.step.xla_order import begin_after

# Batches of one stack that are compiled one by one; more of them are a loop.
_MOST_UNROLLED = 16


def orthogonalize(
    steps: int = 5, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    """Makes every matrix of the updates nearly orthogonal, with entries of size one on average.

    U S V^T becomes about U V^T sqrt(max(m, n)), whatever its scale, by Newton-Schulz iteration with
    the coefficients of Muon. Matrices of one shape are worked on together, on CPUs one after the
    other. Products are in full precision on CPUs and in bfloat16 on accelerators.

    Args:
      steps: Of the iteration, at least 1.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: steps is out of range, or, from `update`, a leaf has no matrices.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.orthogonalize()
      >>> updates, _ = tx.update(jnp.diag(jnp.array([3.0, 1.0])), tx.init(jnp.zeros((2, 2))))
      >>> bool(jnp.all(jnp.abs(jnp.diag(updates) - 2**0.5) < 0.5))
      True

    Source: Jordan et al., 2024, "Muon", and the scale of Liu et al., 2025 (2502.16982).
    """
    require_integer("steps", steps, 1)
    check_dimension_numbers(weight_dimension_numbers)

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        check_types(updates, "update")
        numbers = resolve_dimension_numbers(weight_dimension_numbers, updates)
        structure: Any
        named, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_box)
        leaves = [jnp.asarray(unbox(leaf)) for _, leaf in named]
        views = []
        for (path, _), leaf, of_leaf in zip(
            named, leaves, structure.flatten_up_to(numbers), strict=True
        ):
            views.append(matrix_view(leaf.shape, of_leaf))
            if not views[-1].is_matrix:
                raise ValueError(
                    f"{leaf_name(path)}: got shape {leaf.shape}; allowed: leaves with rows and"
                    " columns. Leave others out with optax.masked or optax.partition."
                )
        results = with_automatic_axes(partial(_of_leaves, tuple(views), steps), leaves)(leaves)
        boxed = [rebox(leaf, x) for (_, leaf), x in zip(named, results, strict=True)]
        return structure.unflatten(boxed), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _of_leaves(
    views: Sequence[MatrixView], steps: int, leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    if not all(leaf.size for leaf in leaves):
        full = [i for i, leaf in enumerate(leaves) if leaf.size]
        done = _of_leaves([views[i] for i in full], steps, [leaves[i] for i in full])
        return [dict(zip(full, done, strict=True)).get(i, leaf) for i, leaf in enumerate(leaves)]
    stacks = [_lying(leaf, view) for leaf, view in zip(leaves, views, strict=True)]
    results = on_platform(partial(_of_stacks, steps), stacks)
    return [_standing(x, leaf, view) for x, leaf, view in zip(results, leaves, views, strict=True)]


def _lying(leaf: jax.Array, view: MatrixView) -> jax.Array:
    """A leaf as a stack of matrices (batch, m, n) with m at most n, float32 or wider."""
    matrices = to_matrices(leaf, view)
    rows, columns = matrices.shape[-2:]
    stack = matrices.reshape(math.prod(matrices.shape[:-2]), rows, columns)
    stack = stack if rows <= columns else jnp.swapaxes(stack, 1, 2)
    return stack.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _standing(stack: jax.Array, leaf: jax.Array, view: MatrixView) -> jax.Array:
    """Undoes `_lying`."""
    rows, columns = jax.eval_shape(partial(to_matrices, view=view), leaf).shape[-2:]
    stack = stack if rows <= columns else jnp.swapaxes(stack, 1, 2)
    batch = [leaf.shape[axis] for axis in view.batch]
    return from_matrices(stack.reshape(*batch, rows, columns), view, leaf.shape).astype(leaf.dtype)


def _of_stacks(steps: int, platform: Platform, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Orthogonalizes stacks of matrices, those of one shape together."""
    results = list(stacks)
    ready = jnp.zeros(())
    product_dtype = platform.directions_dtype
    work = partial(_in_batches, steps, platform.directions_at_once, product_dtype)
    for group in (group for kind in grouping_of(stacks).kinds for group in kind):
        if is_compilers_mesh():
            # In the type of products here already: half of what is moved.
            members = [_as_operand(stacks[i], product_dtype) for i in group]
            members[0] = begin_after(ready, members[0])
            done = each_on_one_device(lambda batch: work([batch], jnp.zeros(()))[0][0], members)
            ready = _known_after(done[0])
        else:
            done, ready = work([stacks[i] for i in group], ready)
        for i, x in zip(group, done, strict=True):
            results[i] = x.astype(stacks[i].dtype) * math.sqrt(x.shape[2])
    return results


def _in_batches(
    steps: int,
    at_once: int,
    product_dtype: Any,
    stacks: Sequence[jax.Array],
    ready: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """Newton-Schulz iteration of stacks of one shape, of as many matrices at once as there may be.

    Begins when `ready` is known; returns the results, and what is known after them.
    """
    _, m, n = stacks[0].shape
    each = max(at_once // max(m * n, 1), 1)
    parts: list[list[jax.Array]] = [[] for _ in stacks]

    def of_batch(ready: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = begin_after(ready, _as_operand(batch, product_dtype))
        # Behind the barrier, because results in bfloat16 would be kept in float32.
        done = jax.lax.optimization_barrier(newton_schulz(batch, steps, product_dtype))
        return _known_after(done), done

    # Of long stacks what fills whole batches goes first, in a loop.
    looped = [len(x) // each if len(x) > _MOST_UNROLLED * each else 0 for x in stacks]
    for i, batches in enumerate(looped):
        if batches:
            whole = stacks[i][: batches * each].reshape(batches, each, m, n)
            ready, done = jax.lax.scan(of_batch, ready, whole)
            parts[i].append(done.reshape(batches * each, m, n))
    rest = [x[batches * each :] for x, batches in zip(stacks, looped, strict=True)]
    for pieces in _pieces([len(stack) for stack in rest], each):
        # In the type of products here already: half of what is turned and put together.
        taken = [_as_operand(rest[i][start:stop], product_dtype) for i, start, stop in pieces]
        ready, done = of_batch(ready, jnp.concatenate(taken))
        ends = 0
        for i, start, stop in pieces:
            parts[i].append(done[ends : ends + stop - start])
            ends += stop - start
    return [x[0] if len(x) == 1 else jnp.concatenate(x) for x in parts], ready


def _as_operand(stack: jax.Array, product_dtype: Any) -> jax.Array:
    return stack.astype(product_dtype or stack.dtype)


def _known_after(done: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(done[:, 0])).astype(jnp.float32)


def _pieces(sizes: Sequence[int], each: int) -> list[list[tuple[int, int, int]]]:
    """Cuts stacks into batches of at most `each` matrices: lists of (stack, start, stop)."""
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                batches.append([])
                room = each
            taken = min(room, size - start)
            batches[-1].append((i, start, start + taken))
            start, room = start + taken, room - taken
    return batches
