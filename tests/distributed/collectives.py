"""What a compiled program moves between devices, read from its text."""

import math
import re
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_OPERATION = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class Collective(NamedTuple):
    """One operation: its kind, and the numbers of each array that it gives."""

    kind: str
    sizes: tuple[int, ...]


def collectives_of(text: str) -> list[Collective]:
    """The collective operations in the text of a compiled program, those of a loop once."""
    found = []
    for line in text.splitlines():
        match = _OPERATION.search(line)
        if match:
            shapes = _SHAPE.findall(match[1])
            sizes = (math.prod(int(x) for x in shape.split(",") if x) for shape in shapes)
            found.append(Collective(match[2], tuple(sizes)))
    return found


def numbers_moved(found: list[Collective]) -> int:
    """Numbers in the results of all of them."""
    return sum(sum(one.sizes) for one in found)
