"""The loop over the steps of a run."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import optax
from tqdm import tqdm

from examples.gpt2.config import Config
from examples.gpt2.elastic import IsFull, Widen
from examples.gpt2.metrics import Metrics, record, validate
from examples.gpt2.step import TrainState

LOG_EVERY = 10  # steps whose losses are fetched at once, so that the next ones need not wait


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Within, Ctrl-C sets the event in place of ending the program."""
    event = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclasses.dataclass(frozen=True)
class Actions:
    """What is done in a loop, apart from its records."""

    step: Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]
    evaluate: Callable[[Any], jax.Array]  # parameters to the validation loss
    save: Callable[[int, TrainState], None]
    widen: Widen | None  # gives full leaves wider buffers; None where buffers stay as they are
    is_full: IsFull | None  # None where the ranks are fixed


def loop(
    config: Config,
    state: TrainState,
    start: int,
    batches: grain.DatasetIterator,
    rate: optax.Schedule,
    metrics: Metrics,
    actions: Actions,
) -> TrainState:
    """Takes the steps after `start`; records, validates and saves at their intervals.

    Buffers that may be widened are looked at every `LOG_EVERY` steps. Ctrl-C is heard between two
    steps.

    Args:
      config: The settings of the run, resolved.
      state: The state at `start`.
      start: The number of steps that were taken before.
      batches: The tokens of the steps.
      rate: The learning rate, for the records.
      metrics: Where losses go.
      actions: What a step, a validation and a checkpoint do.

    Returns:
      The state after the last step.

    Raises:
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the state is saved.
    """
    waiting: list[jax.Array] = []  # losses of the steps since the last record
    clock = time.perf_counter()
    with (
        interruptions() as interrupted,
        tqdm(total=config.steps, initial=start, unit="step", disable=None) as bar,
    ):
        for step in range(start + 1, config.steps + 1):
            state, loss = actions.step(state, next(batches))
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
                    value = float(actions.evaluate(state.params))
                    validate(metrics, step, value, state, actions.is_full)
                if actions.widen is not None and step % LOG_EVERY == 0 and not last:
                    opt_state = actions.widen(state.opt_state, state.params)
                    state = state._replace(opt_state=opt_state)
                if to_save:
                    actions.save(step, state)
                waiting, clock = [], time.perf_counter()
            if stop and not last:
                raise KeyboardInterrupt(f"interrupted after step {step} of {config.steps}")
    return state
