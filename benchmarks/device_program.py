"""The program of a step for an H100 that need not be there: `python -m benchmarks.device_program`.

Compiles update and `apply_updates`, with parameters and state donated, and counts kernels, library
calls, branches and bytes (`program_counts`). `make device-program` makes the environment that this
needs and runs it there. Results go to `results/speed/device_program_<model>.json`.
"""

import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from tqdm import tqdm

from benchmarks import records
from benchmarks.contenders import CONTENDERS
from benchmarks.h100 import compile_for_h100, is_available
from benchmarks.inputs import parameter_shapes
from benchmarks.program_counts import count
from benchmarks.steps import update_step

RESULTS = records.RESULTS / "speed"
STACKED = ", stacked"  # after a contender's name: with the layers' parameters in stacks
ROWS = (
    *("adamw", "adafactor", "adafactor 4 bits", "came"),
    *("muon", "adapprox_muon", "adapprox_muon rank 8"),
    "adapprox_muon 4 bits",
    *("adapprox", "adapprox rank 16", "adapprox 8 bits", "adapprox 4 bits", "adapprox 1 to 64"),
    *(f"adapprox{STACKED}", f"adapprox rank 16{STACKED}"),
)


def stacked(shapes: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters with those of all layers stacked along a first axis."""
    layers: dict[str, list[jax.ShapeDtypeStruct]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = jax.tree_util.keystr(tuple(key for key in path if not isinstance(key.key, int)))
        layers.setdefault(name, []).append(leaf)
    return {
        name: jax.ShapeDtypeStruct(
            (len(of), *of[0].shape) if len(of) > 1 else of[0].shape, of[0].dtype
        )
        for name, of in layers.items()
    }


def program_of(tx: optax.GradientTransformation, shapes: Any) -> Any:
    """The compiled step of an optimizer for parameters of these shapes, in float32."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)

    state = jax.eval_shape(tx.init, params)
    return compile_for_h100(update_step(tx), params, params, state, donate_argnums=(1, 2))


def record_of(name: str, shapes: Any) -> dict[str, Any]:
    """The counts of one row; the longest branch is a step that chooses ranks."""
    contender = name.removesuffix(STACKED)
    start = time.perf_counter()
    compiled = program_of(CONTENDERS[contender](), stacked(shapes) if name != contender else shapes)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    counts, longest = count(text), count(text, branch="longest")
    return {
        "kernels": counts.kernels,
        "library_calls": counts.library_calls,
        "library_calls_of_longest_branch": longest.library_calls,
        "decompositions": longest.decompositions,
        "branches": longest.branches,
        "loops_of_unknown_length": longest.loops_of_unknown_length,
        "gb_moved": counts.nbytes / 1e9,
        "roofline_ms": 1e3 * counts.seconds,
        "roofline_ms_of_longest_branch": 1e3 * longest.seconds,
        "temporaries_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "compile_seconds": seconds,
    }


def main(
    model: Literal["tiny", "117M", "345M"] = "117M",
    rows: tuple[str, ...] = ROWS,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Compiles each optimizer's step, prints a table and writes JSON.

    Args:
      model: The model with the parameters.
      rows: Names from `benchmarks/contenders.py`; ", stacked" behind a name stacks the layers.
      output: File for the JSON.
    """
    unknown = [name for name in rows if name.removesuffix(STACKED) not in CONTENDERS]
    if unknown:
        allowed = ", ".join(CONTENDERS)
        raise SystemExit(f"rows has {unknown}; allowed: {allowed}, with {STACKED!r} after it too.")
    if not is_available():
        raise SystemExit("jax-cuda12-plugin is not installed here; `make device-program` does it.")
    shapes = parameter_shapes(model)
    result = {
        **records.header(),
        "device": "H100, from its description",
        "records": {},
    }
    path = output or RESULTS / f"device_program_{model}.json"
    for name in tqdm(rows, unit="program"):
        result["records"][name] = record_of(name, shapes)
        records.write(path, result)
    print(table(result["records"]))
    print(f"written: {path}")
    return result


def table(rows: dict[str, dict[str, Any]]) -> str:
    """A row for each program, with its roofline over that of the first one."""
    first = next(iter(rows))
    titles = ["", "kernels", "library calls", "branches", "GB moved", "roofline ms"]
    titles += [f"over {first}", "with a choice of ranks, ms", "temporaries MiB"]
    cells = []
    for name, r in rows.items():
        longest = r["roofline_ms_of_longest_branch"]
        counts = [str(r[key]) for key in ("kernels", "library_calls", "branches")]
        times = [f"{r['gb_moved']:.2f}", f"{r['roofline_ms']:.2f}"]
        times += [f"{r['roofline_ms'] / rows[first]['roofline_ms']:.2f}"]
        times += [f"{longest:.2f}" if r["branches"] else ""]
        cells.append([name, *counts, *times, f"{r['temporaries_mib']:.0f}"])
    return records.table(titles, cells)


if __name__ == "__main__":
    tyro.cli(main)
