"""Fine-tunes GPT-2 on a task of GLUE or on SQuAD: `python -m examples.gpt2.finetune --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `best/` with the
parameters that scored best, and their predictions in the form in which they are submitted.
Ctrl-C saves a checkpoint first; `--resume` goes on from the last one.
"""

import logging
import sys

import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data import DataError
from examples.gpt2.finetuning.compare import compare
from examples.gpt2.finetuning.config import Config
from examples.gpt2.finetuning.run import run
from examples.gpt2.hugging_face import CheckpointError
from examples.gpt2.metrics import DivergedError
from examples.gpt2.tokens import TokenizerError


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 diverged, 2 bad input, 130 interrupted."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells each step of its work
    name, flags = "python -m examples.gpt2.finetune", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    try:
        if config.compare:
            compare(config)
        else:
            run(config)
    except (UsageError, DataError, CheckpointError, TokenizerError) as error:
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
