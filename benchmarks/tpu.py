"""Compiles programs for TPUs that need not be there, and reads what their compiler expects.

This needs the wheel `libtpu`, which runs as a compiler without a TPU (`make device-program`
installs it). Times are the compiler's own estimates: cycles of each operation, one after the other.
"""

import importlib.util
import math
import os
import re
from typing import Any

# Before JAX looks for TPUs of this host, of which there are none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies

from benchmarks.program_counts import Computations, branches_of, computations_of

CLOCK = {"v5e": 1.5e9, "v6e": 1.75e9}  # cycles a second
_TOPOLOGY = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 256: "16x16"}


def is_available() -> bool:
    """Whether the compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def mesh_of_tpus(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh of TPUs that need not be there.

    Args:
      kind: "v5e", "v6e" or "v5p".
      shape: Devices along each axis.
      names: Names of the axes.
    """
    devices = math.prod(shape)
    alone: dict[str, Any] = {"chips_per_host_bounds": [1, 1, 1], "num_slices": 1}
    flat = f"{kind}:{_TOPOLOGY[devices]}"
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{flat}x1" if kind == "v5p" else flat,  # whose chips have three neighbours
        **(alone if devices == 1 else {}),
    )
    return topologies.make_mesh(described, shape, names)


def figures(compiled: Any, kind: str) -> dict[str, Any]:
    """Time by the compiler's cycles, and counts, of one execution of a program.

    A step that chooses ranks takes the longest branch; both are given.
    """
    computations = computations_of(compiled.as_text())
    shortest, longest = (
        _cycles(computations, "ENTRY", choose) / CLOCK[kind] * 1e3 for choose in (min, max)
    )
    operations = [one.operation for one in computations["ENTRY"]]
    return {
        "ms": shortest,
        "ms_of_longest_branch": longest,
        "fusions": operations.count("fusion"),
        "loops": sum(one.operation == "while" for of in computations.values() for one in of),
        "branches": operations.count("conditional"),
    }


def _cycles(computations: Computations, name: str, choose: Any) -> float:
    total = 0.0
    for one in computations.get(name, ()):
        total += float(one.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        if one.operation == "while":
            condition = computations.get(one.attribute(r"condition=%([\w.\-]+)"), ())
            # The largest constant that the counter is compared with.
            numbers = [c.rest for c in condition if c.operation == "constant"]
            limits = [int(x) for rest in numbers for x in re.findall(r"^(\d+)\)", rest)]
            body = one.attribute(r"body=%([\w.\-]+)")
            total += max(limits, default=1) * _cycles(computations, body, choose)
        elif one.operation == "conditional":
            branches = branches_of(one)
            total += choose(_cycles(computations, branch, choose) for branch in branches)
    return total
