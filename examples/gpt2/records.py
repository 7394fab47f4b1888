"""Files of JSON lines that a run may be stopped in the middle of writing."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none where it does not exist; a broken line is passed over."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a process was ended while it wrote
    return rows


def append(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds a line in one write, on a line of its own even after a broken one."""
    broken = path.exists() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * broken + json.dumps(row) + "\n")
