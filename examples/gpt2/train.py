"""Trains GPT-2 on text: `python -m examples.gpt2.train --help`.

A run writes to its folder: `settings.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`curves.png` and `sample.txt`. Ctrl-C saves a checkpoint first; `--resume` goes on from the last
one and ends with the very parameters of a run that was never interrupted.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorboardX
import tyro
from flax import nnx
from tqdm import tqdm

import adapprox_jax
from adapprox_jax.rank import resolve_capacity
from examples.gpt2 import data as text
from examples.gpt2 import model as gpt
from examples.gpt2 import optimizers, plots, records
from examples.gpt2.compare import compare
from examples.gpt2.config import (
    Config,
    UsageError,
    gpt_config,
    load_data,
    resolve,
    settings,
)

LOG_EVERY = 10  # steps whose losses are fetched at once, so that the next ones need not wait
MIB = 2**20


class DivergedError(RuntimeError):
    """The loss is not finite."""


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


class Result(NamedTuple):
    """What is left of a run, for comparisons."""

    settings: dict[str, Any]
    validation_loss: float
    curve: list[tuple[int, float]]  # (step, validation loss)
    memory: dict[str, float]
    seconds: float  # of the training loop, validations and compilation included


# ---------------------------------------------------------------------------------- one step


def train_step(
    graphdef: nnx.GraphDef, tx: optax.GradientTransformation, accumulate: int
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """Returns the jitted step: state and tokens (batch, context + 1) to new state and loss.

    Accumulation is a scan over parts of the batch inside of the step, not `optax.MultiSteps`: no
    gradient is kept between steps, checkpoints do not grow, and the optimizer runs once a batch.
    The old state is donated.
    """

    def loss(params: Any, tokens_BxL: jax.Array) -> jax.Array:
        return gpt.loss(nnx.merge(graphdef, params), tokens_BxL)

    def step(state: TrainState, tokens_BxL: jax.Array) -> tuple[TrainState, jax.Array]:
        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            part = jax.value_and_grad(loss)(state.params, tokens)
            return jax.tree.map(jnp.add, total, part), None

        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(state.params, tokens_BxL)
        else:
            parts = tokens_BxL.reshape(accumulate, -1, tokens_BxL.shape[-1])
            zero = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, state.params))
            total, _ = jax.lax.scan(add, zero, parts)
            value, grads = jax.tree.map(lambda x: x / accumulate, total)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


def evaluation(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the jitted mean loss over batches of tokens (batches, batch, context + 1)."""

    def mean_loss(params: Any, tokens_NxBxL: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return jax.lax.map(lambda tokens_BxL: gpt.loss(model, tokens_BxL), tokens_NxBxL).mean()

    return jax.jit(mean_loss)


# -------------------------------------------------------------------------------- checkpoints


def open_checkpoints(out: pathlib.Path) -> ocp.CheckpointManager:
    """The checkpoints of a run, the last two of which are kept.

    Saving is not asynchronous: on a CPU the arrays would still be read while the next step,
    which they are donated to, writes to them.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> None:
    """Saves all that the next step depends on, unless this step is saved already."""
    if checkpoints.latest_step() != step:
        report = adapprox_jax.rank_report(state.opt_state, state.params)
        extra = {
            "data": batches.get_state(),
            "settings": used,
            "shapes": _shapes(state.params),
            "capacities": {name: info.capacity for name, info in report.items()},
        }
        checkpoints.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()), extra=ocp.args.JsonSave(extra)
            ),
        )


def restore(
    checkpoints: ocp.CheckpointManager,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> tuple[int, TrainState]:
    """Returns the last saved step and state, and sets the data to its position.

    The factor buffers have the widths that they were saved with, whatever those of `state` are.

    Raises:
      UsageError: If there is no checkpoint or it is of a run with other settings or parameters.
    """
    step = checkpoints.latest_step()
    if step is None:
        raise UsageError(f"--resume: there is no checkpoint in {checkpoints.directory}")
    extra = checkpoints.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore())).extra
    differences = _differences(extra["settings"], used)
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other settings: {differences}")
    differences = _differences(extra["shapes"], _shapes(state.params))
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other parameters: {differences}")
    batches.set_state(extra["data"])
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    target = target._replace(opt_state=adapprox_jax.resize(target.opt_state, extra["capacities"]))
    target = target._asdict()
    arguments = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    return step, TrainState(**checkpoints.restore(step, args=arguments).state)


def _shapes(params: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    pairs = [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    return ", ".join(f"{n} was {a}, now {b}" for n, a, b in pairs if json.dumps(a) != json.dumps(b))


# ------------------------------------------------------------------------------------ records


class Metrics:
    """Rows of numbers, appended to `metrics.jsonl` and to TensorBoard; `rows` has all of them."""

    def __init__(self, out: pathlib.Path, step: int):
        """Goes on after `step`: rows that an interrupted run wrote beyond it are dropped."""
        path = out / "metrics.jsonl"
        self.rows = [row for row in records.read(path) if row["step"] <= step]
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (whole lines, at once)
        self._board = tensorboardX.SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: Any) -> None:
        """Appends a row; numbers go to TensorBoard too."""
        self.rows.append({"step": step, **values})
        self._file.write(json.dumps(self.rows[-1]) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still held back."""
        self._file.close()
        self._board.close()


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def memory(state: TrainState) -> dict[str, float]:
    """Sizes of the optimizer's state, and how much of the model is in factored leaves."""
    leaves = jax.tree.leaves(state.params)
    report = adapprox_jax.rank_report(state.opt_state, state.params).values()
    parameters = sum(leaf.size for leaf in leaves)
    dense = sum(leaf.nbytes for leaf in leaves)
    sizes = {
        "parameters": parameters,
        "state_mib": nbytes(state.opt_state) / MIB,
        "adamw_state_mib": adapprox_jax.state_nbytes(optax.adamw(1.0), state.params) / MIB,
    }
    if report:
        factors = sum(info.nbytes for info in report)
        replaced = sum(info.dense_nbytes for info in report)
        sizes["factored_share"] = sum(math.prod(info.shape) for info in report) / parameters
        sizes["second_moment_ratio"] = (factors + dense - replaced) / dense
    return sizes


def describe(sizes: dict[str, float]) -> str:
    """`memory` in words."""
    words = (
        f"parameters {sizes['parameters']:,}; optimizer state {sizes['state_mib']:.2f} MiB "
        f"(AdamW's: {sizes['adamw_state_mib']:.2f} MiB)"
    )
    if "factored_share" in sizes:
        words += (
            f"; {sizes['factored_share']:.1%} of the parameters in factored leaves, second moment "
            f"{sizes['second_moment_ratio']:.1%} of the dense one's size"
        )
    return words


def buffer_sizes(config: Config, params: Any) -> tuple[int, ...]:
    """Widths that the factor buffers of an elastic run may have: 8, 16, 32, ... max_rank.

    Raises:
      UsageError: If no matrix is factored.
    """
    used = optimizers.keywords(config.optimizer, config.hyper, config.adapprox)
    max_rank, initial_rank = used["max_rank"], used["initial_rank"]
    first = (
        max(8, initial_rank) if isinstance(max_rank, float) else max(min(8, max_rank), initial_rank)
    )
    narrow = dataclasses.replace(config.adapprox, max_rank=first)
    tx = optimizers.build(config.optimizer, 0.0, config.hyper, narrow)
    state = jax.eval_shape(tx.init, params)
    factors = [jax.tree.leaves(optax.tree.get(state, name)) for name in ("q", "u")]
    largest = max(
        (
            resolve_capacity(max_rank, q.shape[-2], u.shape[-2])
            for q, u in zip(*factors, strict=True)
            if q.ndim
        ),
        default=None,
    )
    if largest is None:
        raise UsageError(f"--elastic: no matrix is large enough for factors of {first} columns")
    between = itertools.takewhile(lambda size: size < largest, (first * 2**i for i in range(64)))
    return (*between, max(first, largest))


def full_error(config: Config) -> float | None:
    """The error above which a matrix counts as full when its rank is the width of its buffers.

    With a margin the error at the full width tells nothing: the rank alone decides.
    """
    if not config.optimizer.startswith("adapprox"):
        return None
    late = dataclasses.replace(config.adapprox, sampling_threshold=None)
    used = optimizers.keywords(config.optimizer, config.hyper, late)
    return None if used["rank_margin"] else used["error_threshold"]


def prepare_folder(config: Config, used: dict[str, Any]) -> None:
    """Makes the run's folder; an earlier run there is kept beside it, unless it is resumed.

    Raises:
      UsageError: If the folder holds something else, or nothing to resume.
    """
    out = config.out
    if config.resume:
        if not (out / "checkpoints").is_dir():
            raise UsageError(f"--resume: there is no checkpoint in {out}")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / "settings.json").exists():
            raise UsageError(f"--out {out}: not a run's folder; give a new or an empty one")
        kept = _free_name(out)
        out.rename(kept)
        print(f"the earlier run in {out} is now {kept}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps(used, indent=2) + "\n")


def _free_name(path: pathlib.Path) -> pathlib.Path:
    number = 1
    while (name := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return name


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Within, Ctrl-C sets the event in place of ending the program."""
    event = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


# ---------------------------------------------------------------------------------- whole run


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
      KeyboardInterrupt: After Ctrl-C, when the checkpoint is saved.
    """
    config = resolve(config)
    data = load_data(config)
    used = settings(config, data.key)
    rate = optimizers.schedule(
        config.learning_rate, config.min_learning_rate, config.warmup, config.steps
    )
    model = gpt.GPT(gpt_config(config), rngs=nnx.Rngs(config.seed))
    graphdef, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    options, widen = config.adapprox, None
    try:
        if config.elastic:
            sizes = buffer_sizes(config, params)
            options = dataclasses.replace(options, max_rank=sizes[0])
            widen = functools.partial(
                adapprox_jax.grow, sizes=sizes, error_threshold=full_error(config)
            )
        tx = build(config.optimizer, rate, config.hyper, options)
    except ValueError as error:
        raise UsageError(f"{config.optimizer}: {error}") from None
    prepare_folder(config, used)
    state = TrainState(params, jax.jit(tx.init)(params))
    print(f"{config.model}, {config.optimizer}: {describe(memory(state))}")
    validation = text.validation_batches(
        data.validation,
        config.context,
        config.batch_size // config.accumulate,
        config.eval_batches * config.accumulate,
    )

    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(
            contextlib.closing(
                text.batches(data.train, config.context, config.batch_size, config.seed)
            )
        )
        checkpoints, start = None, 0
        if keep:
            checkpoints = stack.enter_context(contextlib.closing(open_checkpoints(config.out)))
        if config.resume:
            start, state = restore(checkpoints, state, batches, used)
            print(f"going on after step {start} in {config.out}")
        metrics = stack.enter_context(contextlib.closing(Metrics(config.out, start)))

        def save_at(step: int, state: TrainState) -> None:
            if keep:
                save(checkpoints, step, state, batches, used)

        begin = time.perf_counter()
        state = loop(
            config,
            state,
            start,
            batches,
            step_fn=train_step(graphdef, tx, config.accumulate),
            eval_fn=functools.partial(evaluation(graphdef), tokens_NxBxL=validation),
            rate=rate,
            metrics=metrics,
            save_at=save_at,
            widen=widen,
            full_above=full_error(config),
        )
        seconds = time.perf_counter() - begin
    curve = [(r["step"], r["validation_loss"]) for r in metrics.rows if "validation_loss" in r]
    if keep:
        finish(config, data, nnx.merge(graphdef, state.params), metrics.rows)
    print(f"final validation loss {curve[-1][1]:.4f} in {seconds:.0f} s; all in {config.out}")
    return Result(used, curve[-1][1], curve, memory(state), seconds)


def loop(
    config: Config,
    state: TrainState,
    start: int,
    batches: grain.DatasetIterator,
    *,
    step_fn: Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]],
    eval_fn: Callable[[Any], jax.Array],
    rate: optax.Schedule,
    metrics: Metrics,
    save_at: Callable[[int, TrainState], None],
    widen: Callable[[Any, Any], Any] | None,
    full_above: float | None,
) -> TrainState:
    """Takes the steps after `start`; records, validates and saves at their intervals.

    With `widen`, from the optimizer's state and the parameters to a state with wider buffers where
    they are full, the state is looked at every `LOG_EVERY` steps.

    Ctrl-C is heard between two steps: the state is saved, then KeyboardInterrupt raised.
    """
    waiting: list[jax.Array] = []  # losses of the steps since the last record
    clock = time.perf_counter()
    with (
        interruptions() as interrupted,
        tqdm(total=config.steps, initial=start, unit="step", disable=None) as bar,
    ):
        for step in range(start + 1, config.steps + 1):
            state, loss = step_fn(state, next(batches))
            waiting.append(loss)
            last, stop = step == config.steps, interrupted.is_set()
            to_check = last or step % config.eval_every == 0
            to_save = last or stop or step % config.checkpoint_every == 0
            if to_check or to_save or step % LOG_EVERY == 0:
                losses = [float(x) for x in jax.device_get(waiting)]
                seconds = time.perf_counter() - clock
                speed = len(losses) * config.batch_size * config.context / seconds
                record(metrics, step, losses, rate, speed)
                bar.update(len(losses))
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
                if to_check:
                    validate(metrics, step, float(eval_fn(state.params)), state, full_above)
                if widen is not None and step % LOG_EVERY == 0 and not last:
                    state = state._replace(opt_state=widen(state.opt_state, state.params))
                if to_save:
                    save_at(step, state)
                waiting, clock = [], time.perf_counter()
            if stop and not last:
                raise KeyboardInterrupt(f"interrupted after step {step} of {config.steps}")
    return state


def record(
    metrics: Metrics, step: int, losses: list[float], rate: optax.Schedule, speed: float
) -> None:
    """Writes the losses of the steps up to `step`; raises DivergedError where one is not finite."""
    for at, loss in enumerate(losses, step - len(losses) + 1):
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} at step {at}; try a lower --learning-rate")
        learning_rate = float(rate(at - 1))
        metrics.write(at, loss=loss, learning_rate=learning_rate, tokens_per_second=speed)


def validate(
    metrics: Metrics, step: int, loss: float, state: TrainState, full_above: float | None
) -> None:
    """Writes and prints a validation loss, ranks and bytes; DivergedError if not finite.

    `full_above` is the error above which a matrix counts as full when its rank is the width of its
    buffers.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the validation loss is {loss} at step {step}; try a lower --learning-rate"
        )
    row: dict[str, Any] = {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}
    words = f"step {step}: validation loss {loss:.4f}, perplexity {row['perplexity']:.2f}"
    report = adapprox_jax.rank_report(state.opt_state, state.params)
    if report:
        row["ranks"] = {leaf: info.rank for leaf, info in report.items()}
        row["mean_rank"] = float(np.mean(list(row["ranks"].values())))
        row["full"] = [leaf for leaf, info in report.items() if info.is_full(full_above)]
        row["state_mib"] = nbytes(state.opt_state) / MIB
        earlier = (old.get("peak_state_mib", 0) for old in metrics.rows)
        row["peak_state_mib"] = max([row["state_mib"], *earlier])
        words += (
            f", mean rank {row['mean_rank']:.1f}, {len(row['full'])} of {len(report)} matrices"
            f" full, state {row['state_mib']:.2f} MiB (at most {row['peak_state_mib']:.2f})"
        )
    metrics.write(step, **row)
    tqdm.write(words)


def finish(config: Config, data: text.Data, model: gpt.GPT, rows: list[dict[str, Any]]) -> None:
    """Draws the curves and prints a sample, begun with the first tokens of the validation split."""
    plots.plot_run(rows, config.out / "curves.png")
    prompt = np.asarray(data.validation[: min(16, config.context)], np.int32)
    key = jax.random.key(config.seed)
    sample = gpt.generate(
        model, prompt, key, length=config.sample_tokens, vocabulary=data.vocabulary
    )
    words = data.decode(np.asarray(sample).tolist())
    (config.out / "sample.txt").write_text(words)
    print(f"---- a sample ----\n{words}\n------------------")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 diverged, 2 bad input, 130 interrupted."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells each step of its work
    name, flags = "python -m examples.gpt2.train", (tyro.conf.FlagCreatePairsOff,)
    config = tyro.cli(Config, prog=name, args=arguments, config=flags)
    try:
        if config.compare:
            compare(config, run, DivergedError)
        else:
            run(config)
    except (UsageError, text.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        hint = "the same command" if config.compare else "--resume"
        known = f"{interruption}: {hint} goes on from there" if interruption.args else "interrupted"
        print(known, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
