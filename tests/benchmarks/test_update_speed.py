"""The benchmark of updates runs from end to end; its times are not looked at."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import update_speed
from benchmarks.inputs import gradients_like
from benchmarks.update_speed import main
from examples.gpt2.model import CONFIGS


@pytest.fixture
def small(monkeypatch):
    """A matrix and a vector instead of a model's parameters: less to compile."""
    shapes = {"kernel": (128, 256), "bias": (256,)}
    like = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    monkeypatch.setattr(update_speed, "parameter_shapes", lambda model: like)


@pytest.mark.usefixtures("small")
def test_records_are_written(tmp_path, capsys):
    path = tmp_path / "speed.json"
    names = ("adafactor", "adapprox rank 16", "adapprox_muon rank 8", "came")
    main(("tiny",), names, cycles=2, steps=2, output=path)
    records = json.loads(path.read_text())["records"]["tiny"]
    assert tuple(records) == names
    for record in records.values():
        assert len(record["seconds_of_cycles"]) == 2
        assert record["seconds"] > 0
    assert [records[name].get("ranks") for name in names] == [None, [16], [8], None]
    assert "| adapprox rank 16 | tiny | " in capsys.readouterr().out


def test_training_steps_are_measured(tmp_path, monkeypatch):
    smaller = dict(layers=1, width=32, heads=2, context=16, vocabulary=256)
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(CONFIGS["tiny"], **smaller))
    path = tmp_path / "step.json"
    main(("tiny",), ("adamw",), cycles=2, steps=2, training_step=True, batch=2, output=path)
    record = json.loads(path.read_text())["records"]["tiny"]["adamw"]
    assert len(record["seconds_of_cycles"]) == 2


def test_gradients_have_the_ranks_that_they_promise():
    gradients = gradients_like({"a": np.zeros((64, 80)), "b": np.zeros((80, 64))}, seed=0)
    for rank, gradient in enumerate(gradients.values(), start=1):
        spectrum = np.linalg.svd(np.abs(np.asarray(gradient, np.float64)), compute_uv=False)
        assert spectrum[rank] < 1e-5 * spectrum[0] < spectrum[rank - 1]
