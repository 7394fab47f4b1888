"""docs/results.md says what its records say, and the records what the page claims."""

import json
import pathlib

from examples.gpt2 import compare

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SUMMARY = json.loads((DOCS / "results" / "comparison.json").read_text())["summary"]


def test_tables_are_those_of_the_records():
    page = (DOCS / "results.md").read_text()
    assert compare.results_table(SUMMARY) in page
    assert compare.grid_table(SUMMARY) in page


def test_adapprox_ends_below_the_others_each_at_its_best_rate():
    adapprox, adamw, adafactor = (SUMMARY[name] for name in ("adapprox", "adamw", "adafactor"))
    assert adapprox["mean"] <= adamw["mean"] + 0.01
    assert adapprox["mean"] < adafactor["mean"]
    assert not any(row["at_edge"] for row in (adapprox, adamw, adafactor))
    assert all(len(row["losses"]) == 3 for row in (adapprox, adamw, adafactor))


def test_adapprox_keeps_little_of_the_second_moment():
    memory = SUMMARY["adapprox"]["memory"]
    assert memory["factored_share"] >= 0.95
    assert memory["second_moment_ratio"] <= 0.35
