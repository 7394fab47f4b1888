"""The memory table equals the paper's Table 2 in every cell; peaks are computed from end to end."""

import dataclasses
import functools
import json

import jax
import pytest

pytest.importorskip("flax")

from benchmarks import memory_table
from benchmarks.inputs import parameter_shapes
from benchmarks.memory_table import BESIDE, COLUMNS, FIRST_MOMENTS, MODELS, OURS, PAPER_MIB, main
from examples.gpt2.model import CONFIGS

shapes_of = functools.cache(parameter_shapes)
COMPRESSED = {  # bytes for each parameter
    "Adapprox, rank 16, average in 8 bits": 1.25,
    "Adapprox, rank 16, average in 4 bits": 0.75,
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    # Of our rows only those that are looked at, and the shapes of a model once for all rows.
    ours = {name: make for name, make in OURS.items() if name in COMPRESSED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_table, "parameter_shapes", shapes_of)
        patch.setattr(memory_table, "OURS", ours)
        main(folder=folder)
    return json.loads((folder / "memory_table.json").read_text())["records"]


@pytest.mark.parametrize("b1", FIRST_MOMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_equals_the_papers_at_the_printed_digit(tables, model, b1):
    records = tables[model][str(b1)].items()
    printed = {name: f"{r['mib']:.1f}" for name, r in records if r["paper_mib"] is not None}
    column = COLUMNS.index((model, b1))
    paper = {name: row[column] for name, row in PAPER_MIB.items()}
    assert printed == {name: f"{mib:.1f}" for name, mib in paper.items() if mib is not None}
    assert len(printed) == (5 if b1 else 4)


def test_compressed_averages_cost_what_is_promised(tables):
    records = tables["117M"]["0.9"]
    for name, promised in COMPRESSED.items():
        assert records[name]["bytes_a_parameter"] <= promised


def test_each_of_our_rows_is_made():
    assert set(memory_table.state_records("117M", 0.9)) == {*PAPER_MIB, *OURS, *BESIDE}


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


def test_bad_arguments_are_named():
    with pytest.raises(SystemExit, match=r"batch=0; allowed: an integer of at least 1\."):
        main(batch=0)
