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


def exit_code(work: Callable[[], object], goes_on_by: str | None) -> int:
    """Does the work of a program.

    Args:
      work: What is to be done.
      goes_on_by: The option that goes on where the work was interrupted; None where nothing of an
        unfinished run is kept, and the same command repeats it.

    Returns:
      0, also after SIGTERM once that has saved a run; 1 if it diverged; 2 for bad input, and for
      files and folders that cannot be used; 130 after Ctrl-C, 143 after SIGTERM with nothing saved.
      With a line on the standard error, but where it is done.
    """

    def said(interruption: KeyboardInterrupt, word: str) -> str:
        if not interruption.args:
            return word
        if goes_on_by is None:
            return f"{interruption}: the same command repeats this run, not those before it"
        return f"{interruption}: {goes_on_by} goes on from there"

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
        print(said(termination, "terminated; nothing was saved"), file=sys.stderr)
        return 0 if termination.args and goes_on_by is not None else 128 + signal.SIGTERM
    except KeyboardInterrupt as interruption:
        print(said(interruption, "interrupted"), file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _terminate(number: int, frame: Any) -> None:
    raise Terminated
