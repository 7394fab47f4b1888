"""The loop over the steps of a run."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import optax
from tqdm import tqdm

from examples.gpt2.elastic import Widen
from examples.gpt2.metrics import Metrics, record
from examples.gpt2.processes import is_first, largest
from examples.gpt2.step import TrainState

LOG_EVERY = 10  # steps whose losses are fetched at once, so that the next ones need not wait


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, as schedulers do before they take a machine away."""


class Interruptions:
    """What signals asked for since they are listened to."""

    def __init__(self) -> None:
        self._number = 0

    def hear(self, number: int, _: Any) -> None:
        """A handler of signals."""
        self._number = number

    def asked(self, may_ask_others: bool) -> type[KeyboardInterrupt] | None:
        """What any of the processes was asked for: they agree where they may ask each other."""
        number = self._number if jax.process_count() == 1 else 0
        if may_ask_others:
            number = largest(self._number)
        if not number:
            return None
        return Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def interruptions() -> Iterator[Interruptions]:
    """Within, Ctrl-C and SIGTERM are noted in place of ending the program."""
    heard = Interruptions()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, heard.hear) for number in numbers]
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
    tokens: int  # of a step, for the speed


@dataclasses.dataclass(frozen=True)
class Actions:
    """What is done in a loop, apart from its records."""

    step: Callable[[TrainState, Any], tuple[TrainState, jax.Array]]
    validate: Callable[[int, TrainState], None]
    save: Callable[[int, TrainState], None]
    widen: Widen | None = None  # gives full leaves wider buffers; None where they stay as they are


def loop(
    plan: Plan,
    state: TrainState,
    start: int,
    batches: grain.DatasetIterator,
    rate: optax.Schedule,
    metrics: Metrics,
    actions: Actions,
) -> TrainState:
    """Takes the steps after `start`; records, validates and saves at their intervals.

    Buffers that may be widened are looked at every `LOG_EVERY` steps. Ctrl-C and SIGTERM
    are heard between two steps, and with several processes where losses are recorded.

    Args:
      plan: How long, and when.
      state: The state at `start`.
      start: The number of steps that were taken before.
      batches: What the steps learn from.
      rate: The learning rate, for the records.
      metrics: Where losses go.
      actions: What a step, a validation and a checkpoint do.

    Returns:
      The state after the last step.

    Raises:
      DivergedError: If a loss is not finite.
      KeyboardInterrupt: After Ctrl-C, when the state is saved; `Terminated` after SIGTERM.
    """
    waiting: list[jax.Array] = []  # losses of the steps since the last record
    clock = time.perf_counter()
    with (
        interruptions() as interrupted,
        tqdm(
            total=plan.steps, initial=start, unit="step", disable=None if is_first() else True
        ) as bar,
    ):
        for step in range(start + 1, plan.steps + 1):
            state, loss = actions.step(state, next(batches))
            waiting.append(loss)
            last = step == plan.steps
            to_check = last or step % plan.eval_every == 0
            to_save = last or step % plan.checkpoint_every == 0
            to_record = to_check or to_save or step % LOG_EVERY == 0
            stop = interrupted.asked(to_record)
            if to_record or stop:
                losses = [float(x) for x in jax.device_get(waiting)]
                seconds = time.perf_counter() - clock
                speed = len(losses) * plan.tokens / seconds
                record(metrics, step, losses, rate, speed)
                bar.update(len(losses))
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
                if to_check:
                    actions.validate(step, state)
                if actions.widen is not None and step % LOG_EVERY == 0 and not last:
                    opt_state = actions.widen(state.opt_state, state.params)
                    state = state._replace(opt_state=opt_state)
                if to_save or stop:
                    actions.save(step, state)
                waiting, clock = [], time.perf_counter()
            if stop and not last:
                word = "terminated" if stop is Terminated else "interrupted"
                raise stop(f"{word} after step {step} of {plan.steps}")
    return state
