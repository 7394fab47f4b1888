"""A training that takes a second or two, and what it leaves."""

import json
import pathlib
import shutil
import time

from examples.gpt2 import checkpoints, train

ROOT = pathlib.Path(__file__).parents[2]

SMALL_MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "tokenizer": "bytes"}
SHORT_RUN = {"batch-size": 4, "steps": 6, "warmup": 2}
INTERVALS = {"eval-every": 3, "eval-batches": 2, "checkpoint-every": 3}
FACTORED = {"min-dim-size-to-factor": 16, "max-rank": 4}

ELASTIC = ["--elastic", "--initial-rank", 1, "--max-rank", 12, "--steps", 24]
ELASTIC += ["--error-threshold", 0.02, "--eval-every", 12, "--checkpoint-every", 12]
ALL_AXES = ("--mesh", "data=2,fsdp=2,tensor=2")
FOR_MESHES = ("--batch-size", 8)  # rows for eight devices
MUON = ("--optimizer", "adapprox-muon", "--mu-dtype", "int4")
OPTIONS = {
    "adamw": ["--optimizer", "adamw"],
    "elastic": ELASTIC,
    "split": [*MUON, "--weights", "split", "--accumulate", 2],
    "stochastic": ["--optimizer", "adamw", "--weights", "bfloat16-stochastic"],
    "alone": FOR_MESHES,
    "adamw-alone": [*FOR_MESHES, "--optimizer", "adamw"],
    "on-eight": [*FOR_MESHES, *ALL_AXES],
    "split-on-eight": [*FOR_MESHES, *ALL_AXES, "--optimizer", "adamw", "--weights", "split"],
    "stochastic-on-eight": [*FOR_MESHES, *ALL_AXES, "--weights", "bfloat16-stochastic"],
}


def options_of(settings):
    return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]


def arguments(work, name, *extra):
    places = ["--data", work / "text.py", "--cache", work / "cache", "--out", work / name]
    small = options_of({**SMALL_MODEL, **SHORT_RUN, **INTERVALS, **FACTORED})
    return [*small, *map(str, [*places, *extra])]


def rows_of(out, name="metrics.jsonl"):
    """The metrics of a run, or the rows of another file."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def losses_of(out):
    """The training losses by step, each of which is there once."""
    found = [(row["step"], row["loss"]) for row in rows_of(out) if "loss" in row]
    assert len(found) == len(dict(found))
    return dict(found)


def row_count(out):
    """Of a run that may be at work: its last row may be half written."""
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_rows(out, count, process):
    """Until a run has written so many rows, or has ended."""
    deadline = time.monotonic() + 240
    while row_count(out) < count and process.poll() is None:
        assert time.monotonic() < deadline, f"{out} has no {count} rows"
        time.sleep(0.01)


def saved(out, at=6):
    """The state of a run after a step."""
    with checkpoints.open_checkpoints(out) as manager:
        return manager.restore(at).state


def before_its_end(run, name, last=6):
    """A copy of a run as if it had ended before its last checkpoint."""
    copy = shutil.copytree(run, run.parent / name)
    shutil.rmtree(copy / "checkpoints" / str(last))
    return copy


def error_line(capsys):
    """The one line that a run ends with that cannot be."""
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


def assert_refused(capsys, command, *words, main=train.main):
    """The words stand in the one line that a program ends with."""
    capsys.readouterr()
    assert main(list(map(str, command))) == 2
    line = error_line(capsys)
    for word in words:
        assert word in line + "\n", line
