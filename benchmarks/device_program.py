"""The program of a step for a device that need not be there: `python -m benchmarks.device_program`.

Compiles update and `apply_updates`, with parameters and state donated, for an H100 or a TPU, and
reads what the program says: for an H100 kernels, library calls, branches and bytes
(`program_counts`), for a TPU cycles (`tpu`). `make device-program` makes the environment that this
needs and runs it there. Results go to `results/speed/device_program_<model>_<device>.json`.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import tyro
from tqdm import tqdm

from benchmarks import h100, records, tpu
from benchmarks.inputs import check_rows, parameter_shapes, row
from benchmarks.steps import placed, update_step

RESULTS = records.RESULTS / "speed"
_ROWS_IN_BFLOAT16 = tuple(
    f"{name}, stacked, bfloat16"
    for name in ("adamw", "adapprox", "adapprox 4 bits", "muon", "adapprox_muon 4 bits")
)
_ROWS_OF_GPUS = (
    *("adamw", "adafactor", "adafactor 4 bits", "came"),
    *("muon", "adapprox_muon", "adapprox_muon rank 8"),
    "adapprox_muon 4 bits",
    *("adapprox", "adapprox rank 16", "adapprox 8 bits", "adapprox 4 bits", "adapprox 1 to 64"),
    *("adamw, stacked", "adapprox, stacked", "adapprox rank 16, stacked"),
    *("adapprox 4 bits, stacked", "muon, stacked", "adapprox_muon 4 bits, stacked"),
    *_ROWS_IN_BFLOAT16,
)
# Rows that are not stacked take minutes to compile.
_ROWS_OF_TPUS = (
    *("adamw, stacked", "adafactor, stacked", "adafactor 4 bits, stacked", "adapprox, stacked"),
    *("adapprox 8 bits, stacked", "adapprox 4 bits, stacked"),
    *("muon, stacked", "adapprox_muon, stacked", "adapprox_muon 4 bits, stacked", "adamw"),
    *_ROWS_IN_BFLOAT16,
)


class Device(NamedTuple):
    """A device that need not be there, and its compiler."""

    is_available: Callable[[], bool]
    mesh: Callable[[tuple[int, ...], tuple[str, ...]], jax.sharding.Mesh]
    figures: Callable[[jax.stages.Compiled], dict[str, Any]]
    columns: dict[str, str]  # of the table, by the names of figures
    rows: tuple[str, ...]


_OF_TPUS = {"ms": "ms", "fusions": "fusions", "loops": "loops", "branches": "branches"}
_OF_GPUS = {
    **{"kernels": "kernels", "library_calls": "library calls", "branches": "branches"},
    **{"gb_moved": "GB moved", "ms": "roofline ms"},
}


def _mesh_of_cpus(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, kinds, devices=jax.devices()[: math.prod(shape)])


DEVICES = {
    "cpu": Device(lambda: True, _mesh_of_cpus, lambda compiled: {}, {}, ()),
    "h100": Device(h100.is_available, h100.mesh_of_h100s, h100.figures, _OF_GPUS, _ROWS_OF_GPUS),
    **{
        kind: Device(
            tpu.is_available,
            functools.partial(tpu.mesh_of_tpus, kind),
            functools.partial(tpu.figures, kind=kind),
            _OF_TPUS,
            _ROWS_OF_TPUS,
        )
        for kind in ("v5e", "v5p", "v6e")
    },
}


def device_of(name: str) -> Device:
    """One of `DEVICES`; ends the program if its compiler is missing."""
    if not DEVICES[name].is_available():
        raise SystemExit(f"{name}: no compiler is installed here; `make device-program` does it.")
    return DEVICES[name]


def record_of(name: str, shapes: Any, device: Device) -> dict[str, Any]:
    """The figures of the update of one row."""
    tx, params = row(name, shapes)
    params, state = placed((params, jax.eval_shape(tx.init, params)), device.mesh((1,), ("x",)))
    start = time.process_time()
    step = jax.jit(update_step(tx), donate_argnums=(0, 1))
    compiled = step.lower(params, state, params).compile()
    return {
        **device.figures(compiled),
        "temporaries_mib": compiled.memory_analysis().temp_size_in_bytes / records.MIB,
        "compile_processor_seconds": time.process_time() - start,
    }


def main(
    device: Literal["h100", "v5e", "v6e"] = "h100",
    model: Literal["tiny", "117M", "345M"] = "117M",
    rows: tuple[str, ...] = (),
    output: pathlib.Path | None = None,
) -> None:
    """Compiles each optimizer's step, prints a table and writes JSON.

    Args:
      device: What is compiled for. The times of TPUs are v5e's or v6e's.
      model: The model with the parameters.
      rows: Names from `benchmarks/contenders.py`; ", stacked" behind a name stacks the layers, and
        ", bfloat16" is for parameters and gradients in bfloat16, ", split" for `split_weights`.
        Without any, those of the page.
      output: File for the JSON.
    """
    check_rows("rows", rows)
    target = device_of(device)
    shapes = parameter_shapes(model)
    path = output or RESULTS / f"device_program_{model}_{device}.json"
    result = {**records.header(), "device": f"{device}, from its description", "records": {}}
    for name in tqdm(rows or target.rows, unit="program"):
        result["records"][name] = record_of(name, shapes, target)
        records.write(path, result)
    records.finish(path, result, table(result["records"], device))


def table(rows: dict[str, dict[str, Any]], device: str) -> str:
    """A row for each program, with its time over that of AdamW for the same parameters."""
    columns = DEVICES[device].columns
    titles = ["", *columns.values(), "over AdamW", "with a choice of ranks, ms"]
    cells = []
    for name, r in rows.items():
        _, *words = name.split(", ")
        base = rows.get(", ".join(["adamw", *words]))
        figures = [str(x) if isinstance(x, int) else f"{x:.2f}" for x in map(r.get, columns)]
        figures += [f"{r['ms'] / base['ms']:.2f}" if base else ""]
        figures += [f"{r['ms_of_longest_branch']:.2f}" if r["branches"] else ""]
        seconds = f"{r['compile_processor_seconds']:.0f}"
        cells.append([name, *figures, f"{r['temporaries_mib']:.0f}", seconds])
    return records.table([*titles, "temporaries MiB", "compile, processor s"], cells)


if __name__ == "__main__":
    tyro.cli(main)
