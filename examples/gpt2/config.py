"""The settings of a run: one dataclass, which is also the command line, and its presets."""

import dataclasses
import math
import pathlib
from typing import Any, Literal

import tyro

from examples.gpt2 import data as text
from examples.gpt2 import optimizers
from examples.gpt2.command import InputError
from examples.gpt2.model import CONFIGS, GPTConfig


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
_SHAPE = ("layers", "width", "heads", "context", "vocabulary")  # of a model


@dataclasses.dataclass(frozen=True)
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
        """Raises InputError where one is missing or out of range."""
        if self.coordinator in (None, "auto"):
            good = self.count is self.index is None
        else:
            host, _, port = str(self.coordinator).rpartition(":")
            good = host and _is_number(port) and 0 < int(port) < 2**16
            good = good and None not in (self.count, self.index) and 0 <= self.index < self.count
        if not good:
            raise InputError(
                f"--processes has coordinator, count and index {self.coordinator}, {self.count} and"
                f" {self.index}; allowed: HOST:PORT, a count and an index below it, or auto alone"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains GPT-2 on text. What is None follows from the model, as PRESETS has it."""

    model: Literal["tiny", "117M", "345M"] = "tiny"
    """Size of the model, with the batch, steps and rates that go with it."""
    optimizer: optimizers.Name = "adapprox"
    """What trains it."""
    weights: optimizers.Weights = "float32"
    """How weights are kept: in float32; in bfloat16 with 8 more bits in the optimizer's state; in
    bfloat16, rounded by chance; or in bfloat16, which loses slow changes."""
    data: pathlib.Path | None = None
    """A UTF-8 text file or a folder of them; None for the standard library's source."""
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
    """What the layers compute in; logits and losses are float32 in any case."""

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

    options: tyro.conf.OmitArgPrefixes[optimizers.Options] = dataclasses.field(
        default_factory=optimizers.Options
    )
    """Hyperparameters of the optimizer."""
    elastic: bool = False
    """Begin with narrow factor buffers and widen them as ranks grow, up to --max-rank. Needs
    --initial-rank."""

    mesh: str | None = None
    """Devices along "data", which divides batches, "fsdp", which divides batches and parameters,
    and "tensor", which divides layers: data=2,fsdp=2,tensor=2, for example. None for one device."""
    processes: Processes = dataclasses.field(default_factory=Processes)
    """For devices of several processes; the same command starts each, but for its index."""

    out: pathlib.Path | None = None
    """Folder of the run; None for one in runs/gpt2."""
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


def resolve(config: Config) -> Config:
    """Fills in what the presets decide and checks the rest.

    Raises:
      InputError: If an option is out of range or contradicts another.
    """
    preset, shape = PRESETS[config.model], CONFIGS[config.model]
    ratio = preset.min_learning_rate / preset.learning_rate
    peak = preset.learning_rate if config.learning_rate is None else config.learning_rate
    name = f"{config.model}-{config.optimizer}-seed{config.seed}"
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


def _check(config: Config) -> None:
    positive = "steps learning_rate layers width heads context vocabulary eval_every eval_batches"
    check_numbers(config, f"{positive} checkpoint_every", "min_learning_rate warmup")
    if config.width % config.heads:
        raise InputError(f"--heads {config.heads} does not divide --width {config.width}, and must")
    if config.elastic:
        optimizers.widths(config.options)
    if config.mesh is not None:
        mesh_sizes(config.mesh)
    config.processes.check()
    if config.warmup >= config.steps:
        raise InputError(f"--warmup {config.warmup} must be below --steps {config.steps}")
    if config.tokenizer == "bytes" and config.vocabulary < 256:
        raise InputError(f"--vocabulary {config.vocabulary} is below the 256 of --tokenizer bytes")


def check_numbers(config: Any, positive: str, not_negative: str) -> None:
    """Checks numbers of a training or a fine-tuning.

    Args:
      config: The settings, with `options`, `batch_size`, `accumulate` and `seed`.
      positive: Names of more that must be above 0, where they are not None.
      not_negative: Names of more that must be at least 0.

    Raises:
      InputError: If one is out of range.
    """
    for name in f"{positive} batch_size accumulate".split():
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{option(name)} is {value}, and must be above 0 and finite")
    values = {name: getattr(config, name) for name in f"{not_negative} seed".split()}
    for name, value in (values | {"weight_decay": config.options.weight_decay}).items():
        if not 0 <= value < (2**31 if name == "seed" else math.inf):
            raise InputError(f"{option(name)} is {value}, and must be at least 0 and finite")
    for name in ("b1", "b2"):
        value = getattr(config.options, name)
        if not 0 <= value < 1:
            raise InputError(f"--{name} is {value}, and must be in [0, 1)")
    if config.batch_size % config.accumulate:
        raise InputError(
            f"--accumulate {config.accumulate} does not divide --batch-size "
            f"{config.batch_size}, and must"
        )


def mesh_sizes(words: str) -> dict[str, int]:
    """The sizes of all axes of a mesh, from words such as "data=2,tensor=4".

    Raises:
      InputError: If an axis does not exist, is there twice, or has no size.
    """
    given: dict[str, int] = {}
    for part in words.split(","):
        name, _, size = part.partition("=")
        if name not in MESH_AXES or name in given or not _is_number(size) or int(size) == 0:
            raise InputError(
                f"--mesh {words}: {part!r} is not one of {', '.join(MESH_AXES)} with its size,"
                " each once: data=2,fsdp=2,tensor=2, for example"
            )
        given[name] = int(size)
    return dict.fromkeys(MESH_AXES, 1) | given


def gpt_config(config: Config) -> GPTConfig:
    """The model that resolved settings ask for."""
    return GPTConfig(dtype=config.dtype, **{name: getattr(config, name) for name in _SHAPE})


# What does not decide the result of a run.
_NOT_SETTINGS = {"data", "out", "cache", "resume", "checkpoint_every", "mesh", "processes"}


def settings(config: Config, data_key: str) -> dict[str, Any]:
    """All that decides the result of a resolved run, by option; the same for equal runs."""
    given = dataclasses.asdict(config)
    options = given.pop("options")
    return {k: v for k, v in given.items() if k not in _NOT_SETTINGS} | options | {"data": data_key}


def option(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def as_input(work: Any) -> Any:
    """Does what the library may refuse as bad input."""
    try:
        return work()
    except ValueError as error:
        raise InputError(str(error)) from None


def _is_number(word: str) -> bool:
    """Whether a word is a whole number that counts devices or ports, and not an absurd one."""
    return word.isascii() and word.isdecimal() and len(word) < 10
