"""Time and memory of an optimizer's step: `python -m benchmarks.update_speed`.

A step is update and `apply_updates`, or the whole step of training, over what is donated. All
contenders run in one process, one cycle of steps each in turn, so that whatever slows the
machine slows all of them. Figures are medians over cycles, and ratios are medians of ratios of
neighbouring cycles. A cycle has `rank_interval` steps, so that it includes a choice of ranks.
Memory is what the compiler plans (`memory_analysis`). Results go to `results/speed/`, as JSON named
after what was timed.
"""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from benchmarks import records
from benchmarks.contenders import CONTENDERS
from benchmarks.inputs import (
    WORDS,
    check_rows,
    gradients_like,
    parameter_shapes,
    random_like,
    row,
)
from benchmarks.steps import lowered_step, training_step, update_step
from examples.gpt2.model import CONFIGS, GPT

RESULTS = records.RESULTS / "speed"


@dataclasses.dataclass
class Runner:
    """One contender on one model: its compiled step, the arrays it works on, and its times."""

    name: str
    model: str
    step: Callable[[Any, Any, Any], Any]  # (parameters, state, operands) -> parameters and state
    carry: Any  # parameters and state, donated
    operands: Any
    record: dict[str, Any]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def cycle(self, steps: int) -> None:
        """Runs and times `steps` steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.carry = self.step(*self.carry, self.operands)
        jax.block_until_ready(self.carry)
        self.seconds.append((time.perf_counter() - start) / steps)


Parts = tuple[Callable[..., Any], optax.GradientTransformation, Any, Any]


def update_of(name: str, model: str) -> Parts:
    """The optimizer's step alone, the optimizer, parameters and gradients."""
    tx, shapes = row(name, parameter_shapes(model))
    return update_step(tx), tx, random_like(shapes, 0), gradients_like(shapes, 1)


def training_of(name: str, model: str, batch: int) -> Parts:
    """The whole training step in bfloat16, the optimizer, parameters and tokens."""
    tx = CONTENDERS[name]()
    config = dataclasses.replace(CONFIGS[model], dtype="bfloat16")
    graph, params = nnx.split(GPT(config, rngs=nnx.Rngs(0)))
    shape = (batch, config.context + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocabulary)
    return training_step(graph, tx), tx, params, tokens


def lowered_runner(name: str, model: str, parts: Parts) -> Callable[[], Runner]:
    """Lowers a step; what is returned compiles it, in a thread or not, and records its memory."""
    step, tx, params, operands = parts
    lowered = lowered_step(step, tx, params, operands)
    state_mib = adapprox_jax.state_nbytes(tx, params) / records.MIB

    def compiled() -> Runner:
        run, planned = records.compiled(lowered)
        record = {"state_mib": state_mib, **planned}
        return Runner(name, model, run, (params, jax.jit(tx.init)(params)), operands, record)

    return compiled


def measure(runners: Sequence[Runner], cycles: int, steps: int) -> None:
    """Runs the contenders in turn, first one cycle that is not counted, and fills their records."""
    bar = tqdm([(number, runner) for number in range(cycles + 1) for runner in runners])
    for number, runner in bar:
        bar.set_description(f"{runner.name}, {runner.model}")
        runner.cycle(steps)
        if number == 0:
            runner.seconds.clear()
    for runner in runners:
        runner.record["seconds"] = statistics.median(runner.seconds)
        runner.record["seconds_of_cycles"] = runner.seconds
        found = [ranks for _, ranks in optax.tree.get_all_with_path(runner.carry, "rank")]
        if found:
            every = np.concatenate([np.ravel(ranks) for ranks in jax.tree.leaves(found)])
            runner.record["ranks"] = np.unique(every).tolist()


def main(
    models: tuple[Literal["tiny", "117M", "345M"], ...] = ("117M",),
    contenders: tuple[str, ...] = ("adamw", "adafactor", "adapprox", "adapprox rank 16"),
    cycles: int = 5,
    steps: int = 10,
    training_step: bool = False,
    batch: int = 32,
    cpu: bool = True,
    profile: pathlib.Path | None = None,
    output: pathlib.Path | None = None,
) -> None:
    """Measures steps, prints a table and writes JSON.

    Args:
      models: Models of the paper's Table 1, or tiny.
      contenders: Names from `benchmarks/contenders.py`; of updates with ", stacked", ", bfloat16"
        or ", split" behind them, as in `benchmarks.device_program`. Times are over those of the
        first, with the same words behind its name.
      cycles: Cycles of which the median is taken, after one that is not counted.
      steps: Steps of a cycle: at least `rank_interval`.
      training_step: Time the whole training step instead of the optimizer's alone.
      batch: Sequences of the training step.
      cpu: Whether a CPU is measured if there is no accelerator.
      profile: Folder for a trace of one step of each contender, after all are measured.
      output: File for the JSON.
    """
    check_rows("contenders", contenders, () if training_step else WORDS)
    if min(cycles, steps, batch) < 1:
        raise SystemExit(f"{cycles=}, {steps=}, {batch=}; allowed: integers of at least 1.")
    if not cpu and jax.default_backend() == "cpu":
        raise SystemExit("--no-cpu needs an accelerator, and JAX sees none here.")
    parts_of = functools.partial(training_of, batch=batch) if training_step else update_of
    lowered = [
        lowered_runner(name, model, parts_of(name, model))
        for model in models
        for name in contenders
    ]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as threads:
        runners = list(threads.map(lambda compiled: compiled(), lowered))
    measure(runners, cycles, steps)
    result = {
        **records.header(),
        "steps_of_a_cycle": steps,
        "records": {
            model: {r.name: r.record for r in runners if r.model == model} for model in models
        },
    }
    kind = records.name_of_device(result["device"])
    what = "training_step" if training_step else "update_speed"
    path = output or RESULTS / f"{what}_{'_'.join(models)}_{kind}.json"
    records.finish(path, result, table(result["records"]))
    if profile is not None:
        for runner in runners:
            with jax.profiler.trace(str(profile / f"{runner.name}, {runner.model}")):
                runner.cycle(1)


def table(of_models: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each contender and model: its time over that of the reference, and its memory.

    Times are medians of ratios of neighbouring cycles; least and most are single ones.
    """
    reference = next(iter(next(iter(of_models.values()))))
    titles = ["", "model", "ms", f"over {reference}", "least", "most"]
    titles += ["temporaries MiB", "state MiB", "compile s"]
    rows = []
    for model, of_model in of_models.items():
        for name, one in of_model.items():
            base = of_model.get(", ".join([reference, *name.split(", ")[1:]]))
            found = ratios(one, base) if base else []
            times = [statistics.median(found)] if found else []
            times += [min(found), max(found)] if len(found) > 1 else []
            cells = [f"{1e3 * one['seconds']:.1f}", *(f"{time:.2f}" for time in times)]
            cells += [""] * (4 - len(cells))
            cells += [f"{one['temporaries_mib']:.0f}", f"{one['state_mib']:.1f}"]
            rows.append([name, model, *cells, f"{one['compile_seconds']:.1f}"])
    return records.table(titles, rows)


def ratios(one: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """The times of neighbouring cycles over one another."""
    cycles = one["seconds_of_cycles"], base["seconds_of_cycles"]
    return [own / other for own, other in zip(*cycles, strict=True)]


if __name__ == "__main__":
    tyro.cli(main)
