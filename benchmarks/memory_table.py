"""Memory of optimizer states, beside the paper's Table 2: `python -m benchmarks.memory_table`.

States come from `jax.eval_shape`, so that nothing is allocated. The record is
`results/memory/memory_table.json`.
"""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import adapprox_jax
from adapprox_jax.state.report import tree_nbytes
from benchmarks import records
from benchmarks.contenders import CONTENDERS, DECAY, RATE, adafactor, with_decay
from benchmarks.inputs import parameter_shapes
from benchmarks.opponents.came import scale_by_came

RESULTS = records.RESULTS / "memory"
MODELS = ("117M", "345M")
FIRST_MOMENTS = (0.9, 0.0)

# MiB of the paper's Table 2 in the order of `COLUMNS`; None where it has no such run.
COLUMNS = tuple((model, b1) for model in MODELS for b1 in FIRST_MOMENTS)
PAPER_MIB: dict[str, tuple[float | None, ...]] = {
    "AdamW": (949.7, 949.7, 2707.5, 2707.5),
    "Adafactor": (476.1, 1.2, 1356.7, 2.9),
    "CAME": (476.8, None, 1358.4, None),
    "Adapprox (k_init)": (476.1, 1.2, 1356.7, 2.9),
    "Adapprox (k_max)": (622.0, 147.2, 1791.1, 437.4),
}


def paper_adapprox(b1: float, max_rank: int | float) -> optax.GradientTransformation:
    """Adapprox with the paper's settings and buffers of another width."""
    return adapprox_jax.adapprox(
        RATE, b1=b1, weight_decay=DECAY, **{**adapprox_jax.PAPER, "max_rank": max_rank}
    )


# Rows of the paper's table, made from b1. AdamW keeps its first moment where b1 is 0.
ROWS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "AdamW": lambda b1: optax.adamw(RATE, b1=b1, weight_decay=DECAY),
    "Adafactor": lambda b1: with_decay(adafactor(b1)),
    "CAME": lambda b1: with_decay(scale_by_came(b1)),
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

# More rows of states.
BESIDE: dict[str, Callable[[], optax.GradientTransformation]] = {
    "Adafactor, average in 4 bits": CONTENDERS["adafactor 4 bits"],
    "Muon": CONTENDERS["muon"],
    "adapprox_muon": CONTENDERS["adapprox_muon"],
    "adapprox_muon, average in 4 bits": CONTENDERS["adapprox_muon 4 bits"],
}


def state_records(model: str, b1: float) -> dict[str, dict[str, Any]]:
    """The size of each optimizer's state, with the paper's figure.

    Args:
      model: A row of the paper's Table 1.
      b1: Decay of the first moment.

    Returns:
      A dict from the name of the row to its record.
    """
    shapes = parameter_shapes(model)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    column = COLUMNS.index((model, b1))
    papers = {name: row[column] for name, row in PAPER_MIB.items() if row[column] is not None}
    optimizers = {name: ROWS[name](b1) for name in papers}
    if b1:
        optimizers |= {name: make() for name, make in (OURS | BESIDE).items()}
    found = {}
    for name, tx in optimizers.items():
        state = jax.eval_shape(tx.init, shapes)
        found[name] = {
            "mib": tree_nbytes(state) / records.MIB,
            "paper_mib": papers.get(name),
            "bytes_a_parameter": tree_nbytes(state) / parameters,
        }
    return found


def main(folder: pathlib.Path = RESULTS) -> None:
    """Prints tables and writes JSON.

    Args:
      folder: Folder for the JSON.
    """
    tables = {
        model: {str(b1): state_records(model, b1) for b1 in FIRST_MOMENTS} for model in MODELS
    }
    result = {**records.header(), "records": tables}
    text = f"{paper_table(tables)}\n\n{our_table(tables)}"
    records.finish(folder / "memory_table.json", result, text)


Tables = dict[str, dict[str, dict[str, dict[str, Any]]]]  # by model, b1 and row


def paper_table(tables: Tables) -> str:
    """MiB of the rows that the paper has, by model and b1."""
    columns = [(model, b1) for model in tables for b1 in tables[model]]
    rows = []
    for name in ROWS:
        found = [tables[model][b1].get(name) for model, b1 in columns]
        rows.append([name, *("" if one is None else f"{one['mib']:.1f}" for one in found)])
    return records.table(["", *(f"{model}, b1 = {float(b1):g}" for model, b1 in columns)], rows)


def our_table(tables: Tables) -> str:
    """MiB and bytes per parameter of rows that the paper does not have, of the first model."""
    of_model = next(iter(tables.values()), {}).get(str(FIRST_MOMENTS[0]), {})
    rows = [
        [name, f"{one['mib']:.1f}", f"{one['bytes_a_parameter']:.2f}"]
        for name, one in of_model.items()
        if name == "AdamW" or name in OURS | BESIDE
    ]
    return records.table(["", "MiB", "bytes per parameter"], rows)


if __name__ == "__main__":
    tyro.cli(main)
