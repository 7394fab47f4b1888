"""What the programs' command lines share: how an ending becomes a line and an exit code."""

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

from examples.gpt2.checkpoints import StorageError
from examples.gpt2.config import UsageError
from examples.gpt2.data import DataError
from examples.gpt2.hugging_face import CheckpointError
from examples.gpt2.loop import Terminated
from examples.gpt2.metrics import DivergedError
from examples.gpt2.tokens import TokenizerError


def exit_code(work: Callable[[], object], goes_on_by: str) -> int:
    """Does the work of a program.

    Args:
      work: What is to be done.
      goes_on_by: What goes on where the work was interrupted, in words.

    Returns:
      0, also after SIGTERM; 1 if it diverged; 2 for bad input, and for files and folders that
      cannot be used; 130 after Ctrl-C. With a line on the standard error, but where it is done.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells each step of its work
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        work()
    except (UsageError, DataError, CheckpointError, StorageError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except Terminated as termination:
        known = f"{termination}: {goes_on_by} goes on from there" if termination.args else ""
        print(known or "terminated", file=sys.stderr)
        return 0
    except KeyboardInterrupt as interruption:
        known = f"{interruption}: {goes_on_by} goes on from there" if interruption.args else ""
        print(known or "interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _terminate(number: int, frame: Any) -> None:
    raise Terminated
