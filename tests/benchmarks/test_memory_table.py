"""The memory table equals the paper's Table 2 in every cell; peaks are computed from end to end."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import optax
import pytest

pytest.importorskip("flax")

import adapprox_jax
from benchmarks import memory_table
from benchmarks.inputs import parameter_shapes
from benchmarks.memory_table import FIRST_MOMENTS, MODELS, OURS, PAPER_MIB, main
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
    result = json.loads((folder / "memory_table.json").read_text())
    assert result["command"] == "python -m benchmarks.memory_table"
    return result["records"]


@pytest.mark.parametrize("b1", FIRST_MOMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_equals_the_papers_at_the_printed_digit(tables, model, b1):
    records = tables[model][str(b1)].items()
    printed = {name: f"{r['mib']:.1f}" for name, r in records if r["paper_mib"] is not None}
    paper = PAPER_MIB[model, b1].items()
    assert printed == {name: f"{mib:.1f}" for name, mib in paper if mib is not None}
    assert len(printed) == (5 if b1 else 4)


@pytest.mark.parametrize("model", MODELS)
def test_bookkeeping_is_small(tables, model):
    leaves = len(jax.tree.leaves(shapes_of(model)))
    records = [r for of_b1 in tables[model].values() for r in of_b1.values()]
    found = [r["bookkeeping_bytes"] for r in records if r["bookkeeping_bytes"] is not None]
    # Of each leaf its rank, error and drift; then the count and the key.
    assert set(found) == {leaves * 3 * 4 + 4 + 8}
    assert max(found) < 4096


def test_compressed_averages_cost_what_is_promised(tables):
    records = tables["117M"]["0.9"]
    for name, promised in COMPRESSED.items():
        assert records[name]["bytes_a_parameter"] <= promised


@pytest.mark.slow
def test_each_of_our_rows_is_made():
    assert set(memory_table.state_records("117M", 0.9)) == {*PAPER_MIB["117M", 0.9], *OURS}


def test_bookkeeping_and_the_rest_are_the_whole_state():
    params = {"kernel": jax.ShapeDtypeStruct((128, 256), "float32")}
    tx = adapprox_jax.scale_by_adapprox(max_rank=4)
    factors, placeholder = 4 * 4 * (128 + 256), 4
    rest = memory_table.bookkeeping_nbytes(jax.eval_shape(tx.init, params))
    assert adapprox_jax.state_nbytes(tx, params) == factors + placeholder + rest
    assert memory_table.bookkeeping_nbytes(optax.sgd(1.0).init(params)) is None


def test_peaks_of_a_training_step(tmp_path, monkeypatch, capsys):
    rows = {name: memory_table.PEAK_ROWS[name] for name in ("AdamW", "Adafactor")}
    monkeypatch.setattr(memory_table, "PEAK_ROWS", rows)
    monkeypatch.setattr(memory_table, "MODELS", ())
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(CONFIGS["tiny"], layers=1))
    result = main(peak=True, peak_model="tiny", batch=2, folder=tmp_path)["peaks"]
    (path,) = tmp_path.glob("memory_peak_*.json")
    assert json.loads(path.read_text()) == result
    assert "--peak --peak-model tiny --batch 2" in result["command"]
    adamw, adafactor = result["records"]["tiny"].values()
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(parameter_shapes("tiny"))) / 2**20
    assert adamw["peak_mib"] > adamw["temporaries_mib"] + 3 * parameters
    assert adafactor["share_of_saving"] > 0.9
    assert "| Adafactor | " in capsys.readouterr().out


def test_bad_arguments_are_named():
    with pytest.raises(SystemExit, match=r"batch=0; allowed: an integer of at least 1\."):
        main(batch=0)


def test_the_page_gives_the_peaks_of_the_record():
    root = pathlib.Path(memory_table.__file__).parents[1]
    record = json.loads((root / "results" / "memory" / "memory_peak_cpu.json").read_text())
    page = (root / "docs" / "memory.md").read_text()
    section = page.split("## The peak of a training step")[1].split("\n## ")[0]
    found = {
        tuple(cells) for cells in re.findall(r" \| ([\d.]+) \| ([\d.]+) \| (.*?) ?\|", section)
    }
    recorded = {
        (
            f"{x['state_mib']:.1f}",
            f"{x['peak_mib']:.1f}",
            f"{100 * x['share_of_saving']:.1f} %" if "share_of_saving" in x else "",
        )
        for x in record["records"]["117M"].values()
    }
    assert len(found) == 9
    assert found <= recorded
