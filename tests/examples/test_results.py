"""docs/results.md says what its records say, and the records are of today's defaults."""

import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks.memory_picture import OF_HIDDEN_MATRICES
from examples.gpt2 import compare, optimizers, records

ROOT = pathlib.Path(__file__).parents[2]
LOSSES = ROOT / "results" / "loss"
COMPARISON = json.loads((LOSSES / "comparison.json").read_text())
SUMMARY = COMPARISON["summary"]
FIXED_ROUNDS = json.loads((LOSSES / "fixed_rounds.json").read_text())
RECORDS = {file: json.loads((LOSSES / f"{file}.json").read_text()) for file in OF_HIDDEN_MATRICES}
PICTURE = json.loads((ROOT / "results" / "memory" / "loss_against_bytes.json").read_text())[
    "summary"
]

RATES = {"0.0005", "0.0012", "0.0024"}  # four digits, and no losses


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "results.md").read_text()


def test_tables_are_those_of_the_records(page):
    assert compare.results_table(SUMMARY) in page
    assert compare.grid_table(SUMMARY) in page


def test_the_command_is_that_of_the_records(page):
    assert COMPARISON["command"] in " ".join(page.replace("\\\n", " ").split())


def test_the_tables_of_orthogonal_directions_are_those_of_the_records():
    page = (ROOT / "docs" / "orthogonal.md").read_text()
    rows = {
        file.replace("adapprox-muon-4-bits", "adapprox-muon, int4"): RECORDS[file]["summary"][name]
        for file, (name, _) in OF_HIDDEN_MATRICES.items()
    }
    assert compare.results_table(rows) in page
    assert compare.grid_table(rows) in page
    for record in RECORDS.values():
        assert record["command"] in " ".join(page.replace("\\\n", " ").split())


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (COMPARISON, "adapprox"),
        (COMPARISON, "adamw"),
        (COMPARISON, "adafactor"),
        (FIXED_ROUNDS, "adapprox"),
        *((record, file) for file, record in RECORDS.items()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_comparison_was_run_with_todays_defaults(record, name):
    """Else the page's first table is not of the library that stands beside it."""
    name, options = OF_HIDDEN_MATRICES.get(name, (name, optimizers.AdapproxOptions()))
    today = optimizers.settings(name, optimizers.Hyperparameters(), options)
    runs = [run["settings"] for run in record["runs"]]
    used = [run["optimizer_settings"] for run in runs if run["optimizer"] == name]
    assert used
    for of_one in used:
        assert of_one == today


def all_runs():
    files = (
        "adamw_at_1.2e-3.jsonl",
        "choices.jsonl",
        "larger_vocabulary.jsonl",
        "orthogonal_choices.jsonl",
    )
    of_comparisons = COMPARISON["runs"] + FIXED_ROUNDS["runs"]
    for record in RECORDS.values():
        of_comparisons = of_comparisons + record["runs"]
    return of_comparisons + [row for name in files for row in records.read(LOSSES / name)]


def losses_over_seeds():
    """The losses of each set of runs that differ in nothing but the seed."""
    groups = {}
    for run in all_runs():
        settings = {k: v for k, v in run["settings"].items() if k != "seed"}
        by_seed = groups.setdefault(json.dumps(settings, sort_keys=True), {})
        by_seed[run["settings"]["seed"]] = run["validation_loss"]
    return [list(by_seed.values()) for by_seed in groups.values()]


def test_every_loss_on_the_pages_is_in_the_records(page):
    known = {f"{run['validation_loss']:.4f}" for run in all_runs()}
    for losses in losses_over_seeds():
        if len(losses) >= 3:
            error = np.std(losses, ddof=1) / len(losses) ** 0.5
            known |= {f"{np.mean(losses):.4f}", f"{error:.4f}"}
    known |= {f"{row['validation_loss']:.4f}" for row in PICTURE.values()}
    # Tables between marks are made of the records, and compared with them elsewhere.
    blocks = re.compile(r"<!-- (\w+) -->.*?<!-- end of \1 -->", re.DOTALL)
    orthogonal = (ROOT / "docs" / "orthogonal.md").read_text()
    performance = (ROOT / "docs" / "performance.md").read_text()
    for text in (page, orthogonal, performance, (ROOT / "README.md").read_text()):
        typed = blocks.sub("", text)
        assert set(re.findall(r"\b\d\.\d{4}\b", typed)) - known <= RATES


def test_the_table_of_loss_against_bytes_is_the_record():
    page = (ROOT / "docs" / "memory.md").read_text()
    for name, row in PICTURE.items():
        assert (
            f"| {name} | {row['bytes_a_parameter']:.2f} | {row['validation_loss']:.4f}"
            f" | {row['standard_error']:.4f} | {row['learning_rate']:g} |"
        ) in page
