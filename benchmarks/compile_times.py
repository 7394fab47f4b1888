"""Processor seconds to compile an update of many leaves: `python -m benchmarks.compile_times`.

Contenders are compiled in turn, so that whatever slows the machine slows all of them, and figures
are medians. XLA compiles on several cores: processor seconds count all of them. A thousand leaves
take minutes, so that two contenders are compiled once.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from tqdm import tqdm

from benchmarks import records
from benchmarks.contenders import CONTENDERS

RESULT = records.RESULTS / "speed" / "compile_times_cpu.json"
_NAMES = ("adapprox", "adapprox 1 to 64", "adapprox 4 bits", "adapprox_muon 4 bits")
_MADE = {
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    **{name: CONTENDERS[name] for name in _NAMES},
}
_OF_MANY = ("adafactor", "adapprox")
_KINDS = ((200, 4), (200, 50), (1000, 1000))  # leaves, and shapes of these


def compile_seconds(make: Callable[[], Any], leaves: int, shapes: int) -> float:
    """Processor seconds to compile an update of small matrices of so many shapes."""
    transformation = make()
    sides = (64 + i % shapes for i in range(leaves))
    params = {f"w{i}": jax.ShapeDtypeStruct((64, n), jnp.float32) for i, n in enumerate(sides)}
    state = jax.eval_shape(transformation.init, params)
    lowered = jax.jit(transformation.update).lower(params, state, params)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def main(repeats: int = 3) -> None:
    """Measures, prints a table and writes JSON.

    Args:
      repeats: Of each contender.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    found: dict[str, dict[str, list[float]]] = {}
    wanted = [(number, kind) for number in range(repeats) for kind in _KINDS]
    for number, (leaves, shapes) in tqdm(wanted, unit="kind"):
        times = found.setdefault(f"{leaves} of {shapes} shapes", {})
        for name, make in _MADE.items():
            if leaves < 1000 or (number == 0 and name in _OF_MANY):
                times.setdefault(name, []).append(compile_seconds(make, leaves, shapes))
    medians = {
        kind: {name: statistics.median(seconds) for name, seconds in of_kind.items()}
        for kind, of_kind in found.items()
    }
    result = {**records.header(), "repeats": repeats, "seconds": medians}
    records.finish(RESULT, result, table(medians))


def table(medians: dict[str, dict[str, Any]]) -> str:
    """Seconds, and how many times Adafactor's they are."""
    titles = [""] + [
        f"{kind}: {what}" for kind in medians for what in ("seconds", "over adafactor")
    ]
    rows = []
    for name in next(iter(medians.values())):
        row = [name]
        for of_kind in medians.values():
            seconds = of_kind.get(name)
            ratio = f"{seconds / of_kind['adafactor']:.1f}" if seconds else ""
            row += [f"{seconds:.1f}" if seconds else "", ratio]
        rows.append(row)
    return records.table(titles, rows)


if __name__ == "__main__":
    tyro.cli(main)
