"""The memory table equals the paper's Table 2 in every cell."""

import json

import pytest

from benchmarks import memory_table
from benchmarks.memory_table import COLUMNS, PAPER_MIB, RESULTS

RECORDED = json.loads((RESULTS / "memory_table.json").read_text())


def test_every_cell_equals_the_papers_at_the_printed_digit():
    papers = {
        (model, b1, name): row[column]
        for name, row in PAPER_MIB.items()
        for column, (model, b1) in enumerate(COLUMNS)
        if row[column] is not None
    }
    found = {key: RECORDED["records"][key[0]][str(key[1])][key[2]]["mib"] for key in papers}
    assert len(papers) == 18
    assert {key: round(mib, 1) for key, mib in found.items()} == papers


@pytest.mark.parametrize(
    ("model", "b1"),
    [("117M", 0.9), *(pytest.param(*x, marks=pytest.mark.slow) for x in COLUMNS[1:])],
)
def test_cells_are_what_is_counted(model, b1):
    assert memory_table.papers_rows(model, b1) == RECORDED["records"][model][str(b1)]


def test_our_rows_are_what_is_counted():
    assert memory_table.our_rows() == RECORDED["ours"]
