"""What is written and said of a run while it goes on."""

import json

import optax
import pytest

from examples.gpt2 import metrics
from examples.gpt2.command import DivergedError


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
