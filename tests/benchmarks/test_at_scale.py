"""Runs at scale are cut into pieces that go on, and end in a record."""

import json
import sys

import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

from benchmarks import at_scale
from benchmarks.loss_study import STUDY
from benchmarks.study_results import summarize
from examples.gpt2 import records


def test_text_is_gathered_once_and_to_size(tmp_path):
    folder = at_scale.write_text(tmp_path, 1)
    files = sorted(folder.iterdir())
    size = sum(file.stat().st_size for file in files)
    assert 2**20 <= size < 2**20 + max(file.stat().st_size for file in files)
    files[0].unlink()
    assert at_scale.write_text(tmp_path, 1) == folder
    assert not files[0].exists()
    with pytest.raises(SystemExit, match=r"--mebibytes is 100000; .* MiB of source"):
        at_scale.write_text(tmp_path, 100_000)


def test_rates_are_the_small_models_times_one_factor(tmp_path):
    scale = at_scale.Scale(folder=tmp_path, rate_factor=0.5)
    results = summarize(records.read(STUDY))
    for label in at_scale.LABELS:
        rate = at_scale.config_of(label, scale).learning_rate
        assert rate == pytest.approx(0.5 * results["code", label].rate, rel=0.01)


def test_an_unknown_label_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"--only is 'adam'; allowed: AdamW, b2 0.999, clipped, "):
        at_scale.main(at_scale.Scale(folder=tmp_path), only="adam")


def test_a_machine_without_an_accelerator_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(SystemExit, match="JAX sees no accelerator here; --cpu takes the CPU"):
        at_scale.main(at_scale.Scale(folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pieces_end_in_a_record(tmp_path, monkeypatch):
    options = ["--model", "tiny", "--steps", "4", "--batch-size", "2", "--mebibytes", "1"]
    options += ["--dtype", "float32", "--folder", str(tmp_path), "--cpu"]
    monkeypatch.setattr(sys, "argv", ["at_scale", *options])
    scale = at_scale.Scale("tiny", 4, 2, 1, 1, dtype="float32", folder=tmp_path)
    with pytest.raises(SystemExit, match="is not done: the same command goes on"):
        at_scale.main(scale, minutes=0.05, output=tmp_path / "results", cpu=True)
    assert not (tmp_path / "results").exists()
    at_scale.main(scale, minutes=30, output=tmp_path / "results", cpu=True)
    [file] = (tmp_path / "results").glob("tiny_*.json")
    record = json.loads(file.read_text())
    assert tuple(record["runs"]) == at_scale.LABELS
    for one in record["runs"].values():
        assert one["curve"][-1] == [4, one["validation_loss"]]
    assert file.with_suffix(".png").exists()
