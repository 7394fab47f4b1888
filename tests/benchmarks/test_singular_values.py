"""The spectra of second moments: what they are of, and what is written."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

from benchmarks import singular_values
from benchmarks.singular_values import error_of_rank, spectrum


def of_rank_two():
    """V with singular values 32 and 8; its root has other ones."""
    left, right = np.eye(4)[:, :2], np.eye(6)[:, :2]
    return jnp.asarray(left @ np.diag([32.0, 8.0]) @ right.T, jnp.float32)


def test_spectra_are_over_their_first_value():
    np.testing.assert_allclose(spectrum(of_rank_two()), [1, 0.25, 0, 0], atol=1e-7)
    np.testing.assert_array_equal(spectrum(jnp.zeros((3, 5))), np.zeros(3))
    values = np.array([1.0, 0.25, 0.0])
    assert error_of_rank(values, 1) == pytest.approx(0.25 / np.sqrt(1 + 0.25**2))
    assert error_of_rank(values, 2) == error_of_rank(np.zeros(3), 1) == 0


def test_records_are_of_all_steps_and_matrices(tmp_path, monkeypatch, capsys):
    moments = {step: {"a": of_rank_two(), "b": 3 * of_rank_two()} for step in (1, 4)}
    monkeypatch.setattr(singular_values, "second_moments", lambda *_: moments)
    output = tmp_path / "spectra.json"
    singular_values.main(width=64, steps=(1, 4), count=3, output=output)
    steps = json.loads(output.read_text())["steps"]
    assert steps["4"]["b"]["V"]["singular_values"] == [1, 0.25, 0]
    assert steps["1"]["a"]["root of V"]["singular_values"] == [1, 0.5, 0]
    assert steps["1"]["a"]["V"]["errors"]["8"] == 0
    assert "| root of V, step 4 | 0.447 | 0.000 | 0.000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [{"width": 100}, {"steps": (5, 2)}, {"steps": (0, 2)}, {"count": 0}]
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(SystemExit, match="allowed: from 1, width in steps of 64, steps rising"):
        singular_values.main(**arguments)
