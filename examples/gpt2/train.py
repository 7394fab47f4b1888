"""Trains GPT-2 on text: `python -m examples.gpt2.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`curves.png`, `sample.txt` and, where ranks adapt, `ranks.png`. Ctrl-C and SIGTERM save a checkpoint
first; `--resume` goes on from the last one and ends with the very parameters of a run that was
never interrupted. With more `--steps` it goes on along the learning rates of the longer run.
"""

import sys
from collections.abc import Callable

import optax
import tyro

from examples.gpt2.command import exit_code
from examples.gpt2.compare import compare
from examples.gpt2.config import Config, resolve
from examples.gpt2.metrics import DivergedError
from examples.gpt2.processes import watched
from examples.gpt2.run import Result, run

__all__ = ["DivergedError", "Result", "main", "train"]


def train(
    config: Config,
    *,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
    keep: bool = True,
) -> Result:
    """Trains one model.

    Args:
      config: The settings.
      optimizer: Makes the optimizer from the schedule of the learning rate; None for the optimizer
        that the settings name.
      keep: Whether checkpoints and figures of a run that has ended are left in its folder.

    Returns:
      The validation losses and the sizes in memory.

    Raises:
      DivergedError: If a loss is not finite.
    """
    if optimizer is None:
        return run(config, keep=keep)
    return run(config, keep=keep, build=lambda name, rate, *_: optimizer(rate))


def parse(arguments: list[str] | None) -> Config:
    """The settings of a command line."""
    name, flags = "python -m examples.gpt2.train", (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(Config, prog=name, args=arguments, config=flags)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, as `command.exit_code` tells."""
    config = parse(arguments)
    if config.processes.coordinator is not None:
        given = sys.argv[1:] if arguments is None else arguments
        wrong = exit_code(lambda: resolve(config), None)
        return wrong or watched("examples.gpt2.worker", given, config.processes)
    if config.compare:
        return exit_code(lambda: compare(config, run, DivergedError), "the same command")
    return exit_code(lambda: run(config), "--resume")


if __name__ == "__main__":
    sys.exit(main())
