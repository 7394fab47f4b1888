"""Optimizers that Adapprox is compared with, each a list of Optax's parts and what they are given.

A learning rate follows, so that none of the parts has one of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

import adapprox_jax
from examples.opponents.adam_8_bits import scale_by_adam_8_bits
from examples.opponents.approximations import scale_by_approximated_moment
from examples.opponents.noisy_average import noisy_ema

Part = tuple[Callable[..., Any], dict[str, Any]]

MUON_B2 = 0.95
GALORE_RANK_FRACTION = 4  # of the width: a quarter, as its authors pretrain with
GALORE_GAP = 50  # steps between projections, for runs of hundreds of steps


def adafactor(
    b1: float, b2: float | None, mu_dtype: str | None, decay: Part, noise: bool = False
) -> list[Part]:
    """Adafactor's factored second moment with the clip, the average and the decay of Adapprox.

    Args:
      b1: Of the average of updates.
      b2: A constant decay of the second moment; None for its own, 1 - t^-0.8 at step t.
      mu_dtype: Of the average, as in `guided_ema`; None for Optax's average.
      decay: The weight decay.
      noise: Whether the average has only the noise of 4 bits, and is kept in float32.
    """
    average: Part = (optax.ema, {"decay": b1, "debias": False})
    if noise:
        average = (noisy_ema, {"decay": b1, "bits": 4})
    elif mu_dtype is not None:
        average = (adapprox_jax.guided_ema, {"b1": b1, "mu_dtype": mu_dtype})
    constant = {} if b2 is None else {"decay_rate": b2, "decay_rate_fn": constant_decay}
    return [
        (optax.scale_by_factored_rms, constant),
        (optax.clip_by_block_rms, {"threshold": 1.0}),
        average,
        decay,
    ]


def constant_decay(step: jax.typing.ArrayLike, rate: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """The rate, whatever the step."""
    return rate


def muon(
    b1: float,
    of_hidden: float | None,
    b2: float | None,
    rate_elsewhere: float | None,
    decay: Part,
) -> list[Part]:
    """Optax's Muon with rates like AdamW's, of the matrices that `adapprox_muon` orthogonalizes.

    Its own decay would reach vectors, and a rate of -1 leaves its sign to the one that follows.

    Args:
      b1: Of Adam, for everything else.
      of_hidden: b1 of the hidden matrices; None for Optax's default.
      b2: Of Adam, for everything else; None for that of `adapprox_muon`.
      rate_elsewhere: What the rate of everything else is multiplied by; None for 1.
      decay: The weight decay.
    """
    given = {
        "learning_rate": -1.0,
        "consistent_rms": 0.2,
        "adam_b1": b1,
        "adam_b2": MUON_B2 if b2 is None else b2,
        "muon_weight_dimension_numbers": hidden_numbers,
    }
    if of_hidden is not None:
        given["beta"] = of_hidden
    if rate_elsewhere is not None:
        given["adam_learning_rate"] = -rate_elsewhere
    return [(optax.contrib.muon, given), decay]


def hidden_numbers(params: Any) -> Any:
    """Optax's dimension numbers of Muon for hidden matrices; None for everything else."""
    return _of_hidden(params, optax.contrib.MuonDimensionNumbers())


def sm3(b1: float, decay: Part) -> list[Part]:
    """SM3 (Anil et al., 2019): maxima of rows and columns."""
    return [(optax.scale_by_sm3, {"b1": b1}), decay]


def galore(b1: float, b2: float, decay: Part) -> list[Part]:
    """GaLore (Zhao et al., 2024): Adam on projected gradients of hidden matrices, whole elsewhere.

    Args:
      b1: Of Adam.
      b2: Of Adam.
      decay: The weight decay.
    """
    return [(_scale_by_galore, {"b1": b1, "b2": b2}), decay]


def _scale_by_galore(
    b1: float, b2: float, fraction: int = GALORE_RANK_FRACTION, update_proj_gap: int = GALORE_GAP
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_galore` of a rank that follows the model's width."""

    def of(params: Any) -> optax.GradientTransformation:
        hidden = adapprox_jax.hidden_matrices(params)
        sides = [
            min(x.shape[-2:])
            for x, chosen in zip(jax.tree.leaves(params), jax.tree.leaves(hidden), strict=True)
            if chosen
        ]
        return optax.contrib.scale_by_galore(
            rank=max(min(sides, default=fraction) // fraction, 1),
            update_proj_gap=update_proj_gap,
            base_optimizer=optax.scale_by_adam(b1, b2),
            weight_dimension_numbers=galore_numbers,
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return of(updates).update(updates, state, params)

    return optax.GradientTransformation(lambda params: of(params).init(params), update)


def galore_numbers(params: Any) -> Any:
    """Optax's dimension numbers of GaLore for hidden matrices; None for everything else."""
    return _of_hidden(params, optax.contrib.GaLoreDimensionNumbers())


def adapprox_dense(b1: float, b2: float, options: dict[str, Any], decay: Part) -> list[Part]:
    """Adapprox's chain with a second moment kept whole and approximated at every step.

    Args:
      b1: Of the average of updates.
      b2: Of the second moment.
      options: Its `approximate`, `max_rank` and `min_dim_size_to_factor`, if given.
      decay: The weight decay.
    """
    defaults = {"approximate": "root", "max_rank": 8, "min_dim_size_to_factor": 64}
    unknown = options.keys() - defaults.keys() - {"rate_elsewhere"}
    if unknown:
        raise ValueError(f"{min(unknown)} is no option of adapprox-dense")
    given = {name: options.get(name, default) for name, default in defaults.items()}
    return [
        (scale_by_approximated_moment, {"b2": b2, "eps": 1e-8, **given}),
        (adapprox_jax.clip_by_matrix_rms, {"threshold": 1.0}),
        (optax.ema, {"decay": b1, "debias": False}),
        decay,
    ]


def adamw_8_bits(b1: float, b2: float, decay: Part) -> list[Part]:
    """AdamW with both moments in 8 bits."""
    return [(scale_by_adam_8_bits, {"b1": b1, "b2": b2}), decay]


def _of_hidden(params: Any, numbers: Any) -> Any:
    hidden = adapprox_jax.hidden_matrices(params)
    return jax.tree.map(lambda is_hidden: numbers if is_hidden else None, hidden)
