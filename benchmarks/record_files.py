"""What the benchmarks have in common: records as files, and the memory that a program plans."""

import json
import pathlib
import re
from typing import Any

import jax

MIB = 2**20


def name_of_device(device: str) -> str:
    """The name of a device as a part of a file's."""
    return re.sub(r"\W+", "_", device).lower()


def write(path: pathlib.Path, result: dict[str, Any], indent: int | None = 1) -> None:
    """Writes a record as JSON, and makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=indent) + "\n")


def planned_memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Temporaries and peak of a compiled program in MiB, as its compiler plans them."""
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {"temporaries_mib": memory.temp_size_in_bytes / MIB, "peak_mib": peak / MIB}
