"""The spectra of second moments: what they are of, and what is written."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")
pytest.importorskip("matplotlib")

from benchmarks import rank_history, singular_values
from benchmarks.singular_values import error_of_rank, spectrum
from examples.gpt2 import plots

ROOT = pathlib.Path(__file__).parents[2]


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


def test_records_and_picture_are_of_all_steps_and_matrices(tmp_path, monkeypatch, capsys):
    moments = {step: {"a": of_rank_two(), "b": 3 * of_rank_two()} for step in (1, 4)}
    monkeypatch.setattr(singular_values, "second_moments", lambda *_: moments)
    output = tmp_path / "spectra.json"
    singular_values.main(width=64, steps=(1, 4), count=3, output=output)
    steps = json.loads(output.read_text())["steps"]
    assert steps["4"]["b"]["V"]["singular_values"] == [1, 0.25, 0]
    assert steps["1"]["a"]["root of V"]["singular_values"] == [1, 0.5, 0]
    assert steps["1"]["a"]["V"]["errors"]["8"] == 0
    assert "| 4 | root of V | 0.447 | 0.000 | 0.000 |" in capsys.readouterr().out
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", [{"width": 100}, {"steps": (5, 2)}, {"steps": (0, 2)}, {"count": 0}]
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(SystemExit, match="allowed: from 1, width in steps of 64, steps rising"):
        singular_values.main(**arguments)


def test_the_page_says_what_the_records_say():
    page = (ROOT / "docs" / "results.md").read_text()
    of_values = json.loads((ROOT / "results/loss/singular_values.json").read_text())
    assert singular_values.errors_table(of_values["steps"]) in page
    rows = json.loads((ROOT / "results/loss/rank_history.json").read_text())["rows"]
    first, last = (list(rows[i]["ranks"].values()) for i in (0, -1))
    words = f"mean rank of {np.mean(first):.1f} at step {rows[0]['step']}"
    assert words in page
    words = f"{np.mean(last):.1f} at step {rows[-1]['step']}, {min(last)} the least"
    assert words in page


def test_ranks_are_drawn_of_stacks_too(tmp_path):
    rows = [
        {
            "step": step,
            "ranks": {"['a']": step, "['b']": [1, step]},
            "errors": {"['a']": 0.1, "['b']": 1 / step},
        }
        for step in (1, 2, 3)
    ]
    plots.plot_ranks(rows, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_history_of_ranks_is_that_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = rank_history.main(max_rank=8, steps=4, every=2, output=tmp_path / "ranks.json")
    assert [row["step"] for row in result["rows"]] == [2, 4]
    for row in result["rows"]:
        assert row["ranks"].keys() == row["errors"].keys()
        assert all(1 <= rank <= 8 for rank in row["ranks"].values())
    assert (tmp_path / "ranks.png").exists()


def test_a_history_of_nothing_is_refused():
    with pytest.raises(SystemExit, match="steps=0, every=20; allowed: integers of at least 1"):
        rank_history.main(steps=0)
