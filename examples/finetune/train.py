"""Fine-tunes GPT-2 on a task of GLUE or on SQuAD: `python -m examples.finetune.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `best/` with the
parameters that scored best, and `predictions/` of those. Ctrl-C saves a checkpoint first.
`--resume` goes on from the last one.
"""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from examples.finetune.checkpoint import read_checkpoint
from examples.finetune.config import Config, check, settings
from examples.finetune.heads import Batch, WithHead
from examples.finetune.tasks import LENGTHS, Split, Task, load_task
from examples.gpt2 import checkpoints, metrics, optimizers
from examples.gpt2.batches import prefetched
from examples.gpt2.command import InputError, exit_code, one_line
from examples.gpt2.config import as_input
from examples.gpt2.folder import run_folder, write_whole
from examples.gpt2.loop import Actions, Plan, TrainState, loop, train_step
from examples.gpt2.model import GPT

_SHORTEST = 8  # tokens of an example, at least


def finetune(config: Config) -> dict[str, float]:
    """Fine-tunes one model.

    Returns:
      The scores on the validation split after the epoch with the best one, in percent.

    Raises:
      InputError: If the settings or the files cannot be used.
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the checkpoint is saved.
    """
    gpt, task, used = _read(config)
    out = config.out or pathlib.Path(
        f"runs/finetune/{config.task}-{config.optimizer}-seed{config.seed}"
    )
    per_epoch = len(task.train["tokens"]) // config.batch_size
    steps = config.epochs * per_epoch
    rate = _schedule(config.learning_rate, round(config.warmup * steps), steps)
    graphdef, params = nnx.split(WithHead(gpt, task.outputs, rngs=nnx.Rngs(config.seed)), nnx.Param)
    # Copies: a step is given its arrays for good.
    params = jax.tree.map(jnp.array, nnx.to_pure_dict(params))
    tx = as_input(lambda: optimizers.build(config.optimizer, config.options, rate))
    tx = optimizers.keeping(config.weights, tx)
    begin = jax.jit(functools.partial(optimizers.first_state, config.weights, tx))
    state = TrainState(*begin(params))
    del params  # in float32
    print(f"{config.task}, {config.optimizer}: {metrics.describe(state)}")
    predict = _predictor(graphdef, task, config.batch_size // config.accumulate)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_folder(out, config.resume, used))

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        batches = opened(_batches(task.train, config.batch_size, config.seed))
        manager = stack.enter_context(checkpoints.open_checkpoints(out))
        best = opened(_open_best(out, task.metric))
        start = 0
        if config.resume:
            start, state = checkpoints.restore(manager, state, batches, used)
            print(f"going on after step {start} in {out}")
        rows = opened(metrics.Metrics(out, start))

        def exported(state: TrainState) -> Any:
            whole = config.weights == "split"
            params = adapprox_jax.join_weights(*state) if whole else state.params
            return jax.tree.map(lambda x: x.astype(config.export), params)

        def validate(step: int, state: TrainState) -> None:
            params = exported(state)
            scores = task.validation.score(predict(params, task.validation))
            rows.write(step, **{f"validation_{name}": x for name, x in scores.items()})
            tqdm.write(f"step {step}: {_in_words(scores)}")
            if best.latest_step() != step:
                best.save(step, args=ocp.args.StandardSave(params), metrics=scores)

        actions = Actions(
            step=train_step(
                lambda params, batch: task.loss(nnx.merge(graphdef, params), batch),
                tx,
                config.accumulate,
            ),
            record=lambda step, losses, seconds: rows.record(step, losses, seconds, rate),
            validate=validate,
            save=lambda step, state: checkpoints.save(manager, step, state, batches, used),
        )
        plan = Plan(steps, per_epoch, min(config.checkpoint_every, per_epoch))
        state = loop(plan, state, start, batches, actions)
        at, scores, chosen = _restored(best, out, exported(state))
        for split in filter(None, (task.validation, task.test)):
            file = out / "predictions" / split.file
            file.parent.mkdir(exist_ok=True)
            write_whole(file, split.submission(predict(chosen, split)))
    print(f"best after step {at}: {_in_words(scores)}; all in {out}")
    return scores


def _read(config: Config) -> tuple[GPT, Task, dict[str, Any]]:
    """The model, the task, and all that decides the result."""
    check(config)
    gpt, tokenizer = read_checkpoint(config.checkpoint, config.dtype)
    context = gpt.config.context
    length = min(LENGTHS[config.task], context) if config.length is None else config.length
    if not _SHORTEST <= length <= context:
        allowed = f"from {_SHORTEST} to the model's context, {context}"
        raise InputError(f"--length is {length}, and must be {allowed}")
    task = load_task(config.task, config.data, config.cache, tokenizer, length, config.examples)
    examples = len(task.train["tokens"])
    if examples < config.batch_size:
        raise InputError(f"--batch-size is {config.batch_size}; there are {examples} examples")
    digests = {
        "checkpoint": _digest(nnx.state(gpt, nnx.Param)),
        "data": _digest([task.train, task.validation.batch]),
    }
    return gpt, task, settings(config, digests) | {"length": length}


def _predictor(
    graphdef: nnx.GraphDef, task: Task, batch_size: int
) -> Callable[[Any, Split], np.ndarray]:
    """Returns what works out the logits of a split, batch by batch."""
    logits = jax.jit(lambda params, batch: task.logits(nnx.merge(graphdef, params), batch))

    def predict(params: Any, split: Split) -> np.ndarray:
        count = len(split.batch["tokens"])
        parts = []
        for begin in range(0, count, batch_size):
            # The last batch is filled with the last example, so that one program serves all.
            rows = np.minimum(np.arange(begin, begin + batch_size), count - 1)
            parts.append(np.asarray(logits(params, {k: x[rows] for k, x in split.batch.items()})))
        return np.concatenate(parts)[:count]

    return predict


def _schedule(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """A linear warmup to the peak, then a line down to 0."""
    if not warmup:
        return optax.linear_schedule(peak, 0.0, steps)
    up = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    down = optax.linear_schedule(peak, 0.0, steps - warmup)
    return optax.join_schedules([up, down], [warmup])


@dataclasses.dataclass(frozen=True)
class _Examples:
    """The rows of a batch as a source for Grain."""

    batch: Batch

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def __getitem__(self, index: int) -> Batch:
        return {name: array[index] for name, array in self.batch.items()}


def _batches(train: Batch, batch_size: int, seed: int) -> grain.DatasetIterator[Batch]:
    """Endless batches, each epoch in a new order that the seed fixes; the rest is left out."""
    dataset = grain.MapDataset.source(_Examples(train)).seed(seed).shuffle()
    return prefetched(dataset.batch(batch_size, drop_remainder=True).repeat())


def _open_best(out: pathlib.Path, metric: str) -> ocp.CheckpointManager:
    """The parameters with the best score so far, and no others, with their scores."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1,
        best_fn=lambda scores: scores[metric],
        best_mode="max",
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager((out / "best").absolute(), options=options)


def _restored(
    best: ocp.CheckpointManager, out: pathlib.Path, like: Any
) -> tuple[int, dict[str, float], Any]:
    """Step, scores and parameters of the best epoch."""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        step = best.best_step()
        params = best.restore(step, args=ocp.args.StandardRestore(shapes))
        return step, dict(best.metrics(step)), params
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{out / 'best'}: cannot be read: {one_line(error)}") from None


def _digest(tree: Any) -> str:
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha.update(np.ascontiguousarray(leaf).tobytes())
    return sha.hexdigest()[:16]


def _in_words(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in scores.items())


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, as `command.exit_code` tells."""
    name, flags = "python -m examples.finetune.train", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    return exit_code(lambda: finetune(config))


if __name__ == "__main__":
    sys.exit(main())
