"""The figures of an accelerator: parts are run until the time is up."""

import json

import pytest

from benchmarks.on_device import PARTS, run_parts

SMALL = {"small": ("--models", "tiny", "--contenders", "adamw", "--cycles", "1", "--steps", "1")}


@pytest.mark.slow
def test_parts_are_run_until_the_time_is_up(tmp_path, capfd):
    assert run_parts(SMALL, 300, tmp_path) == 0
    record = json.loads((tmp_path / "small_device.json").read_text())
    assert record["records"]["tiny"]["adamw"]["seconds"] > 0
    assert record["command"].startswith("python -m benchmarks.update_speed --models tiny")
    assert str(tmp_path) not in record["command"]
    assert run_parts({"small": (*SMALL["small"], "--no-cpu")}, 300, tmp_path) == 1
    assert json.loads((tmp_path / "small_device.json").read_text()) == record  # the earlier one
    assert [file.name for file in tmp_path.iterdir()] == ["small_device.json"]
    assert run_parts({**SMALL, **PARTS}, 0.01, tmp_path / "late") == 5
    assert "not measured within 0 s: small, update_117M" in capfd.readouterr().out
    assert not (tmp_path / "late").exists()
