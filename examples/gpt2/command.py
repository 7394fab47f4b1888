"""How a program ends: errors that are the user's to mend, signals, and exit codes."""

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax


class InputError(ValueError):
    """What was given cannot be used; one line says what, where and what is allowed."""


class DivergedError(RuntimeError):
    """A loss is not finite."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, as schedulers do before they take a machine away."""


def exit_code(work: Callable[[], object]) -> int:
    """Does the work of a program and says in a line why it ended early.

    Returns:
      0, also after SIGTERM once the run is saved; 1 if it diverged; 2 for bad input and for files
      and devices that cannot be used; 130 after Ctrl-C; 143 after SIGTERM with nothing saved.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports each step of its work
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        work()
    except InputError as error:
        return _end(2, f"error: {error}")
    except DivergedError as error:
        return _end(1, f"stopped: {error}")
    except jax.errors.JaxRuntimeError as error:
        return _end(2, f"error: {one_line(error)}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _end(2, f"error: {where}{error.strerror or error}")
    except Terminated as saved:
        return _end(0 if saved.args else 143, str(saved) or "terminated; nothing was saved")
    except KeyboardInterrupt as saved:
        return _end(130, str(saved) or "interrupted")
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def one_line(error: object) -> str:
    """The words of an error, on one line of moderate length."""
    return " ".join(str(error).split())[:200]


def _end(code: int, line: str) -> int:
    print(line, file=sys.stderr)
    return code


def _terminate(number: int, frame: Any) -> None:
    raise Terminated
