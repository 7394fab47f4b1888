"""Validation loss against bytes of state per parameter: `python -m benchmarks.memory_picture`.

Trains the default GPT-2 of `examples.gpt2.train` with each optimizer: every rate with the first
seed, the best with the others. A finished run is one line of
`results/memory/loss_against_bytes.jsonl`, and is not done again. AdamW, Adafactor, Adapprox at
rank 8, Muon and adapprox_muon are taken from the records of docs/results.md and docs/orthogonal.md.
Writes JSON and a picture beside the lines.
"""

import itertools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import optax
import tyro
from matplotlib.figure import Figure

import adapprox_jax
from benchmarks.came import came
from benchmarks.contenders import DECAY, adafactor
from examples.gpt2 import optimizers, records
from examples.gpt2.config import Config
from examples.gpt2.run import run

LOSSES = pathlib.Path(__file__).parents[1] / "results" / "loss"
RESULTS = pathlib.Path(__file__).parents[1] / "results" / "memory"
SEEDS = (0, 1, 2)
# What docs/orthogonal.md found to be the best for each, by the file in results/loss.
OF_HIDDEN_MATRICES: dict[str, tuple[optimizers.Name, optimizers.AdapproxOptions]] = {
    "muon": ("muon", optimizers.AdapproxOptions(muon_b1=0.9, rate_elsewhere=4.0)),
    **{
        file: (
            "adapprox-muon",
            optimizers.AdapproxOptions(muon_b1=0.8, rate_elsewhere=2.0, mu_dtype=mu_dtype),
        )
        for file, mu_dtype in (("adapprox-muon", None), ("adapprox-muon-4-bits", "int4"))
    },
}
_OTHERS_SETTINGS = ("optimizer", "optimizer_settings", "elastic")  # not what is trained with here


class QuantizedAdamState(NamedTuple):
    """State of `scale_by_quantized_adam`."""

    count: jax.Array
    average: adapprox_jax.GuidedEmaState
    nu: Any


def scale_by_quantized_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, mu_dtype: Any = jnp.int8
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with its first moment in 8 or 4 bits."""
    ema = adapprox_jax.guided_ema(b1, mu_dtype=mu_dtype)

    def init(params: optax.Params) -> QuantizedAdamState:
        zeros = optax.tree.zeros_like(params)
        return QuantizedAdamState(jnp.zeros([], jnp.int32), ema.init(params), zeros)

    def update(
        grads: optax.Updates, state: QuantizedAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, QuantizedAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu, average = ema.update(grads, state.average)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g**2, grads, state.nu)
        updates = jax.tree.map(
            lambda m, v: m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), mu, nu
        )
        return updates, QuantizedAdamState(count, average, nu)

    return optax.GradientTransformation(init, update)


class Contender(NamedTuple):
    """An optimizer with the peak rates that are tried."""

    make: Callable[[optax.ScalarOrSchedule], optax.GradientTransformation]
    rates: tuple[float, ...]
    recorded_as: str | None = None  # its name in the records of docs/results.md
    seeds: tuple[int, ...] = SEEDS


def _adapprox(rate: optax.ScalarOrSchedule, **settings: Any) -> optax.GradientTransformation:
    # As the runs on file were made: the default has no oversampling, with the same loss
    # (docs/design.md).
    settings = {"oversampling": 5, **settings}
    return adapprox_jax.adapprox(rate, weight_decay=DECAY, mask=optimizers.is_matrix, **settings)


def _with_rank(max_rank: int, mu_dtype: Any = None, **settings: Any) -> Contender:
    return Contender(
        lambda rate: _adapprox(rate, max_rank=max_rank, mu_dtype=mu_dtype, **settings), (2.4e-3,)
    )


def _quantized_adamw(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_quantized_adam(),
        optax.add_decayed_weights(DECAY, mask=optimizers.is_matrix),
        optax.scale_by_learning_rate(rate),
    )


def _of_hidden_matrices(file: str) -> Contender:
    name, options = OF_HIDDEN_MATRICES[file]
    hyper = optimizers.Hyperparameters()
    recorded = json.loads((LOSSES / f"{file}.json").read_text())["summary"][name]
    return Contender(
        lambda rate: optimizers.build(name, rate, hyper, options),
        tuple(float(rate) for rate in recorded["grid"]),
        file,
        seeds=(0, 1, 2, 3, 4),
    )


# At the best of the rates that docs/results.md tried, or of several here where it tried none.
CONTENDERS: dict[str, Contender] = {
    "AdamW": Contender(
        lambda rate: optax.adamw(rate, weight_decay=DECAY, mask=optimizers.is_matrix),
        (1.2e-3,),
        "adamw",
    ),
    "AdamW, 8-bit first moment": Contender(_quantized_adamw, (1.2e-3,)),
    "Adafactor": Contender(
        lambda rate: adafactor(rate, mask=optimizers.is_matrix), (2.4e-3,), "adafactor"
    ),
    "CAME": Contender(
        lambda rate: came(rate, weight_decay=DECAY, mask=optimizers.is_matrix),
        (4e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3),
    ),
    "Adapprox, rank 8": _with_rank(8)._replace(recorded_as="adapprox"),
    "Adapprox, rank 16": _with_rank(16),
    "Adapprox, rank 16, 8 bits": _with_rank(16, jnp.int8),
    "Adapprox, rank 16, 4 bits": _with_rank(16, jnp.int4),
    "Adapprox, rank 8, 8 bits": _with_rank(8, jnp.int8),
    "Adapprox, rank 8, 4 bits": _with_rank(8, jnp.int4),
    "Adapprox, rank 16, bfloat16": _with_rank(16, jnp.bfloat16),
    "Adapprox, rank 8, factors in bfloat16": _with_rank(8, factor_dtype=jnp.bfloat16),
    "Muon": _of_hidden_matrices("muon"),
    "adapprox_muon": _of_hidden_matrices("adapprox-muon"),
    "adapprox_muon, 4 bits": _of_hidden_matrices("adapprox-muon-4-bits"),
    "Adapprox, rank 8, no first moment": Contender(
        lambda rate: _adapprox(rate, b1=0.0), (6e-4, 1.2e-3, 2.4e-3)
    ),
}


def result(name: str, rate: float, seed: int, may_train: bool) -> dict[str, Any] | None:
    """One run: from the file if it is there, else trained now, or None if it may not be."""
    path, contender = RESULTS / "loss_against_bytes.jsonl", CONTENDERS[name]
    key = {"name": name, "learning_rate": rate, "seed": seed}
    rows = recorded_runs(name) + records.read(path)
    found = next((row for row in rows if key.items() <= row.items()), None)
    if found is None and may_train:
        print(f"-- {name}, peak rate {rate:g}, seed {seed}", flush=True)
        out = pathlib.Path("runs/memory") / f"{name}-{rate:g}-{seed}".replace(", ", "-")
        config = Config(learning_rate=rate, seed=seed, out=out)
        done = run(config, keep=False, build=lambda _, rate, *rest: contender.make(rate))
        jax.clear_caches()
        bytes_a_parameter = done.memory["state_mib"] * 2**20 / done.memory["parameters"]
        found = {
            **key,
            "validation_loss": done.validation_loss,
            "bytes_a_parameter": bytes_a_parameter,
            "settings": {k: v for k, v in done.settings.items() if k not in _OTHERS_SETTINGS},
            "jax": jax.__version__,
        }
        records.append(path, found)
    return found


def recorded_runs(name: str) -> list[dict[str, Any]]:
    """The runs of docs/results.md of one contender with its default settings."""
    wanted = CONTENDERS[name].recorded_as
    if wanted in OF_HIDDEN_MATRICES:
        rows = json.loads((LOSSES / f"{wanted}.json").read_text())["runs"]
        wanted, _ = OF_HIDDEN_MATRICES[wanted]
    else:
        rows = records.read(LOSSES / "after_speed.jsonl")
        if wanted != "adapprox":  # whose records there are of earlier defaults
            rows += records.read(LOSSES / "adamw_at_1.2e-3.jsonl")
            rows += json.loads((LOSSES / "comparison.json").read_text())["runs"]
    return [
        {
            "name": name,
            "learning_rate": row["settings"]["learning_rate"],
            "seed": row["settings"]["seed"],
            "validation_loss": row["validation_loss"],
            "bytes_a_parameter": row["memory"]["state_mib"] * 2**20 / row["memory"]["parameters"],
        }
        for row in rows
        if row["settings"]["optimizer"] == wanted and row["settings"]["vocabulary"] == 512
    ]


def main(contenders: tuple[str, ...] = tuple(CONTENDERS)) -> None:
    """Runs what is missing, prints the table, writes JSON and a PNG.

    Args:
      contenders: Which to run now; the table and the picture show all that are complete.
    """
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"contenders has {unknown}; allowed: {', '.join(CONTENDERS)}.")
    summary = {}
    for name, contender in CONTENDERS.items():
        may_train = name in contenders
        runs = [result(name, rate, contender.seeds[0], may_train) for rate in contender.rates]
        if None in runs:
            continue
        best = min(runs, key=lambda row: row["validation_loss"])["learning_rate"]
        of_seeds = [result(name, best, seed, may_train) for seed in contender.seeds]
        if None in of_seeds:
            continue
        losses = [row["validation_loss"] for row in of_seeds]
        summary[name] = {
            "validation_loss": statistics.mean(losses),
            "standard_error": statistics.stdev(losses) / len(losses) ** 0.5,
            "bytes_a_parameter": runs[0]["bytes_a_parameter"],
            "learning_rate": best,
            "losses": losses,
            "first_seed": {f"{row['learning_rate']:g}": row["validation_loss"] for row in runs},
        }
    (RESULTS / "loss_against_bytes.json").write_text(
        json.dumps({"command": "python -m benchmarks.memory_picture", "summary": summary}, indent=1)
        + "\n"
    )
    print("| | bytes per parameter | validation loss | standard error | peak rate |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in summary.items():
        print(
            f"| {name} | {row['bytes_a_parameter']:.2f} | {row['validation_loss']:.4f}"
            f" | {row['standard_error']:.4f} | {row['learning_rate']:g} |"
        )
    draw(summary, RESULTS / "loss_against_bytes.png")


def draw(summary: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Draws loss with its standard error against bytes per parameter."""
    figure = Figure(figsize=(9, 5))
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20"].colors
    for color, (name, row) in zip(itertools.cycle(colors), summary.items(), strict=False):
        axes.errorbar(
            row["bytes_a_parameter"],
            row["validation_loss"],
            row["standard_error"],
            fmt="o" if name.lower().startswith("adapprox") else "s",
            color=color,
            capsize=2,
            label=name,
        )
    axes.set(
        xlabel="bytes of optimizer state per parameter", ylabel="validation loss, 3 to 5 seeds"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    tyro.cli(main)
