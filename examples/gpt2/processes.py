"""A run of several processes: where they meet, and what they agree on.

JAX ends all processes of a run when one of them is lost; --resume, given to all, goes on.
"""

import contextlib
import hashlib
import io
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.gpt2.command import InputError, one_line
from examples.gpt2.config import Processes

TIME_TO_MEET = 40  # seconds until all processes must be there
HEARTBEAT = 30  # seconds without a sign of life after which a process is lost


@contextlib.contextmanager
def connected(processes: Processes) -> Iterator[None]:
    """Within, JAX has the devices of all processes, and only the first one prints.

    Raises:
      InputError: If they cannot meet.
    """
    if processes.coordinator is None:
        yield
        return
    address = None if processes.coordinator == "auto" else processes.coordinator
    try:
        jax.distributed.initialize(
            address,
            processes.count,
            processes.index,
            initialization_timeout=TIME_TO_MEET,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"--processes: {one_line(error)}") from None
    with contextlib.redirect_stdout(sys.stdout if is_first() else io.StringIO()):
        yield


def is_first() -> bool:
    """Whether this is the process that writes records and pictures for all."""
    return jax.process_index() == 0


def require_alike(given: object) -> None:
    """Raises InputError, in all processes, where one of them was given other options."""
    digest = hashlib.sha256(repr(given).encode()).digest()[:4]
    of_all = multihost_utils.process_allgather(np.frombuffer(digest, np.int32))
    if (of_all != of_all.reshape(-1)[0]).any():
        raise InputError("the processes were not all given the same options")


def by_first(work: Callable[[], object]) -> None:
    """Lets the first process do what one does for all; the others wait, and end where it fails.

    Raises:
      Exception: What the work raises; in the others an InputError.
    """
    error: Exception | None = None
    if is_first():
        try:
            work()
        except Exception as raised:
            error = raised
    if largest(error is not None):
        raise error or InputError("the first process says why")


def largest(number: int) -> int:
    """The largest of the numbers that the processes have."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())
