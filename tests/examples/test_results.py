"""The losses that are typed on the pages are those of the records."""

import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks.loss_study import STUDY
from examples.gpt2 import records

ROOT = pathlib.Path(__file__).parents[2]
LOSSES = ROOT / "results" / "loss"


def all_runs(*more):
    files = LOSSES / "orthogonal_choices.jsonl", *more
    return [row for file in files for row in records.read(file)]


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
    blocks = re.compile(r"<!-- ([\w ]+) -->.*?<!-- end of \1 -->", re.DOTALL)
    typed = blocks.sub("", (ROOT / page).read_text())
    rates = {"0.0005", "0.0012", "0.0024"}  # four digits, and no losses
    assert set(re.findall(r"\b\d\.\d{4}\b", typed)) - known <= rates
