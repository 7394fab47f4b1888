"""Comparisons of optimizers."""

import json

from examples.gpt2 import train
from examples.gpt2.metrics import DivergedError
from examples.gpt2.run import Result
from tests.examples.small import arguments


def test_comparison_leaves_table_figure_and_records(work, capsys):
    command = arguments(work, "compared", "--seeds", 1, "--compare", "adamw", "adapprox")
    assert train.main(command) == 0
    assert "| adapprox | 0.0024 |" in capsys.readouterr().out
    out = work / "compared"
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "| adamw | 0.0024 |" in (out / "comparison.md").read_text()
    assert not list(out.glob("*/checkpoints"))
    record = json.loads((out / "comparison.json").read_text())
    adamw, adapprox = record["runs"]
    assert adamw["settings"]["optimizer"] == "adamw"
    assert adapprox["settings"]["optimizer_settings"]["max_rank"] == 4
    for run in record["runs"]:
        assert set(run["versions"]) == {"python", "jax", "optax", "revision"}
    assert [step for step, _ in adapprox["curve"]] == [3, 6]
    memory = record["summary"]["adapprox"]["memory"]
    assert 0 < memory["second_moment_ratio"] < 1
    assert 0.9 < memory["factored_share"] < 1
    assert memory["state_mib"] < memory["adamw_state_mib"]
    assert "factored_share" not in adamw["memory"]


def test_comparison_goes_on_where_it_was_interrupted(work, capsys, monkeypatch):
    done = []

    def pretend(config, *, keep):
        assert not keep
        done.append((config.optimizer, config.learning_rate, config.seed))
        if config.learning_rate > 1:
            raise DivergedError("the loss is nan")
        loss = config.learning_rate + config.seed
        return Result({}, loss, [(3, 5.0), (6, loss)], {"state_mib": 1.0}, 1.0)

    def command(*names):
        rates = ["--learning-rates", 0.25, 0.5, 2, "--seeds", 3]
        return [*arguments(work, "continued", *rates), "--compare", *names]

    monkeypatch.setattr(train, "run", pretend)
    assert train.main(command("adamw")) == 0
    out = capsys.readouterr().out
    assert "| adamw | 0.25 | 1.2500 | 0.5774 | 3 |" in out
    assert "| adamw | 0.2500 | 0.5000 | diverged |" in out
    assert "warning: adamw: the best rate, 0.25, is at the grid's edge" in out
    assert done == [("adamw", rate, 0) for rate in (0.25, 0.5, 2)] + [
        ("adamw", 0.25, seed) for seed in (1, 2)
    ]
    results = work / "continued" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:4]) + lines[4][:50])  # ended while it wrote the last one

    done.clear()
    assert train.main(command("adamw", "adafactor")) == 0
    assert done[0] == ("adamw", 0.25, 2)
    assert [name for name, _, _ in done[1:]] == ["adafactor"] * 5
    assert "| adamw | 0.25 | 1.2500 | 0.5774 | 3 |" in capsys.readouterr().out

    done.clear()
    assert train.main(command("adafactor", "adamw")) == 0
    assert not done
    assert train.main([*command("adamw"), "--hyper.b2", "0.99"]) == 0
    assert len(done) == 5  # other settings: other runs
