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
import shlex
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
from examples.gpt2.model import CONFIGS, GPT, loss

RESULTS = records.RESULTS / "speed"


@dataclasses.dataclass
class Runner:
    """One contender on one model: its compiled step, the arrays it works on, and its times."""

    name: str
    model: str
    step: Callable[[Any, Any], Any]  # (state, fixed operands) -> (state, the rest of its results)
    state: Any  # donated
    operands: Any
    record: dict[str, Any]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def cycle(self, steps: int) -> None:
        """Runs and times `steps` steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, rest = self.step(self.state, self.operands)
        jax.block_until_ready((self.state, rest))
        self.seconds.append((time.perf_counter() - start) / steps)


def update_runner(name: str, model: str, params: Any, grads: Any, in_place: bool) -> Runner:
    """The update alone: new updates and state from gradients, with the old state donated.

    Args:
      name: Name of the contender.
      model: Name of the model.
      params: Parameters.
      grads: Gradients.
      in_place: Donate the last updates too, whose memory the next ones then take.
    """
    tx = CONTENDERS[name]()

    def step(carry: Any, operands: Any) -> Any:
        grads, params = operands
        updates, state = tx.update(grads, carry[0], params)
        return ((state, updates), ()) if in_place else ((state,), updates)

    state = jax.jit(tx.init)(params)
    carry = (state, jax.tree.map(jnp.zeros_like, params)) if in_place else (state,)
    return compiled_runner(name, model, tx, params, step, carry, (grads, params))


def training_runner(name: str, model: str, batch: int, dtype: str) -> Runner:
    """The whole training step: forward, backward, update, with everything donated."""
    tx = CONTENDERS[name]()
    config = dataclasses.replace(CONFIGS[model], dtype=dtype)
    graph, params = nnx.split(GPT(config, rngs=nnx.Rngs(0)))
    shape = (batch, config.context + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocabulary)

    def step(carry: Any, tokens: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), ()

    carry = (params, jax.jit(tx.init)(params))
    return compiled_runner(name, model, tx, params, step, carry, tokens)


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


def ratio(runner: Runner, base: Runner) -> float:
    """Median of the ratios of cycles side by side; of medians where one of them has none."""
    if len(runner.seconds) != len(base.seconds):
        return statistics.median(runner.seconds) / statistics.median(base.seconds)
    return statistics.median(s / b for s, b in zip(runner.seconds, base.seconds, strict=True))


def main(
    models: tuple[Literal["tiny", "117M", "345M"], ...] = ("117M",),
    contenders: tuple[str, ...] = ("adamw", "adafactor", "adapprox", "adapprox rank 16"),
    cycles: int = 5,
    steps: int = 10,
    in_place: bool = False,
    training_step: bool = False,
    batch: int = 32,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    patience: float = 60.0,
    cpu: bool = True,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measures updates, prints a table and writes JSON.

    Args:
      models: Models of the paper's Table 1, or tiny.
      contenders: Names from `benchmarks/contenders.py`; "all" for all of them.
      cycles: Cycles of which the median is taken, after one that is not counted.
      steps: Steps of a cycle: at least `rank_interval`.
      in_place: Write updates over the last ones, instead of into new memory.
      training_step: Time the whole training step instead of the update alone.
      batch: Sequences of the training step.
      dtype: Type that its layers compute in.
      patience: Seconds a cycle may take; slower contenders are measured by one step.
      cpu: Whether a CPU is measured if there is no accelerator.
      output: File for the JSON.
    """
    names = tuple(CONTENDERS) if contenders == ("all",) else contenders
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"contenders has {unknown}; allowed: all, {', '.join(CONTENDERS)}.")
    if min(cycles, steps, batch) < 1:
        raise SystemExit(f"{cycles=}, {steps=}, {batch=}; allowed: integers of at least 1.")
    if not cpu and jax.default_backend() == "cpu":
        raise SystemExit("--no-cpu needs an accelerator, and JAX sees none here.")
    device = jax.devices()[0].device_kind
    runners = []
    for model in models:
        if training_step:
            runners += [training_runner(name, model, batch, dtype) for name in names]
        else:
            shapes = parameter_shapes(model)
            params, grads = random_like(shapes, 0), gradients_like(shapes, 1)
            runners += [update_runner(name, model, params, grads, in_place) for name in names]
    measure(runners, cycles, steps, patience)
    reference = "adafactor" if "adafactor" in names else names[0]
    by_name = {(runner.model, runner.name): runner for runner in runners}
    for runner in runners:
        over = {reference: by_name[runner.model, reference]}
        if runner.model != models[0]:
            over[models[0]] = by_name[models[0], runner.name]
        for what, base in over.items():
            runner.record[f"over_{what}"] = ratio(runner, base)
    of_training = ["--training-step", "--batch", str(batch), "--dtype", dtype]
    what = f"training_step_{batch}" if training_step else "update_speed"
    what += "_in_place" if in_place else ""
    result = {
        "command": shlex.join(
            ["python", "-m", "benchmarks.update_speed", "--models", *models]
            + ["--contenders", *names, "--cycles", str(cycles), "--steps", str(steps)]
            + (["--in-place"] if in_place else [])
            + (of_training if training_step else [])
            + ["--patience", str(patience)]
        ),
        "device": device,
        "jax": jax.__version__,
        "steps_of_a_cycle": steps,
        "records": {
            model: {r.name: r.record for r in runners if r.model == model} for model in models
        },
    }
    kind = records.name_of_device(device)
    path = output or RESULTS / f"{what}_{'_'.join(models)}_{kind}.json"
    records.write(path, result)
    print(f"{device}\n{table(result['records'])}")
    print(f"written: {path}")
    return result


def table(of_models: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each contender and model: its time over that of the reference, and its memory.

    Least and most are the ratios of single cycles.
    """
    first = next(iter(next(iter(of_models.values())).values()))
    reference = next(key for key in first if key.startswith("over_")).removeprefix("over_")
    titles = ["", "model", f"over {reference}", "least", "most"]
    titles += ["temporaries MiB", "state MiB", "compile s"]
    rows = []
    for model, of_model in of_models.items():
        base = of_model[reference]["seconds_of_cycles"]
        for name in (name for name in of_model if name in CONTENDERS):
            r = of_model[name]
            cells = [f"{r[f'over_{reference}']:.2f}", "", ""]
            if len(base) == len(r["seconds_of_cycles"]):
                ratios = [s / b for s, b in zip(r["seconds_of_cycles"], base, strict=True)]
                cells[1:] = [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
            cells += [f"{r['temporaries_mib']:.0f}", f"{r['state_mib']:.1f}"]
            rows.append([name, model, *cells, f"{r['compile_seconds']:.1f}"])
    return records.table(titles, rows)


if __name__ == "__main__":
    tyro.cli(main)
