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

from examples.gpt2 import checkpoints, elastic, optimizers, plots
from examples.gpt2 import data as text
from examples.gpt2 import model as gpt
from examples.gpt2.batches import batches as training_batches
from examples.gpt2.batches import validation_batches
from examples.gpt2.config import Config, UsageError, gpt_config, load_data, resolve, settings
from examples.gpt2.folder import run_folder, write_settings
from examples.gpt2.loop import Actions, Plan, loop
from examples.gpt2.metrics import Metrics, describe, memory, validate
from examples.gpt2.step import TrainState, evaluation, token_loss, train_step


class Result(NamedTuple):
    """What is left of a run, for comparisons."""

    settings: dict[str, Any]
    validation_loss: float
    curve: list[tuple[int, float]]  # (step, validation loss)
    memory: dict[str, float]
    seconds: float  # of the training loop, validations and compilation included


def run(
    config: Config,
    *,
    keep: bool = True,
    build: Callable[..., optax.GradientTransformation] = optimizers.build,
) -> Result:
    """Trains one model.

    Args:
      config: The settings; what they leave to the presets is filled in here.
      keep: Whether to save checkpoints, a figure and a sample; metrics are written in any case.
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
    rate = optimizers.schedule(
        config.learning_rate, config.min_learning_rate, config.warmup, config.steps
    )
    graphdef, params = nnx.split(gpt.GPT(gpt_config(config), rngs=nnx.Rngs(config.seed)), nnx.Param)
    params = nnx.to_pure_dict(params)
    try:
        options, widen = elastic.narrow(config, params)
        tx = build(config.optimizer, rate, config.hyper, options)
    except ValueError as error:
        raise UsageError(f"{config.optimizer}: {error}") from None
    state = TrainState(params, jax.jit(tx.init)(params))
    print(f"{config.model}, {config.optimizer}: {describe(memory(state))}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(run_folder(config.out, config.resume, used))

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        batches = opened(
            training_batches(data.train, config.context, config.batch_size, config.seed)
        )
        manager = stack.enter_context(checkpoints.open_checkpoints(config.out)) if keep else None
        start = 0
        if config.resume:
            start, state = checkpoints.restore(manager, state, batches, used)
            write_settings(config.out, used)  # a run may be made longer
            print(f"going on after step {start} in {config.out}")
        metrics = opened(Metrics(config.out, start))

        def save(step: int, state: TrainState) -> None:
            if keep:
                checkpoints.save(manager, step, state, batches, used)

        evaluate, tokens_NxBxL = evaluation(graphdef), _validation(config, data)

        def check(step: int, state: TrainState) -> None:
            value = float(evaluate(state.params, tokens_NxBxL))
            validate(metrics, step, value, state, elastic.fullness(config))

        plan = Plan(
            steps=config.steps,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            tokens=config.batch_size * config.context,
        )
        actions = Actions(
            step=train_step(token_loss(graphdef), tx, config.accumulate),
            validate=check,
            save=save,
            widen=widen,
        )
        begin = time.perf_counter()
        state = loop(plan, state, start, batches, rate, metrics, actions)
        seconds = time.perf_counter() - begin
        if not any("validation_loss" in row for row in metrics.rows):
            check(config.steps, state)  # nothing was left to do, and the records were lost
        curve = [(r["step"], r["validation_loss"]) for r in metrics.rows if "validation_loss" in r]
        if keep:
            finish(config, data, nnx.merge(graphdef, state.params), metrics.rows)
    print(f"final validation loss {curve[-1][1]:.4f} in {seconds:.0f} s; all in {config.out}")
    return Result(used, curve[-1][1], curve, memory(state), seconds)


def _validation(config: Config, data: text.Data) -> np.ndarray:
    """Batches as large as the parts that a batch is worked on in."""
    return validation_batches(
        data.validation,
        config.context,
        config.batch_size // config.accumulate,
        config.eval_batches * config.accumulate,
    )


def finish(config: Config, data: text.Data, model: gpt.GPT, rows: list[dict[str, Any]]) -> None:
    """Draws curves and ranks; prints a sample that begins as the validation split does."""
    plots.plot_run(rows, config.out / "curves.png")
    if optimizers.ranks_adapt(config.optimizer, config.hyper, config.adapprox):
        of_ranks = [row for row in rows if "errors" in row]
        if of_ranks:
            plots.plot_ranks(of_ranks, config.out / "ranks.png")
    prompt = np.asarray(data.validation[: min(16, config.context)], np.int32)
    key = jax.random.key(config.seed)
    sample = gpt.generate(
        model, prompt, key, length=config.sample_tokens, vocabulary=data.vocabulary
    )
    words = data.decode(np.asarray(sample).tolist())
    (config.out / "sample.txt").write_text(words)
    print(f"---- a sample ----\n{words}\n------------------")
