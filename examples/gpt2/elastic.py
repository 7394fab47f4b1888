"""Factor buffers that follow the ranks: their widths, and when a matrix fills them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax

import adapprox_jax
from adapprox_jax.settings import resolve_capacity
from examples.gpt2 import optimizers
from examples.gpt2.config import Config, UsageError

Widen = Callable[[Any, Any], Any]  # optimizer's state and parameters to a state
IsFull = Callable[[adapprox_jax.RankInfo], bool]


def narrow(config: Config, params: Any) -> tuple[optimizers.AdapproxOptions, Widen | None]:
    """What an elastic run begins with, and what widens its buffers.

    Args:
      config: The settings of the run.
      params: The parameters, or their shapes.

    Returns:
      The options with the narrowest buffers, and the function that gives full leaves wider ones.
      The options as they are, and None, where the run is not elastic.

    Raises:
      UsageError: If no matrix is factored.
    """
    if not config.elastic:
        return config.adapprox, None
    sizes = buffer_sizes(config, params)
    widen = functools.partial(adapprox_jax.grow, sizes=sizes, error_threshold=_full_above(config))
    return dataclasses.replace(config.adapprox, max_rank=sizes[0]), widen


def buffer_sizes(config: Config, params: Any) -> tuple[int, ...]:
    """Widths that the factor buffers of an elastic run may have: 8, 16, 32, ... max_rank.

    Args:
      config: The settings of the run.
      params: The parameters, or their shapes.

    Returns:
      The widths, the narrowest first.

    Raises:
      UsageError: If no matrix is factored.
    """
    used = optimizers.keywords(config.optimizer, config.hyper, config.adapprox)
    max_rank, initial_rank = used["max_rank"], used["initial_rank"]
    if isinstance(max_rank, float):
        first = max(8, initial_rank)
    else:
        first = max(min(8, max_rank), initial_rank)
    options = dataclasses.replace(config.adapprox, max_rank=first)
    state = jax.eval_shape(
        optimizers.build(config.optimizer, 0.0, config.hyper, options).init, params
    )
    factors = [jax.tree.leaves(optax.tree.get(state, name)) for name in ("q", "u")]
    largest = max(
        (
            resolve_capacity(max_rank, q.shape[-2], u.shape[-2])
            for q, u in zip(*factors, strict=True)
            if q.ndim
        ),
        default=None,
    )
    if largest is None:
        raise UsageError(f"--elastic: no matrix is large enough for factors of {first} columns")
    between = itertools.takewhile(lambda size: size < largest, (first * 2**i for i in range(64)))
    return (*between, max(first, largest))


def fullness(config: Config) -> IsFull | None:
    """Returns what says whether a matrix fills its buffers; None where no rank can grow."""
    if not optimizers.ranks_adapt(config.optimizer, config.hyper, config.adapprox):
        return None
    above = _full_above(config)
    return lambda info: info.is_full(above)


def _full_above(config: Config) -> float | None:
    """The error above which a matrix counts as full when its rank is the width of its buffers.

    With a margin the error at the full width tells nothing: the rank alone decides.
    """
    late = dataclasses.replace(config.adapprox, sampling_threshold=None)
    used = optimizers.keywords(config.optimizer, config.hyper, late)
    return None if used["rank_margin"] else used["error_threshold"]
