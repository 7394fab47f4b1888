"""The figures of an accelerator: parts are run until the time is up."""

import json

import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")

from benchmarks.on_device import PARTS, Part, main, run_parts

SMALL = Part("tiny", ("adamw",), ("--cycles", "1", "--steps", "1"))


def test_parts_are_run_until_the_time_is_up(tmp_path, capfd):
    assert run_parts((SMALL,), 300, tmp_path, "cpu") == 0
    record = json.loads((tmp_path / "update_tiny_cpu.json").read_text())
    assert record["records"]["tiny"]["adamw"]["seconds"] > 0
    assert run_parts((SMALL, *PARTS), 0.01, tmp_path / "late", "cpu") == 5
    assert "not measured within 0 s: update_tiny, update_117M" in capfd.readouterr().out
    assert not (tmp_path / "late").exists()


def test_a_machine_without_an_accelerator_is_told():
    with pytest.raises(SystemExit, match="JAX sees no accelerator here; --cpu takes the CPU"):
        main()
    with pytest.raises(SystemExit, match="seconds is 0; allowed: a number above 0"):
        main(seconds=0)
