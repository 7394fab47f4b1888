"""One step of training, and the loop over the steps of a run."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import adapprox_jax
from examples.gpt2.command import Terminated
from examples.gpt2.processes import is_first, largest

LOG_EVERY = 10  # steps whose losses are fetched at once, so that the next ones need not wait


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    opt_state: Any


def train_step(
    loss: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    accumulate: int,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, jax.Array]]:
    """Returns the jitted step, from a state and a batch to a new state and the loss.

    Accumulation is a scan over parts of the batch inside the step, not `optax.MultiSteps`: no
    gradient is kept between steps.

    Args:
      loss: A mean over a batch, of parameters and an array or a tree with the batch's axis first.
      tx: The optimizer.
      accumulate: Parts of a batch.
      shardings: Of the new state; None for one device. The old state is donated.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(state.params, batch)
        else:
            # Each part has rows of every device.
            parts = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0), batch
            )
            both = jax.value_and_grad(loss)
            value, grads = adapprox_jax.accumulate(both, state.params, parts)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    out_shardings = None if shardings is None else (shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=out_shardings)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM are added to a list instead of ending the program."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda it, _: heard.append(it)) for number in numbers]
    try:
        yield heard
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long a loop is, and when it does what."""

    steps: int
    eval_every: int
    checkpoint_every: int


@dataclasses.dataclass(frozen=True)
class Actions:
    """What a loop does; each takes a step's number first, but for the step itself."""

    step: Callable[[TrainState, Any], tuple[TrainState, jax.Array]]
    record: Callable[[int, list[float], float], None]  # of the last losses and their seconds
    validate: Callable[[int, TrainState], None]
    save: Callable[[int, TrainState], None]
    grow: Callable[[Any, Any], Any] | None = None  # of the optimizer's state and parameters


def loop(
    plan: Plan, state: TrainState, start: int, batches: Iterator[Any], actions: Actions
) -> TrainState:
    """Takes the steps after `start`; records, validates and saves at their intervals.

    Ctrl-C and SIGTERM are heard between two steps, and by several processes where losses are
    recorded.

    Args:
      plan: How long, and when.
      state: The state at `start`.
      start: The number of steps that were taken before.
      batches: What the steps learn from.
      actions: What a step, a record, a validation and a checkpoint do.

    Returns:
      The state after the last step.

    Raises:
      KeyboardInterrupt: After Ctrl-C, when the state is saved; `Terminated` after SIGTERM.
    """
    waiting: list[jax.Array] = []  # losses of the steps since the last record
    clock = time.perf_counter()
    bar = tqdm(total=plan.steps, initial=start, unit="step", disable=None if is_first() else True)
    alone = jax.process_count() == 1
    with signals() as heard, bar:
        for step in range(start + 1, plan.steps + 1):
            state, loss = actions.step(state, next(batches))
            waiting.append(loss)
            last = step == plan.steps
            to_check = last or step % plan.eval_every == 0
            to_save = last or step % plan.checkpoint_every == 0
            to_record = to_check or to_save or step % LOG_EVERY == 0
            # Several processes can agree on what they heard only where all of them are.
            stop = largest(heard[-1] if heard else 0) if alone or to_record else 0
            if to_record or stop:
                losses = [float(x) for x in jax.device_get(waiting)]
                actions.record(step, losses, time.perf_counter() - clock)
                bar.update(len(losses))
                bar.set_postfix_str(f"loss {losses[-1]:.3f}")
                if to_check:
                    actions.validate(step, state)
                if actions.grow is not None and step % LOG_EVERY == 0 and not last:
                    opt_state = actions.grow(state.opt_state, state.params)
                    state = state._replace(opt_state=opt_state)
                if to_save or stop:
                    actions.save(step, state)
                waiting, clock = [], time.perf_counter()
            if stop and not last:
                where = f"after step {step} of {plan.steps}: --resume goes on from there"
                if stop == signal.SIGTERM:
                    raise Terminated(f"terminated {where}")
                raise KeyboardInterrupt(f"interrupted {where}")
    return state
