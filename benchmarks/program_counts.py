"""Counts of a compiled GPU program, read from its text: kernels, calls, branches, bytes.

The time is a roofline, not a measurement. A kernel costs its bytes at the memory's bandwidth, or a
launch if that is more. A branch or a loop of unknown length costs a round trip to the host, and a
library's call what `CALLS` says. Floating-point work is left out. This is good for comparing two
programs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

# Of an H100, by its data sheet's bandwidth and what was seen on an H200: AdamW reaches 87 % of the
# bandwidth, a small kernel takes 1.6 us in a graph of kernels, and so do the kernels of a call.
BANDWIDTH = 0.87 * 3.35e12  # bytes a second
LAUNCH, ROUND_TRIP = 1.6e-6, 20e-6  # seconds
# Seconds of a library's call, whether it works on one small matrix or on a hundred. Those of other
# calls than Cholesky factors and triangular solves were not seen.
CALLS = {
    "gesvdj": 700e-6,
    "gesvd": 2000e-6,
    "syev": 300e-6,
    "potrf": 6e-6,
    "geqrf": 100e-6,
    "orgqr": 100e-6,
    "triangularSolve": 6e-6,
    "trsm": 6e-6,
}
DECOMPOSITIONS = ("gesvdj", "gesvd", "syev")
_NO_KERNELS = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "async-update", "async-done", "copy-done"),
}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def attribute(self, pattern: str) -> str:
        """The group of a pattern in the attributes; empty where there is none."""
        found = re.search(pattern, self.rest)
        return found.group(1) if found else ""


Computations = dict[str, list[Instruction]]


@dataclasses.dataclass
class Counts:
    """Counts of one execution of a program."""

    kernels: int = 0
    library_calls: int = 0
    decompositions: int = 0  # of these SVDs and eigendecompositions
    branches: int = 0
    loops_of_unknown_length: int = 0
    nbytes: int = 0  # read and written by kernels
    seconds: float = 0.0  # by the roofline

    def add(self, other: "Counts", times: int = 1) -> None:
        """Adds the counts of another part of the program, `times` times."""
        for field in dataclasses.fields(self):
            more = times * getattr(other, field.name)
            setattr(self, field.name, getattr(self, field.name) + more)


def count(text: str, choose: Callable[..., Any] = min) -> Counts:
    """Counts the work of one execution of a program.

    Args:
      text: Of the optimized program, `compiled.as_text()`.
      choose: `min` takes the shortest branch where there are several, `max` the longest.
    """
    return _count(computations_of(text), "ENTRY", choose)


def computations_of(text: str) -> Computations:
    """The computations of a program by name; the first one to run is ENTRY."""
    found: Computations = {}
    name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            name = "ENTRY" if head.group(1) else head.group(2)
            found[name] = []
        elif name:
            line_of = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)
            if line_of:
                found[name].append(Instruction(*line_of.groups()))
    return found


def _count(computations: Computations, name: str, choose: Any) -> Counts:
    total = Counts()
    shapes: dict[str, str] = {}
    for instruction in computations.get(name, ()):
        shapes[instruction.name] = instruction.shape
        if instruction.operation == "while":
            body = instruction.attribute(r"body=%([\w.\-]+)")
            trips = instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"')
            if not trips:
                total.add(Counts(loops_of_unknown_length=1, seconds=2 * ROUND_TRIP))
            total.add(_count(computations, body, choose), int(trips or 1))
        elif instruction.operation == "conditional":
            total.add(Counts(branches=1, seconds=ROUND_TRIP))
            branches = (_count(computations, one, choose) for one in branches_of(instruction))
            total.add(choose(branches, key=lambda counts: counts.seconds))
        elif instruction.operation in ("call", "async-start"):
            called = instruction.attribute(r"(?:to_apply|calls)=%([\w.\-]+)")
            total.add(_count(computations, called, choose))
        elif instruction.operation not in _NO_KERNELS:
            total.add(_kernel(computations, instruction, shapes))
    return total


def branches_of(conditional: Instruction) -> list[str]:
    """The names of the computations of a conditional."""
    named = conditional.attribute(r"branch_computations=\{([^}]*)\}")
    if named:
        return re.findall(r"%([\w.\-]+)", named)
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", conditional.rest)


def _kernel(computations: Computations, instruction: Instruction, shapes: dict[str, str]) -> Counts:
    nbytes = _bytes_moved(computations, instruction, shapes)
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    library = next((name for name in CALLS if name in target), None)
    if library is None:
        return Counts(kernels=1, nbytes=nbytes, seconds=max(nbytes / BANDWIDTH, LAUNCH))
    is_decomposition = library in DECOMPOSITIONS
    return Counts(1, 1, int(is_decomposition), nbytes=nbytes, seconds=CALLS[library])


def _bytes_moved(computations: Computations, kernel: Instruction, shapes: dict[str, str]) -> int:
    """Bytes read and written; of an array that is sliced or updated in place, only the part."""
    read = [nbytes_of(shapes.get(operand, "")) for operand in kernel.operands]
    written = nbytes_of(kernel.shape)
    inside = computations.get(kernel.attribute(r"calls=%([\w.\-]+)"), [])
    local = {one.name: one.shape for one in inside}
    index_of = {
        one.name: int(one.rest.split(")")[0]) for one in inside if one.operation == "parameter"
    }
    parameter_of = {name: name for name in index_of}  # bitcasts of a parameter are added
    parts: collections.Counter[str] = collections.Counter()
    whole: set[str] = set()
    for one in inside:
        used = [parameter_of[name] for name in one.operands if name in parameter_of]
        first = one.operands[0] if one.operands else ""
        if one.operation in ("bitcast", "reshape") and used:
            parameter_of[one.name] = used[0]
        elif one.operation == "dynamic-slice" and first in parameter_of:
            parts[used[0]] += nbytes_of(one.shape)
        elif one.operation == "dynamic-update-slice" and first in parameter_of:
            update = nbytes_of(local.get(one.operands[1], ""))
            parts[used[0]] += update
            written -= nbytes_of(one.shape) - update
            whole.update(parameter_of[x] for x in one.operands[1:] if x in parameter_of)
        else:
            whole.update(used)
    for name, index in index_of.items():
        if name not in whole and name in parts and index < len(read):
            read[index] = min(read[index], parts[name])
    return max(written, 0) + sum(read)


def nbytes_of(shape: str) -> int:
    """Bytes of the arrays in a shape, written as in the text of a program."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    total = 0
    for dtype, sizes in arrays:
        bits = re.search(r"\d+", dtype)
        numbers = math.prod(int(size) for size in sizes.split(",") if size)
        total += -(-numbers * (int(bits[0]) if bits else 8) // 8)
    return total
