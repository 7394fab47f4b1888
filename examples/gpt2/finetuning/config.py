"""The settings of a fine-tuning: one dataclass, which is also the command line."""

import dataclasses
import pathlib
from typing import Any, Literal

from examples.gpt2 import optimizers
from examples.gpt2.config import UsageError, check_numbers
from examples.gpt2.finetuning import tasks


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tunes GPT-2 on a task of GLUE or on SQuAD, or compares optimizers at it."""

    task: tasks.Name
    """What to learn: CoLA, SST-2, MRPC or MNLI of GLUE, or SQuAD v1.1."""
    checkpoint: pathlib.Path
    """Folder of a GPT-2 with its tokenizer, as transformers saves it, or of a run of
    examples.gpt2.train."""
    data: pathlib.Path
    """Folder with the task's official files: train.tsv, dev.tsv (of MNLI dev_matched.tsv) and, if
    predictions are wanted, test.tsv; of SQuAD train-v1.1.json and dev-v1.1.json."""
    examples: int | None = None
    """How many of the task's training examples, of SQuAD questions, are learnt from: the first
    ones; by default all."""
    optimizer: optimizers.Name = "adapprox"
    """What trains it."""

    epochs: int = 3
    """Times that the examples are seen, but for what is left over from whole batches."""
    batch_size: int = 32
    """Examples in an update; of SQuAD windows of its contexts."""
    accumulate: int = 1
    """Parts that a batch is worked on in, one after the other, to save memory."""
    learning_rate: float = 1e-4
    """Peak of the learning rate; from there it falls linearly to 0."""
    warmup: float = 0.1
    """Part of the updates before the peak."""
    length: int | None = None
    """Tokens of an example; by default 64 of CoLA, 384 of SQuAD, 128 else, or the model's context
    if that is less."""
    seed: int = 0
    """Fixes the head at the start and the order of the examples."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the layers compute in."""
    from_adam: bool = False
    """Begin with the state of AdamW that the checkpoint was trained with, converted; of Adapprox
    alone. The checkpoint must be of examples.gpt2.train with --optimizer adamw."""

    hyper: optimizers.Hyperparameters = dataclasses.field(
        default_factory=lambda: optimizers.Hyperparameters(weight_decay=0.01)
    )
    """What all optimizers share."""
    adapprox: optimizers.AdapproxOptions = dataclasses.field(
        default_factory=optimizers.AdapproxOptions
    )
    """Keywords of adapprox_jax.adapprox, where they are explained."""

    out: pathlib.Path | None = None
    """Folder for checkpoints, metrics and predictions; by default one in runs/finetune, named
    after the task, the optimizer and the seed."""
    cache: pathlib.Path = pathlib.Path("runs/data")
    """Folder for the tokenizers of examples.gpt2.train."""
    checkpoint_every: int = 1000
    """Updates between checkpoints, at most an epoch; one is saved at Ctrl-C in any case."""
    resume: bool = False
    """Go on from the last checkpoint in the folder."""

    compare: tuple[optimizers.Name, ...] = ()
    """Optimizers to compare, in place of one training."""
    seeds: int = 3
    """Seeds of a comparison, counted from --seed."""
    learning_rates: tuple[float, ...] = ()
    """Peak rates of a comparison: each is tried with the first seed, the best with all."""


# What a run does, as opposed to where it is kept and what it is part of.
_NOT_SETTINGS = {
    *("checkpoint", "data", "out", "cache", "resume", "checkpoint_every"),
    "examples",  # those that are left are in the digest of the data
    *("compare", "seeds", "learning_rates"),
    *("hyper", "adapprox"),  # what becomes of them is in the optimizer's settings
}


def settings(config: Config, of_files: dict[str, str]) -> dict[str, Any]:
    """All that decides the result of a run, for the records; the same for equal runs.

    Args:
      config: The settings.
      of_files: A digest of the checkpoint and one of the data.
    """
    kept = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_SETTINGS}
    kept["from_adam"] = begins_with_adam(config)
    optimizer = optimizers.settings(config.optimizer, config.hyper, config.adapprox)
    return {**kept, "optimizer_settings": optimizer, **of_files}


def begins_with_adam(config: Config) -> bool:
    """Whether the run's optimizer is given AdamW's state."""
    return config.from_adam and config.optimizer.startswith("adapprox")


def check(config: Config) -> None:
    """Raises UsageError where an option is out of range or contradicts another."""
    positive = ("epochs", "batch_size", "accumulate", "learning_rate", "length", "examples")
    check_numbers(config, (*positive, "checkpoint_every", "seeds"), ("seed",))
    if not 0 <= config.warmup < 1:
        raise UsageError(f"--warmup is {config.warmup}, and must be in [0, 1)")
    if config.out is not None and config.out.resolve() == config.checkpoint.resolve():
        raise UsageError(f"--out {config.out}: has the checkpoint; give another folder")
    names = config.compare or (config.optimizer,)
    for name in names:
        try:
            optimizers.settings(name, config.hyper, config.adapprox)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from None
    if config.from_adam and not any(name.startswith("adapprox") for name in names):
        allowed = ", ".join(name for name in optimizers.NAMES if name.startswith("adapprox"))
        raise UsageError(f"--from-adam: {', '.join(names)} cannot begin so; allowed: {allowed}")
