"""Checkpoints of a run: all that the next step depends on.

Each has a file of checksums, made when it is whole. One that was cut, altered or half deleted since
is put aside, by name, and the one before it is used.
"""

import contextlib
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp

import adapprox_jax
from examples.gpt2.config import UsageError, option_of
from examples.gpt2.processes import from_first, is_first, wait_for_all
from examples.gpt2.step import TrainState

CHECKSUMS = "checksums.json"
NONE = -1  # no step


class StorageError(RuntimeError):
    """A checkpoint could not be written; the message is one line that says where and why."""


@contextlib.contextmanager
def open_checkpoints(out: pathlib.Path) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints of a run, the last two of which are kept; all are sealed at the end.

    On a CPU saving is not asynchronous: the arrays would still be read while the next step, which
    they are donated to, writes to them. An accelerator's are copied to the host first.
    """
    is_async = jax.default_backend() != "cpu"
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=is_async)
    with contextlib.closing(
        ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)
    ) as checkpoints:
        yield checkpoints
        with _in_one_line(checkpoints, "the last checkpoint"):
            seal(checkpoints)


def any_saved(out: pathlib.Path) -> bool:
    """Whether the folder of a run holds a checkpoint."""
    return any(path.name.isdecimal() for path in (out / "checkpoints").glob("*"))


def discard(out: pathlib.Path) -> None:
    """Removes the checkpoints of a run."""
    if is_first():
        shutil.rmtree(out / "checkpoints", ignore_errors=True)


@contextlib.contextmanager
def _in_one_line(checkpoints: ocp.CheckpointManager, what: str) -> Iterator[None]:
    """Within, what goes wrong is a `StorageError`: TensorStore has no errors of its own."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise  # of the devices, or of another process that is lost
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StorageError(
            f"{checkpoints.directory}: {what} cannot be written: {reason}"
        ) from error


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> None:
    """Saves all that the next step depends on, unless this step is saved already.

    Raises:
      StorageError: If it cannot be written. The checkpoints before it stay.
    """
    if checkpoints.latest_step() == step:
        return
    with _in_one_line(checkpoints, f"the checkpoint of step {step}"):
        seal(checkpoints)  # the one before, which is whole by now
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
                state=ocp.args.StandardSave(_without_empty(state)._asdict()),
                extra=ocp.args.JsonSave(extra),
            ),
        )
        if not checkpoints.is_saving_in_progress():
            seal(checkpoints)


def seal(checkpoints: ocp.CheckpointManager) -> None:
    """Writes the checksums of checkpoints that are whole and have none, once saving has ended."""
    checkpoints.wait_until_finished()
    if not is_first():
        return
    for step in checkpoints.all_steps():
        folder = pathlib.Path(checkpoints.directory) / str(step)
        if not (folder / CHECKSUMS).exists():
            temporary = folder / f"{CHECKSUMS}.partial"
            temporary.write_text(json.dumps(_checksums(folder), indent=1) + "\n")
            temporary.rename(folder / CHECKSUMS)


def damage_of(folder: pathlib.Path) -> str | None:
    """What of a checkpoint is not as it was saved, in words; None where all is, or is not known."""
    try:
        known = json.loads((folder / CHECKSUMS).read_text())
    except FileNotFoundError:
        return None  # ended between the checkpoint and its checksums
    except (ValueError, OSError):
        return f"{CHECKSUMS} cannot be read"
    found = _checksums(folder)
    for name, checksum in known.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != checksum:
            return f"{name} was altered"
    return None


def _checksums(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(CHECKSUMS):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def restore(
    checkpoints: ocp.CheckpointManager,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> tuple[int, TrainState]:
    """Returns the last good step and its state, and sets the data to its position.

    The factor buffers have the widths that they were saved with, whatever those of `state` are, and
    the arrays lie as those of `state`. Damaged checkpoints are named and put beside the good ones.

    Raises:
      UsageError: If there is no good checkpoint, or it is of a run with other settings or
        parameters, or something else than damage is in the way.
    """
    while True:
        step = from_first(_last_good(checkpoints) if is_first() else NONE)
        if step == NONE:
            raise UsageError(
                f"--resume: there is no checkpoint in {checkpoints.directory} that is whole"
            )
        checkpoints.reload()
        try:
            return step, _restored(checkpoints, step, state, batches, used)
        except UsageError:
            raise
        except Exception as error:  # of Orbax, TensorStore or msgpack, as the damage has it
            folder = pathlib.Path(checkpoints.directory) / str(step)
            reason = " ".join(str(error).split())[:200]
            if (folder / CHECKSUMS).exists():
                raise UsageError(
                    f"--resume: {folder} is as it was saved, and cannot be used: {reason}"
                ) from error
            wait_for_all("a damaged checkpoint")
            if is_first():
                _put_aside(folder, f"cannot be read: {reason}")
            checkpoints.reload()


def _last_good(checkpoints: ocp.CheckpointManager) -> int:
    """The last step whose checkpoint is as it was saved; later ones are put aside."""
    for step in sorted(checkpoints.all_steps(), reverse=True):
        folder = pathlib.Path(checkpoints.directory) / str(step)
        damage = damage_of(folder)
        if damage is None:
            return step
        _put_aside(folder, damage)
    return NONE


def _put_aside(folder: pathlib.Path, damage: str) -> None:
    kept = folder.parents[1] / "damaged" / folder.name
    kept.parent.mkdir(exist_ok=True)
    folder.rename(free_name(kept))
    print(f"{folder}: {damage}; it is now in {kept.parent}")


def free_name(path: pathlib.Path) -> pathlib.Path:
    """A path, with a number behind it where there is something already."""
    number, name = 1, path
    while name.exists():
        name = path.with_name(f"{path.name}.{number}")
        number += 1
    return name


def _restored(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    batches: grain.DatasetIterator,
    used: dict[str, Any],
) -> TrainState:
    extra = checkpoints.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore())).extra
    before = dict(extra["settings"])
    if used.get("steps", 0) > before.get("steps", 0):
        before["steps"] = used["steps"]  # a run may be made longer
    differences = _other_settings(before, used)
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other settings: {differences}")
    differences = _differences(extra["shapes"], _shapes(state.params), "".join)
    if differences:
        raise UsageError(f"--resume: the checkpoint is of other parameters: {differences}")
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    target = target._replace(opt_state=adapprox_jax.resize(target.opt_state, extra["capacities"]))
    filled = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(_filled(x.shape), x.dtype, sharding=x.sharding), target
    )
    arguments = ocp.args.Composite(state=ocp.args.StandardRestore(filled._asdict()))
    restored = TrainState(**checkpoints.restore(step, args=arguments).state)
    restored = jax.tree.map(
        lambda x, like: x if like.size else x[tuple(map(slice, like.shape))], restored, target
    )
    batches.set_state(extra["data"])
    return restored


def _without_empty(state: TrainState) -> TrainState:
    """A state with zeros in place of empty arrays, which Orbax refuses; GaLore's has some."""

    def fill(x: jax.Array) -> jax.Array:
        return x if x.size else jax.device_put(np.zeros(_filled(x.shape), x.dtype), x.sharding)

    return jax.tree.map(fill, state)


def _filled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in shape) if 0 in shape else shape


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
