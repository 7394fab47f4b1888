"""Operations of a compiled program that move data between devices, read from its text."""

import re
from typing import NamedTuple

from benchmarks.program_counts import (
    Computations,
    Instruction,
    branches_of,
    computations_of,
    nbytes_of,
)

_KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


class Collective(NamedTuple):
    """An operation between devices, with the arrays that each device has after it."""

    kind: str
    shape: str
    times: int  # in one execution of the program

    @property
    def nbytes(self) -> int:
        """Bytes of its results in one execution of the program."""
        return self.times * nbytes_of(self.shape)


def collectives_of(text: str) -> list[Collective]:
    """The operations between devices in one execution of a program; all branches are taken.

    Args:
      text: The optimized program, `compiled.as_text()`.
    """
    return _within(computations_of(text), "ENTRY", 1)


def _within(computations: Computations, name: str, times: int) -> list[Collective]:
    found = []
    for instruction in computations.get(name, ()):
        kind = instruction.operation.removesuffix("-start")
        if kind in _KINDS:
            found.append(Collective(kind, _result(instruction), times))
        trips = int(instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
        body = instruction.attribute(r"body=%([\w.\-]+)")
        for called in (body, *branches_of(instruction)):
            found += _within(computations, called, times * trips)
    return found


def _result(instruction: Instruction) -> str:
    """The shape of the results.

    Where an operation runs beside other work, its operands may stand before its results.
    """
    shape = instruction.shape
    kind = instruction.operation
    has_operands = kind in ("all-gather-start", "collective-permute-start") or "((" in shape
    if not (kind.endswith("-start") and has_operands):
        return shape
    arrays = re.findall(r"\w+\[[\d,]*\]", shape)
    return " ".join(arrays[len(arrays) // 2 :])
