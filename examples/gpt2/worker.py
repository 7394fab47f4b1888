"""What each of several processes of `examples.gpt2.train` does, started by it."""

import os
import sys
import traceback

import jax

from examples.gpt2.command import exit_code
from examples.gpt2.config import Config, UsageError
from examples.gpt2.processes import connected, end_with_parent
from examples.gpt2.run import run
from examples.gpt2.train import parse


def work(config: Config) -> None:
    """Trains, together with the other processes."""
    with connected(config.processes):
        try:
            run(config)
        except jax.errors.JaxRuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            words = "--resume, given to all, goes on if another process was lost"
            raise UsageError(f"{config.processes}: {reason}; {words}") from None


def main() -> int:
    """Returns the exit code, as `command.exit_code` tells."""
    end_with_parent()
    config = parse(sys.argv[1:])
    code = 1
    try:
        code = exit_code(lambda: work(config), "--resume")
    except Exception:
        traceback.print_exc()
    if code:  # others may not have come to an end, and JAX would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
