"""An optimizer's step on hundreds of devices that need not be there: `python -m benchmarks.scale`.

Compiles update and `apply_updates` for abstract parameters of a Llama-shaped model in bfloat16,
with stacked layers divided over a mesh. Counts what each device would hold and move, and how long
compilation takes. H100s and TPUs need the compilers that `make device-program` sets up. Results go
to `results/scale/<model>_<platform>.json`.
"""

import collections
import math
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import adapprox_jax
from adapprox_jax.state.report import shaped_nbytes, tree_nbytes
from benchmarks import records
from benchmarks.collectives import collectives_of
from benchmarks.contenders import CONTENDERS
from benchmarks.device_program import DEVICES, device_of
from benchmarks.program_counts import count
from benchmarks.steps import update_step

RESULTS = records.RESULTS / "scale"
AXES = ("fsdp", "tensor")


class Llama(NamedTuple):
    """Sizes of a model."""

    layers: int
    width: int
    inner: int
    heads: int  # of 128 numbers each
    key_value_heads: int
    vocabulary: int = 128_256


LLAMAS = {
    "tiny": Llama(2, 256, 512, 2, 1, 1024),
    "160M": Llama(12, 768, 2048, 6, 6, 50_304),  # layers as large as GPT-2's of 117M
    "8B": Llama(32, 4096, 14_336, 32, 8),
    "70B": Llama(80, 8192, 28_672, 64, 8),
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    name: CONTENDERS[name]
    for name in (
        *("adamw", "adafactor", "muon"),
        *("adapprox", "adapprox 4 bits", "adapprox_muon", "adapprox_muon 4 bits"),
    )
}


def parameters(sizes: Llama, mesh: Mesh | Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract parameters of a model, divided by full sharding and tensor parallelism.

    Args:
      sizes: Sizes of the model.
      mesh: A mesh with the axes "fsdp" and "tensor".
    """
    layers, width, inner = sizes.layers, sizes.width, sizes.inner
    queries, keys = 128 * sizes.heads, 128 * sizes.key_value_heads
    into, out_of = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    shapes = {
        "tokens": ((sizes.vocabulary, width), P("tensor", "fsdp")),
        "q": ((layers, width, queries), into),
        "k": ((layers, width, keys), into),
        "v": ((layers, width, keys), into),
        "o": ((layers, queries, width), out_of),
        "gate": ((layers, width, inner), into),
        "up": ((layers, width, inner), into),
        "down": ((layers, inner, width), out_of),
        "norm_1": ((layers, width), P()),
        "norm_2": ((layers, width), P()),
        "norm": ((width,), P()),
        "head": ((width, sizes.vocabulary), P("fsdp", "tensor")),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }


def record_of(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh, platform: str
) -> dict[str, Any]:
    """Memory, work and communication of a step, on each device of a mesh.

    Args:
      tx: The optimizer.
      params: Abstract parameters with shardings.
      mesh: The mesh of these shardings.
      platform: The devices.

    Returns:
      Sizes in MiB, numbers of kernels and collectives, and MiB that are moved: by kind, and in
      percent of a reduction of the gradients that a device works out. For accelerators also
      milliseconds, without those of what is moved.
    """
    shardings = adapprox_jax.state_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )

    placed = jax.tree.map(lambda x: x.sharding, params)
    start = time.process_time()
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(update_step(tx), donate_argnums=(0, 1), out_shardings=(placed, shardings))
            .lower(params, state, params)
            .compile()
        )
    seconds = time.process_time() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    moved: dict[str, int] = collections.Counter()
    number = 0
    for one in collectives_of(text):
        moved[one.kind] += one.nbytes
        number += one.times
    gradients = tree_nbytes(params) / mesh.shape["tensor"]
    of_state = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    return {
        "state_mib": sum(shaped_nbytes(s.shard_shape(x.shape), x.dtype) for x, s in of_state)
        / records.MIB,
        "temporaries_mib": memory.temp_size_in_bytes / records.MIB,
        "kernels": count(text).kernels,
        "collectives": number,
        "mib_moved": {kind: nbytes / records.MIB for kind, nbytes in moved.items()},
        "percent_of_gradients": 100 * sum(moved.values()) / gradients,
        "compile_processor_seconds": seconds,
        **({"ms": DEVICES[platform].figures(compiled)["ms"]} if platform != "cpu" else {}),
    }


def main(
    model: Literal["tiny", "8B", "70B"] = "8B",
    meshes: tuple[str, ...] = ("4x4", "16x16"),
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS),
    platform: Literal["cpu", "h100", "v5e", "v6e"] = "cpu",
    output: pathlib.Path | None = None,
) -> None:
    """Compiles the steps, prints a table and writes JSON.

    Args:
      model: The model with the parameters.
      meshes: Devices along the axes "fsdp" and "tensor", such as 8x4.
      optimizers: Names of `OPTIMIZERS`.
      platform: The devices that they are compiled for.
      output: File for the JSON.
    """
    records.check_names("optimizers", optimizers, OPTIMIZERS)
    if not meshes or not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", mesh) for mesh in meshes):
        raise SystemExit(f"{meshes=}; allowed: pairs of numbers such as 8x4.")
    device = device_of(platform)
    shapes = {mesh: tuple(map(int, mesh.split("x"))) for mesh in meshes}
    most = max(map(math.prod, shapes.values()))
    if platform == "cpu" and jax.config.jax_num_cpu_devices < most:
        jax.config.update("jax_num_cpu_devices", most)
    result: dict[str, Any] = {**records.header(), "device": platform, "records": {}}
    path = output or RESULTS / f"{model}_{platform}.json"
    wanted = [(name, mesh) for mesh in meshes for name in optimizers]
    for name, words in tqdm(wanted, unit="program"):
        mesh = device.mesh(shapes[words], AXES)
        params = parameters(LLAMAS[model], mesh)
        record = record_of(OPTIMIZERS[name](), params, mesh, platform)
        result["records"].setdefault(words, {})[name] = record
        records.write(path, result)
    records.finish(path, result, table(result["records"]))


def table(of_meshes: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each mesh and optimizer. All figures are of one device."""
    titles = ["mesh", "", "state MiB", "temporaries MiB", "MiB moved", "% of gradients"]
    titles += ["collectives", "kernels", "ms", "compile, processor s"]
    rows = []
    for mesh, of_optimizers in of_meshes.items():
        for name, r in of_optimizers.items():
            cells = [mesh, name, f"{r['state_mib']:.0f}", f"{r['temporaries_mib']:.0f}"]
            cells += [f"{sum(r['mib_moved'].values()):.1f}", f"{r['percent_of_gradients']:.2f}"]
            cells += [str(r["collectives"]), str(r["kernels"])]
            cells += [f"{r['ms']:.1f}" if "ms" in r else ""]
            rows.append([*cells, f"{r['compile_processor_seconds']:.0f}"])
    return records.table(titles, rows)


if __name__ == "__main__":
    tyro.cli(main)
