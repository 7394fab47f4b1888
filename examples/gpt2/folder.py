"""The folder of a run: one process at a time works in it, and an earlier run there is kept."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

from examples.gpt2.command import InputError

LOCK = "process"  # a file with the number of the process that holds a lock on it


@contextlib.contextmanager
def run_folder(out: pathlib.Path, resume: bool, used: dict[str, Any]) -> Iterator[None]:
    """Makes the folder of a run and locks it; an earlier run there is moved to a folder beside it.

    Args:
      out: The folder.
      resume: Whether to go on in the folder instead of beginning anew.
      used: The settings, which are written there.

    Raises:
      InputError: If the folder holds something else, or nothing to resume, or if another process
        works in it.
    """
    if resume and not (out / "checkpoints").is_dir():
        raise InputError(f"--resume: there is no checkpoint in {out}")
    with contextlib.ExitStack() as locks:
        if out.exists() and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir())):
            if not resume and not (out / "settings.json").exists():
                raise InputError(f"--out {out}: not a run's folder; give a new or an empty one")
            locks.enter_context(_locked(out))
            if not resume:
                kept = free_name(out)
                out.rename(kept)
                print(f"the earlier run in {out} is now {kept}")
        if not resume:
            out.mkdir(parents=True, exist_ok=True)
            locks.enter_context(_locked(out))
            write_whole(out / "settings.json", json.dumps(used, indent=2) + "\n")
        yield


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that it is there whole, or as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def free_name(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, with a number appended where it exists already."""
    number, name = 1, path
    while name.exists():
        name = path.with_name(f"{path.name}.{number}")
        number += 1
    return name


@contextlib.contextmanager
def _locked(out: pathlib.Path) -> Iterator[None]:
    """Holds a lock that the system takes back when the process ends, however it ends."""
    with open(out / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"--out {out}: {holder} is at work there; give another folder, or wait for it"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
