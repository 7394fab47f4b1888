"""Trains GPT-2 on text: `python -m examples.gpt2.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`curves.png` and `sample.txt`. Ctrl-C saves a checkpoint first; `--resume` goes on from the last
one and ends with the very parameters of a run that was never interrupted.
"""

import logging
import sys

import tyro

from examples.gpt2.compare import compare
from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import DataError
from examples.gpt2.metrics import DivergedError
from examples.gpt2.run import run


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 diverged, 2 bad input, 130 interrupted."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells each step of its work
    name, flags = "python -m examples.gpt2.train", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    try:
        if config.compare:
            compare(config, run, DivergedError)
        else:
            run(config)
    except (UsageError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        hint = "the same command" if config.compare else "--resume"
        known = f"{interruption}: {hint} goes on from there" if interruption.args else "interrupted"
        print(known, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
