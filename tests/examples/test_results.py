"""The pages on losses say what their records say, and the records are of today's settings."""

import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks.loss_study import STUDY
from examples.gpt2 import compare, optimizers, records

ROOT = pathlib.Path(__file__).parents[2]
LOSSES = ROOT / "results" / "loss"
OPTIONS = optimizers.AdapproxOptions
# What docs/orthogonal.md compares, by the file of its record.
OF_HIDDEN_MATRICES = {
    "muon": ("muon", OPTIONS(muon_b1=0.9, rate_elsewhere=4.0)),
    "adapprox-muon": ("adapprox-muon", OPTIONS(muon_b1=0.8, rate_elsewhere=2.0)),
    "adapprox-muon-4-bits": (
        "adapprox-muon",
        OPTIONS(muon_b1=0.8, rate_elsewhere=2.0, mu_dtype="int4"),
    ),
}
RECORDS = {file: json.loads((LOSSES / f"{file}.json").read_text()) for file in OF_HIDDEN_MATRICES}


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


@pytest.mark.parametrize("file", OF_HIDDEN_MATRICES)
def test_the_comparison_was_run_with_todays_defaults(file):
    """Else the page's first table is not of the library that stands beside it."""
    name, options = OF_HIDDEN_MATRICES[file]
    today = optimizers.settings(name, optimizers.Hyperparameters(), options)
    runs = [run["settings"] for run in RECORDS[file]["runs"]]
    used = [run["optimizer_settings"] for run in runs if run["optimizer"] == name]
    assert used
    for of_one in used:
        assert of_one == today


def all_runs(*more):
    files = LOSSES / "choices.jsonl", LOSSES / "orthogonal_choices.jsonl", *more
    of_comparisons = [run for record in RECORDS.values() for run in record["runs"]]
    return of_comparisons + [row for file in files for row in records.read(file)]


def losses_over_seeds():
    """The losses of each set of runs that differ in nothing but the seed."""
    groups = {}
    for run in all_runs(STUDY):
        if run["validation_loss"] is not None:
            settings = {k: v for k, v in run["settings"].items() if k != "seed"}
            by_seed = groups.setdefault(json.dumps(settings, sort_keys=True), {})
            by_seed[run["settings"]["seed"]] = run["validation_loss"]
    return [list(by_seed.values()) for by_seed in groups.values()]


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/orthogonal.md"])
def test_every_loss_on_the_pages_is_in_the_records(page):
    known = {f"{run['validation_loss']:.4f}" for run in all_runs()}
    for losses in losses_over_seeds():  # of the study's many runs no single ones
        if len(losses) >= 3:
            error = np.std(losses, ddof=1) / len(losses) ** 0.5
            known |= {f"{np.mean(losses):.4f}", f"{error:.4f}"}
    # Tables between marks are made of the records, and compared with them elsewhere.
    blocks = re.compile(r"<!-- (\w+) -->.*?<!-- end of \1 -->", re.DOTALL)
    typed = blocks.sub("", (ROOT / page).read_text())
    rates = {"0.0005", "0.0012", "0.0024"}  # four digits, and no losses
    assert set(re.findall(r"\b\d\.\d{4}\b", typed)) - known <= rates
