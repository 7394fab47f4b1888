"""The settings of a fine-tuning: one dataclass, which is also the command line."""

import dataclasses
import pathlib
from typing import Any, Literal

import tyro

from examples.finetune import tasks
from examples.gpt2 import optimizers
from examples.gpt2.command import InputError
from examples.gpt2.config import check_numbers


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tunes GPT-2 on a task of GLUE or on SQuAD."""

    task: tasks.Name
    """What to learn: CoLA, SST-2, MRPC or MNLI of GLUE, or SQuAD v1.1."""
    checkpoint: pathlib.Path
    """Folder of a GPT-2 with its tokenizer, as transformers saves it, or of a run of
    examples.gpt2.train."""
    data: pathlib.Path | None = None
    """Folder with files of the task that Hugging Face's datasets reads, with the splits and columns
    that it has there; None to fetch the task."""
    examples: int | None = None
    """How many of the training examples, of SQuAD questions, are learnt from; None for all."""
    optimizer: optimizers.Name = "adapprox"
    """What trains it."""
    weights: optimizers.Weights = "float32"
    """How weights are kept: in float32; in bfloat16 with 8 more bits in the optimizer's state; in
    bfloat16, rounded by chance; or in bfloat16, which loses slow changes."""

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
    """Tokens of an example; None for 64 of CoLA, 384 of SQuAD, 128 of the others, or the model's
    context if that is less."""
    seed: int = 0
    """Fixes the head at the start and the order of the examples."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the layers compute in."""
    options: tyro.conf.OmitArgPrefixes[optimizers.Options] = dataclasses.field(
        default_factory=lambda: optimizers.Options(weight_decay=0.01)
    )
    """Hyperparameters of the optimizer."""

    out: pathlib.Path | None = None
    """Folder of the run; None for one in runs/finetune."""
    export: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters that scored best, in the folder's best/."""
    cache: pathlib.Path = pathlib.Path("runs/data")
    """Folder for data that was fetched."""
    checkpoint_every: int = 1000
    """Updates between checkpoints, at most an epoch; one is saved at Ctrl-C in any case."""
    resume: bool = False
    """Go on from the last checkpoint in the folder."""


# What does not decide the result of a run; what is in the files is in their digests.
_NOT_SETTINGS = {"checkpoint", "data", "examples", "out", "cache", "resume", "checkpoint_every"}


def settings(config: Config, digests: dict[str, str]) -> dict[str, Any]:
    """All that decides the result of a run, by option; the same for equal runs."""
    given = dataclasses.asdict(config)
    options = given.pop("options")
    return {k: v for k, v in given.items() if k not in _NOT_SETTINGS} | options | digests


def check(config: Config) -> None:
    """Raises InputError where an option is out of range or contradicts another."""
    check_numbers(config, "epochs learning_rate length examples checkpoint_every", "warmup")
    if config.warmup >= 1:
        raise InputError(f"--warmup is {config.warmup}, and must be in [0, 1)")
    if config.out is not None and config.out.resolve() == config.checkpoint.resolve():
        raise InputError(f"--out {config.out}: has the checkpoint; give another folder")
