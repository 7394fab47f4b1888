"""Time and memory of an optimizer's update: `python -m benchmarks.update_speed`.

All contenders run in one process, one cycle of steps each in turn, so that what slows the machine
slows all of them; the figures are medians over cycles, and so are ratios of cycles side by side.
A cycle has `rank_interval` steps, those that choose ranks included. Memory is what the compiler
plans (`memory_analysis`). Results go to `benchmarks/results/update_speed_<model>_<device>.json` and
a picture beside it.
"""

import dataclasses
import json
import pathlib
import re
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
from matplotlib.figure import Figure
from tqdm import tqdm

import adapprox_jax
from benchmarks.contenders import CONTENDERS
from benchmarks.inputs import gradients_like, parameter_shapes, random_like
from examples.gpt2.model import CONFIGS, GPT, loss

RESULTS = pathlib.Path(__file__).parent / "results"
MIB = 2**20


@dataclasses.dataclass
class Runner:
    """One contender: its compiled step, what it works on, and its times."""

    name: str
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


def update_runner(name: str, params: Any, grads: Any, in_place: bool = False) -> Runner:
    """The update alone: new updates and state from gradients, with the old state donated.

    Args:
      name: Name of the contender.
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
    return compiled_runner(name, tx, params, step, carry, (grads, params))


def training_runner(name: str, config: Any, batch: int) -> Runner:
    """The whole training step: forward, backward, update, with everything donated."""
    tx = CONTENDERS[name]()
    graph, params = nnx.split(GPT(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (batch, config.context + 1), 0, 50257)

    def step(carry: Any, tokens: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), ()

    return compiled_runner(name, tx, params, step, (params, jax.jit(tx.init)(params)), tokens)


def compiled_runner(
    name: str, tx: Any, params: Any, step: Callable[..., Any], state: Any, operands: Any
) -> Runner:
    """Compiles a step and notes how long that took and what memory it plans to use."""
    lowered = jax.jit(step, donate_argnums=0, keep_unused=True).lower(state, operands)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    record = {
        "state_mib": adapprox_jax.state_nbytes(tx, params) / MIB,
        "temporaries_mib": memory.temp_size_in_bytes / MIB,
        "compile_seconds": seconds,
    }
    return Runner(name, compiled, state, operands, record)


def measure(runners: Sequence[Runner], cycles: int, steps: int) -> dict[str, dict[str, Any]]:
    """Runs the contenders in turn, first one cycle that is not counted; returns their records."""
    bar = tqdm(total=(cycles + 1) * len(runners), unit="cycle")
    for round_ in range(cycles + 1):
        for runner in runners:
            bar.set_description(runner.name)
            runner.cycle(steps)
            if round_ == 0:
                runner.seconds.clear()
            bar.update()
    bar.close()
    for runner in runners:
        runner.record["seconds"] = statistics.median(runner.seconds)
        runner.record["seconds_of_cycles"] = runner.seconds
        ranks = optax.tree.get(runner.state, "rank")
        if ranks is not None:
            runner.record["ranks"] = sorted({int(r) for r in jax.tree.leaves(ranks)})
    return {runner.name: runner.record for runner in runners}


def main(
    model: Literal["tiny", "117M", "345M"] = "117M",
    contenders: tuple[str, ...] = ("adamw", "adafactor", "adapprox", "adapprox rank 16"),
    cycles: int = 5,
    steps: int = 10,
    in_place: bool = False,
    training_step: bool = False,
    batch: int = 32,
    output: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Measures updates, prints a table and writes JSON and a PNG.

    Args:
      model: Whose parameters: a row of the paper's Table 1, or tiny.
      contenders: Names from `benchmarks/contenders.py`; "all" for all of them.
      cycles: Cycles of which the median is taken, after one that is not counted.
      steps: Steps of a cycle: at least `rank_interval`.
      in_place: Let the updates take the place of the last ones, and not that of new memory.
      training_step: Time the whole training step in bfloat16, and not the update alone.
      batch: Sequences of the training step.
      output: Where the JSON goes; the PNG lies beside it.
    """
    names = tuple(CONTENDERS) if contenders == ("all",) else contenders
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"contenders has {unknown}; allowed: all, {', '.join(CONTENDERS)}.")
    if min(cycles, steps, batch) < 1:
        raise SystemExit(f"{cycles=}, {steps=}, {batch=}; allowed: integers of at least 1.")
    device = jax.devices()[0].device_kind
    if training_step:
        config = dataclasses.replace(CONFIGS[model], dtype="bfloat16")
        runners = [training_runner(name, config, batch) for name in names]
    else:
        shapes = parameter_shapes(model)
        params, grads = random_like(shapes, 0), gradients_like(shapes, 1)
        runners = [update_runner(name, params, grads, in_place) for name in names]
    records = measure(runners, cycles, steps)
    reference = "adafactor" if "adafactor" in names else names[0]
    base = records[reference]["seconds_of_cycles"]
    for record in records.values():
        ratios = [s / b for s, b in zip(record["seconds_of_cycles"], base, strict=True)]
        record[f"over_{reference}"] = statistics.median(ratios)
    what = f"training_step_{batch}" if training_step else "update_speed"
    what += "_in_place" if in_place else ""
    result = {
        "command": shlex.join(
            ["python", "-m", "benchmarks.update_speed", "--model", model, "--contenders", *names]
            + ["--cycles", str(cycles), "--steps", str(steps)]
            + (["--in-place"] if in_place else [])
            + (["--training-step", "--batch", str(batch)] if training_step else [])
        ),
        "device": device,
        "jax": jax.__version__,
        "model": model,
        "steps_of_a_cycle": steps,
        "records": records,
    }
    kind = re.sub(r"\W+", "_", device).lower()
    path = output or RESULTS / f"{what}_{model}_{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print_table(records)
    draw(records, f"{model}, {device}", path.with_suffix(".png"))
    print(f"written: {path}")
    return result


def print_table(records: dict[str, dict[str, Any]]) -> None:
    """Prints one line a contender."""
    ratio = next(key for key in next(iter(records.values())) if key.startswith("over_"))
    print(f"| | seconds | {ratio.replace('_', ' ')} | temporaries MiB | state MiB | compile s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, r in records.items():
        print(
            f"| {name} | {r['seconds']:.3f} | {r[ratio]:.2f} | {r['temporaries_mib']:.0f}"
            f" | {r['state_mib']:.1f} | {r['compile_seconds']:.1f} |"
        )


def draw(records: dict[str, dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Draws time against memory beyond the parameters and gradients."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, record in records.items():
        memory = record["state_mib"] + record["temporaries_mib"]
        axes.scatter(memory, record["seconds"])
        axes.annotate(name, (memory, record["seconds"]), fontsize="small")
    axes.set(xlabel="state and temporaries (MiB)", ylabel="seconds an update", title=title)
    axes.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
