"""The study of losses: how rates are tuned, and that it goes on where it was stopped."""

import json
import math
import time

import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

from benchmarks import loss_study
from benchmarks.loss_entries import GROUPS, SETTINGS, Entry
from benchmarks.loss_study import config_of, entries, tune, tuned
from examples.gpt2 import loop, optimizers
from examples.gpt2.config import resolve, settings
from examples.gpt2.run import Result


def parabola(best):
    """Records whose loss is least at a rate; very high rates diverge."""
    asked = []

    def result(rate, seed):
        asked.append((rate, seed))
        loss = None if rate > 20 else math.log2(rate / best) ** 2 + seed
        return {"validation_loss": loss}

    return result, asked


@pytest.mark.parametrize("best", [1.0, 4.3, 0.11, 15.0])
def test_the_best_rate_has_a_worse_one_on_either_side(best):
    result, asked = parabola(best)
    tuned = tune(Entry("adamw", 1.0, seeds=3), result)
    assert abs(math.log2(tuned.rate / best)) <= 0.5
    rates = list(tuned.grid)
    assert rates == sorted(rates)
    assert rates[0] < tuned.rate < rates[-1]
    assert [(tuned.rate, seed) in asked for seed in range(3)] == [True] * 3
    assert {seed for rate, seed in asked if rate != tuned.rate} == {0}
    assert len(tuned.runs) == 3


@pytest.mark.parametrize("best", [1.0, 1.35, 4.9])
def test_a_finer_search_has_worse_rates_a_root_of_two_away(best):
    result, _ = parabola(best)
    tuned = tune(Entry("adamw", 1.0, seeds=2, finer=True), result)
    assert abs(math.log2(tuned.rate / best)) <= 0.25
    rates = list(tuned.grid)
    place = rates.index(tuned.rate)
    for neighbour in (rates[place - 1], rates[place + 1]):
        assert abs(math.log2(neighbour / tuned.rate)) == pytest.approx(0.5)
    coarse = tune(Entry("adamw", 1.0, seeds=2), result)
    assert set(coarse.grid) <= set(rates)  # their runs serve both


def test_three_seeds_decide_between_rates_that_the_first_finds_close():
    """The first finds 1 best by a little, the others 2 by much; 0.5 is not close."""
    losses = {
        0.5: [3.10, 1.0, 1.0, 1.0, 1.0],
        1.0: [3.00, 3.5, 3.5, 3.5, 3.5],
        2.0: [3.02, 3.1, 3.1, 3.1, 3.1],
        4.0: [3.20, 1.0, 1.0, 1.0, 1.0],
    }
    asked = []

    def result(rate, seed):
        asked.append((rate, seed))
        return {"validation_loss": losses[rate][seed]}

    tuned = tune(Entry("adamw", 1.0, seeds=5), result)
    assert tuned.rate == 2.0
    assert [run["validation_loss"] for run in tuned.runs] == losses[2.0]
    assert {rate: len(runs) for rate, runs in tuned.grid.items()} == {
        0.5: 1,
        1.0: 3,
        2.0: 5,
        4.0: 1,
    }
    assert len(asked) == len(set(asked)) == 10
    assert tune(Entry("adamw", 1.0, seeds=1), result).rate == 1.0
    finer = {1.0: [3.0] * 5, 2.0: [3.01, 2.9, 2.9, 2.9, 2.9]}

    def of_finer(rate, seed):
        place = round(2 * math.log2(rate))
        return {"validation_loss": finer.get(rate, [3.1 + abs(place) / 10] * 5)[seed]}

    tuned = tune(Entry("adamw", 1.0, seeds=5, finer=True), of_finer)
    assert tuned.rate == 2.0
    assert min(tuned.grid) < 2.0 < max(tuned.grid)


def test_an_entry_with_a_run_missing_is_not_whole():
    result, _ = parabola(1.0)
    entry = Entry("adamw", 1.0, seeds=3)
    assert tune(entry, lambda rate, seed: None if seed == 2 else result(rate, seed)) is None
    assert tune(entry, lambda rate, seed: None if rate == 2 else result(rate, seed)) is None


def test_every_entry_can_be_built_and_no_two_are_the_same_run():
    seen = {}
    for setting, label, entry in entries(tuple(GROUPS), tuple(SETTINGS)):
        optimizers.build(entry.optimizer, entry.rate, entry.hyper, entry.options)
        used = settings(resolve(config_of(entry, setting, entry.rate, 0)), setting)
        seen.setdefault(json.dumps(used, sort_keys=True), []).append(label)
    # One setting may be asked for in two groups: its runs are made once.
    alike = [labels for labels in seen.values() if len(labels) > 1]
    assert sorted(map(sorted, alike)) == [
        ["Adafactor", "Adafactor's means, b2 1 - t^-0.8"],
        ["Adafactor's means, b2 0.99", "Adafactor, b2 0.99"],
        ["adapprox", "adapprox, unchanged", "rank 8, b2 0.999"],
        ["adapprox, b2 0.95", "rank 8, b2 0.95"],
        ["adapprox, b2 0.99", "rank 8, b2 0.99"],
        ["adapprox, b2 1 - t^-0.8", "rank 8, b2 1 - t^-0.8"],
        ["adapprox, bias correction", "rank 8, b2 0.999, bias correction"],
        ["adapprox_muon", "adapprox_muon, unchanged"],
    ]


@pytest.mark.parametrize("group", ["larger", "longer"])
def test_runs_elsewhere_are_of_optimizers_that_are_compared(group):
    for label, entry in GROUPS[group].items():
        same = {**GROUPS["choices"], **GROUPS["ours"], **GROUPS["opponents"]}[label]
        assert (entry.optimizer, entry.options, entry.hyper) == (
            same.optimizer,
            same.options,
            same.hyper,
        )


def test_controls_and_choices_are_of_the_first_text_alone():
    of_prose = {label for _, label, _ in entries(tuple(GROUPS), ("prose",))}
    assert of_prose == {*GROUPS["ours"], *GROUPS["opponents"], *GROUPS["noise"]}


def test_rates_of_long_runs_are_looked_for_in_short_ones():
    short, asked_short = parabola(2.0)
    long, asked_long = parabola(4.0)
    found = tuned(
        Entry("adamw", 1.0, seeds=2), "longer", {"larger": short, "longer": long}.__getitem__
    )
    assert found.rate == 2.0
    assert asked_long == [(2.0, 0), (2.0, 1)]
    assert [run["validation_loss"] for run in found.runs] == [1.0, 2.0]
    assert len(asked_short) > 3
    assert tuned(Entry("adamw", 1.0), "longer", lambda _: lambda rate, seed: None) is None


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The study with two entries and runs that are pretended; returns the runs made."""
    made = []

    def pretend(config, *, keep):
        assert not keep
        made.append((config.optimizer, config.learning_rate, config.seed))
        loss = math.log2(config.learning_rate) ** 2 + config.seed
        return Result({}, loss, [(1, loss)], {"state_mib": 1.0}, 1.0)

    class Data:
        key = "text"

    group = {"a": Entry("adamw", 1.0, seeds=2), "b": Entry("sm3", 1.0, seeds=1)}
    monkeypatch.setattr(loss_study, "GROUPS", {"ours": group})
    monkeypatch.setattr(loss_study, "GROUPS_OF", {"code": ("ours",)})
    monkeypatch.setattr(loss_study, "STUDY", tmp_path / "study.jsonl")
    monkeypatch.setattr(loss_study, "load_data", lambda config: Data)
    monkeypatch.setattr(loss_study, "run", pretend)
    return made


def test_what_is_recorded_is_not_run_again(study, tmp_path):
    loss_study.main(("ours",), ("code",))
    expected = [("adamw", rate, 0) for rate in (1.0, 0.5, 2.0)] + [("adamw", 1.0, 1)]
    expected += [("sm3", rate, 0) for rate in (1.0, 0.5, 2.0)]
    assert study == expected
    path = tmp_path / "study.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:40])  # stopped while it wrote
    study.clear()
    loss_study.main(("ours",), ("code",))
    assert study == expected[5:]


def test_one_entry_alone(study):
    loss_study.main(("ours",), ("code",), labels=("b",))
    assert {name for name, *_ in study} == {"sm3"}


def test_no_run_begins_when_the_time_is_over(study, capsys):
    loss_study.main(("ours",), ("code",), minutes=0)
    assert study == []
    assert capsys.readouterr().err.strip() == "the time is up: the same command goes on from there"


def test_a_run_hears_when_the_time_is_up(study, monkeypatch, capsys):
    def pretend(config, *, keep):
        with loop.interruptions() as interrupted:
            while interrupted.asked(False) is None:
                time.sleep(0.01)
        raise loop.Terminated("terminated after step 3 of 6")

    monkeypatch.setattr(loss_study, "run", pretend)
    loss_study.main(("ours",), ("code",), minutes=0.01)
    line = "terminated after step 3 of 6: the same command goes on from there"
    assert line in capsys.readouterr().err


def test_the_parts_are_all_the_work(study):
    for part in range(2):
        loss_study.main(("ours",), ("code",), part=part, parts=2)
    assert {name for name, *_ in study} == {"adamw", "sm3"}
    assert len(study) == 7


def test_equal_runs_are_one_process_s_work():
    chosen = list(entries(("ours", "opponents", "controls", "choices"), ("code",)))
    parts = [loss_study._share(chosen, part, 3) for part in range(3)]
    assert sorted(label for part in parts for _, label, _ in part) == sorted(
        label for _, label, _ in chosen
    )
    [with_rank_8] = [part for part in parts if "rank 8, b2 0.999" in [one[1] for one in part]]
    assert "adapprox" in [one[1] for one in with_rank_8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"groups": ("theirs",)}, r"groups has \['theirs'\]; allowed: ours"),
        ({"where": ("verse",)}, r"where has \['verse'\]; allowed: code; prose"),
        ({"labels": ("AdamW",)}, r"labels has \['AdamW'\]; allowed: a; b"),
        ({"part": 2, "parts": 2}, "part is 2; allowed: from 0 to parts - 1 = 1"),
    ],
)
def test_what_cannot_be_asked_for_is_named(study, arguments, words):
    with pytest.raises(SystemExit, match=words):
        loss_study.main(**{"groups": ("ours",), **arguments})
    assert study == []
