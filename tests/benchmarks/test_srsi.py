"""The benchmark of S-RSI; its times are not looked at."""

import json

import jax
import jax.numpy as jnp

from benchmarks import srsi


def test_errors_are_between_those_of_adafactor_and_the_svd(tmp_path, monkeypatch, capsys):
    moments = {
        str(seed): jnp.square(jax.random.normal(jax.random.key(seed), (32, 64))) for seed in (0, 1)
    }
    monkeypatch.setattr(srsi, "second_moments", lambda *_: {100: moments})
    path = tmp_path / "srsi.json"
    srsi.main(width=64, ranks=(1, 8), rounds=1, output=path)
    records = json.loads(path.read_text())["records"]
    assert set(records) == {"adafactor", "srsi 1", "svd 1", "srsi 8", "svd 8"}
    for rank in (1, 8):
        best = records[f"svd {rank}"]["error"]
        assert best <= records[f"srsi {rank}"]["error"] <= 1.02 * best
    assert records["svd 1"]["error"] <= records["adafactor"]["error"] <= 1
    assert "| S-RSI, rank 8 |" in capsys.readouterr().out
