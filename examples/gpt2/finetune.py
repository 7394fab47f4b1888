"""Fine-tunes GPT-2 on a task of GLUE or on SQuAD: `python -m examples.gpt2.finetune --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `best/` with the
parameters that scored best, and their predictions in the form in which they are submitted.
Ctrl-C saves a checkpoint first; `--resume` goes on from the last one.
"""

import sys

import tyro

from examples.gpt2.command import exit_code
from examples.gpt2.finetuning.compare import compare
from examples.gpt2.finetuning.config import Config
from examples.gpt2.finetuning.run import run


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 diverged, 2 bad input, 130 interrupted."""
    name, flags = "python -m examples.gpt2.finetune", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    if config.compare:
        return exit_code(lambda: compare(config), None)
    return exit_code(lambda: run(config), "--resume")


if __name__ == "__main__":
    sys.exit(main())
