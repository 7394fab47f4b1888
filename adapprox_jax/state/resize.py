"""Factor buffers of another width, between steps and on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adapprox_jax.argument_checks import (
    NOT_NEGATIVE,
    check_concrete,
    require,
    require_flag,
    require_integer,
)
from adapprox_jax.settings import require_max_rank, resolve_capacity
from adapprox_jax.sharding.axes import on_host
from adapprox_jax.state.layout import (
    LeafState,
    ScaleByAdapproxState,
    leaf_states,
    second_moments,
    with_leaf_states,
)
from adapprox_jax.state.report import rank_report


def resize(
    opt_state: Any,
    max_rank: int | float | Mapping[str, int | float],
    *,
    truncate: bool = False,
) -> Any:
    """Grows or shrinks the factor buffers of an optimizer state; the optimizer stays as it is.

    A wider buffer changes nothing in the next update; a narrower one drops empty columns. A fixed
    rank is the width of the buffers, and so what is given here from the next factors on. The next
    call of a jitted step compiles it anew.

    Args:
      opt_state: Any state that holds a `ScaleByAdapproxState` somewhere, with concrete arrays, or
        of `jax.ShapeDtypeStruct`s, which have no ranks in use to be looked at.
      max_rank: New width: an int, or a float as a fraction of min(m, n), for every factored leaf;
        or a dict from paths, as in `rank_report`, to these, for some. Cut, as by `adapprox`, to the
        widest that are smaller than the matrix.
      truncate: Whether columns in use may be dropped, the last ones, which are the smallest unless
        `rotate` is False. The error and the estimate of the distance from the exact second moment
        then grow by what is lost.

    Returns:
      The state with new buffers.

    Raises:
      ValueError: a width is out of range, a path is not in the state, or the state has no factored
        leaf or traced arrays. Or columns in use would be dropped without `truncate`. Nothing is
        changed then.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512))}
      >>> tx = adapprox_jax.adapprox(1e-3, initial_rank=1, max_rank=64)
      >>> state = adapprox_jax.resize(tx.init(params), 16)
      >>> adapprox_jax.rank_report(state, params)["['kernel']"].capacity
      16
    """
    for name, width in max_rank.items() if isinstance(max_rank, Mapping) else [("", max_rank)]:
        require_max_rank(f"max_rank[{name!r}]" if name else "max_rank", width)
    require_flag("truncate", truncate)
    check_concrete("resize", opt_state)
    known: set[str] = set()

    def resize_leaf(name: str, leaf: LeafState) -> LeafState:
        if not leaf.is_factored:
            return leaf
        known.add(name)
        width = max_rank.get(name) if isinstance(max_rank, Mapping) else max_rank
        if width is None:
            return leaf
        capacity = resolve_capacity(width, leaf.q.shape[-2], leaf.u.shape[-2])
        return _resize_leaf(name, leaf, capacity, truncate)

    def resize_state(state: Any) -> Any:
        if not isinstance(state, ScaleByAdapproxState):
            return state
        leaves = list(map(resize_leaf, second_moments(state).paths, leaf_states(state)))
        return with_leaf_states(state, state.count, leaves)

    resized = jax.tree.map(
        resize_state, opt_state, is_leaf=lambda x: isinstance(x, ScaleByAdapproxState)
    )
    if not known and max_rank != {}:
        raise ValueError(
            "opt_state holds no factored leaf of Adapprox; there is nothing to resize."
        )
    unknown = set(max_rank) - known if isinstance(max_rank, Mapping) else set()
    if unknown:
        given, allowed = (
            ", ".join(map(repr, sorted(names))) for names in (map(str, unknown), known)
        )
        raise ValueError(f"max_rank has {given}; allowed: {allowed}.")
    return resized


def grow(
    opt_state: Any,
    params: Any,
    sizes: Sequence[int],
    error_threshold: float | None = None,
) -> Any:
    """Gives the leaves whose rank has reached their buffers' width the next size.

    With each growth the largest buffers go from one of `sizes` to the next, and all leaves that are
    full go with them. So a run compiles its step at most once for each size. A leaf that fills
    its buffers only when the last size is in use keeps them; `resize` widens it at the cost of one
    more compilation.

    Args:
      opt_state: Any state that holds a `ScaleByAdapproxState` somewhere, with concrete arrays.
      params: The parameters that it was made for.
      sizes: Widths, rising. The state begins with buffers of the first.
      error_threshold: A leaf is full if its rank is its buffers' width and its error above this
        number; None: if its rank is the width.

    Returns:
      The state: as it was if no leaf is full, or if the largest size is in use.

    Raises:
      ValueError: a size is no integer above the one before, or the arrays are traced.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"kernel": jnp.ones((256, 512))}
      >>> tx = adapprox_jax.adapprox(1e-3, initial_rank=4, max_rank=4)
      >>> state = adapprox_jax.grow(tx.init(params), params, sizes=(4, 8, 16))
      >>> adapprox_jax.rank_report(state, params)["['kernel']"].capacity
      8
    """
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ValueError(f"sizes is {sizes!r}; allowed: a sequence of rising integers.")
    if error_threshold is not None:
        holds, allowed = NOT_NEGATIVE
        require("error_threshold", error_threshold, holds, f"{allowed}, or None")
    check_concrete("grow", opt_state)
    for i, size in enumerate(sizes):
        require_integer(f"sizes[{i}]", size, sizes[i - 1] + 1 if i else 1)
    report = rank_report(opt_state, params)
    full = [name for name, info in report.items() if info.is_full(error_threshold)]
    largest = max((info.capacity for info in report.values()), default=0)
    larger = [size for size in sizes if size > largest]
    return resize(opt_state, dict.fromkeys(full, larger[0])) if full and larger else opt_state


def _resize_leaf(name: str, leaf: LeafState, capacity: int, truncate: bool) -> LeafState:
    """One leaf with buffers of another width."""
    is_abstract = isinstance(leaf.q, jax.ShapeDtypeStruct)
    if not is_abstract and capacity < np.max(on_host(leaf.rank), initial=0):
        energies = np.sum(np.square(on_host(leaf.u).astype(np.float64)), axis=-2)
        left_out, norm = (np.sqrt(x.sum(-1)) for x in (energies[..., capacity:], energies))
        share = left_out / np.where(norm == 0, 1, norm)
        if not truncate:
            used = np.max(on_host(leaf.rank))
            raise ValueError(
                f"{name}: {used} columns are in use, {capacity} were asked for, and"
                f" {np.max(share):.2%} of the norm would be lost; allowed: at least {used}, or"
                " truncate=True."
            )
        # ||A||^2 = ||q u^T||^2 / (1 - xi^2), since the two are orthogonal.
        old = np.square(on_host(leaf.error).astype(np.float64))
        error = np.sqrt(old + np.square(share) * (1 - old))
        leaf = leaf._replace(
            rank=jnp.minimum(leaf.rank, capacity),
            error=_like(leaf.error, error),
            drift=_like(leaf.drift, on_host(leaf.drift).astype(np.float64) + left_out),
        )
    return leaf._replace(q=_fit(leaf.q, capacity), u=_fit(leaf.u, capacity))


def _like(old: Any, value: np.ndarray) -> jax.Array:
    """A value with the type of an old one, and its sharding where it has one."""
    new = value.astype(old.dtype)
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else jnp.asarray(new)


def _fit(x: Any, width: int) -> Any:
    """An array, or an abstract one, with its last axis cut to a width, or with zeros added."""
    if x.shape[-1] == width:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype, sharding=x.sharding)
    missing = max(width - x.shape[-1], 0)
    return jnp.pad(x[..., :width], [(0, 0)] * (x.ndim - 1) + [(0, missing)])
