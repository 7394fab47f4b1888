"""One fine-tuning, from its settings to its scores.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `checkpoints/`, `best/` with the
parameters that scored best, and their predictions in the form in which they are submitted.
"""

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Iterator
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
from examples.gpt2.finetuning.config import Config, check, settings
from examples.gpt2.finetuning.heads import Batch, WithHead
from examples.gpt2.finetuning.tasks import LENGTHS, Predictions, Task, load_task
from examples.gpt2.loop import Actions, Plan, loop
from examples.gpt2.metrics import Metrics, describe, memory
from examples.gpt2.pretrained import Pretrained, read_pretrained
from examples.gpt2.run import prepare_folder
from examples.gpt2.step import TrainState, train_step


class Result(NamedTuple):
    """What is left of a run, for comparisons."""

    settings: dict[str, Any]
    scores: dict[str, float]  # of the best epoch on the validation split, in percent
    curve: list[tuple[int, float]]  # (step, the task's first metric)
    memory: dict[str, float]


class Prepared(NamedTuple):
    """What all runs of a comparison share."""

    pretrained: Pretrained
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
    pretrained = read_pretrained(config.checkpoint, config.dtype, config.cache)
    if config.from_adam and pretrained.adam is None:
        allowed = "a run of examples.gpt2.train with --optimizer adamw"
        raise UsageError(
            f"--from-adam: {config.checkpoint} has no state of AdamW; allowed: {allowed}"
        )
    context = pretrained.model.config.context
    length = min(LENGTHS[config.task], context) if config.length is None else config.length
    if length > context:
        raise UsageError(
            f"--length is {length}, and must be at most the model's context, {context}"
        )
    task = load_task(config.task, config.data, pretrained.tokenizer, length)
    params = nnx.to_pure_dict(nnx.state(pretrained.model, nnx.Param))
    digests = {"checkpoint": _digest(params), "data": _digest([task.train, task.validation.batch])}
    return Prepared(pretrained, task, length, digests)


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
    pretrained, task = prepared.pretrained, prepared.task
    out = config.out or pathlib.Path(
        f"runs/finetune/{config.task}-{config.optimizer}-seed{config.seed}"
    )
    used = settings(config, prepared.digests) | {"length": prepared.length}
    examples = len(task.train["tokens"])
    if examples < config.batch_size:
        raise UsageError(f"--batch-size is {config.batch_size}; there are {examples} examples")
    per_epoch = examples // config.batch_size
    steps = config.epochs * per_epoch
    rate = _schedule(config.learning_rate, round(config.warmup * steps), steps)

    model = WithHead(pretrained.model, task.outputs, rngs=nnx.Rngs(config.seed))
    graphdef, params = nnx.split(model, nnx.Param)
    # Copies: a step is given its arrays for good, and the next run begins with the same model.
    params = jax.tree.map(jnp.copy, nnx.to_pure_dict(params))
    try:
        tx = optimizers.build(config.optimizer, rate, config.hyper, config.adapprox)
        opt_state = jax.jit(tx.init)(params)
    except ValueError as error:
        raise UsageError(f"{config.optimizer}: {error}") from None
    if config.from_adam:
        opt_state = adapprox_jax.from_adam(tx, _with_head(pretrained.adam, params), params)
        opt_state = schedules_at_zero(opt_state)
    state = TrainState(params, opt_state)
    prepare_folder(out, config.resume, used)
    print(f"{config.task}, {config.optimizer}: {describe(memory(state))}")
    print(f"{examples} examples, {steps} updates")

    def loss(params: Any, batch: Batch) -> jax.Array:
        return task.loss(nnx.merge(graphdef, params), batch)

    predict = predictor(graphdef, task, config.batch_size)
    with contextlib.ExitStack() as stack:

        def opened(resource: Any) -> Any:
            return stack.enter_context(contextlib.closing(resource))

        batches = opened(_batches(task.train, config.batch_size, config.seed))
        manager = opened(checkpoints.open_checkpoints(out)) if keep else None
        best = opened(_open_best(out)) if keep else None
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
                best.save(step, args=arguments, metrics={"score": scores[task.metric]})

        def save(step: int, state: TrainState) -> None:
            if keep:
                checkpoints.save(manager, step, state, batches, used)

        actions = Actions(
            step=train_step(loss, tx, config.accumulate), validate=validate, save=save
        )
        plan = Plan(steps, per_epoch, per_epoch, config.batch_size * prepared.length)
        state = loop(plan, state, start, batches, rate, metrics, actions)
        rows = [row for row in metrics.rows if f"validation_{task.metric}" in row]
        # The later of equals, as the folder of the best keeps it.
        top = max(rows, key=lambda row: (row[f"validation_{task.metric}"], row["step"]))
        scores = {
            name.removeprefix("validation_"): value
            for name, value in top.items()
            if name.startswith("validation_")
        }
        if best is not None:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state.params)
            chosen = best.restore(best.best_step(), args=ocp.args.StandardRestore(shapes))
            for split in filter(None, (task.validation, task.test)):
                folder = out / ("validation" if split is task.validation else "test")
                folder.mkdir(exist_ok=True)
                print(f"predictions in {split.write(predict(chosen, split), folder)}")
    words = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
    print(f"best after step {top['step']}: {words}; all in {out}")
    curve = [(row["step"], row[f"validation_{task.metric}"]) for row in rows]
    return Result(used, scores, curve, memory(state))


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


def _batches(train: Batch, batch_size: int, seed: int) -> grain.DatasetIterator[Batch]:
    """Endless batches, each epoch in a new order that the seed fixes; the rest is left out."""
    rows = [dict(zip(train, row, strict=True)) for row in zip(*train.values(), strict=True)]
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle()
    dataset = dataset.batch(batch_size, drop_remainder=True).repeat()
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def _open_best(out: pathlib.Path) -> ocp.CheckpointManager:
    """The parameters with the best score so far, and no others."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1,
        best_fn=lambda metrics: metrics["score"],
        best_mode="max",
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager((out / "best").absolute(), options=options)


def _with_head(adam: optax.ScaleByAdamState, params: Any) -> optax.ScaleByAdamState:
    """AdamW's moments of a model, and zeros for the head that it lacks."""
    head = jax.tree.map(np.zeros_like, params["head"])
    return adam._replace(mu={"gpt": adam.mu, "head": head}, nu={"gpt": adam.nu, "head": head})


def schedules_at_zero(opt_state: Any) -> Any:
    """The state with the rate at its beginning: `from_adam` goes on with that of the training."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def reset(node: Any) -> Any:
        return node._replace(count=jnp.zeros_like(node.count)) if is_schedule(node) else node

    return jax.tree.map(reset, opt_state, is_leaf=is_schedule)


def _digest(tree: Any) -> str:
    sha = hashlib.sha256()
    for leaf in _arrays(tree):
        sha.update(np.ascontiguousarray(leaf).tobytes())
    return sha.hexdigest()[:16]


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    return (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
