"""What the programs' command lines share: how an ending becomes a line and an exit code."""

import logging
import sys
from collections.abc import Callable

from examples.gpt2.config import UsageError
from examples.gpt2.data import DataError
from examples.gpt2.hugging_face import CheckpointError
from examples.gpt2.metrics import DivergedError
from examples.gpt2.tokens import TokenizerError


def exit_code(work: Callable[[], object], goes_on_by: str) -> int:
    """Does the work of a program.

    Args:
      work: What is to be done.
      goes_on_by: What goes on where the work was interrupted, in words.

    Returns:
      0, 1 if it diverged, 2 for bad input, 130 if it was interrupted; all but 0 with a line on the
      standard error.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells each step of its work
    try:
        work()
    except (UsageError, DataError, CheckpointError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        known = f"{interruption}: {goes_on_by} goes on from there" if interruption.args else ""
        print(known or "interrupted", file=sys.stderr)
        return 130
    return 0
