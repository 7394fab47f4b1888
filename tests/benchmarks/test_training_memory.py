"""What whole training steps take, of a small model compiled for a CPU."""

import json

import pytest

from benchmarks import training_memory


def test_a_table_and_a_picture(tmp_path, capsys):
    path, rows = tmp_path / "tiny.json", ("AdamW, float32", "AdamW, split weights")
    training_memory.main("cpu", "tiny", 1, 16, rows, path)
    records = json.loads(path.read_text())["records"]
    assert records["AdamW, split weights"]["weights_mib"] * 2 == pytest.approx(
        records["AdamW, float32"]["weights_mib"]
    )
    assert "AdamW, split weights" in capsys.readouterr().out
    training_memory.draw(records, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    refused = training_memory.table({"v5p": {"AdamW": {"refused": "too much"}}})
    assert "does not fit" in refused
