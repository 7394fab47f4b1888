"""The optimizers that the programs offer: each decays only matrices, as the paper does."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
import optax.contrib

import adapprox_jax
from examples.gpt2.command import InputError

Name = Literal["adapprox", "adapprox-paper", "adapprox-muon", "adamw", "adafactor", "muon"]
Weights = Literal["float32", "split", "bfloat16-stochastic", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Hyperparameters of the optimizer; those that are not given are the library's defaults."""

    b1: float = 0.9
    """Decay of the average. Hidden matrices have 0.95 in Muon, and one by the rate in ours."""
    b2: float = 0.999
    """Decay of the second moment. Adafactor has 1 - t^-0.8, Muon 0.95."""
    weight_decay: float = 0.1
    """Decoupled decay of all matrices."""
    clip_norm: float | None = None
    """Norm that all gradients together are clipped at."""
    max_rank: int | float | None = None
    """Adapprox: columns of the factors, as a number or as a fraction of a matrix's shorter side."""
    initial_rank: int | None = None
    """Adapprox: the first rank, where ranks adapt."""
    error_threshold: float | None = None
    """Adapprox: the relative error below which a rank is high enough, where ranks adapt."""
    mu_dtype: Literal["float32", "bfloat16", "int8", "int5", "int4"] | None = None
    """Adapprox: type of the average."""
    min_dim_size_to_factor: int | None = None
    """Adapprox: matrices with a shorter side have a whole second moment."""


def build(
    name: Name, options: Options, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Returns an optimizer by its name.

    "adafactor" has the factored second moment of Adafactor, and the clip, average, weight decay and
    schedule of the others. `optax.adafactor` would scale the rate by the size of each parameter.

    Raises:
      ValueError: If the library refuses an option.
    """
    decay = {"weight_decay": options.weight_decay, "mask": is_matrix}
    adam = {"b1": options.b1, "b2": options.b2, **decay}
    match name:
        case "adapprox":
            tx = adapprox_jax.adapprox(learning_rate, **adam | _of_adapprox(options))
        case "adapprox-paper":
            paper = {**adapprox_jax.PAPER, "cosine_guidance": True}  # as in its pretraining
            tx = adapprox_jax.adapprox(learning_rate, **adam | paper | _of_adapprox(options))
        case "adapprox-muon":
            tx = adapprox_jax.adapprox_muon(
                learning_rate, adapprox_b1=options.b1, **decay, **_of_adapprox(options)
            )
        case "adamw":
            tx = optax.adamw(learning_rate, **adam)
        case "adafactor":
            tx = optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.ema(options.b1, debias=False),
                optax.add_decayed_weights(**decay),
                optax.scale_by_learning_rate(learning_rate),
            )
        case "muon":
            muon = optax.contrib.muon(
                -1.0,  # the sign of the updates, to which a decay of matrices alone is added
                adam_b1=options.b1,
                adam_b2=0.95,
                consistent_rms=0.2,  # updates as large as AdamW's
                muon_weight_dimension_numbers=_hidden,
            )
            tx = optax.chain(
                muon,
                optax.add_decayed_weights(**decay),
                optax.scale_by_learning_rate(learning_rate),
            )
    if options.clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), tx)


def keeping(weights: Weights, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer for weights that are kept in some way."""
    if weights == "split":
        return adapprox_jax.split_weights(tx)
    return adapprox_jax.stochastic_rounding(tx) if weights == "bfloat16-stochastic" else tx


def first_state(
    weights: Weights, tx: optax.GradientTransformation, params: Any
) -> tuple[Any, optax.OptState]:
    """The weights as they are kept, and the optimizer's state, from float32 parameters."""
    if weights == "split":
        return adapprox_jax.split(tx, params)
    if weights != "float32":
        params = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    return params, tx.init(params)


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


def is_matrix(params: Any) -> Any:
    """The weight decay mask: True for leaves with two axes or more."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def widths(options: Options) -> tuple[int, ...]:
    """Widths that factor buffers take on as ranks grow: 8, 16, 32, ... `max_rank`.

    Raises:
      InputError: If ranks do not adapt, or `max_rank` is not a number of columns.
    """
    first, last = options.initial_rank, options.max_rank
    if first is None or not isinstance(last, int) or first > last:
        given = f"--initial-rank {first} and --max-rank {last}"
        raise InputError(f"--elastic needs both ranks in columns, the first not above; got {given}")
    sizes = [max(8, first)]
    while 2 * sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return (*sizes, last) if sizes[-1] < last else (last,)


def grower(options: Options) -> Callable[[Any, Any], Any]:
    """Returns what widens the buffers of matrices that fill them, of state and parameters."""
    sizes, threshold = widths(options), options.error_threshold or 0.01
    return lambda opt_state, params: adapprox_jax.grow(opt_state, params, sizes, threshold)


def _of_adapprox(options: Options) -> dict[str, Any]:
    shared = {"b1", "b2", "weight_decay", "clip_norm"}
    given = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    return {k: v for k, v in given.items() if k not in shared}


def _hidden(params: Any) -> Any:
    """Optax's dimension numbers of Muon for hidden matrices; None for other parameters."""
    numbers = optax.contrib.MuonDimensionNumbers()
    hidden = adapprox_jax.hidden_matrices(params)
    return jax.tree.map(lambda is_hidden: numbers if is_hidden else None, hidden)
