"""The default training, at its full length."""

import json

import pytest

from examples.gpt2 import train


@pytest.mark.slow
def test_default_run_learns(tmp_path, capsys):
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    assert train.main(places) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert losses[-1] < 3.3 < losses[0]
    assert "AdamW's" in capsys.readouterr().out
