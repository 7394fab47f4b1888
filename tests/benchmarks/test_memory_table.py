"""The memory table equals the paper's Table 2 in every cell."""

import json

import pytest

from benchmarks import memory_table
from benchmarks.memory_table import COLUMNS, RESULTS

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
