"""orthogonalize: matrices made nearly orthogonal, those of one shape together."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import require_integer
from adapprox_jax.linalg.newton_schulz import newton_schulz
from adapprox_jax.linalg.rounding import wide_dtype
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixView, from_matrices, to_matrices
from adapprox_jax.params.views import WeightDimensionNumbers, check_dimension_numbers, views_of
from adapprox_jax.sharding.axes import (
    devices_in_use,
    is_compilers_mesh,
    using_mesh_of,
    with_automatic_axes,
)
from adapprox_jax.sharding.matrix_exchange import by_kind, each_on_one_device
from adapprox_jax.step.alike import MANY, alike, places_within, stacked, unstacked
from adapprox_jax.step.batching import grouping_of, together
from adapprox_jax.step.platform import Platform, on_platform
from adapprox_jax.step.xla_order import begin_after, first_two


def orthogonalize(
    steps: int = 5, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    """Makes every matrix of the updates nearly orthogonal, with entries of size one on average.

    U S V^T becomes about U V^T sqrt(max(m, n)), whatever its scale, by Newton-Schulz iteration with
    the coefficients of Muon. Matrices of one shape are worked on together, as many as fit a
    number of entries. Products are in full precision on CPUs and in bfloat16 on accelerators.

    Args:
      steps: Of the iteration, at least 1.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`, and
        how many fused matrices it has, as `MatrixDimensionNumbers` says.

    Returns:
      An `optax.GradientTransformation` without state.

    Raises:
      ValueError: steps is out of range, or, from `update`, a leaf has no matrices.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.orthogonalize()
      >>> updates, _ = tx.update(jnp.diag(jnp.array([3.0, 1.0])), tx.init(jnp.zeros((2, 2))))
      >>> bool(jnp.all(jnp.abs(jnp.diag(updates) - 2**0.5) < 0.5))
      True

    Source: Jordan et al., 2024, "Muon", and the scale of Liu et al., 2025 (2502.16982).
    """
    require_integer("steps", steps, 1)
    check_dimension_numbers(weight_dimension_numbers)

    def directions(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        leaves = Leaves.of(updates, "update")
        arrays = [jnp.asarray(x) for x in leaves.arrays]
        views = views_of(weight_dimension_numbers, leaves)
        for name, x, view in zip(leaves.names, arrays, views, strict=True):
            if not view.is_matrix:
                raise ValueError(
                    f"{name}: got shape {x.shape}; allowed: leaves with rows and columns. Leave"
                    " others out with optax.masked or optax.partition."
                )
        with using_mesh_of(arrays):
            of_leaves = partial(_of_leaves, leaves.names, views, steps)
            results = with_automatic_axes(of_leaves, arrays)(arrays)
        return leaves.filled(results)

    return optax.stateless(directions)


def _of_leaves(
    names: Sequence[str], views: Sequence[MatrixView], steps: int, leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """The directions of leaves; empty ones stay as they are."""
    results = list(leaves)
    full = [i for i, leaf in enumerate(leaves) if leaf.size]
    stacks = [to_matrices(leaves[i], views[i]).astype(wide_dtype(leaves[i].dtype)) for i in full]
    parts = [views[i].parts_of_sides for i in full]
    directions = on_platform(partial(_of_stacks, [names[i] for i in full], parts, steps), stacks)
    for i, stack in zip(full, directions, strict=True):
        results[i] = from_matrices(stack, views[i], leaves[i].shape).astype(leaves[i].dtype)
    return results


def _of_stacks(
    names: Sequence[str],
    parts: Sequence[tuple[int, int]],
    steps: int,
    platform: Platform,
    stacks: Sequence[jax.Array],
) -> list[jax.Array]:
    """Orthogonalizes stacks of matrices, those of one shape together."""
    results = list(stacks)
    last: jax.Array | None = None
    many: list[list[int]] = []
    if platform.is_cpu:
        # Zeros around a matrix stay zeros. Fused parts would be cut at other places.
        can_grow = [len(x) == max(of) == 1 or None for x, of in zip(stacks, parts, strict=True)]
        many = [group for group in alike(stacks, can_grow) if len(group) > 1]
    places = places_within(many, stacks)
    others = sorted(set(range(len(stacks))).difference(*many))
    of_others = grouping_of([stacks[i] for i in others]).kinds
    groups = many + [[others[i] for i in group] for kind in of_others for group in kind]
    fused_alike = [
        ([i for i in group if parts[i] == of], of)
        for group in groups
        for of in dict.fromkeys(parts[i] for i in group)
    ]
    for group, of in fused_alike:
        work = partial(_each_part, partial(_in_turn, steps, platform), of)
        on_mesh = is_compilers_mesh()
        kinds = by_kind(names, group) if on_mesh else [[i] for i in group]
        room = devices_in_use() if on_mesh else _at_once(platform, stacks[group[0]].shape)
        for some in _batches(stacks, kinds, room):
            # In the type of products here already: half of what is moved and put together.
            members = [stacks[i].astype(platform.directions_dtype or stacks[i].dtype) for i in some]
            if last is not None:
                # A row of each matrix tells, because a batch of matrices is done all at once.
                members[0] = begin_after(platform, last[:, 0], members[0])
            if on_mesh:
                done = each_on_one_device(work, [names[i] for i in some], members)
            elif group in many:
                of_members = work(stacked([x[0] for x in members]))
                done = [x[None] for x in unstacked(of_members, places, [x[0] for x in members])]
            else:
                done = together(work, members)
            last = done[0]
            for i, x in zip(some, done, strict=True):
                longest = max(stacks[i].shape[1] // of[0], stacks[i].shape[2] // of[1])
                scale: float | jax.Array = math.sqrt(longest)
                if platform.is_cpu and devices_in_use() == 1 and len(some) < MANY:
                    # XLA makes a whole array of a number that it knows, long before. To wait costs
                    # a kernel for each leaf, so not where many small ones share theirs.
                    scale = begin_after(platform, first_two(x), jnp.asarray(scale, x.dtype))
                results[i] = x.astype(stacks[i].dtype) * scale
    return results


def _each_part(
    work: Callable[[jax.Array], jax.Array], parts: tuple[int, int], stack: jax.Array
) -> jax.Array:
    """Works on the parts of matrices, each by itself.

    Here, where a device has whole matrices: on a mesh, cutting those that are divided would gather.
    """
    if parts == (1, 1):
        return work(stack)
    in_rows = jnp.concatenate(jnp.split(stack, parts[0], axis=1))
    done = work(jnp.concatenate(jnp.split(in_rows, parts[1], axis=2)))
    joined = jnp.concatenate(jnp.split(done, parts[1]), axis=2)
    return jnp.concatenate(jnp.split(joined, parts[0]), axis=1)


def _at_once(platform: Platform, shape: Sequence[int]) -> int:
    """How many matrices are worked on at once."""
    return max(platform.directions_at_once // math.prod(shape[1:]), 1)


def _batches(
    stacks: Sequence[jax.Array], kinds: Sequence[Sequence[int]], most: int
) -> list[list[int]]:
    """Stacks of one shape, kind by kind, in batches of so many matrices. A long kind is alone."""
    batches: list[list[int]] = []
    room = 0
    for kind in kinds:
        size = sum(len(stacks[i]) for i in kind)
        if size > room:
            batches.append([])
            room = most
        batches[-1] += kind
        room -= size
    return batches


@partial(jax.jit, static_argnums=(0, 1))
def _in_turn(steps: int, platform: Platform, stack: jax.Array) -> jax.Array:
    """Newton-Schulz iteration of a stack; of a long one some matrices after the others."""

    def of_some(batch: jax.Array) -> jax.Array:
        # Behind a barrier, because results in bfloat16 would be kept in float32.
        dtype, unroll = platform.directions_dtype, not platform.is_cpu
        return jax.lax.optimization_barrier(newton_schulz(batch, steps, dtype, unroll))

    at_once = _at_once(platform, stack.shape)
    if len(stack) <= at_once:
        return of_some(stack)

    def one_batch(i: jax.Array, stack: jax.Array) -> jax.Array:
        batch = jax.lax.dynamic_slice_in_dim(stack, i * at_once, at_once)
        return jax.lax.dynamic_update_slice_in_dim(stack, of_some(batch), i * at_once, 0)

    # In place: XLA makes the empty result of a `jax.lax.map` long before the loop.
    whole = len(stack) // at_once * at_once
    done = jax.lax.fori_loop(0, whole // at_once, one_batch, stack)
    return done if whole == len(stack) else jnp.concatenate([done[:whole], of_some(stack[whole:])])
