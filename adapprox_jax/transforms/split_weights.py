"""split_weights: 16-bit weights whose missing bits are part of the optimizer's state."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.argument_checks import (
    check_state,
    require_choice,
    require_dtype,
    require_same,
    require_transformation,
)
from adapprox_jax.linalg.split_floats import (
    HALVES,
    REMAINDERS,
    joined,
    parts,
    remainder_of,
    upper_part,
)
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.step.xla_order import materialize, on_cpus
from adapprox_jax.transforms.in_float32 import difference, stepped, weights_of

_Tree = TypeVar("_Tree")


class SplitWeightsState(NamedTuple):
    """State of `split_weights`.

    Attributes:
      remainder: What each weight lacks, int8 or int16, with the parameters' structure and shapes.
      zero: A scalar, of which only the type counts: that of the weights.
      inner_state: Of the wrapped optimizer.
    """

    remainder: Any
    zero: jax.Array
    inner_state: optax.OptState


def split_weights(
    tx: optax.GradientTransformation, bits: int = 24, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> optax.GradientTransformationExtraArgs:
    """Trains 16-bit weights as if they had 24 or 32 bits, with any optimizer.

    The model uses weights of 16 bits, and the state keeps 8 or 16 bits of each weight that these
    lack: together they are a float32 number, without its last 8 bits or whole. A step puts them
    together, calls the wrapped optimizer with float32 weights and gradients, and gives the
    difference to the new 16-bit weights, which `optax.apply_updates` adds. Begin with `split`, and
    read the float32 weights with `join_weights`.

    With 24 bits a bfloat16 weight is always known to 2^-16 of its size. Where steps are smaller, as
    in fine-tuning at a rate of 1e-6, take 32 bits. Then a weight is a float32 number, and nothing
    is lost. In float16, weights beyond 65,519 are cut to it, and those below 6e-5 are known to
    2^-38.

    Rate, weight decay and all else that changes updates or looks at their types belong into `tx`,
    as do `optax.apply_if_finite` and `schedule_free`. Around it they raise an error,
    or weights are silently wrong.

    Args:
      tx: Any Optax transformation. It sees float32, so its state is float32 unless it says
        otherwise.
      bits: Of weight and remainder together: 24 for int8 remainders, 32 for int16.
      dtype: Of the weights, bfloat16 or float16.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `SplitWeightsState`. Its updates are
      float32 and must be added by `optax.apply_updates`, unchanged. Its `init` takes weights of
      `dtype`, with remainders of zero, or float32 weights, whose remainders it keeps.

    Raises:
      ValueError: an argument is out of range, or, from `init` and `update`, weights have another
        type, the state has remainders of other bits, or `tx` changes shapes.
      TypeError: a weight or a gradient is no real floating-point array.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.split_weights(optax.sgd(1e-3))
      >>> params, state = adapprox_jax.split(tx, {"w": jnp.full(4, 1.0)})
      >>> for _ in range(2):  # less than half of the last bit of a bfloat16, 1/256
      ...     updates, state = tx.update({"w": jnp.full(4, 1.0, jnp.bfloat16)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["w"].dtype, round(float(adapprox_jax.join_weights(params, state)["w"][0]), 4)
      (dtype(bfloat16), 0.998)

    Source: FlashOptim (2602.23349), whose remainders are shares of half the last bit.
    """
    require_transformation("tx", tx)
    require_choice("bits", bits, tuple(REMAINDERS))
    require_dtype("dtype", dtype, [half.name for half in HALVES])
    half, kept = jnp.dtype(dtype), REMAINDERS[bits]
    inner = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> SplitWeightsState:
        leaves = weights_of(params, (half, np.dtype(np.float32)))
        cut = [parts(array.astype(jnp.float32), half, kept) for array in leaves.arrays]
        weights = leaves.filled([joined(*pair) for pair in cut])
        remainders = leaves.filled([remainder for _, remainder in cut])
        return SplitWeightsState(remainders, jnp.zeros([], half), inner.init(weights))

    def update(
        updates: optax.Updates,
        state: SplitWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SplitWeightsState]:
        if params is None:
            raise ValueError("params is None; allowed: the weights, as split gives them.")
        check_state(state, SplitWeightsState, "split_weights")
        leaves = weights_of(params, (half,))
        remainders = leaves.matching(state.remainder, "the weights")
        halves = leaves.arrays
        for name, array, remainder in zip(leaves.names, halves, remainders.arrays, strict=True):
            require_same(f"{name}: the state's remainder has type", remainder.dtype, kept)
            require_same(f"{name}: the weight has shape", array.shape, remainder.shape)
        weights = list(map(joined, halves, remainders.arrays))
        new, inner_state = stepped(inner, updates, state.inner_state, leaves, weights, extra_args)
        # The new halves and the remainders are made by two kernels on CPUs. If both read the old
        # halves, these cannot be overwritten, and XLA copies all of them before the step begins.
        new = on_cpus(lambda weights: list(map(materialize, weights)), new)
        steps = [difference(upper_part(x, half, kept), p) for x, p in zip(new, halves, strict=True)]
        # What optax.apply_updates will give, which is another number where the step was rounded:
        # where a weight shrinks by far. The remainder belongs to it.
        reached = [
            (p.astype(jnp.float32) + step).astype(half)
            for p, step in zip(halves, steps, strict=True)
        ]
        kept_now = [remainder_of(x, p, kept) for x, p in zip(new, reached, strict=True)]
        state = SplitWeightsState(remainders.filled(kept_now), state.zero, inner_state)
        return leaves.filled(steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def split(tx: optax.GradientTransformation, params: _Tree) -> tuple[_Tree, optax.OptState]:
    """16-bit weights, and an optimizer's state that keeps the rest of the float32 weights.

    Args:
      tx: `split_weights(...)`, alone or wrapped, say by `optax.masked` or `optax.MultiSteps`.
      params: float32 weights, or 16-bit ones, whose remainders are zero. Parameters that `tx` does
        not split may be of any type.

    Returns:
      The weights for the model, in 16 bits where `tx` splits them, and the state.

    Raises:
      ValueError: tx splits no weights, or one of them twice.
      TypeError: a weight is no real floating-point array.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.split_weights(optax.adamw(1e-3))
      >>> params, state = adapprox_jax.split(tx, {"w": jnp.full(4, 0.1)})
      >>> params["w"].dtype, state.remainder["w"].dtype
      (dtype(bfloat16), dtype('int8'))

    Source: as `split_weights`.
    """
    require_transformation("tx", tx)
    state = tx.init(params)
    if not _split_states(state):
        raise ValueError("tx splits no weights; allowed: split_weights(...), alone or wrapped.")

    def upper(_: str, wide: jax.Array, remainder: jax.Array, half: np.dtype) -> jax.Array:
        return upper_part(wide.astype(jnp.float32), half, remainder.dtype)

    return _with_parts(params, state, upper), state


def join_weights(params: _Tree, state: optax.OptState) -> _Tree:
    """The float32 weights of a training with `split_weights`: to evaluate, export or save.

    Args:
      params: The weights in 16 bits.
      state: Of the optimizer after the same step, wrapped or not.

    Returns:
      The parameters in float32 where they are split, and as they are where they are not.

    Raises:
      ValueError: the state is of no split weights, or of other parameters.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.split_weights(optax.adamw(1e-3), bits=32)
      >>> params, state = adapprox_jax.split(tx, {"w": jnp.full(4, 0.1)})
      >>> bool((adapprox_jax.join_weights(params, state)["w"] == 0.1).all())
      True

    Source: as `split_weights`.
    """

    def join(name: str, half: jax.Array, remainder: jax.Array, dtype: np.dtype) -> jax.Array:
        require_same(f"{name}: the weight has type", half.dtype, dtype)
        return joined(half, remainder)

    return _with_parts(params, state, join)


def _split_states(state: Any) -> list[SplitWeightsState]:
    """The states of `split_weights` in that of an optimizer, and in one another."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SplitWeightsState))
    states = [node for node in nodes if isinstance(node, SplitWeightsState)]
    return [x for node in states for x in (node, *_split_states(node.inner_state))]


def _with_parts(
    params: _Tree, state: Any, function: Callable[[str, Any, Any, np.dtype], jax.Array]
) -> _Tree:
    """Parameters with a function of path, weight, remainder and type where a weight is split."""
    states = _split_states(state)
    if not states:
        raise ValueError(
            "the state has no remainders; expected that of split_weights, or of what wraps it."
        )
    leaves = Leaves.of(params)
    results = dict(zip(leaves.names, leaves.arrays, strict=True))
    done = set()
    for node in states:
        remainders = Leaves.of(node.remainder)
        for name, remainder in zip(remainders.names, remainders.arrays, strict=True):
            if name in done:
                raise ValueError(f"{name}: the weight has two remainders; allowed: one.")
            shape = getattr(results.get(name), "shape", "of none")
            require_same(f"{name}: the weight has shape", shape, remainder.shape)
            results[name] = function(name, results[name], remainder, node.zero.dtype)
            done.add(name)
    return leaves.filled(list(results.values()))
