"""Trains GPT-2 on text: `python -m examples.gpt2.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `curves.png` and the
tokenizer. Ctrl-C and SIGTERM save a checkpoint first. `--resume` goes on from
the last one and ends with the very parameters of a run that was never interrupted. With more
`--steps` it goes on along the learning rates of the longer run.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import adapprox_jax
from examples.gpt2 import checkpoints, data, mesh, metrics, optimizers
from examples.gpt2 import model as gpt
from examples.gpt2.batches import batches as training_batches
from examples.gpt2.batches import validation_batches
from examples.gpt2.command import DivergedError, exit_code
from examples.gpt2.config import Config, as_input, gpt_config, resolve, settings
from examples.gpt2.folder import run_folder, write_whole
from examples.gpt2.loop import Actions, Plan, TrainState, loop, train_step
from examples.gpt2.processes import by_first, connected, is_first, require_alike


class Result(NamedTuple):
    """What is left of a run."""

    settings: dict[str, Any]
    validation_loss: float
    curve: list[tuple[int, float]]  # (step, validation loss)
    memory: dict[str, float]
    seconds: float  # of the training steps, compilation included


def train(
    config: Config,
    *,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
    keep: bool = True,
) -> Result:
    """Trains one model.

    Args:
      config: The settings; what they leave to the presets is filled in here.
      optimizer: Makes the optimizer from the schedule of the learning rate; None for the optimizer
        that the settings name.
      keep: Whether checkpoints and a figure of a run that has ended are left in its folder. If not,
        checkpoints are there only while it is interrupted.

    Returns:
      The validation losses and the sizes in memory.

    Raises:
      InputError: If the settings, the text or the folder cannot be used.
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the checkpoint is saved; `Terminated` after SIGTERM.
    """
    config = resolve(config)
    text = data.load(
        config.data,
        tokenizer=config.tokenizer,
        vocabulary=config.vocabulary,
        context=config.context,
        cache=config.cache,
    )
    used = settings(config, text.key)
    require_alike((used, config.mesh, config.resume, config.checkpoint_every))
    if optimizer is not None:
        used = {k: v for k, v in used.items() if k not in {"optimizer", *vars(config.options)}}
    rate = optimizers.schedule(
        config.learning_rate, config.min_learning_rate, config.warmup, config.steps
    )
    make = optimizer or functools.partial(optimizers.build, config.optimizer, config.options)
    tx = as_input(lambda: optimizers.keeping(config.weights, make(rate)))
    with contextlib.ExitStack() as stack:
        if not keep:
            stack.push(lambda kind, *_: _discard_at_its_end(config, kind))
        devices = mesh.make_mesh(config)
        if devices is not None:
            stack.enter_context(jax.set_mesh(devices))
        graphdef, state = _first_state(config, tx, devices)
        placed = None if devices is None else jax.tree.map(lambda x: x.sharding, state)
        print(f"{config.model}, {config.optimizer}: {metrics.describe(state)}")
        by_first(lambda: stack.enter_context(run_folder(config.out, config.resume, used)))
        batches = training_batches(text.train, config.context, config.batch_size, config.seed)
        stack.enter_context(contextlib.closing(batches))
        manager = stack.enter_context(checkpoints.open_checkpoints(config.out))
        start = 0
        if config.resume:
            start, state = checkpoints.restore(manager, state, batches, used)
            print(f"going on after step {start} in {config.out}")
        if is_first():
            write_whole(config.out / "settings.json", json.dumps(used, indent=2) + "\n")
            if text.tokenizer is not None:
                shutil.copy(text.tokenizer, config.out)
        rows = stack.enter_context(contextlib.closing(metrics.Metrics(config.out, start)))

        def loss(params: Any, tokens_BxL: jax.Array) -> jax.Array:
            return gpt.loss(nnx.merge(graphdef, params), tokens_BxL)

        take = train_step(loss, tx, config.accumulate, placed)
        evaluate = jax.jit(lambda params, x: jax.lax.map(lambda x: loss(params, x), x).mean())
        tokens_NxBxL = mesh.place(_validation(config, text), devices)

        def validate(step: int, state: TrainState) -> None:
            rows.validate(step, float(evaluate(state.params, tokens_NxBxL)), state)

        def save(step: int, state: TrainState) -> None:
            if keep or step < config.steps:
                checkpoints.save(manager, step, state, batches, used)

        actions = Actions(
            step=lambda state, batch: take(state, mesh.place(batch, devices)),
            record=lambda step, losses, seconds: rows.record(step, losses, seconds, rate),
            validate=validate,
            save=save,
            grow=optimizers.grower(config.options) if config.elastic else None,
        )
        plan = Plan(config.steps, config.eval_every, config.checkpoint_every)
        state = loop(plan, state, start, batches, actions)
        if not rows.curve("validation_loss"):
            validate(config.steps, state)  # nothing was left to do, and the records were lost
        if keep and is_first():
            metrics.plot(rows.rows, config.out / "curves.png")
    curve = rows.curve("validation_loss")
    seconds = sum(each for _, each in rows.curve("seconds"))
    print(f"final validation loss {curve[-1][1]:.4f} in {seconds:.0f} s; all in {config.out}")
    return Result(used, curve[-1][1], curve, metrics.memory(state), seconds)


def _first_state(
    config: Config, tx: optax.GradientTransformation, devices: jax.sharding.Mesh | None
) -> tuple[nnx.GraphDef, TrainState]:
    """The structure of the model, and its first parameters with the optimizer's state."""

    def make() -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(gpt.GPT(gpt_config(config), rngs=nnx.Rngs(config.seed)), nnx.Param)

    graphdef, _ = nnx.eval_shape(make)
    params = mesh.make_params(lambda: nnx.to_pure_dict(make()[1]), devices)
    shardings = None
    if devices is not None:
        of_params = jax.tree.map(lambda x: x.sharding, params)
        shardings = of_params, adapprox_jax.state_shardings(tx, params)
    begin = functools.partial(optimizers.first_state, config.weights, tx)
    return graphdef, TrainState(*jax.jit(begin, out_shardings=shardings)(params))


def _validation(config: Config, text: data.Data) -> np.ndarray:
    """Batches as large as the parts that a batch is worked on in."""
    rows, count = config.batch_size // config.accumulate, config.eval_batches * config.accumulate
    return validation_batches(text.validation, config.context, rows, count)


def _discard_at_its_end(config: Config, raised: type[BaseException] | None) -> None:
    """Removes the checkpoints of a run that has ended or diverged: nothing goes on from it."""
    if is_first() and (raised is None or issubclass(raised, DivergedError)):
        shutil.rmtree(config.out / "checkpoints", ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, as `command.exit_code` tells."""
    flags = (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog="python -m examples.gpt2.train", args=arguments, config=flags)

    def work() -> None:
        config.processes.check()
        with connected(config.processes):
            train(config)

    code = exit_code(work)
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # others may not have come to an end, and JAX would wait for them
    return code


if __name__ == "__main__":
    sys.exit(main())
