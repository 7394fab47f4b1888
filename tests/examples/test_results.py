"""docs/results.md says what its records say, and the records what the page claims."""

import json
import pathlib
import re

import numpy as np

from examples.gpt2 import compare, records

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SUMMARY = json.loads((DOCS / "results" / "comparison.json").read_text())["summary"]


def test_tables_are_those_of_the_records():
    page = (DOCS / "results.md").read_text()
    assert compare.results_table(SUMMARY) in page
    assert compare.grid_table(SUMMARY) in page


def test_every_loss_on_the_pages_is_in_the_records():
    runs = json.loads((DOCS / "results" / "comparison.json").read_text())["runs"]
    for name in ("choices.jsonl", "larger_vocabulary.jsonl"):
        runs += records.read(DOCS / "results" / name)
    known = {f"{run['validation_loss']:.4f}" for run in runs}
    for row in SUMMARY.values():
        known |= {f"{row['mean']:.4f}", f"{row['standard_error']:.4f}"}
    guided = [
        run["validation_loss"]
        for run in runs
        if run["settings"]["optimizer"] == "adapprox"
        and run["settings"]["learning_rate"] == 1.2e-3
        and run["settings"]["adapprox"]["cosine_guidance"]
        and run["settings"]["adapprox"]["approximate"] == "root"
        and run["settings"]["adapprox"]["guidance_max_scale"] == 10
    ]
    assert len(guided) == 3
    known |= {f"{np.mean(guided):.4f}", f"{np.std(guided, ddof=1) / 3**0.5:.4f}"}
    for page in (DOCS / "results.md", DOCS.parent / "README.md"):
        assert set(re.findall(r"\b(?!0\.00)\d\.\d{4}\b", page.read_text())) <= known


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
