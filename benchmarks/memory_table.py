"""Memory of optimizer states, beside the paper's Table 2: `python -m benchmarks.memory_table`.

States come from `jax.eval_shape`, so that nothing is allocated. The record is
`results/memory/memory_table.json`.
"""

import math
import pathlib
from collections.abc import Callable, Mapping

import jax
import optax
import tyro

import adapprox_jax
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

# Contenders that the paper does not have, at 117M, beside AdamW.
OURS = (
    *("adamw", "adafactor 4 bits", "adapprox", "adapprox 8 bits", "adapprox 4 bits"),
    *("adapprox rank 16", "muon", "adapprox_muon", "adapprox_muon 4 bits"),
)


def state_records(
    model: str, optimizers: Mapping[str, optax.GradientTransformation]
) -> dict[str, dict[str, float]]:
    """The size of each optimizer's state, by its name, for a model of the paper's Table 1."""
    shapes = parameter_shapes(model)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    sizes = {name: adapprox_jax.state_nbytes(tx, shapes) for name, tx in optimizers.items()}
    return {
        name: {"mib": nbytes / records.MIB, "bytes_a_parameter": nbytes / parameters}
        for name, nbytes in sizes.items()
    }


def papers_rows(model: str, b1: float) -> dict[str, dict[str, float]]:
    """The records of the rows that the paper has for a model and a decay of the first moment."""
    column = COLUMNS.index((model, b1))
    names = [name for name, row in PAPER_MIB.items() if row[column] is not None]
    return state_records(model, {name: ROWS[name](b1) for name in names})


def our_rows() -> dict[str, dict[str, float]]:
    """The records of `OURS`."""
    return state_records(MODELS[0], {name: CONTENDERS[name]() for name in OURS})


def main(folder: pathlib.Path = RESULTS) -> None:
    """Prints tables and writes JSON.

    Args:
      folder: Folder for the JSON.
    """
    of_paper = {
        model: {str(b1): papers_rows(model, b1) for b1 in FIRST_MOMENTS} for model in MODELS
    }
    result = {**records.header(), "records": of_paper, "ours": our_rows()}
    text = f"{paper_table(of_paper)}\n\n{our_table(result['ours'])}"
    records.finish(folder / "memory_table.json", result, text)


Rows = dict[str, dict[str, float]]


def paper_table(of_paper: dict[str, dict[str, Rows]]) -> str:
    """MiB of the rows that the paper has, by model and b1."""
    columns = [(model, b1) for model in of_paper for b1 in of_paper[model]]
    rows = []
    for name in ROWS:
        found = [of_paper[model][b1].get(name) for model, b1 in columns]
        rows.append([name, *("" if one is None else f"{one['mib']:.1f}" for one in found)])
    return records.table(["", *(f"{model}, b1 = {float(b1):g}" for model, b1 in columns)], rows)


def our_table(ours: Rows) -> str:
    """MiB and bytes per parameter."""
    rows = [
        [name, f"{one['mib']:.1f}", f"{one['bytes_a_parameter']:.2f}"] for name, one in ours.items()
    ]
    return records.table(["", "MiB", "bytes per parameter"], rows)


if __name__ == "__main__":
    tyro.cli(main)
