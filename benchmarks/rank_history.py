"""Rank and error of every matrix over a training: `python -m benchmarks.rank_history`.

Trains the default model of `examples.gpt2.train` with adaptive ranks. Results go to
`results/loss/rank_history.json` and a heat map beside it; every adaptive run of the program draws
the same as its `ranks.png`.
"""

import pathlib
import tempfile
from typing import Any

import tyro

from benchmarks import record_files
from examples.gpt2 import plots, records
from examples.gpt2.config import Config
from examples.gpt2.optimizers import AdapproxOptions
from examples.gpt2.run import run

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "loss"


def main(
    max_rank: int = 64,
    error_threshold: float = 0.01,
    steps: int = 400,
    every: int = 20,
    output: pathlib.Path = RESULTS / "rank_history.json",
) -> dict[str, Any]:
    """Trains, and writes JSON and a PNG.

    Args:
      max_rank: The largest rank; the first is 1.
      error_threshold: The rank grows while the error is above it.
      steps: Updates.
      every: Updates between two looks.
      output: Where the JSON goes; the PNG lies beside it.
    """
    if min(max_rank, steps, every) < 1:
        raise SystemExit(f"{max_rank=}, {steps=}, {every=}; allowed: integers of at least 1.")
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            steps=steps,
            warmup=min(20, steps // 2),
            eval_every=every,
            eval_batches=1,
            adapprox=AdapproxOptions(
                initial_rank=1, max_rank=max_rank, error_threshold=error_threshold
            ),
            out=pathlib.Path(folder) / "run",
        )
        done = run(config, keep=False)
        rows = [row for row in records.read(config.out / "metrics.jsonl") if "ranks" in row]
    kept = [{name: row[name] for name in ("step", "ranks", "errors")} for row in rows]
    result = {
        "command": f"python -m benchmarks.rank_history --max-rank {max_rank}"
        f" --error-threshold {error_threshold:g} --steps {steps} --every {every}",
        "settings": done.settings,
        "rows": kept,
    }
    record_files.write(output, result, indent=None)
    plots.plot_ranks(kept, output.with_suffix(".png"))
    print(f"written: {output}")
    return result


if __name__ == "__main__":
    tyro.cli(main)
