"""Checkpoints of a run, by Orbax: all that the next step depends on.

Orbax writes a checkpoint whole or not at all, but does not notice when its numbers change on a disk
later. So a fingerprint of the state lies beside it. A checkpoint that cannot be read, or does not
have its fingerprint, is named and put aside, and the one before it is used.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import adapprox_jax
from examples.gpt2.command import InputError, one_line
from examples.gpt2.config import option
from examples.gpt2.folder import free_name
from examples.gpt2.loop import TrainState


@contextlib.contextmanager
def open_checkpoints(out: pathlib.Path) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints of a run, the last two of which are kept.

    On a CPU saving is not asynchronous: the arrays would still be read while the next step, which
    they are donated to, writes to them. An accelerator's arrays are copied to the host first.
    """
    is_async = jax.default_backend() != "cpu"
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=is_async)
    manager = ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)
    with contextlib.closing(manager):
        yield manager
        with _in_one_line(manager):
            manager.wait_until_finished()


@contextlib.contextmanager
def _in_one_line(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Within, failures of storage are an InputError: TensorStore has no errors of its own."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise  # of the devices, or of another process that is lost
    except (OSError, ValueError, RuntimeError) as error:
        reason = one_line(error)
        raise InputError(
            f"{manager.directory}: a checkpoint cannot be written: {reason}"
        ) from error


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> None:
    """Saves all that the next step depends on, unless this step is saved already.

    Raises:
      InputError: If it cannot be written. The checkpoints before it stay.
    """
    if manager.latest_step() == step:
        return
    report = adapprox_jax.rank_report(state.opt_state, state.params)
    beside = {
        "data": batches.get_state(),
        "settings": used,
        "capacities": {name: info.capacity for name, info in report.items()},
        "fingerprint": int(_fingerprint(state)),
    }
    with _in_one_line(manager):
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state._asdict()), beside=ocp.args.JsonSave(beside)
            ),
        )


def restore(
    manager: ocp.CheckpointManager,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> tuple[int, TrainState]:
    """Returns the last good step and its state, and sets the data to its position.

    The factor buffers have the widths with which they were saved, and the arrays lie as those of
    `state` do.

    Raises:
      InputError: If there is no good checkpoint, or it is of a run with other settings.
    """
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            return step, _restored(manager, step, state, batches, used)
        except (InputError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # of Orbax, TensorStore or JSON, as the damage has it
            folder = pathlib.Path(manager.directory) / str(step)
            kept = free_name(folder.parents[1] / f"damaged-{step}")
            folder.rename(kept)
            print(f"{folder}: cannot be used: {one_line(error)}; it is now {kept}")
            manager.reload()
    raise InputError(f"--resume: there is no checkpoint in {manager.directory} that is whole")


def _restored(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> TrainState:
    arguments = ocp.args.Composite(beside=ocp.args.JsonRestore())
    beside = manager.restore(step, args=arguments).beside
    _require_same(beside["settings"], used)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    target = target._replace(opt_state=adapprox_jax.resize(target.opt_state, beside["capacities"]))
    arguments = ocp.args.Composite(state=ocp.args.StandardRestore(target._asdict()))
    restored = TrainState(**manager.restore(step, args=arguments).state)
    if int(_fingerprint(restored)) != beside["fingerprint"]:
        raise ValueError("its numbers are not those that were saved")
    batches.set_state(beside["data"])
    return restored


@jax.jit
def _fingerprint(tree: Any) -> jax.Array:
    """A sum over all bytes with weights that depend on their place; the same on every mesh."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        if leaf.dtype == jnp.int4:
            leaf = leaf.astype(jnp.int8)
        parts = jax.lax.bitcast_convert_type(leaf, jnp.uint8).astype(jnp.uint32)
        places = jnp.zeros(parts.shape, jnp.uint32)
        for axis in range(parts.ndim):
            at = jax.lax.broadcasted_iota(jnp.uint32, parts.shape, axis)
            places = places * jnp.uint32(7919) + at
        total = total * jnp.uint32(31) + jnp.sum(parts * (2 * places + 1), dtype=jnp.uint32)
    return total


def _require_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises InputError where settings differ; a run may be made longer.

    Another text is named if nothing else differs: other tokenizers make other data, too.
    """
    if now.get("steps", 0) > before.get("steps", 0):
        before = before | {"steps": now["steps"]}
    # As JSON has them, where 1 is not 1.0: a rank, and a fraction.
    differ = [k for k in before | now if json.dumps(before.get(k)) != json.dumps(now.get(k))]
    words = [f"{option(k)} was {before.get(k)}, now {now.get(k)}" for k in differ if k != "data"]
    if differ:
        said = ", ".join(words) or "the text (--data) is another"
        raise InputError(f"--resume: the checkpoint is of other settings: {said}")
