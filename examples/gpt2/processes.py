"""A run of several processes: where they meet, what they agree on, and how they end.

JAX aborts all processes of a run when one of them is lost, whatever they do. So each command
starts another process for the work, and is left to say what became of it.
"""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.gpt2.config import Processes, UsageError

TIME_TO_MEET = 40  # seconds until all processes must be there
HEARTBEAT = 30  # seconds without a sign of life after which a process is lost


def watched(module: str, arguments: Sequence[str], processes: Processes) -> int:
    """Runs a module in a process of its own.

    Args:
      module: Its name; its main function calls `end_with_parent`.
      arguments: Of its command line.
      processes: Which one it is.

    Returns:
      Its exit code; 2, after a line, where it was aborted or killed.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    numbers = (signal.SIGINT, signal.SIGTERM)  # for the child alone: a terminal sends them to both
    previous = [signal.signal(number, lambda it, _: child.send_signal(it)) for number in numbers]
    try:
        code = child.wait()
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    if code >= 0:
        return code
    if -code in numbers:  # before it heard signals
        return 128 - code
    how = f"{processes}: ended by {signal.Signals(-code).name}"
    if -code == signal.SIGABRT:
        how += ", as JAX does when another one has ended; what that one said tells why"
    print(
        f"error: {how}; --resume, given to all, goes on if there is a checkpoint", file=sys.stderr
    )
    return 2


def end_with_parent() -> None:
    """Ends this process when the one that `watched` it is gone, however it went."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(2)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def connected(processes: Processes) -> Iterator[None]:
    """Within, JAX has the devices of all processes, and only the first one prints.

    Raises:
      UsageError: If they cannot meet. Where they do not in time, the process ends here, after a
        line, with 2.
    """

    def give_up() -> None:
        print(f"error: {processes}: not all came in {TIME_TO_MEET} s", file=sys.stderr)
        os._exit(2)

    late = threading.Timer(TIME_TO_MEET, give_up)
    late.daemon = True
    late.start()
    try:
        if processes.coordinator == "auto":
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
        else:
            _require_free(processes)
            jax.distributed.initialize(
                processes.coordinator,
                processes.count,
                processes.index,
                heartbeat_timeout_seconds=HEARTBEAT,
            )
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{processes}: {reason}") from None
    finally:
        late.cancel()
    with contextlib.ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield


def _require_free(processes: Processes) -> None:
    """Raises OSError where the first process cannot listen: JAX would abort it."""
    if processes.index == 0:
        port = int(str(processes.coordinator).rpartition(":")[2])
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))


def is_first() -> bool:
    """Whether this is the process that writes records and pictures for all."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def require_alike(given: dict[str, object]) -> None:
    """Raises UsageError, in all processes, where one of them was given something else.

    Args:
      given: The words of every option, by its name.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(item).encode()).digest()[:8] for item in given.items()]
    mine = np.frombuffer(b"".join(digests), np.int32).reshape(len(given), 2)
    of_all = multihost_utils.process_allgather(mine)
    differ = [name for i, name in enumerate(given) if (of_all[:, i] != of_all[0, i]).any()]
    if differ:
        raise UsageError(f"not all processes were given the same {', '.join(differ)}")


def by_first(work: Callable[[], object]) -> None:
    """Lets the first process do what one does for all; the others wait, and end where it fails.

    Raises:
      Exception: What the work raises; in the others a UsageError.
    """
    error: Exception | None = None
    if is_first():
        try:
            work()
        except Exception as raised:
            error = raised
    if from_first(error is not None):
        raise error or UsageError("the first process says why")


def from_first(number: int) -> int:
    """The number that the first process has, in all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def largest(number: int) -> int:
    """The largest of the numbers that the processes have."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())
