"""Decoupled weight decay, plain or cautious, and the learning rate: the end of an optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adapprox_jax.argument_checks import (
    FINITE,
    NOT_NEGATIVE,
    Range,
    at_step,
    require_flag,
    require_or_schedule,
)
from adapprox_jax.params.leaves import require_booleans, spread_booleans


def add_cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule = 1e-4, mask: Any = None
) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` for the entries whose update and parameter agree in sign.

    An update is what will be subtracted: where it agrees with the parameter both shrink it, and
    where it does not, the decay would work against it.

    Args:
      weight_decay: Multiple of the parameters that is added, at least 0, or a schedule of it.
      mask: Which leaves decay: a tree of booleans, or a function from the parameters to it.

    Returns:
      An `optax.GradientTransformation` whose update needs the parameters, with the state of
      `optax.add_decayed_weights`.

    Raises:
      ValueError: weight_decay is out of range, or, from `update`, parameters are not given.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> tx = adapprox_jax.add_cautious_weight_decay(0.1)
      >>> params = jnp.array([1.0, 1.0])
      >>> updates, _ = tx.update(jnp.array([0.5, -0.5]), tx.init(params), params)
      >>> [round(float(x), 2) for x in updates]
      [0.6, -0.5]

    Source: "Cautious Weight Decay" (2510.12402).
    """
    plain = optax.add_decayed_weights(_checked_schedule("weight_decay", weight_decay, NOT_NEGATIVE))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        decayed, state = plain.update(updates, state, params)

        def chosen(x: jax.Array | None, with_decay: jax.Array, w: Any) -> jax.Array | None:
            if x is None:  # of a model that is its own parameters, say of a function
                return None
            return jnp.where(jnp.sign(x) * jnp.sign(w) >= 0, with_decay, x).astype(x.dtype)

        return jax.tree.map(chosen, updates, decayed, params, is_leaf=lambda x: x is None), state

    decay, checked = optax.GradientTransformation(plain.init, update), _checked_mask(mask)
    return decay if checked is None else optax.masked(decay, checked)


def decay_and_rate(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    mask: Any,
    cautious: bool,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """The end of an optimizer: decoupled weight decay and the learning rate."""
    rate = _checked_schedule("learning_rate", learning_rate, FINITE)
    schedule = _checked_schedule("weight_decay", weight_decay, NOT_NEGATIVE)
    require_flag("cautious_weight_decay", cautious)
    if cautious:
        decay = add_cautious_weight_decay(weight_decay, mask)
    else:
        decay = optax.add_decayed_weights(schedule, _checked_mask(mask))
    scaled = optax.scale_by_learning_rate(rate)
    if mask is not None:
        decay = _needing("a mask is given", decay)
    elif callable(weight_decay):
        decay = _needing("weight_decay is a function of the step", decay)
    if callable(learning_rate):
        scaled = _needing("learning_rate is a function of the step", scaled)
    return decay, scaled


def _needing(what: str, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation, which says what a state was made without."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if isinstance(state, optax.EmptyState):
            raise ValueError(
                f"{what}, and the state was made without one; allowed: a state made with one."
            )
        return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def _checked_schedule(
    name: str, value: optax.ScalarOrSchedule, of: Range
) -> optax.ScalarOrSchedule:
    """A number or schedule, checked: ValueError now or where it gives no allowed number."""
    require_or_schedule(name, value, *of)
    return (lambda step: at_step(name, value, step, *of)) if callable(value) else value


def _checked_mask(mask: Any) -> Callable[[Any], Any] | None:
    """A function from the parameters to a mask that fits them; None for none.

    Optax would take for True what is no boolean.
    """
    if not callable(mask):
        require_booleans("mask", mask)
    return None if mask is None else partial(spread_booleans, "mask", mask)
