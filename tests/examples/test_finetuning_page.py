"""docs/finetuning.md says what its record says."""

import json
import pathlib

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

from examples.gpt2.finetuning.compare import results_table

ROOT = pathlib.Path(__file__).parents[2]
RECORD = json.loads((ROOT / "results" / "finetune" / "sst2.json").read_text())
SUMMARY = RECORD["summary"]
PAGE = " ".join((ROOT / "docs" / "finetuning.md").read_text().replace("\\\n", " ").split())


def test_the_table_and_the_command_are_the_records():
    header, line, *rows = results_table({"sst2": SUMMARY}).splitlines()
    table = [header, line, *(row for row in rows if "in the paper" not in row)]
    assert " ".join(table) in PAGE
    assert RECORD["command"] in PAGE
    assert not any(row["at_edge"] for row in SUMMARY.values())


@pytest.mark.parametrize(
    ("below", "above"), [("adapprox, AdamW's state", "adapprox"), ("adapprox", "adamw")]
)
def test_differences_are_paired(below, above):
    scores = [np.array([one["accuracy"] for one in SUMMARY[k]["scores"]]) for k in (above, below)]
    difference = scores[0] - scores[1]
    error = difference.std(ddof=1) / difference.size**0.5
    assert f"{difference.mean():.2f} ± {error:.2f} " in PAGE
