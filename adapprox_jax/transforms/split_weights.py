"""split_weights: 16-bit weights whose missing bits are part of the optimizer's state."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adapprox_jax.argument_checks import check_state, require_choice, require_transformation
from adapprox_jax.linalg.split_floats import HALVES, REMAINDERS, joined, remainder_of, upper_part
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.transforms.in_float32 import check_half, difference, stepped

_Tree = TypeVar("_Tree")
_FLOAT32 = np.dtype(np.float32)


class SplitWeightsState(NamedTuple):
    """State of `split_weights`.

    Attributes:
      remainder: What each weight lacks, int8 or int16, with the parameters' structure and shapes.
      inner_state: Of the wrapped optimizer.
    """

    remainder: Any
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

    With 24 bits a bfloat16 weight is known to 2^-16 of its size. Where steps are smaller than that,
    as in fine-tuning at a rate of 1e-6, take 32 bits: then nothing is lost. A weight that one step
    makes 2^16 times smaller is known to 2^-24 of its size before. Weights beyond the largest
    bfloat16 or float16 stay at it. What looks at the types of updates, as `optax.apply_if_finite`
    does, belongs into `tx`.

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
    half = _half(dtype)
    kept = REMAINDERS[bits]
    inner = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> SplitWeightsState:
        leaves = Leaves.of(params, "weight")
        for name, array in zip(leaves.names, leaves.arrays, strict=True):
            check_half(name, array, (half, _FLOAT32), "Cast it, or leave it out with optax.masked.")
        wide = [array.astype(jnp.float32) for array in leaves.arrays]
        halves = [upper_part(array, half, kept) for array in wide]
        remainders = [remainder_of(*pair, kept) for pair in zip(wide, halves, strict=True)]
        weights = leaves.filled(list(map(joined, halves, remainders)))
        return SplitWeightsState(leaves.filled(remainders), inner.init(weights))

    def update(
        updates: optax.Updates,
        state: SplitWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SplitWeightsState]:
        if params is None:
            raise ValueError("params is None; allowed: the weights, as split gives them.")
        check_state(state, SplitWeightsState, "split_weights")
        leaves = Leaves.of(params, "weight")
        remainders = leaves.matching(state.remainder, "the weights")
        halves = leaves.arrays
        for name, array, remainder in zip(leaves.names, halves, remainders.arrays, strict=True):
            check_half(name, array, (half,), "adapprox_jax.split gives such weights.")
            _check_remainder(name, array, remainder, kept)
        weights = list(map(joined, halves, remainders.arrays))
        new, inner_state = stepped(inner, updates, state.inner_state, leaves, weights, extra_args)
        steps = [difference(upper_part(x, half, kept), p) for x, p in zip(new, halves, strict=True)]
        # What is added need not be what was meant: where a weight shrinks by far it is rounded.
        reached = [
            (p.astype(jnp.float32) + step).astype(half)
            for p, step in zip(halves, steps, strict=True)
        ]
        kept_now = [remainder_of(x, p, kept) for x, p in zip(new, reached, strict=True)]
        state = SplitWeightsState(remainders.filled(kept_now), inner_state)
        return leaves.filled(steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def split(
    tx: optax.GradientTransformation, params: _Tree, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[_Tree, optax.OptState]:
    """16-bit weights, and an optimizer's state that keeps the rest of the float32 weights.

    Args:
      tx: `split_weights(...)`, alone or wrapped, say by `optax.masked` or `optax.MultiSteps`.
      params: float32 weights.
      dtype: That of `split_weights`.

    Returns:
      The weights for the model, of `dtype` where `tx` splits them, and the state.

    Raises:
      ValueError: tx splits no weights, or dtype is neither bfloat16 nor float16.

    Examples:
      >>> import jax.numpy as jnp, optax, adapprox_jax
      >>> tx = adapprox_jax.split_weights(optax.adamw(1e-3))
      >>> params, state = adapprox_jax.split(tx, {"w": jnp.full(4, 0.1)})
      >>> params["w"].dtype, state.remainder["w"].dtype
      (dtype(bfloat16), dtype('int8'))
    """
    require_transformation("tx", tx)
    half, state = _half(dtype), tx.init(params)

    def cut(name: str, wide: jax.Array, remainder: jax.Array) -> jax.Array:
        del name
        return upper_part(wide.astype(jnp.float32), half, remainder.dtype)

    return _with_parts(params, state, cut), state


def join_weights(params: _Tree, state: optax.OptState) -> _Tree:
    """The float32 weights of a training with `split_weights`: to evaluate, export or save.

    Args:
      params: The weights in 16 bits.
      state: Of the optimizer, wrapped or not.

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
    """

    def join(name: str, half: jax.Array, remainder: jax.Array) -> jax.Array:
        check_half(name, half, HALVES, "Is it joined already?")
        return joined(half, remainder)

    return _with_parts(params, state, join)


def _with_parts(params: _Tree, state: Any, function: Callable[[str, Any, Any], jax.Array]) -> _Tree:
    """Parameters with a function of name, weight and remainder where a weight is split."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SplitWeightsState))
    split_by = [Leaves.of(x.remainder) for x in nodes if isinstance(x, SplitWeightsState)]
    found = {
        name: array
        for leaves in split_by
        for name, array in zip(leaves.names, leaves.arrays, strict=True)
    }
    leaves = Leaves.of(params)
    given = dict(zip(leaves.names, leaves.arrays, strict=True))
    if not split_by:
        raise ValueError(
            "the state has no remainders; expected that of split_weights, or of what wraps it."
        )
    for name, remainder in found.items():
        shape = getattr(given.get(name), "shape", None)
        if shape != remainder.shape:
            raise ValueError(
                f"{name}: the weight has shape {shape}; expected {remainder.shape}, the"
                " remainder's."
            )
    return leaves.filled(
        [
            function(name, array, found[name]) if name in found else array
            for name, array in given.items()
        ]
    )


def _half(dtype: jax.typing.DTypeLike) -> np.dtype:
    """A type of 16-bit weights. Raises ValueError for others."""
    require_choice("dtype", jnp.dtype(dtype).name, [half.name for half in HALVES])
    return jnp.dtype(dtype)


def _check_remainder(name: str, array: jax.Array, remainder: jax.Array, kept: np.dtype) -> None:
    """Raises ValueError where a remainder is of other bits or of another shape."""
    if remainder.dtype != kept:
        raise ValueError(
            f"{name}: the state's remainder has type {remainder.dtype.name}; expected {kept.name}."
            " Was the state made with another number of bits?"
        )
    if remainder.shape != array.shape:
        raise ValueError(
            f"{name}: the weight has shape {array.shape}; the state's remainder has"
            f" {remainder.shape}. Was the state made for other parameters?"
        )
