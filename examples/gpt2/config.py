"""The settings of a run: one dataclass, which is also the command line, and its presets."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from examples.gpt2 import data as text
from examples.gpt2 import optimizers
from examples.gpt2.hints import by_case, show_defaults
from examples.gpt2.model import CONFIGS, GPTConfig

_LARGEST_SEED = 2**31 - 1


class UsageError(ValueError):
    """The settings cannot be used; the message is one line that says why and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """How long and at which rates a model is trained, unless the command line says otherwise."""

    batch_size: int
    steps: int
    warmup: int
    learning_rate: float
    min_learning_rate: float
    eval_every: int
    checkpoint_every: int


# "tiny" ends in minutes on two CPU cores; the two others are the paper's pretraining.
PRESETS = {
    "tiny": Preset(16, 400, 20, 2.4e-3, 4e-4, eval_every=50, checkpoint_every=100),
    "117M": Preset(128, 100_000, 1_000, 3e-4, 5e-5, eval_every=1_000, checkpoint_every=1_000),
    "345M": Preset(128, 100_000, 1_000, 3e-4, 3e-5, eval_every=1_000, checkpoint_every=1_000),
}


MESH_AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
@show_defaults(
    {"coordinator": "this process alone", "count": "the cluster's", "index": "the cluster's"},
)
class Processes:
    """Which of how many processes this is, and where they meet."""

    coordinator: str | None = None
    """HOST:PORT of the first process, the same for all; "auto" where the cluster tells JAX all
    three, as Slurm, Open MPI and TPUs do."""
    count: int | None = None
    """How many there are."""
    index: int | None = None
    """Which one this is, from 0."""

    def check(self) -> None:
        """Raises UsageError where one is missing or out of range."""
        numbers = (self.count, self.index)
        if self.coordinator in (None, "auto"):
            if numbers != (None, None):
                raise UsageError(
                    f"--processes.coordinator is {self.coordinator or 'not given'}: leave out"
                    " --processes.count and --processes.index, or give its HOST:PORT"
                )
            return
        host, _, port = str(self.coordinator).rpartition(":")
        if not host or not _is_number(port) or not 0 < int(port) < 2**16:
            raise UsageError(
                f"--processes.coordinator is {self.coordinator}, and must be HOST:PORT or auto"
            )
        if self.count is None or self.index is None or not 0 <= self.index < self.count:
            raise UsageError(
                f"--processes.count is {self.count} and --processes.index {self.index}: both are"
                " needed, and the index must be from 0 to the count - 1"
            )

    def __str__(self) -> str:
        """In words."""
        if self.count is None:
            return f"--processes.coordinator {self.coordinator}"
        return f"process {self.index} of {self.count}, which meet at {self.coordinator}"


_SHAPE = ("layers", "width", "heads", "context", "vocabulary")  # of a model, as options say it


def _preset_defaults() -> dict[str, str]:
    """What `--help` shows for the options that the presets decide, and for others that are None."""
    settings = {
        model: dataclasses.asdict(preset) | {name: getattr(CONFIGS[model], name) for name in _SHAPE}
        for model, preset in PRESETS.items()
    }
    names = settings["tiny"]
    words = {name: by_case({model: of[name] for model, of in settings.items()}) for name in names}
    ratios = {
        model: f"{preset.min_learning_rate / preset.learning_rate:.3g} of the peak"
        for model, preset in PRESETS.items()
    }
    return words | {
        "vocabulary": f"{words['vocabulary']}, 256 with --tokenizer bytes",
        "min_learning_rate": by_case(ratios),
        "data": "the standard library's source",
        "out": "a folder in runs/gpt2, named after the model, the optimizer and the seed",
        "compare": "none",
        "learning_rates": "that of --learning-rate",
        "mesh": "the first device alone",
    }


@dataclasses.dataclass(frozen=True)
@show_defaults(_preset_defaults())
class Config:
    """Trains GPT-2 on text, or compares optimizers at it."""

    model: Literal["tiny", "117M", "345M"] = "tiny"
    """Size of the model, with the batch, steps and rates that go with it."""
    optimizer: optimizers.Name = "adapprox"
    """What trains it."""
    data: pathlib.Path | None = None
    """A UTF-8 text file or a folder of them."""
    tokenizer: text.Tokenizer = "sentencepiece"
    """SentencePiece, trained on the training split, or plain bytes."""

    steps: int | None = None
    """Number of updates."""
    batch_size: int | None = None
    """Windows of text in an update."""
    accumulate: int = 1
    """Parts that a batch is worked on in, one after the other, to save memory."""
    learning_rate: float | None = None
    """Peak of the learning rate."""
    min_learning_rate: float | None = None
    """Rate at the end."""
    warmup: int | None = None
    """Updates before the peak."""
    seed: int = 0
    """Fixes the parameters at the start and the order of the data."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the layers compute in; parameters, logits and losses are float32 in any case."""

    layers: int | None = None
    """Number of blocks."""
    width: int | None = None
    """Size of the residual stream."""
    heads: int | None = None
    """Attention heads of a block."""
    context: int | None = None
    """Tokens in a window."""
    vocabulary: int | None = None
    """Tokens of the tokenizer, at most."""

    hyper: optimizers.Hyperparameters = dataclasses.field(
        default_factory=optimizers.Hyperparameters
    )
    """What all optimizers share, but for b2: adafactor has a decay of its own, 1 - t^-0.8."""
    adapprox: optimizers.AdapproxOptions = dataclasses.field(
        default_factory=optimizers.AdapproxOptions
    )
    """Keywords of adapprox_jax.adapprox, where they are explained."""
    elastic: bool = False
    """Begin with narrow factor buffers and widen them where ranks reach their width, up to
    --adapprox.max-rank. The rank must be adaptive."""

    mesh: str | None = None
    """Devices along "data", which divides batches, "fsdp", which divides batches and parameters,
    and "tensor", which divides layers: data=2,fsdp=2,tensor=2, say. An axis left out is 1."""
    processes: Processes = dataclasses.field(default_factory=Processes)
    """For devices of several processes; the same command starts each, but for its index."""

    out: pathlib.Path | None = None
    """Folder for checkpoints, metrics and figures."""
    cache: pathlib.Path = pathlib.Path("runs/data")
    """Folder for tokenizers and tokens."""
    resume: bool = False
    """Go on from the last checkpoint in the folder."""
    eval_every: int | None = None
    """Updates between validations."""
    eval_batches: int = 32
    """Batches of a validation, the same ones every time."""
    checkpoint_every: int | None = None
    """Updates between checkpoints; one is saved at the end and at Ctrl-C in any case."""
    sample_tokens: int = 200
    """Length of the text that is generated at the end."""

    compare: tuple[optimizers.Name, ...] = ()
    """Optimizers to compare, in place of one training."""
    seeds: int = 3
    """Seeds of a comparison, counted from --seed."""
    learning_rates: tuple[float, ...] = ()
    """Peak rates of a comparison: each is tried with the first seed, the best with all."""


def resolve(config: Config) -> Config:
    """Fills in what the presets decide and checks the rest.

    Raises:
      UsageError: If an option is out of range or contradicts another.
    """
    preset, shape = PRESETS[config.model], CONFIGS[config.model]
    ratio = preset.min_learning_rate / preset.learning_rate
    peak = preset.learning_rate if config.learning_rate is None else config.learning_rate
    name = f"{config.model}-{config.optimizer}-seed{config.seed}"
    if config.compare:
        name = f"{config.model}-compare"
    defaults = {
        **dataclasses.asdict(preset),
        **{name: getattr(shape, name) for name in _SHAPE},
        "min_learning_rate": peak * ratio,
        "out": pathlib.Path("runs/gpt2") / name,
    }
    if config.tokenizer == "bytes":
        defaults["vocabulary"] = 256
    missing = {k: v for k, v in defaults.items() if getattr(config, k) is None}
    config = dataclasses.replace(config, **missing)
    _check(config)
    return config


def gpt_config(config: Config) -> GPTConfig:
    """The model that resolved settings ask for."""
    return GPTConfig(dtype=config.dtype, **{name: getattr(config, name) for name in _SHAPE})


def load_data(config: Config) -> text.Data:
    """The text that resolved settings ask for."""
    return text.load(
        config.data,
        tokenizer=config.tokenizer,
        vocabulary=config.vocabulary,
        context=config.context,
        cache=config.cache,
    )


_GROUPS = {"hyper": optimizers.Hyperparameters, "adapprox": optimizers.AdapproxOptions}
# What a run does, as opposed to where it is kept and what is shown of it.
_NOT_SETTINGS = {
    *("data", "out", "cache", "resume", "checkpoint_every", "sample_tokens"),
    *("compare", "seeds", "learning_rates", "mesh", "processes"),
    *_GROUPS,  # what becomes of them is in the optimizer's settings
}


def settings(config: Config, data_key: str) -> dict[str, Any]:
    """All that decides the result of a resolved run, for the records; the same for equal runs.

    Every argument of the optimizer is there as it was resolved: a record tells what was run also
    when defaults have changed since.
    """
    kept = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_SETTINGS}
    optimizer = optimizers.settings(config.optimizer, config.hyper, config.adapprox)
    return {**kept, "optimizer_settings": optimizer, "data": data_key}


def option_of(keys: tuple[str, ...]) -> str:
    """The option that decides an entry of `settings`, which has these keys."""
    name = keys[-1]
    if keys == ("data",):
        return "the text (--data)"
    if keys[0] != "optimizer_settings":
        return _option(name)
    if keys[1:] == ("ema", "decay"):
        name = "b1"  # of "adafactor"
    for part, options in _GROUPS.items():
        if name in {field.name for field in dataclasses.fields(options)}:
            return f"--{part}{_option(name).replace('--', '.')}"
    return f"the optimizer's {'.'.join(keys[1:])}"


def check_numbers(config: Any, positive: Sequence[str], not_negative: Sequence[str]) -> None:
    """Checks what a training and a fine-tuning have in common.

    Args:
      config: The settings, with `hyper`, `learning_rates`, `batch_size` and `accumulate`.
      positive: Names of those that must be above 0, where they are not None.
      not_negative: Names of those that must be at least 0.

    Raises:
      UsageError: One is out of range.
    """
    for name in positive:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{_option(name)} is {value}, and must be above 0 and finite")
    for name in not_negative:
        value = getattr(config, name)
        if not value >= 0:
            raise UsageError(f"{_option(name)} is {value}, and must be at least 0")
    if config.seed > _LARGEST_SEED:
        raise UsageError(f"--seed is {config.seed}, and must be at most {_LARGEST_SEED}")
    for name in ("b1", "b2"):
        value = getattr(config.hyper, name)
        if not 0 <= value < 1:
            raise UsageError(f"--hyper.{name} is {value}, and must be in [0, 1)")
    if not config.hyper.weight_decay >= 0:
        value = config.hyper.weight_decay
        raise UsageError(f"--hyper.weight-decay is {value}, and must be at least 0")
    for rate in config.learning_rates:
        if not 0 < rate < math.inf:
            raise UsageError(f"--learning-rates has {rate}, and all must be above 0 and finite")
    if config.batch_size % config.accumulate:
        raise UsageError(
            f"--accumulate {config.accumulate} does not divide --batch-size "
            f"{config.batch_size}, and must"
        )
    if config.resume and config.compare:
        raise UsageError("--compare goes on by itself where it was interrupted: leave out --resume")


def _check(config: Config) -> None:
    positive = "steps batch_size accumulate learning_rate layers width heads context vocabulary"
    positive += " eval_every eval_batches checkpoint_every seeds"
    check_numbers(
        config, positive.split(), ("min_learning_rate", "warmup", "seed", "sample_tokens")
    )
    if config.width % config.heads:
        raise UsageError(f"--heads {config.heads} does not divide --width {config.width}, and must")
    for name in config.compare or (config.optimizer,):
        try:
            adapts = optimizers.ranks_adapt(name, config.hyper, config.adapprox)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from None
        if config.elastic and not adapts:
            raise UsageError(
                "--elastic needs ranks that adapt: adapprox with --adapprox.initial-rank, or"
                f" adapprox-paper, and not {name}"
            )
    if config.mesh is not None:
        mesh_sizes(config.mesh)
    config.processes.check()
    if config.compare and config.processes.coordinator is not None:
        raise UsageError("--compare runs in one process: leave out --processes.coordinator")
    if config.warmup >= config.steps:
        raise UsageError(f"--warmup {config.warmup} must be below --steps {config.steps}")
    if config.tokenizer == "bytes" and config.vocabulary < 256:
        raise UsageError(f"--vocabulary {config.vocabulary} is below the 256 of --tokenizer bytes")


def mesh_sizes(words: str) -> dict[str, int]:
    """The sizes of all axes of a mesh, from words such as "data=2,tensor=4".

    Raises:
      UsageError: If an axis does not exist, is there twice, or has no size.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    seen = []
    for part in words.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or name in seen or not _is_number(size) or int(size) == 0:
            raise UsageError(
                f"--mesh {words}: {part!r} is not one of {', '.join(MESH_AXES)} with its size,"
                " each once: data=2,fsdp=2,tensor=2, say"
            )
        sizes[name] = int(size)
        seen.append(name)
    return sizes


def _is_number(word: str) -> bool:
    """Whether a word is a whole number that counts devices or ports, and not an absurd one."""
    return word.isascii() and word.isdecimal() and len(word) < 10


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
