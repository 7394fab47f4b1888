"""Time and memory of an optimizer's update: `python -m benchmarks.update_speed`.

All contenders run in one process, one cycle of steps each in turn, so that whatever slows the
machine slows all of them. Figures are medians over cycles, and ratios are medians of ratios of
neighbouring cycles. A cycle has `rank_interval` steps, so that it includes a choice of ranks. A
contender that is too slow for a cycle is measured by one step, which keeps its ranks. Memory is
what the compiler plans (`memory_analysis`). Results go to `results/speed/`, as JSON named after
what was timed.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from benchmarks import records
from benchmarks.contenders import CONTENDERS
from benchmarks.inputs import gradients_like, parameter_shapes, random_like
from benchmarks.steps import training_step
from examples.gpt2.model import CONFIGS, GPT

RESULTS = records.RESULTS / "speed"


@dataclasses.dataclass
class Runner:
    """One contender on one model: its compiled step, the arrays it works on, and its times."""

    name: str
    model: str
    step: Callable[[Any, Any], Any]  # (state, fixed operands) -> state
    state: Any  # donated; the optimizer's own state is a part of it
    operands: Any
    record: dict[str, Any]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def cycle(self, steps: int) -> None:
        """Runs and times `steps` steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state = self.step(self.state, self.operands)
        jax.block_until_ready(self.state)
        self.seconds.append((time.perf_counter() - start) / steps)


def update_runner(name: str, model: str, params: Any, grads: Any) -> Runner:
    """The update alone: new updates and state, written over the last ones.

    Args:
      name: Name of the contender.
      model: Name of the model.
      params: Parameters.
      grads: Gradients.
    """
    tx = CONTENDERS[name]()

    def step(carry: Any, operands: Any) -> Any:
        grads, params = operands
        _, state = carry
        return tx.update(grads, state, params)

    carry = (jax.tree.map(jnp.zeros_like, params), jax.jit(tx.init)(params))
    return compiled_runner(name, model, tx, params, step, carry, (grads, params))


def training_runner(name: str, model: str, batch: int) -> Runner:
    """The whole training step in bfloat16: forward, backward, update, with everything donated."""
    tx = CONTENDERS[name]()
    config = dataclasses.replace(CONFIGS[model], dtype="bfloat16")
    graph, params = nnx.split(GPT(config, rngs=nnx.Rngs(0)))
    shape = (batch, config.context + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocabulary)

    step = training_step(graph, tx)
    carry = (params, jax.jit(tx.init)(params))
    return compiled_runner(name, model, tx, params, lambda carry, x: step(*carry, x), carry, tokens)


def compiled_runner(
    name: str,
    model: str,
    tx: Any,
    params: Any,
    step: Callable[..., Any],
    state: Any,
    operands: Any,
) -> Runner:
    """Compiles a step, and records the time of compilation and the memory that it plans to use."""
    lowered = jax.jit(step, donate_argnums=0, keep_unused=True).lower(state, operands)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    record = {
        "state_mib": adapprox_jax.state_nbytes(tx, params) / records.MIB,
        **records.planned_memory(compiled),
        "compile_seconds": seconds,
    }
    return Runner(name, model, compiled, state, operands, record)


def measure(runners: Sequence[Runner], cycles: int, steps: int, patience: float) -> None:
    """Runs the contenders in turn, first one cycle that is not counted, and fills their records.

    A contender whose cycle would take longer than `patience` seconds, by its first two steps, is
    left out of the rounds: the second step is its figure.
    """
    for runner in tqdm(runners, desc="first steps", unit="contender"):
        runner.cycle(1)
        runner.cycle(1)
        if runner.seconds[-1] * steps > patience:
            runner.record["cycles_left_out"] = True
            del runner.seconds[0]
        else:
            runner.seconds.clear()
    in_turn = [runner for runner in runners if not runner.seconds]
    bar = tqdm(total=(cycles + 1) * len(in_turn), unit="cycle")
    for round_ in range(cycles + 1):
        for runner in in_turn:
            bar.set_description(f"{runner.name}, {runner.model}")
            runner.cycle(steps)
            if round_ == 0:
                runner.seconds.clear()
            bar.update()
    bar.close()
    for runner in runners:
        runner.record["seconds"] = statistics.median(runner.seconds)
        runner.record["seconds_of_cycles"] = runner.seconds
        found = [ranks for _, ranks in optax.tree.get_all_with_path(runner.state, "rank")]
        if found:
            runner.record["ranks"] = sorted({int(r) for r in jax.tree.leaves(found)})


def main(
    models: tuple[Literal["tiny", "117M", "345M"], ...] = ("117M",),
    contenders: tuple[str, ...] = ("adamw", "adafactor", "adapprox", "adapprox rank 16"),
    cycles: int = 5,
    steps: int = 10,
    training_step: bool = False,
    batch: int = 32,
    patience: float = 60.0,
    cpu: bool = True,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measures updates, prints a table and writes JSON.

    Args:
      models: Models of the paper's Table 1, or tiny.
      contenders: Names from `benchmarks/contenders.py`. Times are over those of "adafactor" if it
        is among them, otherwise over those of the first.
      cycles: Cycles of which the median is taken, after one that is not counted.
      steps: Steps of a cycle: at least `rank_interval`.
      training_step: Time the whole training step instead of the update alone.
      batch: Sequences of the training step.
      patience: Seconds a cycle may take; slower contenders are measured by one step.
      cpu: Whether a CPU is measured if there is no accelerator.
      output: File for the JSON.
    """
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"contenders has {unknown}; allowed: {', '.join(CONTENDERS)}.")
    if min(cycles, steps, batch) < 1:
        raise SystemExit(f"{cycles=}, {steps=}, {batch=}; allowed: integers of at least 1.")
    if not cpu and jax.default_backend() == "cpu":
        raise SystemExit("--no-cpu needs an accelerator, and JAX sees none here.")
    runners = []
    for model in models:
        if training_step:
            runners += [training_runner(name, model, batch) for name in contenders]
        else:
            shapes = parameter_shapes(model)
            params, grads = random_like(shapes, 0), gradients_like(shapes, 1)
            runners += [update_runner(name, model, params, grads) for name in contenders]
    measure(runners, cycles, steps, patience)
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
    records.write(path, result)
    print(table(result["records"]))
    print(f"written: {path}")
    return result


def table(of_models: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each contender and model: its time over that of the reference, and its memory.

    Times are medians of ratios of neighbouring cycles; least and most are single ones. Contenders
    that were measured by one step have the ratio of medians.
    """
    names = [name for name in next(iter(of_models.values())) if name in CONTENDERS]
    reference = "adafactor" if "adafactor" in names else names[0]
    titles = ["", "model", "seconds", f"over {reference}", "least", "most"]
    titles += ["temporaries MiB", "state MiB", "compile s"]
    rows = []
    for model, of_model in of_models.items():
        base = of_model[reference]
        for name in names:
            one = of_model[name]
            ratios = [one["seconds"] / base["seconds"]]
            if len(one["seconds_of_cycles"]) == len(base["seconds_of_cycles"]):
                cycles = zip(one["seconds_of_cycles"], base["seconds_of_cycles"], strict=True)
                ratios = [own / other for own, other in cycles]
            times = statistics.median(ratios), min(ratios), max(ratios)
            cells = [f"{one['seconds']:.3f}"]
            cells += (
                [f"{time:.2f}" for time in times]
                if len(ratios) > 1
                else [f"{times[0]:.2f}", "", ""]
            )
            cells += [f"{one['temporaries_mib']:.0f}", f"{one['state_mib']:.1f}"]
            rows.append([name, model, *cells, f"{one['compile_seconds']:.1f}"])
    return records.table(titles, rows)


if __name__ == "__main__":
    tyro.cli(main)
