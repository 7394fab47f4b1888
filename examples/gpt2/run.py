"""One run, from its settings to its results.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`curves.png`, `sample.txt` and, where ranks adapt, `ranks.png`.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import adapprox_jax
from examples.gpt2 import checkpoints, elastic, mesh, optimizers, plots
from examples.gpt2 import data as text
from examples.gpt2 import model as gpt
from examples.gpt2.batches import batches as training_batches
from examples.gpt2.batches import validation_batches
from examples.gpt2.config import (
    Config,
    UsageError,
    gpt_config,
    load_data,
    option_of,
    resolve,
    settings,
)
from examples.gpt2.folder import run_folder, write_settings
from examples.gpt2.loop import Actions, Plan, loop
from examples.gpt2.metrics import MIB, DivergedError, Metrics, describe, memory, validate
from examples.gpt2.processes import by_first, from_first, is_first, require_alike
from examples.gpt2.step import TrainState, evaluation, token_loss, train_step


class Result(NamedTuple):
    """What is left of a run, for comparisons."""

    settings: dict[str, Any]
    validation_loss: float
    curve: list[tuple[int, float]]  # (step, validation loss)
    memory: dict[str, float]
    seconds: float  # of the training loop, validations and compilation included; of a run that was
    # interrupted the steps alone up to there


def run(
    config: Config,
    *,
    keep: bool = True,
    build: Callable[..., optax.GradientTransformation] = optimizers.build,
) -> Result:
    """Trains one model.

    Args:
      config: The settings; what they leave to the presets is filled in here.
      keep: Whether to leave checkpoints, a figure and a sample. If not, there are checkpoints only
        while it is interrupted, and only metrics are left of a run that came to its end.
      build: Makes the optimizer, as `optimizers.build` does.

    Returns:
      The validation losses and the sizes in memory.

    Raises:
      UsageError: If the settings cannot be used.
      text.DataError: If the text cannot be used.
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the checkpoint is saved; `Terminated` after SIGTERM.
      checkpoints.StorageError: If a checkpoint cannot be written.
    """
    config = resolve(config)
    data = load_data(config)
    used = settings(config, data.key)
    require_alike(
        {option_of((k,)): v for k, v in (vars(config) | used).items() if k != "processes"}
    )
    rate = optimizers.schedule(
        config.learning_rate, config.min_learning_rate, config.warmup, config.steps
    )
    with contextlib.ExitStack() as stack:
        if not keep:
            stack.push(lambda kind, *_: _discard_at_its_end(config, kind))
        devices = mesh.make_mesh(config)
        if devices is not None:
            stack.enter_context(jax.set_mesh(devices))
        share = mesh.share(devices, config.batch_size)
        graphdef, params = make_model(config, devices)
        try:
            options, widen = elastic.narrow(config, params)
            tx = build(config.optimizer, rate, config.hyper, options)
        except ValueError as error:
            raise UsageError(f"{config.optimizer}: {error}") from None
        shardings = None if devices is None else adapprox_jax.state_shardings(tx, params)
        state = TrainState(params, jax.jit(tx.init, out_shardings=shardings)(params))
        print(f"{config.model}, {config.optimizer}: {describe(memory(state))}")
        if devices is not None:
            each = mesh.bytes_on_device(state.opt_state) / MIB
            print(f"{dict(devices.shape)}: {each:.2f} MiB of the optimizer's state on each device")

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        by_first(lambda: stack.enter_context(run_folder(config.out, config.resume, used)))
        batches = opened(
            training_batches(data.train, config.context, config.batch_size, config.seed, share)
        )
        manager = stack.enter_context(checkpoints.open_checkpoints(config.out))
        start = 0
        if config.resume:
            start, state = checkpoints.restore(manager, state, batches, used)
            if is_first():
                write_settings(config.out, used)  # a run may be made longer
            print(f"going on after step {start} in {config.out}")
        metrics = opened(Metrics(config.out, start))

        def save(step: int, state: TrainState) -> None:
            if keep or step < config.steps:
                checkpoints.save(manager, step, state, batches, used)

        evaluate, tokens_NxBxL = evaluation(graphdef), _validation(config, data, devices)

        def check(step: int, state: TrainState) -> None:
            value = float(evaluate(state.params, tokens_NxBxL))
            validate(metrics, step, value, state, elastic.fullness(config))

        plan = Plan(
            steps=config.steps,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            tokens=config.batch_size * config.context,
        )
        placed = jax.tree.map(lambda x: x.sharding, state) if devices is not None else None
        take = train_step(token_loss(graphdef), tx, config.accumulate, placed)
        actions = Actions(
            step=lambda state, batch: take(state, mesh.place_batch(batch, devices)),
            validate=check,
            save=save,
            widen=widen,
        )
        earlier = [row["tokens_per_second"] for row in metrics.rows if "tokens_per_second" in row]
        begin = time.perf_counter()
        state = loop(plan, state, start, batches, rate, metrics, actions)
        seconds = time.perf_counter() - begin + sum(plan.tokens / speed for speed in earlier)
        lost = not any("validation_loss" in row for row in metrics.rows)
        if from_first(lost):
            check(config.steps, state)  # nothing was left to do, and the records were lost
        curve = [(r["step"], r["validation_loss"]) for r in metrics.rows if "validation_loss" in r]
        if keep:
            finish(config, data, nnx.merge(graphdef, state.params), metrics.rows)
    print(f"final validation loss {curve[-1][1]:.4f} in {seconds:.0f} s; all in {config.out}")
    return Result(used, curve[-1][1], curve, memory(state), seconds)


def make_model(config: Config, devices: Mesh | None) -> tuple[nnx.GraphDef, Any]:
    """The structure of a run's model and its first parameters, on a mesh if there is one."""

    def make() -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(gpt.GPT(gpt_config(config), rngs=nnx.Rngs(config.seed)), nnx.Param)

    graphdef, _ = nnx.eval_shape(make)
    return graphdef, mesh.make_params(lambda: nnx.to_pure_dict(make()[1]), devices)


def _discard_at_its_end(config: Config, raised: type[BaseException] | None) -> None:
    """Removes the checkpoints of a run that has ended, or has diverged: nothing goes on from it."""
    if raised is None or issubclass(raised, DivergedError):
        checkpoints.discard(config.out)


def _validation(config: Config, data: text.Data, devices: Mesh | None) -> np.ndarray | jax.Array:
    """Batches as large as the parts that a batch is worked on in."""
    batches = validation_batches(
        data.validation,
        config.context,
        config.batch_size // config.accumulate,
        config.eval_batches * config.accumulate,
    )
    return mesh.place_batches(batches, devices)


def finish(config: Config, data: text.Data, model: gpt.GPT, rows: list[dict[str, Any]]) -> None:
    """Draws curves and ranks; prints a sample that begins as the validation split does."""
    prompt = np.asarray(data.validation[: min(16, config.context)], np.int32)
    key = jax.random.key(config.seed)
    sample = gpt.generate(
        model, prompt, key, length=config.sample_tokens, vocabulary=data.vocabulary
    )
    words = data.decode(multihost_utils.process_allgather(sample, tiled=True).tolist())
    if not is_first():
        return
    plots.plot_run(rows, config.out / "curves.png")
    if optimizers.ranks_adapt(config.optimizer, config.hyper, config.adapprox):
        of_ranks = [row for row in rows if "errors" in row]
        if of_ranks:
            plots.plot_ranks(of_ranks, config.out / "ranks.png")
    (config.out / "sample.txt").write_text(words)
    print(f"---- a sample ----\n{words}\n------------------")
