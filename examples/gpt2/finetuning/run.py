"""One fine-tuning, from its settings to its scores.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `best/` with the
parameters that scored best, and their predictions in the form in which they are submitted.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from examples.gpt2 import checkpoints, optimizers
from examples.gpt2.config import UsageError
from examples.gpt2.finetuning.config import Config, begins_with_adam, check, settings
from examples.gpt2.finetuning.heads import Batch, WithHead
from examples.gpt2.finetuning.tasks import (
    LENGTHS,
    METRICS,
    SHORTEST,
    Predictions,
    Task,
    load_task,
)
from examples.gpt2.folder import run_folder
from examples.gpt2.hugging_face import CheckpointError
from examples.gpt2.loop import Actions, Plan, loop
from examples.gpt2.metrics import MIB, Metrics, describe, memory
from examples.gpt2.pretrained import AdamMoments, read_pretrained
from examples.gpt2.step import TrainState, train_step


class Result(NamedTuple):
    """What is left of a run, for comparisons."""

    settings: dict[str, Any]
    scores: dict[str, float]  # of the best epoch on the validation split, in percent
    curve: list[tuple[int, float]]  # (step, the task's first metric)
    memory: dict[str, float]


class Prepared(NamedTuple):
    """What all runs of a comparison share; arrays are the host's."""

    graphdef: nnx.GraphDef
    params: Any  # of the model, without a head
    adam: AdamMoments | None
    task: Task
    length: int
    digests: dict[str, str]


def prepare(config: Config) -> Prepared:
    """Reads the checkpoint and the task.

    Raises:
      UsageError: The settings cannot be used.
      CheckpointError, TokenizerError, DataError: The files cannot.
    """
    check(config)
    model, tokenizer, adam = read_pretrained(
        config.checkpoint, config.dtype, config.cache, moments=config.from_adam
    )
    context = model.config.context
    length = min(LENGTHS[config.task], context) if config.length is None else config.length
    if not SHORTEST <= length <= context:
        allowed = f"from {SHORTEST} to the model's context, {context}"
        raise UsageError(f"--length is {length}, and must be {allowed}")
    task = load_task(config.task, config.data, tokenizer, length, config.examples)
    examples = len(task.train["tokens"])
    if examples < config.batch_size:
        raise UsageError(f"--batch-size is {config.batch_size}; there are {examples} examples")
    graphdef, params = nnx.split(model, nnx.Param)
    params = jax.device_get(nnx.to_pure_dict(params))
    digests = {
        "checkpoint": _digest([params, repr(model.config).encode()]),
        "data": _digest([task.train, task.digest.encode()]),
    }
    return Prepared(graphdef, params, adam, task, length, digests)


def run(config: Config, prepared: Prepared | None = None, *, keep: bool = True) -> Result:
    """Fine-tunes one model.

    Args:
      config: The settings.
      prepared: What `prepare` read; None to read it here.
      keep: Whether to save checkpoints and predictions; metrics are written in any case.

    Returns:
      The scores on the validation split after the epoch with the best, and the sizes in memory.

    Raises:
      UsageError: If the settings cannot be used.
      CheckpointError, TokenizerError, DataError: If the files cannot.
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the checkpoint is saved.
    """
    prepared = prepare(config) if prepared is None else prepared
    task = prepared.task
    out = config.out or pathlib.Path(
        f"runs/finetune/{config.task}-{config.optimizer}-seed{config.seed}"
    )
    used = settings(config, prepared.digests) | {"length": prepared.length}
    examples = len(task.train["tokens"])
    per_epoch = examples // config.batch_size
    steps = config.epochs * per_epoch
    rate = _schedule(config.learning_rate, round(config.warmup * steps), steps)

    gpt = nnx.merge(prepared.graphdef, prepared.params)
    model = WithHead(gpt, task.outputs, rngs=nnx.Rngs(config.seed))
    graphdef, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    try:
        tx = optimizers.build(config.optimizer, rate, config.hyper, config.adapprox)
        sizes = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "state_mib": adapprox_jax.state_nbytes(tx, params) / MIB,
            "adamw_state_mib": adapprox_jax.state_nbytes(optax.adamw(1.0), params) / MIB,
        }
        print(f"{config.task}, {config.optimizer}: {describe(sizes)}")
        print(f"{task.contents}, {steps} updates", flush=True)
        # Copies: a step is given its arrays for good, and the next run begins with the same model.
        params = jax.tree.map(jnp.array, params)
        opt_state = _first_state(config, tx, params, prepared.adam)
    except ValueError as error:
        raise UsageError(f"{config.optimizer}: {error}") from None
    state = TrainState(params, opt_state)

    def loss(params: Any, batch: Batch) -> jax.Array:
        return task.loss(nnx.merge(graphdef, params), batch)

    predict = predictor(graphdef, task, config.batch_size // config.accumulate)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_folder(out, config.resume, used))

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        batches = opened(_batches(task.train, config.batch_size, config.seed))
        manager = stack.enter_context(checkpoints.open_checkpoints(out)) if keep else None
        best = opened(_open_best(out, task.metric)) if keep else None
        start = 0
        if config.resume:
            start, state = checkpoints.restore(manager, state, batches, used)
            print(f"going on after step {start} in {out}")
        metrics = opened(Metrics(out, start))

        def validate(step: int, state: TrainState) -> None:
            scores = task.validation.score(predict(state.params, task.validation))
            metrics.write(step, **{f"validation_{name}": x for name, x in scores.items()})
            words = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            tqdm.write(f"step {step}: {words}")
            if best is not None and best.latest_step() != step:
                arguments = ocp.args.StandardSave(state.params)
                best.save(step, args=arguments, metrics=scores)

        def save(step: int, state: TrainState) -> None:
            if keep:
                checkpoints.save(manager, step, state, batches, used)

        actions = Actions(
            step=train_step(loss, tx, config.accumulate), validate=validate, save=save
        )
        plan = Plan(
            steps=steps,
            eval_every=per_epoch,
            checkpoint_every=min(config.checkpoint_every, per_epoch),
            tokens=config.batch_size * prepared.length,
        )
        state = loop(plan, state, start, batches, rate, metrics, actions)
        rows = [row for row in metrics.rows if f"validation_{task.metric}" in row]
        if best is None:
            # The later of equals, as the folder of the best keeps it.
            top = max(rows, key=lambda row: (row[f"validation_{task.metric}"], row["step"]))
            at, scores = (
                top["step"],
                {name: top[f"validation_{name}"] for name in METRICS[config.task]},
            )
        else:
            at, scores, chosen = _restored(best, out, state.params)
            for split in filter(None, (task.validation, task.test)):
                folder = out / ("validation" if split is task.validation else "test")
                folder.mkdir(exist_ok=True)
                print(f"predictions in {split.write(predict(chosen, split), folder)}")
    words = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
    print(f"best after step {at}: {words}; all in {out}")
    curve = [(row["step"], row[f"validation_{task.metric}"]) for row in rows]
    return Result(used, scores, curve, memory(state))


def _first_state(
    config: Config, tx: optax.GradientTransformation, params: Any, adam: AdamMoments | None
) -> Any:
    """The optimizer's state before the first step: a fresh one, or AdamW's converted."""
    if adam is None or not begins_with_adam(config):
        return jax.jit(tx.init)(params)
    head = jax.tree.map(np.zeros_like, params["head"])  # which AdamW did not know
    of_model = adam.state
    moments = of_model._replace(
        mu={"gpt": of_model.mu, "head": head}, nu={"gpt": of_model.nu, "head": head}
    )
    given = optimizers.keywords(config.optimizer, config.hyper, config.adapprox)
    shared = inspect.signature(adapprox_jax.from_adam).parameters.keys() & given.keys()
    made_with = {name: given[name] for name in shared} | {
        name: getattr(adam, name) for name in ("b1", "b2", "eps")
    }
    return schedules_at_zero(adapprox_jax.from_adam(tx, moments, params, **made_with))


def predictor(
    graphdef: nnx.GraphDef, task: Task, batch_size: int
) -> Callable[[Any, Predictions], np.ndarray]:
    """Returns what works out the logits of a split, batch by batch."""
    logits = jax.jit(lambda params, batch: task.logits(nnx.merge(graphdef, params), batch))

    def predict(params: Any, split: Predictions) -> np.ndarray:
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
    dataset = dataset.batch(batch_size, drop_remainder=True).repeat()
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


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
        if step is None:
            raise ValueError("it is empty")
        params = best.restore(step, args=ocp.args.StandardRestore(shapes))
        return step, dict(best.metrics(step)), params
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{out / 'best'}: cannot be read: {reason}") from None


def schedules_at_zero(opt_state: Any) -> Any:
    """The state with the rate at its beginning: `from_adam` goes on with that of the training."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def reset(node: Any) -> Any:
        return node._replace(count=jnp.zeros_like(node.count)) if is_schedule(node) else node

    return jax.tree.map(reset, opt_state, is_leaf=is_schedule)


def _digest(tree: Any) -> str:
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha.update(leaf if isinstance(leaf, bytes) else np.ascontiguousarray(leaf).tobytes())
    return sha.hexdigest()[:16]
