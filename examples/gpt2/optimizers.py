"""The optimizers that can be compared: each a chain of Optax parts with one learning rate schedule.

All of them decay only matrices, decoupled from the gradient, as the paper does.
"""

import dataclasses
import inspect
from typing import Any, Literal, get_args

import jax
import optax

import adapprox_jax

Name = Literal["adapprox", "adapprox-paper", "adamw", "adafactor"]
NAMES: tuple[str, ...] = get_args(Name)


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """What all optimizers share."""

    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.1


@dataclasses.dataclass(frozen=True)
class AdapproxOptions:
    """Keywords of `adapprox_jax.adapprox`; None leaves the library's default (or the paper's)."""

    initial_rank: int | None = None
    max_rank: int | float | None = None
    error_threshold: float | None = None
    sampling_threshold: bool | None = None
    """Raise the threshold early in training, by adapprox_jax.sampling_threshold, and add columns
    one by one."""
    rank_interval: int | None = None
    rank_margin: int | None = None
    approximate: Literal["moment", "root"] | None = None
    power_iterations: int | None = None
    oversampling: int | None = None
    rotate: bool | None = None
    warm_start: bool | None = None
    orthogonalization: Literal["qr", "cholesky"] | None = None
    cosine_guidance: bool | None = None
    guidance_max_scale: float | None = None
    bias_correction: bool | None = None
    clipping_threshold: float | None = None
    min_dim_size_to_factor: int | None = None
    mu_dtype: Literal["float32", "bfloat16", "int8", "int4"] | None = None
    factor_dtype: Literal["float32", "bfloat16"] | None = None

    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def settings(name: Name, options: AdapproxOptions) -> dict[str, Any]:
    """What an Adapprox runs with, the library's defaults included, for the records; else empty.

    Only what JSON can hold.
    """
    if not name.startswith("adapprox"):
        return {}
    used: dict[str, Any] = {}
    for function in (adapprox_jax.scale_by_adapprox, adapprox_jax.adapprox):
        used |= {p.name: p.default for p in inspect.signature(function).parameters.values()}
    used |= _paper() if name == "adapprox-paper" else {}
    shared = {field.name for field in dataclasses.fields(Hyperparameters)}
    used = {k: v for k, v in (used | options.given()).items() if k not in shared}
    return {k: v for k, v in used.items() if isinstance(v, bool | int | float | str)}


def _one_by_one(error: jax.Array) -> int:
    return 1


def _paper() -> dict[str, Any]:
    return {**adapprox_jax.PAPER, "cosine_guidance": True}  # guided, as the paper's pretraining is


def is_matrix(params: Any) -> Any:
    """The weight decay mask: True for leaves with two axes or more."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def schedule(peak: float, minimum: float, warmup: int, steps: int) -> optax.Schedule:
    """Linear warmup to the peak, then half a cosine down to the minimum at the last step.

    The first step's rate is one part of `warmup + 1` of the peak, not zero.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=minimum,
    )


def build(
    name: Name,
    learning_rate: optax.ScalarOrSchedule,
    hyper: Hyperparameters,
    options: AdapproxOptions,
) -> optax.GradientTransformation:
    """Returns an optimizer by its name.

    "adafactor" is what compares fairly with the others: its factored second moment with the same
    clip, average of updates, decay and schedule. (`optax.adafactor` would scale the rate by the
    size of each parameter.)

    Args:
      name: One of `NAMES`.
      learning_rate: A number or a schedule.
      hyper: What all optimizers share.
      options: What is given to Adapprox beyond its defaults; the others ignore it.

    Returns:
      An Optax gradient transformation.
    """
    shared = dataclasses.asdict(hyper) | {"mask": is_matrix}
    match name:
        case "adapprox" | "adapprox-paper":
            keywords = (_paper() if name == "adapprox-paper" else {}) | options.given()
            if keywords.pop("sampling_threshold", False):
                late = settings(name, options)["error_threshold"]
                keywords["error_threshold"] = adapprox_jax.sampling_threshold(hyper.b2, late)
                keywords["rank_growth"] = _one_by_one
            return adapprox_jax.adapprox(learning_rate, **shared, **keywords)
        case "adamw":
            return optax.adamw(learning_rate, **shared)
        case "adafactor":
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.ema(hyper.b1, debias=False),
                optax.add_decayed_weights(hyper.weight_decay, mask=is_matrix),
                optax.scale_by_learning_rate(learning_rate),
            )
        case _:
            raise ValueError(f"optimizer must be one of {', '.join(NAMES)}, got {name!r}")
