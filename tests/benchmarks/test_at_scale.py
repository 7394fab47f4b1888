"""Runs at scale: their text, their rates, and their records."""

import json

import pytest

from benchmarks import at_scale, loss_tables


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


@pytest.mark.slow
def test_runs_end_in_records_at_the_small_models_rates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ("adapprox", "Muon")
    arguments = {"batch_size": 2, "mebibytes": 1, "dtype": "float32", "cpu": True}
    at_scale.main("tiny", 4, names=names, folder=tmp_path / "runs", **arguments)
    (file,) = tmp_path.rglob("runs.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    best = loss_tables.summarize(loss_tables.read(loss_tables.STUDY))
    rates = [0.25 * best["code", name].rate for name in names]
    assert [row["settings"]["learning_rate"] for row in rows] == pytest.approx(rates)
    for row in rows:
        assert row["curve"][-1][0] == 4
        assert row["memory"]["state_mib"] > 0
        assert "optimizer" not in row["settings"]  # that of the example's settings was not used
    assert "| Muon |" in capsys.readouterr().out
