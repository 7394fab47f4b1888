"""Checkpoints of a run: all that the next step depends on."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

import adapprox_jax
from examples.gpt2.config import UsageError, option_of
from examples.gpt2.step import TrainState


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
    differences = _other_settings(extra["settings"], used)
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other settings: {differences}")
    differences = _differences(extra["shapes"], _shapes(state.params), "".join)
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other parameters: {differences}")
    batches.set_state(extra["data"])
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    target = target._replace(opt_state=adapprox_jax.resize(target.opt_state, extra["capacities"]))
    target = target._asdict()
    arguments = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    return step, TrainState(**checkpoints.restore(step, args=arguments).state)


def _other_settings(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings that differ, by their options; not those that follow from one that is named."""
    following = {"optimizer": "optimizer_settings", "tokenizer": "data", "vocabulary": "data"}
    left_out = {other for name, other in following.items() if old.get(name) != new.get(name)}
    old, new = ({k: v for k, v in used.items() if k not in left_out} for used in (old, new))
    return _differences(old, new, option_of)


def _shapes(params: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}


def _differences(
    old: dict[str, Any], new: dict[str, Any], named: Callable[[tuple[str, ...]], str]
) -> str:
    """The entries that differ, in words; `named` is from the keys of an entry to its name."""
    olds, news = _entries(old), _entries(new)
    # As JSON has them, where 1 is not 1.0: a rank, a fraction.
    differing = [k for k in {**olds, **news} if json.dumps(olds.get(k)) != json.dumps(news.get(k))]
    return ", ".join(f"{named(k)} was {olds.get(k)}, now {news.get(k)}" for k in differing)


def _entries(tree: dict[str, Any], keys: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The entries of nested dictionaries by their keys."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        found |= _entries(value, (*keys, key)) if isinstance(value, dict) else {(*keys, key): value}
    return found
