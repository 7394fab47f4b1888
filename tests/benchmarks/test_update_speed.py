"""The benchmark of updates runs from end to end; its times are not looked at."""

import dataclasses
import json
import pathlib
import shlex

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")

from benchmarks import update_speed
from benchmarks.inputs import gradients_like
from benchmarks.update_speed import main
from examples.gpt2.model import CONFIGS

ROOT = pathlib.Path(__file__).parents[2]


def records_of(name, model="117M"):
    path = ROOT / "results" / "speed" / f"update_speed_{name}_cpu.json"
    return json.loads(path.read_text())["records"][model]


def ratios(records, name, reference):
    cycles = [records[key]["seconds_of_cycles"] for key in (name, reference)]
    return [one / other for one, other in zip(*cycles, strict=False)]


def test_the_page_says_what_the_records_say():
    page = (ROOT / "docs" / "performance.md").read_text()
    for record in records_of("in_place_117M").values():
        over = record["over_adafactor"]
        cells = [f"{over:.2f}" if over < 10 else f"{over:.0f}", f"{record['temporaries_mib']:.0f}"]
        cells += [f"{record['state_mib']:.1f}", f"{record['compile_seconds']:.1f}"]
        assert " | ".join(cells) in page
    many = records_of("in_place_117M_48_cycles")
    small, large = (records_of("in_place_117M_345M", model) for model in ("117M", "345M"))
    for name in ("adapprox", "adapprox rank 16", "adapprox 1 to 16 of 192"):
        cells = [f"{of[name]['over_adafactor']:.2f}" for of in (small, large)]
        cells.append(", ".join(f"{of[name]['temporaries_mib']:.0f}" for of in (small, large)))
        assert " | ".join(cells) in page
        if name in many:
            found = ratios(many, name, "adafactor")
            figures = many[name]["over_adafactor"], min(found), max(found)
            assert " | ".join(f"{x:.2f}" for x in figures) in page
    muon = records_of("muon_117M")
    for name in set(muon) - {"muon"}:
        found = ratios(muon, name, "muon")
        cells = [f"{min(found):.2f} to {max(found):.2f}", f"{muon[name]['temporaries_mib']:.0f}"]
        cells += [f"{muon[name]['state_mib']:.1f}", f"{muon[name]['compile_seconds']:.0f}"]
        assert " | ".join(cells) in page


def test_the_readme_gives_the_least_and_the_most_of_all_cycles():
    readme = " ".join((ROOT / "README.md").read_text().split())
    records = [records_of(name) for name in ("in_place_117M", "in_place_117M_48_cycles")]

    def span(name, reference):
        found = [x for of in records if reference in of for x in ratios(of, name, reference)]
        return f"{min(found):.1f} to {max(found):.1f}"

    assert f"{span('adapprox', 'adafactor')} times as long as Adafactor's" in readme
    assert f"({span('adapprox rank 16', 'adafactor')} at rank 16)" in readme
    assert f"{span('adapprox', 'adamw')} times as long as AdamW's" in readme


@pytest.fixture
def small(monkeypatch):
    """A matrix and a vector in place of a model's parameters: less to compile."""
    shapes = {"kernel": (128, 256), "bias": (256,)}
    like = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    monkeypatch.setattr(update_speed, "parameter_shapes", lambda model: like)


@pytest.mark.usefixtures("small")
def test_records_and_picture_are_written(tmp_path, capsys):
    path = tmp_path / "speed.json"
    names = ("adafactor", "adapprox rank 16", "sm3")
    main(("tiny",), names, cycles=2, steps=2, output=path)
    result = json.loads(path.read_text())
    assert shlex.split(result["command"])[6:9] == list(names[:3])
    records = result["records"]["tiny"]
    assert tuple(records) == names
    for record in records.values():
        assert len(record["seconds_of_cycles"]) == 2
        assert record["over_adafactor"] > 0
    assert records["adapprox rank 16"]["ranks"] == [0, 16]  # dense leaves have 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| adapprox rank 16 |" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_the_ranks_of_an_optimizer_of_several_parts_are_recorded(tmp_path):
    path = tmp_path / "speed.json"
    result = main(("tiny",), ("adapprox_muon rank 8",), cycles=1, steps=1, output=path)
    assert result["records"]["tiny"]["adapprox_muon rank 8"]["ranks"] == [0, 8]


def test_a_whole_training_step(tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(CONFIGS["tiny"], layers=1))
    path = tmp_path / "step.json"
    main(("tiny",), ("adamw",), cycles=1, steps=1, training_step=True, batch=2, output=path)
    assert json.loads(path.read_text())["records"]["tiny"]["adamw"]["over_adamw"] == 1


@pytest.mark.usefixtures("small")
def test_a_slow_contender_is_measured_by_one_step(tmp_path):
    path = tmp_path / "slow.json"
    result = main(("tiny",), ("adamw",), cycles=2, steps=2, patience=0, output=path)
    record = result["records"]["tiny"]["adamw"]
    assert len(record["seconds_of_cycles"]) == 1
    assert record["cycles_left_out"]


def test_gradients_have_the_ranks_that_they_promise():
    gradients = gradients_like({"a": np.zeros((64, 80)), "b": np.zeros((80, 64))}, seed=0)
    for rank, gradient in enumerate(gradients.values(), start=1):
        spectrum = np.linalg.svd(np.abs(np.asarray(gradient, np.float64)), compute_uv=False)
        assert spectrum[rank] < 1e-5 * spectrum[0] < spectrum[rank - 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(contenders=("sgd",)), r"contenders has \['sgd'\]; allowed: all, adamw, "),
        (dict(cycles=0), "cycles=0, .*; allowed: integers of at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(("tiny",), **arguments)
