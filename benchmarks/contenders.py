"""Optimizers with their settings, by name, for the benchmarks of speed, memory and programs.

Each has momentum, clip and weight decay where it has them at all. `loss_study` has its own table,
with tuned rates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import adapprox_jax
from benchmarks.opponents.came import scale_by_came

RATE, DECAY = 1e-4, 0.1


def with_decay(
    directions: optax.GradientTransformation,
    rate: optax.ScalarOrSchedule = RATE,
    weight_decay: float = DECAY,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Steps against directions, with weight decay.

    Args:
      directions: What gradients become.
      rate: Learning rate.
      weight_decay: Multiplied by the learning rate.
      mask: Which leaves decay.
    """
    decay = optax.add_decayed_weights(weight_decay, mask)
    return optax.chain(directions, decay, optax.scale_by_learning_rate(rate))


def adafactor(
    b1: float = 0.9, mu_dtype: str | None = None, nesterov: bool = False
) -> optax.GradientTransformation:
    """Adafactor's factored second moment with the clip and the average of Adapprox.

    `optax.adafactor` would scale the rate by the size of each parameter.

    Args:
      b1: Decay of the average of updates; 0 for no average.
      mu_dtype: As of `adapprox_jax.guided_ema`; None for an average in the parameters' type.
      nesterov: Likewise.
    """
    average = optax.ema(b1, debias=False) if b1 else optax.identity()
    if mu_dtype is not None or nesterov:
        average = adapprox_jax.guided_ema(b1, mu_dtype=mu_dtype, nesterov=nesterov)
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), average)


def muon(b1: float = 0.95) -> optax.GradientTransformation:
    """Optax's Muon for the matrices that `adapprox_muon` makes orthogonal, with Adam for the rest.

    Args:
      b1: Momentum of the hidden matrices.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=b1,
        consistent_rms=0.2,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers=_hidden_numbers,
    )


def on_separate_matrices(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that sees each fused kernel "qkv" as three leaves: queries, keys and values."""

    def apart(tree: Any) -> Any:
        def of_leaf(path: Any, leaf: Any) -> Any:
            names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            is_fused = "qkv" in names and leaf.ndim == 2
            return dict(zip("qkv", jnp.split(leaf, 3, 1), strict=True)) if is_fused else leaf

        return jax.tree_util.tree_map_with_path(of_leaf, tree)

    def together(_: Any, found: Any) -> Any:
        is_apart = isinstance(found, dict)
        return jnp.concatenate([found[name] for name in "qkv"], 1) if is_apart else found

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates_apart, state = tx.update(apart(updates), state, apart(params))
        return jax.tree.map(together, updates, updates_apart), state

    return optax.GradientTransformation(lambda params: tx.init(apart(params)), update)


def _hidden_numbers(params: Any) -> Any:
    """Optax's dimension numbers for hidden matrices, stacked or not, and None for others."""
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    hidden = adapprox_jax.hidden_matrices(params)
    return jax.tree.map(lambda is_hidden: numbers if is_hidden else None, hidden)


def _adapprox(**settings: Any) -> optax.GradientTransformation:
    return adapprox_jax.adapprox(RATE, weight_decay=DECAY, **settings)


def _adapprox_muon(**settings: Any) -> optax.GradientTransformation:
    return adapprox_jax.adapprox_muon(RATE, weight_decay=DECAY, **settings)


CONTENDERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(RATE, weight_decay=DECAY),
    "adafactor": lambda: with_decay(adafactor()),
    "adafactor 4 bits": lambda: with_decay(adafactor(mu_dtype="int4")),
    "adapprox": _adapprox,
    "adapprox rank 16": lambda: _adapprox(max_rank=16),
    "adapprox 8 bits": lambda: _adapprox(mu_dtype="int8"),
    "adapprox 4 bits": lambda: _adapprox(mu_dtype="int4"),
    "adapprox rank 16 8 bits": lambda: _adapprox(max_rank=16, mu_dtype="int8"),
    "adapprox 1 to 64": lambda: _adapprox(initial_rank=1, max_rank=64),
    # Ranks of 1 to 16 in wider buffers: the gradients of `inputs.py` have such ranks.
    "adapprox 1 to 16 of 64": lambda: _adapprox(
        initial_rank=1, max_rank=64, error_threshold=0.01, rank_growth=lambda error: 5
    ),
    "adapprox PAPER": lambda: _adapprox(**adapprox_jax.PAPER),
    "adapprox_muon": _adapprox_muon,
    "adapprox_muon rank 8": lambda: _adapprox_muon(second_moment=True),
    "adapprox_muon 4 bits": lambda: _adapprox_muon(mu_dtype="int4"),
    "came": lambda: with_decay(scale_by_came()),
    "muon": lambda: with_decay(muon()),
}
