"""Memory of optimizer states, beside the paper's Table 2: `python -m benchmarks.memory_table`.

States are made under `jax.eval_shape` and steps are compiled for abstract values, so that nothing
is allocated. With `--peak` the peak of the whole training step follows, by what the compiler plans
(`memory_analysis`). Results go to `results/memory/memory_table.json` and
`results/memory/memory_peak_<device>.json`.
"""

import dataclasses
import functools
import math
import pathlib
import shlex
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from benchmarks import record_files
from benchmarks.contenders import DECAY, RATE, adafactor
from benchmarks.inputs import parameter_shapes
from examples.gpt2.model import CONFIGS, GPT, loss
from examples.opponents.came import came

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "memory"
MODELS = ("117M", "345M")
FIRST_MOMENTS = (0.9, 0.0)

# MiB of the paper's Table 2 by model and b1; None where it has no such run.
PAPER_MIB: dict[tuple[str, float], dict[str, float | None]] = {
    ("117M", 0.9): {
        "AdamW": 949.7,
        "Adafactor": 476.1,
        "CAME": 476.8,
        "Adapprox (k_init)": 476.1,
        "Adapprox (k_max)": 622.0,
    },
    ("117M", 0.0): {
        "AdamW": 949.7,
        "Adafactor": 1.2,
        "CAME": None,
        "Adapprox (k_init)": 1.2,
        "Adapprox (k_max)": 147.2,
    },
    ("345M", 0.9): {
        "AdamW": 2707.5,
        "Adafactor": 1356.7,
        "CAME": 1358.4,
        "Adapprox (k_init)": 1356.7,
        "Adapprox (k_max)": 1791.1,
    },
    ("345M", 0.0): {
        "AdamW": 2707.5,
        "Adafactor": 2.9,
        "CAME": None,
        "Adapprox (k_init)": 2.9,
        "Adapprox (k_max)": 437.4,
    },
}


def paper_adapprox(b1: float, max_rank: int | float) -> optax.GradientTransformation:
    """Adapprox with the paper's settings and another width of the buffers."""
    return adapprox_jax.adapprox(
        RATE, b1=b1, weight_decay=DECAY, **{**adapprox_jax.PAPER, "max_rank": max_rank}
    )


# Rows of the table: from b1 to the optimizer. AdamW keeps its first moment where b1 is 0.
ROWS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "AdamW": lambda b1: optax.adamw(RATE, b1=b1, weight_decay=DECAY),
    "Adafactor": lambda b1: adafactor(b1=b1),
    "CAME": lambda b1: came(RATE, b1=b1, weight_decay=DECAY),
    "Adapprox (k_init)": lambda b1: paper_adapprox(b1, adapprox_jax.PAPER["initial_rank"]),
    "Adapprox (k_max)": lambda b1: paper_adapprox(b1, adapprox_jax.PAPER["max_rank"]),
}

# Rows that the paper does not have, with a first moment.
OURS: dict[str, Callable[[], optax.GradientTransformation]] = {
    f"Adapprox, rank {rank}{words}": functools.partial(
        adapprox_jax.adapprox, RATE, weight_decay=DECAY, max_rank=rank, mu_dtype=dtype
    )
    for rank in (8, 16)
    for words, dtype in {
        "": None,
        ", average in bfloat16": jnp.bfloat16,
        ", average in 8 bits": jnp.int8,
        ", average in 4 bits": jnp.int4,
    }.items()
}

# Rows of the peaks. "A quarter" of the smaller side is a fixed rank: all columns in use.
PEAK_ROWS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: ROWS["AdamW"](0.9),
    "Adafactor": lambda: ROWS["Adafactor"](0.9),
    "CAME": lambda: ROWS["CAME"](0.9),
    **OURS,
    "Adapprox, a quarter": lambda: adapprox_jax.adapprox(RATE, weight_decay=DECAY, max_rank=0.25),
}


def nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of `jax.ShapeDtypeStruct`s."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bookkeeping_nbytes(state: Any) -> int | None:
    """Bytes of Adapprox's state that are no factors and no second moment.

    Args:
      state: Of any optimizer; its arrays may be abstract.

    Returns:
      The bytes of the count, key, ranks, errors and drifts; None where none of it is Adapprox's.
    """
    states = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, adapprox_jax.ScaleByAdapproxState)
    )
    found = [s for s in states if isinstance(s, adapprox_jax.ScaleByAdapproxState)]
    if not found:
        return None
    rest = [s._replace(q=None, u=None, nu=None) for s in found]
    return nbytes(rest)


def state_records(model: str, b1: float) -> dict[str, dict[str, Any]]:
    """What each optimizer's state takes, beside the paper's figure.

    Args:
      model: A row of the paper's Table 1.
      b1: Decay of the first moment.

    Returns:
      A dict from the name of the row to its record; rows that the paper leaves out are left out.
    """
    shapes = parameter_shapes(model)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    papers = {name: mib for name, mib in PAPER_MIB[model, b1].items() if mib is not None}
    optimizers = {name: ROWS[name](b1) for name in papers}
    if b1:
        optimizers |= {name: make() for name, make in OURS.items()}
    records = {}
    for name, tx in optimizers.items():
        state = jax.eval_shape(tx.init, shapes)
        records[name] = {
            "mib": nbytes(state) / record_files.MIB,
            "paper_mib": papers.get(name),
            "bytes_a_parameter": nbytes(state) / parameters,
            "bookkeeping_bytes": bookkeeping_nbytes(state),
        }
    return records


def peak_record(tx: optax.GradientTransformation, model: str, batch: int) -> dict[str, float]:
    """Compiles a training step in float32, with parameters and state donated, and never runs it.

    Args:
      tx: The optimizer.
      model: A key of `examples.gpt2.model.CONFIGS`.
      batch: Sequences of the step.

    Returns:
      MiB of the state, of the step's temporaries and of its peak: arguments, results and
      temporaries less what shares memory; and the seconds that compiling took.
    """
    config = dataclasses.replace(CONFIGS[model], dtype="float32")
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    state = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, tokens)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return {
        "state_mib": adapprox_jax.state_nbytes(tx, params) / record_files.MIB,
        **record_files.planned_memory(compiled),
        "compile_seconds": seconds,
    }


def add_shares(records: dict[str, dict[str, float]]) -> None:
    """Adds to each record but AdamW's how much of its state's saving is one of the peak too."""
    base = records["AdamW"]
    for name, record in records.items():
        if name != "AdamW":
            saved = base["state_mib"] - record["state_mib"]
            record["share_of_saving"] = (base["peak_mib"] - record["peak_mib"]) / saved


def main(
    peak: bool = False,
    peak_model: Literal["tiny", "117M", "345M"] = "117M",
    batch: int = 1,
    folder: pathlib.Path = RESULTS,
) -> dict[str, Any]:
    """Prints the table, with the peaks if asked for, and writes JSON.

    Args:
      peak: Also compile training steps and print their peaks.
      peak_model: Whose training steps.
      batch: Sequences of the training step.
      folder: Where the JSON goes.
    """
    if batch < 1:
        raise SystemExit(f"{batch=}; allowed: an integer of at least 1.")
    device = jax.devices()[0].device_kind
    header = {"device": device, "jax": jax.__version__, "optax": optax.__version__}
    command = ["python", "-m", "benchmarks.memory_table"]
    tables = {
        model: {str(b1): state_records(model, b1) for b1 in FIRST_MOMENTS} for model in MODELS
    }
    for model, of_model in tables.items():
        for b1, records in of_model.items():
            print(f"{model}, b1 = {b1}")
            print_states(records)
    result = {"command": shlex.join(command), **header, "records": tables}
    _write(folder / "memory_table.json", result)
    if not peak:
        return {"states": result}
    bar = tqdm(PEAK_ROWS.items(), unit="contender")
    peaks = {name: peak_record(make(), peak_model, batch) for name, make in bar}
    add_shares(peaks)
    print(f"training step of {peak_model}, float32, batch {batch}, {device}")
    print_peaks(peaks)
    command += ["--peak", "--peak-model", peak_model, "--batch", str(batch)]
    peak_result = {"command": shlex.join(command), **header, "records": {peak_model: peaks}}
    kind = record_files.name_of_device(device)
    _write(folder / f"memory_peak_{kind}.json", peak_result)
    return {"states": result, "peaks": peak_result}


def _write(path: pathlib.Path, result: dict[str, Any]) -> None:
    record_files.write(path, result)
    print(f"written: {path}")


def print_states(records: dict[str, dict[str, Any]]) -> None:
    """Prints one line an optimizer."""
    print("| | MiB | paper, MiB | bytes per parameter | bookkeeping, bytes |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, r in records.items():
        bookkeeping = r["bookkeeping_bytes"]
        paper = "" if r["paper_mib"] is None else f"{r['paper_mib']:.1f}"
        cells = [f"{r['mib']:.1f}", paper, f"{r['bytes_a_parameter']:.3f}"]
        cells += ["" if bookkeeping is None else f"{bookkeeping}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_peaks(records: dict[str, dict[str, float]]) -> None:
    """Prints one line an optimizer."""
    print("| | state MiB | temporaries MiB | peak MiB | of the state's saving | compile s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, r in records.items():
        share = f"{100 * r['share_of_saving']:.1f} %" if "share_of_saving" in r else ""
        cells = [f"{r['state_mib']:.1f}", f"{r['temporaries_mib']:.1f}", f"{r['peak_mib']:.1f}"]
        print(f"| {name} | " + " | ".join([*cells, share, f"{r['compile_seconds']:.0f}"]) + " |")


if __name__ == "__main__":
    tyro.cli(main)
