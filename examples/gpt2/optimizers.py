"""The optimizers that can be compared: each a chain of Optax parts with one learning rate schedule.

All of them decay only matrices, decoupled from the gradient, as the paper does.
"""

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import optax

import adapprox_jax
from examples.gpt2 import opponents
from examples.gpt2.hints import by_case, show_defaults
from examples.opponents import approximations
from examples.opponents.came import came

Name = Literal[
    "adapprox",
    "adapprox-paper",
    "adapprox-muon",
    "adapprox-dense",
    "adamw",
    "adamw-8-bits",
    "adafactor",
    "adafactor-b2",
    "adafactor-noisy",
    "came",
    "galore",
    "muon",
    "sm3",
]
NAMES: tuple[str, ...] = get_args(Name)


@dataclasses.dataclass(frozen=True)
@show_defaults({"clip_norm": "no clipping"})
class Hyperparameters:
    """What all optimizers share, but for b2: adafactor has a decay of its own, 1 - t^-0.8, and
    adapprox-muon and muon have 0.95. Their b1 is that of everything but the hidden matrices.
    """

    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.1
    decays: Literal["matrices", "hidden", "everything"] = "matrices"
    """What the weight decay reaches: all matrices, those that neither embed nor end the model, or
    vectors too."""
    clip_norm: float | None = None
    """Norm that all gradients together are clipped at."""


# Guided, as the paper's pretraining is.
PAPER = {**adapprox_jax.PAPER, "cosine_guidance": True}
# What has a rate elsewhere of its own; of all others `build` multiplies the updates.
_WITH_RATE_ELSEWHERE = ("adapprox-muon", "muon")
# Arguments that records from before they existed lack, with what was done then.
_SINCE = [("cautious_weight_decay", False)]


def _arguments(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """All arguments of a function by name, with defaults where none is given, but for the rate."""
    bound = inspect.signature(function).bind_partial(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def _library_defaults() -> dict[str, str]:
    """Words for the defaults of `adapprox_jax.adapprox`, and of the paper where it has others."""
    library = _arguments(adapprox_jax.adapprox)
    words = {
        name: by_case({"adapprox": value, "adapprox-paper": PAPER.get(name, value)})
        for name, value in library.items()
    }
    muon = _arguments(adapprox_jax.adapprox_muon)
    words = {name: str(value) for name, value in muon.items()} | words
    of_muon = {f"muon_{name}": str(muon[name]) for name in ("b1", "b2")}
    others = {
        "sampling_threshold": "False",
        "b2_exponent": "a constant b2",
        "embedding_rank": "that of max_rank",
    }
    return words | of_muon | others


@dataclasses.dataclass(frozen=True)
@show_defaults(_library_defaults())
class AdapproxOptions:
    """Keywords of `adapprox_jax.adapprox`, where they are explained."""

    initial_rank: int | None = None
    max_rank: int | float | None = None
    error_threshold: float | None = None
    sampling_threshold: bool | None = None
    """Raise the threshold early in training, by adapprox_jax.sampling_threshold, and add columns
    one by one."""
    rank_interval: int | None = None
    rank_margin: int | None = None
    approximate: approximations.Name | None = None
    """What is factored; adapprox has "moment" and "root", adapprox-dense all of them."""
    power_iterations: int | None = None
    oversampling: int | None = None
    rotate: bool | None = None
    warm_start: bool | None = None
    orthogonalization: Literal["qr", "cholesky"] | None = None
    cosine_guidance: bool | None = None
    guidance_max_scale: float | None = None
    bias_correction: bool | None = None
    b2_exponent: float | None = None
    """In place of a constant b2: 1 - t^-exponent, adapprox_jax.increasing_decay."""
    cautious_weight_decay: bool | None = None
    clipping_threshold: float | None = None
    min_dim_size_to_factor: int | None = None
    mu_dtype: Literal["float32", "bfloat16", "int8", "int5", "int4"] | None = None
    factor_dtype: Literal["float32", "bfloat16"] | None = None
    embedding_rank: int | None = None
    """Of adapprox alone: max_rank of the matrix that embeds the tokens and makes the logits."""
    rate_elsewhere: float | None = None
    """What the rates of everything but the hidden matrices are multiplied by."""
    muon_b1: float | None = None
    """Of adapprox-muon and muon: b1 of the hidden matrices."""
    muon_b2: float | None = None
    """Of adapprox-muon b2 of all leaves, of muon b2 of everything but the hidden matrices."""
    nesterov: bool | None = None
    """Of adapprox-muon alone, as all that follow."""
    newton_schulz_steps: int | None = None
    second_moment: bool | Literal["neurons"] | None = None

    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def keywords(name: Name, hyper: Hyperparameters, options: AdapproxOptions) -> dict[str, Any]:
    """Every keyword of `adapprox` or `adapprox_muon` that an Adapprox is built with.

    Args:
      name: "adapprox", "adapprox-paper" or "adapprox-muon".
      hyper: What all optimizers share.
      options: What is given beyond the defaults.

    Returns:
      The library's defaults, overridden by the paper's settings where they are asked for, and by
      what is given.

    Raises:
      ValueError: An option is given that this one does not have.
    """
    given = options.given()
    sampling = given.pop("sampling_threshold", False)
    exponent = given.pop("b2_exponent", None)
    if name != "adapprox-muon":
        given.pop("rate_elsewhere", None)  # by `build`, as the next
    if name == "adapprox":
        given.pop("embedding_rank", None)
    if name == "adapprox-muon":
        for keyword in ("b1", "b2"):
            given |= {keyword: given.pop(f"muon_{keyword}")} if f"muon_{keyword}" in given else {}
        shared = {**_shared(hyper), "b1_elsewhere": hyper.b1}
        del shared["b1"], shared["b2"]
        function, presets = adapprox_jax.adapprox_muon, shared
    else:
        function = adapprox_jax.adapprox
        presets = _shared(hyper) | (PAPER if name == "adapprox-paper" else {})
    unknown = given.keys() - inspect.signature(function).parameters.keys()
    if unknown:
        raise ValueError(f"{min(unknown)} is no argument of {function.__name__}")
    used = _arguments(function, **presets | given)
    if sampling:
        late = used["error_threshold"]
        used["error_threshold"] = adapprox_jax.sampling_threshold(hyper.b2, late)
        used["rank_growth"] = one_column
    if exponent is not None:
        used["b2"] = adapprox_jax.increasing_decay(exponent)
    return used


def ranks_adapt(name: Name, hyper: Hyperparameters, options: AdapproxOptions) -> bool:
    """Whether an optimizer chooses the ranks of its factors as it goes."""
    if not name.startswith("adapprox"):
        return False
    return keywords(name, hyper, options)["initial_rank"] is not None


def settings(name: Name, hyper: Hyperparameters, options: AdapproxOptions) -> dict[str, Any]:
    """Every argument of an optimizer that `build` makes, but for the learning rate's.

    Args:
      name: One of `NAMES`.
      hyper: What all optimizers share.
      options: What is given to Adapprox beyond its defaults; the others ignore it, but for
        the rate elsewhere, b1 and b2 of "muon" and the type of the average of "adafactor".

    Returns:
      The arguments as JSON can hold them, functions in words. Those of "adafactor" stand by the
      part of its chain that they belong to, under the names that Optax gives them.

    Raises:
      ValueError: If there is no optimizer of this name.
    """
    match name:
        case "adapprox" | "adapprox-paper" | "adapprox-muon":
            used = keywords(name, hyper, options)
        case "adamw":
            used = _arguments(optax.adamw, **_shared(hyper))
        case "came":
            used = _arguments(came, **_shared(hyper))
        case _:
            used = {
                part.__name__: _arguments(part, **given)
                for part, given in _parts(name, hyper, options)
            }
    if name == "adafactor":
        rate = used["scale_by_factored_rms"]["decay_rate"]
        used = {"decay": f"1 - t^-{rate}", **used}  # Optax's `decay_rate_fn`
    if hyper.clip_norm is not None:
        used["clip_by_global_norm"] = hyper.clip_norm
    if options.embedding_rank is not None and name == "adapprox":
        used["embedding_rank"] = options.embedding_rank
    if options.rate_elsewhere is not None and name not in _WITH_RATE_ELSEWHERE:
        used["rate_elsewhere"] = options.rate_elsewhere
    return {key: value for key, value in _in_words(used).items() if (key, value) not in _SINCE}


def _shared(hyper: Hyperparameters) -> dict[str, Any]:
    shared = {name: getattr(hyper, name) for name in ("b1", "b2", "weight_decay")}
    return {**shared, "mask": MASKS[hyper.decays]}


def _parts(name: Name, hyper: Hyperparameters, options: AdapproxOptions) -> list[opponents.Part]:
    """The chain of an opponent, before the learning rate."""
    b1, b2 = hyper.b1, hyper.b2
    decay = {"weight_decay": hyper.weight_decay, "mask": MASKS[hyper.decays]}
    end = (optax.add_decayed_weights, decay)
    match name:
        case "adafactor":
            return opponents.adafactor(b1, None, options.mu_dtype, end)
        case "adafactor-b2":
            return opponents.adafactor(b1, b2, options.mu_dtype, end)
        case "adafactor-noisy":
            return opponents.adafactor(b1, None, None, end, noise=True)
        case "adapprox-dense":
            return opponents.adapprox_dense(b1, b2, options.given(), end)
        case "adamw-8-bits":
            return opponents.adamw_8_bits(b1, b2, end)
        case "galore":
            return opponents.galore(b1, b2, end)
        case "muon":
            of_muon = options.muon_b1, options.muon_b2, options.rate_elsewhere
            return opponents.muon(b1, *of_muon, end)
        case "sm3":
            return opponents.sm3(b1, end)
        case _:
            raise ValueError(f"optimizer must be one of {', '.join(NAMES)}, got {name!r}")


def _in_words(value: Any) -> Any:
    """What JSON can hold as it is; functions by name, with the values that they were made with."""
    if isinstance(value, dict):
        return {key: _in_words(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_in_words(item) for item in value]
    if value is is_matrix:
        return "matrices"
    if callable(value):
        made_with = inspect.getclosurevars(value).nonlocals
        name = value.__qualname__.partition(".<locals>")[0]
        inner = ", ".join(f"{key}={_in_words(made_with[key])}" for key in sorted(made_with))
        return f"{name}({inner})" if inner else name
    return str(value) if value == math.inf else value


def one_column(error: jax.Array) -> int:
    """A growth of the rank by one column, whatever the error."""
    return 1


def is_matrix(params: Any) -> Any:
    """The weight decay mask: True for leaves with two axes or more."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


MASKS: dict[str, Callable[[Any], Any] | None] = {
    "matrices": is_matrix,
    "hidden": adapprox_jax.hidden_matrices,
    "everything": None,
}


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
    size of each parameter.) Its second moment decays by 1 - t^-0.8 at step t; that of
    "adafactor-b2" by b2. "adafactor-noisy" is "adafactor" with the noise of an average in 4 bits.

    Args:
      name: One of `NAMES`.
      learning_rate: A number or a schedule.
      hyper: What all optimizers share.
      options: What is given to Adapprox beyond its defaults; the others ignore it, but for
        the rate elsewhere, b1 and b2 of "muon" and the type of the average of "adafactor".

    Returns:
      An Optax gradient transformation.

    Raises:
      ValueError: If there is no optimizer of this name, or Adapprox refuses an argument.
    """
    if options.rate_elsewhere is not None and name not in _WITH_RATE_ELSEWHERE:
        return _with_rate_elsewhere(name, learning_rate, hyper, options)
    match name:
        case "adapprox" | "adapprox-paper":
            used = keywords(name, hyper, options)
            tx = adapprox_jax.adapprox(learning_rate, **used)
            if options.embedding_rank is not None and name == "adapprox":
                wide = adapprox_jax.adapprox(
                    learning_rate, **used | {"max_rank": options.embedding_rank}
                )
                tx = optax.partition({"embedding": wide, "else": tx}, _embedding_or_else)
        case "adapprox-muon":
            tx = adapprox_jax.adapprox_muon(learning_rate, **keywords(name, hyper, options))
        case "adamw":
            tx = optax.adamw(learning_rate, **_shared(hyper))
        case "came":
            tx = came(learning_rate, **_shared(hyper))
        case _:
            parts = [part(**arguments) for part, arguments in _parts(name, hyper, options)]
            tx = optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
    if hyper.clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(hyper.clip_norm), tx)


def _with_rate_elsewhere(
    name: Name,
    learning_rate: optax.ScalarOrSchedule,
    hyper: Hyperparameters,
    options: AdapproxOptions,
) -> optax.GradientTransformation:
    """An optimizer whose updates, but not the decay, are multiplied outside of hidden matrices."""
    if options.cautious_weight_decay:
        raise ValueError("rate_elsewhere and cautious_weight_decay cannot be given together")
    without_decay = dataclasses.replace(hyper, weight_decay=0.0)
    plain = dataclasses.replace(options, rate_elsewhere=None)
    return optax.chain(
        build(name, 1.0, without_decay, plain),  # of the updates' sign
        optax.masked(optax.scale(options.rate_elsewhere), _elsewhere),
        optax.add_decayed_weights(-hyper.weight_decay, MASKS[hyper.decays]),
        optax.scale_by_learning_rate(learning_rate, flip_sign=False),
    )


def _elsewhere(params: Any) -> Any:
    return jax.tree.map(operator.not_, adapprox_jax.hidden_matrices(params))


def _embedding_or_else(params: Any) -> Any:
    """Labels: the tied matrix that embeds the tokens, and all else."""

    def label(path: Any, _: Any) -> str:
        name = jax.tree_util.keystr(path[:1], simple=True)
        return "embedding" if name == "tokens" else "else"

    return jax.tree_util.tree_map_with_path(label, params)
