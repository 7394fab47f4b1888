"""The optimizers that are compared, each with momentum, clip and decay where it has them.

SM3, GaLore and Muon are those of the study of losses: the latter two of hidden matrices, with Adam
elsewhere.
"""

from collections.abc import Callable
from functools import partial

import optax

import adapprox_jax
from examples.gpt2.optimizers import AdapproxOptions, Hyperparameters, Name, build
from examples.opponents.came import came

RATE, DECAY = 1e-4, 0.1


def adafactor(b1: float = 0.9) -> optax.GradientTransformation:
    """Adafactor's rank-1 second moment with the rest of Adapprox's chain; no average for b1 = 0."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.ema(b1, debias=False) if b1 else optax.identity(),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(RATE),
    )


def _adapprox(**settings: object) -> optax.GradientTransformation:
    return adapprox_jax.adapprox(RATE, weight_decay=DECAY, **settings)


def _of_study(name: Name) -> optax.GradientTransformation:
    hyper = Hyperparameters(weight_decay=DECAY, decays="everything")
    return build(name, RATE, hyper, AdapproxOptions())


CONTENDERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(RATE, weight_decay=DECAY),
    "adafactor": adafactor,
    "adapprox": _adapprox,
    "adapprox rank 16": lambda: _adapprox(max_rank=16),
    "adapprox 8 bits": lambda: _adapprox(mu_dtype="int8"),
    "adapprox 1 to 64": lambda: _adapprox(initial_rank=1, max_rank=64),
    # Ranks of 1 to 16 in use in wide buffers: the gradients of `inputs.py` have such ranks.
    "adapprox 1 to 16 of 192": lambda: _adapprox(
        initial_rank=1, max_rank=192, error_threshold=0.01, rank_growth=lambda error: 5
    ),
    "adapprox PAPER": lambda: _adapprox(**adapprox_jax.PAPER),
    "adapprox_muon": lambda: adapprox_jax.adapprox_muon(RATE, weight_decay=DECAY),
    "adapprox_muon rank 8": lambda: adapprox_jax.adapprox_muon(
        RATE, weight_decay=DECAY, second_moment=True
    ),
    "adapprox_muon 4 bits": lambda: adapprox_jax.adapprox_muon(
        RATE, weight_decay=DECAY, mu_dtype="int4"
    ),
    "came": lambda: came(RATE, weight_decay=DECAY),
    **{name: partial(_of_study, name) for name in ("sm3", "galore", "muon")},
}
