"""Trains GPT-2 on text: `python -m examples.gpt2.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`curves.png` and `sample.txt`. Ctrl-C saves a checkpoint first; `--resume` goes on from the last
one and ends with the very parameters of a run that was never interrupted.
"""

import sys

import tyro

from examples.gpt2.command import exit_code
from examples.gpt2.compare import compare
from examples.gpt2.config import Config
from examples.gpt2.metrics import DivergedError
from examples.gpt2.run import run


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 diverged, 2 bad input, 130 interrupted."""
    name, flags = "python -m examples.gpt2.train", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    if config.compare:
        return exit_code(lambda: compare(config, run, DivergedError), "the same command")
    return exit_code(lambda: run(config), "--resume")


if __name__ == "__main__":
    sys.exit(main())
