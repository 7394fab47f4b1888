"""The memory table equals the paper's Table 2 in every cell."""

import json

import pytest

pytest.importorskip("flax")

from benchmarks import memory_table
from benchmarks.memory_table import BESIDE, COLUMNS, OURS, PAPER_MIB, RESULTS

RECORDED = json.loads((RESULTS / "memory_table.json").read_text())["records"]
COMPRESSED = {  # bytes for each parameter
    "Adapprox, rank 16, average in 8 bits": 1.25,
    "Adapprox, rank 16, average in 4 bits": 0.75,
}


@pytest.mark.parametrize(("model", "b1"), COLUMNS)
def test_every_cell_equals_the_papers_at_the_printed_digit(model, b1):
    records = RECORDED[model][str(b1)].items()
    printed = {name: f"{r['mib']:.1f}" for name, r in records if r["paper_mib"] is not None}
    column = COLUMNS.index((model, b1))
    paper = {name: row[column] for name, row in PAPER_MIB.items()}
    assert printed == {name: f"{mib:.1f}" for name, mib in paper.items() if mib is not None}
    assert len(printed) == (5 if b1 else 4)


@pytest.mark.parametrize(
    ("model", "b1"),
    [("117M", 0.9), *(pytest.param(*x, marks=pytest.mark.slow) for x in COLUMNS[1:])],
)
def test_cells_are_what_is_counted(model, b1):
    counted = memory_table.state_records(model, b1)
    assert counted == RECORDED[model][str(b1)]
    if b1:
        assert set(counted) == {*PAPER_MIB, *OURS, *BESIDE}


def test_compressed_averages_cost_what_is_promised():
    records = RECORDED["117M"]["0.9"]
    for name, promised in COMPRESSED.items():
        assert records[name]["bytes_a_parameter"] <= promised
