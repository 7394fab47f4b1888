"""Errors of the best approximations of second moments, and what is written of them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import singular_values


def of_rank_two():
    """V with singular values 32 and 8; its root has other ones."""
    left, right = np.eye(4)[:, :2], np.eye(6)[:, :2]
    return jnp.asarray(left @ np.diag([32.0, 8.0]) @ right.T, jnp.float32)


def test_errors_are_those_of_the_singular_values_left_out():
    expected = {"1": 0.25 / np.sqrt(1 + 0.25**2), "8": 0, "32": 0}
    assert singular_values.errors(of_rank_two()) == pytest.approx(expected, abs=1e-7)
    assert singular_values.errors(jnp.zeros((3, 5))) == {"1": 0, "8": 0, "32": 0}


def test_records_are_of_all_steps_and_matrices(tmp_path, monkeypatch, capsys):
    moments = {step: {"a": of_rank_two(), "b": 3 * of_rank_two()} for step in (1, 4)}
    monkeypatch.setattr(singular_values, "second_moments", lambda *_: moments)
    output = tmp_path / "errors.json"
    singular_values.main(width=64, steps=(1, 4), output=output)
    steps = json.loads(output.read_text())["steps"]
    assert steps["4"]["b"]["V"]["1"] == pytest.approx(0.2425, abs=1e-4)
    assert "| root of V, step 4 | 0.447 | 0.000 | 0.000 |" in capsys.readouterr().out
