"""The page of results: what its blocks say of records, and that they are today's."""

import json
import math

import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

from benchmarks import report, study_tables
from benchmarks.loss_entries import GROUPS, GROUPS_OF
from benchmarks.loss_study import config_of
from benchmarks.report import BLOCKS, blocks_of, filled
from benchmarks.study_results import Summary, difference, lowest, summarize
from examples.gpt2 import records
from examples.gpt2.config import resolve, settings


def summary(losses, size=1.0, rate=1e-3, curve=((10, 4.0), (20, 3.0))):
    values = dict(enumerate(losses))
    tried = {rate: losses, 2 * rate: [losses[0] + 1]}
    return Summary(rate, values, tried, False, size, [list(curve)] * len(losses))


RESULTS = {
    ("code", "adapprox"): summary([3.0, 3.2], 4.0, 2e-3),
    ("code", "adapprox, 4 bits"): summary([3.1, 3.2], 1.0),
    ("code", "AdamW, b2 0.999, clipped"): summary([3.5, 3.5], 8.0, 1e-3, ((10, 4.0), (20, 3.5))),
    ("code", "adapprox, unchanged"): summary([3.0, 3.2], 4.0, 2e-3),
    ("code", "adapprox, cautious decay"): summary([2.9, 3.0], 4.0),
    ("code", "rank 8, b2 0.99"): summary([3.3]),
    ("code", "rank 8, b2 0.99, bias correction"): summary([3.2], rate=2e-3),
    ("code", "rank 8, b2 0.999"): summary([3.3]),
    ("code", "rank 8, b2 0.999, bias correction"): summary([3.2]),
    ("code", "exact, b2 0.99"): summary([3.5]),
    ("code", "exact, b2 0.999"): summary([3.3]),
    ("larger", "Muon"): summary([3.3], rate=6e-3),
    ("longer", "Muon"): summary([2.3], rate=6e-3),
    ("code", "adapprox, no average"): summary([3.6, 3.7], 0.5),
}


def test_differences_are_paired_by_seed():
    one, other = summary([3.0, 3.4]), summary([3.1, 3.2, 9.0])
    mean, error, seeds = difference(one, other)
    assert (round(mean, 6), round(error, 6), seeds) == (0.05, 0.15, 2)
    assert difference(summary([1.0]), other)[1:] == (None, 1)


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        (
            "comparison",
            ["| adapprox | 4.00 | 3.1000 ± 0.1000 | -0.4000 ± 0.1000 | 2 | 0.002 |  |  |  |  |"],
        ),
        (
            "controls",
            [
                "| 3.3000 (0.001); 3.2000 (0.002) | -; - |",
                "| exact | - | 3.3000 (0.001); - | 3.5",
            ],
        ),
        ("effects", ["| b2 0.99, minus b2 0.999 | +0.0667 | +0.0000 | +0.2000 | 3 |"]),
        (
            "effects",
            ["| bias correction, minus no bias correction | -0.1000 | -0.1000 | -0.1000 | 2 |"],
        ),
        ("choices", ["| adapprox, unchanged | 4.00 | 3.1000 |  | 2 | 0.002 |"]),
        (
            "choices",
            ["| adapprox, cautious decay | 4.00 | 2.9500 | -0.1500 ± 0.0500 | 2 | 0.001 |"],
        ),
        ("rates", ["- code: AdamW, b2 0.999, clipped, is best at 0.001; times that, adapprox 2."]),
        (
            "steps",
            ["|  | steps to the loss of AdamW, b2 0.999, clipped |", "| adapprox | 20 of 20 |"],
        ),
        ("longer", ["| Muon | 1.00 | 0.006 | 3.3000 | 2.3000 |"]),
        (
            "pairs",
            [
                "| adapprox, minus AdamW, b2 0.999, clipped | -0.4000 ± 0.1000 |  |",
                "| adapprox, 4 bits, minus AdamW, b2 0.999, clipped | -0.3500 ± 0.0500 |  |",
            ],
        ),
        ("noise", ["| adapprox, 4 bits, minus adapprox | +0.0500 ± 0.0500 |  |"]),
        ("averages", ["| adapprox, no average | 3.6500 | +0.5500 ± 0.0500 | 2 |"]),
        (
            "claims",
            [
                "| code | adapprox, 4 bits | 1.00 | AdamW, b2 0.999, clipped | -0.3500 ± 0.0500"
                " | 2 |",
            ],
        ),
        ("rivals", ["None."]),
    ],
)
def test_what_the_blocks_say(block, lines):
    for line in lines:
        assert line in BLOCKS[block](RESULTS)


def test_opponents_with_lower_loss_and_no_more_bytes_are_named():
    results = {
        **RESULTS,
        ("code", "SM3"): summary([2.5, 2.6], 2.0),
        ("code", "CAME"): summary([2.8, 3.3], 2.0),
        ("code", "Muon"): summary([2.5, 2.6], 9.0),
    }
    assert BLOCKS["rivals"](results).splitlines()[2:] == [
        "| code | CAME | adapprox | -0.0500 ± 0.1500 | no |",
        "| code | SM3 | adapprox | -0.5500 ± 0.0500 | yes |",
    ]


def test_every_run_is_on_the_page_and_the_chosen_rate_is_bold():
    whole = rows_of("SM3", "opponents", [3.0, 3.1, 3.2])
    of_first_seed = [(GROUPS["opponents"]["CAME"].rate * factor, 0) for factor in (0.5, 1, 2)]
    part = rows_of("CAME", "opponents", [2.0, 2.1, 2.2], missing=of_first_seed)
    rows = json.loads(json.dumps(whole + part))
    assert study_tables.runs_table(rows, summarize(rows)).splitlines()[2:] == [
        "| CAME | code | 0.0003: 2.1500 (2) |",
        "| SM3 | code | 0.05: diverged (1), **0.1: 3.1000 (3)**, 0.2: diverged (1) |",
    ]


def test_pairs_without_runs_and_empty_tables_are_left_out():
    assert "Adafactor" not in BLOCKS["pairs"](RESULTS)
    assert BLOCKS["longer"]({}) == "Not all runs are there yet."


def test_what_the_records_took_and_leave_open_is_said():
    """A run that two groups ask for counts where it is asked for first."""
    sm3 = rows_of("SM3", "opponents", [3.0, 3.1, 3.2])
    unchanged = rows_of("adapprox, unchanged", "choices", [3.0, 3.1, 3.2])
    corrected = rows_of("adapprox, bias correction", "choices", [3.0, 3.1, 3.2])
    rows = json.loads(json.dumps(sm3 + unchanged + corrected))
    *table, _, line = study_tables.effort(rows, RESULTS).splitlines()
    assert table[2:] == [
        "| what is compared, on code | 10 | 5.0 |",
        "| choices, on code | 5 | 2.5 |",
        "| all | 15 | 7.5 |",
    ]
    total = sum(len(GROUPS[group]) for groups in GROUPS_OF.values() for group in groups)
    assert line == f"{total - len(RESULTS)} of {total} rows lack runs and are left out."


def test_two_texts_in_one_setting_are_not_mixed():
    rows = rows_of("SM3", "opponents", [3.0, 3.1, 3.2])
    rows[0]["settings"]["data"] = "other"
    with pytest.raises(ValueError, match="code has runs on two texts: other and digest"):
        summarize(rows)


def test_an_entry_that_diverged_everywhere_is_shown_as_that():
    results = summarize(json.loads(json.dumps(rows_of("SM3", "opponents", [None] * 3))))
    assert "| SM3 |  | 3 of 3 diverged |" in BLOCKS["comparison"](results)


def test_only_blocks_are_replaced_and_a_second_time_nothing():
    page = "a 3.14\n<!-- rates -->\nold\n<!-- end of rates -->\nb\n"
    blocks = blocks_of([], RESULTS)
    once, there = filled(page, blocks)
    assert there == {"rates"}
    assert once.startswith("a 3.14\n<!-- rates -->\n- code: AdamW, b2 0.999, clipped, is best at")
    assert once.endswith("<!-- end of rates -->\nb\n")
    assert filled(once, blocks)[0] == once
    assert filled("<!-- rates -->\n", blocks) == ("<!-- rates -->\n", set())


def rows_of(label, group, losses, missing=()):
    """Records of an entry at the three rates around its first one, and of all seeds there."""
    entry = GROUPS[group][label]
    runs = [(entry.rate * factor, 0) for factor in (0.5, 1, 2)]
    runs += [(entry.rate, seed) for seed in range(1, entry.seeds)]
    memory = {"state_mib": 1.0, "parameters": 2**19}
    return [
        {
            "setting": "code",
            "settings": settings(resolve(config_of(entry, "code", rate, seed)), "digest"),
            "validation_loss": losses[seed] if rate == entry.rate else None,
            "curve": [] if losses[seed] is None else [(400, losses[seed])],
            "memory": None if losses[seed] is None else memory,
            "seconds": 3600.0,
        }
        for rate, seed in runs
        if (rate, seed) not in missing
    ]


def test_records_are_summarized_where_they_are_whole():
    whole = rows_of("SM3", "opponents", [3.0, 3.1, 3.2])
    entry = GROUPS["opponents"]["CAME"]
    part = rows_of("CAME", "opponents", [3.0, 3.1, 3.2], missing=[(entry.rate, 2)])
    results = summarize(json.loads(json.dumps(whole + part)))
    assert list(results) == [("code", "SM3")]
    one = results["code", "SM3"]
    assert one.losses == {0: 3.0, 1: 3.1, 2: 3.2}
    assert list(one.tried.values()) == [[math.inf], [3.0, 3.1, 3.2], [math.inf]]
    assert one.bytes_a_parameter == 2.0


def test_the_best_is_chosen_among_those_with_the_most_seeds():
    three, five = summary([3.0, 3.1, 3.2]), summary([2.9, 3.0, 3.1, 4.0, 4.0])
    results = {
        ("code", "Muon"): three,
        ("code", "SM3"): five,
        ("code", "AdaMuon"): summary([3.5, 3.5, 3.5, 3.4, 3.4]),
    }
    assert lowest(results, "code", ("Muon", "SM3", "CAME", "AdaMuon")) == "SM3"
    assert lowest(results, "code", ("Muon", "CAME")) == "Muon"
    assert lowest(results, "prose", ("Muon", "SM3")) is None


def test_what_was_tuned_on_the_finer_grid_is_marked():
    results = {**RESULTS, ("code", "adapprox"): RESULTS["code", "adapprox"]._replace(finer=True)}
    for block in ("comparison", "measured"):
        said = BLOCKS[block](results)
        assert "| adapprox † |" in said
        assert "| adapprox, 4 bits |" in said


def test_the_pages_are_what_the_records_say():
    rows = records.read(report.STUDY)
    blocks = blocks_of(rows, summarize(rows))
    for name in report.PAGES:
        page = (report.ROOT / name).read_text()
        assert filled(page, blocks)[0] == page, f"{name}: run python -m benchmarks.report"


@pytest.mark.parametrize("file", report.DRAWINGS)
def test_the_pictures_are_drawn_of_what_there_is(tmp_path, file):
    path = tmp_path / "picture.png"
    report.DRAWINGS[file](RESULTS, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_diverged_is_said_and_has_no_difference():
    one, other = summary([3.0, math.inf, 3.4]), summary([3.1, 3.1, 3.3])
    mean, error, seeds = difference(one, other)
    assert math.isnan(mean)
    assert (error, seeds) == (None, 3)
    results = {("code", "SM3"): one, ("code", "AdamW, b2 0.95"): other}
    assert "| SM3 | 1.00 | 1 of 3 diverged |  | 3 |" in BLOCKS["comparison"](results)
