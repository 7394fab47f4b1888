"""Records of benchmarks: files, tables, and what all of them hold."""

import json
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parents[1] / "results"
MIB = 2**20


def name_of_device(device: str) -> str:
    """The name of a device as part of a file name."""
    return re.sub(r"\W+", "_", device).lower()


def header() -> dict[str, str]:
    """The command that makes a record, and what it runs on."""
    name = pathlib.Path(sys.argv[0]).stem
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def write(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a record as JSON, and makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def finish(path: pathlib.Path, record: dict[str, Any], text: str) -> None:
    """Writes a whole record, and prints its table and where it is."""
    write(path, record)
    print(f"{text}\nwritten: {path}")


def check_names(argument: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Ends the program if an argument has a name that is not allowed."""
    allowed = list(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"{argument} has {unknown}; allowed: {'; '.join(allowed)}.")


def read(path: pathlib.Path) -> Any:
    """What `write` wrote."""
    return json.loads(path.read_text())


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: the first column to the left, all others to the right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, float]]:
    """A compiled program, the seconds it took, and MiB as its compiler plans them.

    The peak is arguments, results and temporaries, less what shares memory.
    """
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    temporaries = memory.temp_size_in_bytes / MIB
    record = {"temporaries_mib": temporaries, "peak_mib": peak / MIB, "compile_seconds": seconds}
    return program, record
