"""Summaries and tables of the loss study."""

import math

from benchmarks.loss_tables import Summary, comparison, difference, summarize, with_error


def row(contender, rate, seed, loss, setting="code"):
    memory = None if loss is None else {"state_mib": 2.0, "parameters": 2**20}
    settings = {"learning_rate": rate, "seed": seed}
    common = {"setting": setting, "contender": contender, "settings": settings}
    return {**common, "validation_loss": loss, "memory": memory}


def summary(*losses, size=1.0):
    return Summary(1e-3, dict(enumerate(losses)), size)


def test_the_best_rate_has_the_least_mean_among_those_with_most_seeds():
    rows = [row("a", 1e-3, seed, loss) for seed, loss in enumerate((3.0, 3.2))]
    rows += [row("a", 2e-3, seed, loss) for seed, loss in enumerate((2.9, 3.5))]
    rows += [row("a", 4e-3, 0, 2.0), row("b", 1e-3, 0, None), row("a", 1e-3, 0, 9.0, "prose")]
    results = summarize(rows)
    assert results["code", "a"] == Summary(1e-3, {0: 3.0, 1: 3.2}, 2.0)
    assert results["code", "b"].losses == {0: math.inf}
    assert math.isnan(results["code", "b"].bytes_a_parameter)
    assert results["prose", "a"].mean == 9.0


def test_differences_are_paired_by_seed():
    assert difference(summary(3.0, 3.4), summary(3.1, 3.2, 9.0)) == "+0.0500 ± 0.1500"
    assert difference(summary(1.0), summary(3.0)) == "-2.0000"
    assert difference(summary(1.0, math.inf), summary(3.0, 3.0)) == ""
    assert with_error([1.0, 3.0], ".2f") == "2.00 ± 1.00"


def test_a_comparison_leaves_out_what_did_not_run_and_names_what_diverged():
    results = {
        ("code", "a"): summary(3.0, 3.2),
        ("prose", "a"): summary(4.0, 4.0),
        ("code", "b"): summary(2.0, math.inf, 2.0, size=0.5),
    }
    lines = comparison(results, ("a", "b", "c"), "a", ("code", "prose")).splitlines()
    assert lines[2:] == [
        "| a | 1.00 | 2 | 3.1000 ± 0.1000 | 0 | 0.001 | 4.0000 ± 0.0000 | 0 | 0.001 |",
        "| b | 0.50 | 3 | 1 of 3 diverged |  | 0.001 |  |  |  |",
    ]
