"""What is written and said of a run while it goes on."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2 import metrics
from examples.gpt2.command import DivergedError
from examples.gpt2.loop import TrainState
from examples.gpt2.optimizers import Options, build

PARAMS = {"matrix": jnp.ones((64, 64)), "vector": jnp.ones(64)}


def state_of(name, **options):
    return TrainState(PARAMS, build(name, Options(**options), 1.0).init(PARAMS))


@pytest.mark.parametrize("name", ["adamw", "adapprox"])
def test_a_validation_is_written_with_ranks_where_there_are_any(name, tmp_path, capsys):
    rows = metrics.Metrics(tmp_path, 0)
    rows.validate(3, 2.0, state_of(name, max_rank=4))
    rows.close()
    [row] = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["validation_loss"] == 2
    words = capsys.readouterr().out
    assert "step 3: validation loss 2.0000" in words
    assert ("mean rank 4.0" in words) == (row.get("ranks") == {"['matrix']": 4})
    assert ("mean rank" in words) == (name == "adapprox")


def test_losses_are_rows_up_to_one_that_is_not_finite(tmp_path):
    rows = metrics.Metrics(tmp_path, 0)
    rows.record(3, [3.0, 2.0], 1.0, optax.linear_schedule(1.0, 0.0, 10))
    assert rows.curve("loss") == [(2, 3.0), (3, 2.0)]
    assert rows.curve("learning_rate")[0] == (2, pytest.approx(0.9))
    assert rows.curve("seconds")[1] == (3, 0.5)
    with pytest.raises(DivergedError, match="the loss is nan at step 4"):
        rows.record(4, [float("nan")], 1.0, optax.constant_schedule(1.0))
    rows.close()


def test_rows_beyond_a_step_and_half_a_line_are_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    rows = metrics.Metrics(tmp_path, 2)
    rows.write(3, loss=1.0)
    rows.close()
    written = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert written == rows.rows == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]


def test_a_state_is_told_in_bytes_and_shares():
    state = state_of("adapprox")
    sizes = metrics.memory(state)
    assert sizes["parameters"] == 64 * 64 + 64
    np.testing.assert_allclose(sizes["factored_share"], 64 / 65)
    for name, of in (("state_mib", state.opt_state), ("adamw_state_mib", state_of("adamw")[1])):
        assert sizes[name] * metrics.MIB == sum(leaf.nbytes for leaf in jax.tree.leaves(of))
    assert "98.5% of them in factored leaves" in metrics.describe(state)
