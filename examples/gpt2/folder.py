"""The folder of a run: one process at a time works in it, and nothing earlier is lost there."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

from examples.gpt2.checkpoints import free_name
from examples.gpt2.config import UsageError
from examples.gpt2.records import write_whole

LOCK = "process"  # the file that a process holds a lock on, with its number and machine


@contextlib.contextmanager
def run_folder(out: pathlib.Path, resume: bool, used: dict[str, Any]) -> Iterator[None]:
    """Makes the folder of a run, which is this process's within; an earlier run is kept beside it.

    Args:
      out: The folder.
      resume: Go on in it, in place of beginning anew.
      used: The settings, which are written there.

    Raises:
      UsageError: If the folder holds something else, nothing to resume, or the run of a process
        that has not ended.
    """
    if resume and not (out / "checkpoints").is_dir():
        raise UsageError(f"--resume: there is no checkpoint in {out}")
    with contextlib.ExitStack() as locks:
        if out.exists() and (not out.is_dir() or _holds_something(out)):
            if not resume and not (out / "settings.json").exists():
                raise UsageError(f"--out {out}: not a run's folder; give a new or an empty one")
            locks.enter_context(_locked(out))
            if not resume:
                kept = free_name(out)
                out.rename(kept)
                print(f"the earlier run in {out} is now {kept}")
        if not resume:
            out.mkdir(parents=True, exist_ok=True)
            locks.enter_context(_locked(out))
            write_settings(out, used)
        yield


def write_settings(out: pathlib.Path, used: dict[str, Any]) -> None:
    """Writes the settings of a run to its folder, whole or not at all."""
    write_whole(out / "settings.json", json.dumps(used, indent=2) + "\n")


def _holds_something(out: pathlib.Path) -> bool:
    return any(path.name != LOCK for path in out.iterdir())


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[None]:
    """Holds a lock that the system takes back when the process ends, however it ends."""
    with open(out / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UsageError(
                f"--out {out}: {holder} is at work there; give another folder, or wait for it"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
