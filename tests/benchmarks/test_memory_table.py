"""The memory table equals the paper's Table 2 in every cell; peaks are computed from end to end."""

import dataclasses
import json

import jax
import pytest

from benchmarks import memory_table
from benchmarks.inputs import parameter_shapes
from benchmarks.memory_table import COLUMNS, RESULTS, main
from examples.gpt2.model import CONFIGS

RECORDED = json.loads((RESULTS / "memory_table.json").read_text())["records"]


def test_every_cell_equals_the_papers_at_the_printed_digit():
    columns = [RECORDED[model][str(b1)].values() for model, b1 in COLUMNS]
    cells = [row for column in columns for row in column if row["paper_mib"] is not None]
    assert len(cells) == 18
    assert [round(cell["mib"], 1) for cell in cells] == [cell["paper_mib"] for cell in cells]


@pytest.mark.parametrize(
    ("model", "b1"),
    [("117M", 0.9), *(pytest.param(*x, marks=pytest.mark.slow) for x in COLUMNS[1:])],
)
def test_cells_are_what_is_counted(model, b1):
    counted = memory_table.state_records(model, b1)
    assert counted == RECORDED[model][str(b1)]


def test_peaks_of_a_training_step(tmp_path, monkeypatch, capsys):
    rows = {name: memory_table.PEAK_ROWS[name] for name in ("AdamW", "Adafactor")}
    monkeypatch.setattr(memory_table, "PEAK_ROWS", rows)
    monkeypatch.setattr(memory_table, "MODELS", ())
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(CONFIGS["tiny"], layers=1))
    main(peak=True, peak_model="tiny", batch=2, folder=tmp_path)
    (path,) = tmp_path.glob("memory_peak_*.json")
    adamw, adafactor = json.loads(path.read_text())["records"]["tiny"].values()
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(parameter_shapes("tiny"))) / 2**20
    assert adamw["peak_mib"] > adamw["temporaries_mib"] + 3 * parameters
    saved, of_state = (adamw[key] - adafactor[key] for key in ("peak_mib", "state_mib"))
    assert saved / of_state > 0.9
    assert f" | {100 * saved / of_state:.1f} % |" in capsys.readouterr().out
