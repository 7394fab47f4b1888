"""Files that a run may be stopped in the middle of writing, and JSON of others."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects in the lines of a file, none where it does not exist; others are passed over."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a process was ended while it wrote
        if isinstance(row, dict):
            rows.append(row)
    return rows


def append(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds a line in one write, on a line of its own even after a broken one."""
    broken = path.exists() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * broken + json.dumps(row) + "\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file that is there whole, or as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def as_in_json(value: Any) -> Any:
    """What JSON makes of a value: lists of tuples."""
    return json.loads(json.dumps(value))


def quoted(given: object, most: int = 80) -> str:
    """What was given, for a message: on one line, cut where it is long."""
    words = repr(given)
    return words if len(words) <= most else f"{words[:most]}..."


def read_json(file: pathlib.Path, error: type[ValueError]) -> Any:
    """What a JSON file holds; where it cannot be read the error, in a line with file and place."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as reason:
        raise error(f"{file}: cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError:
        raise error(f"{file}: not UTF-8 text") from None
    except json.JSONDecodeError as reason:
        at = f"line {reason.lineno}, column {reason.colno}"
        raise error(f"{file}, {at}: not JSON: {reason.msg}") from None
    except (ValueError, RecursionError):
        raise error(f"{file}: has numbers or brackets beyond all measure") from None
