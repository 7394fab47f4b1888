"""A training that takes a second or two, and what it leaves."""

import json
import pathlib

import jax
import numpy as np

from examples.gpt2 import checkpoints

ROOT = pathlib.Path(__file__).parents[2]

SMALL_MODEL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "tokenizer": "bytes"}
SHORT_RUN = {"batch-size": 4, "steps": 6, "warmup": 2}
INTERVALS = {"eval-every": 3, "eval-batches": 2, "checkpoint-every": 3}
FACTORED = {"min-dim-size-to-factor": 16, "max-rank": 4}


def arguments(work, name, *extra):
    places = ["--data", work / "text.py", "--cache", work / "cache", "--out", work / name]
    small = {**SMALL_MODEL, **SHORT_RUN, **INTERVALS, **FACTORED}
    options = [part for name, value in small.items() for part in (f"--{name}", value)]
    return list(map(str, [*options, *places, *extra]))


def rows_of(out):
    """The metrics of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def saved(out, at=6):
    """The state of a run after a step."""
    with checkpoints.open_checkpoints(out) as manager:
        return manager.restore(at).state


def assert_equal_bits(first, second):
    first, second = (jax.tree_util.tree_leaves_with_path(tree) for tree in (first, second))
    assert [path for path, _ in first] == [path for path, _ in second]
    for (path, a), (_, b) in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


def error_line(capsys):
    """The one line that a run ends with that cannot be."""
    [line] = capsys.readouterr().err.strip().splitlines()
    return line
