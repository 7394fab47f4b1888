"""The whole program on a small text and a very small model."""

import dataclasses
import json
import math
import shutil
import signal

import chex
import jax
import optax
import pytest
import tyro

from examples.gpt2 import command, optimizers, train
from examples.gpt2 import config as settings
from examples.gpt2.folder import run_folder
from tests.examples.small import (
    OPTIONS,
    arguments,
    assert_refused,
    before_its_end,
    losses_of,
    rows_of,
    saved,
)


# Ranks that adapt in buffers that follow them are all that a fixed width has, and more.
@pytest.mark.parametrize(("name", "steps"), [("adamw", 6), ("elastic", 24)])
def test_a_run_leaves_what_people_expect(run_of, name, steps):
    out = run_of(name)
    names = {path.name for path in out.iterdir()}
    assert names == {"checkpoints", "curves.png", "metrics.jsonl", "process", "settings.json"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    losses = losses_of(out)
    assert list(losses) == list(range(1, steps + 1))
    assert abs(losses[1] - math.log(256)) < 0.1
    checks = [row for row in rows_of(out) if "validation_loss" in row]
    assert [row["step"] for row in checks] == [steps // 2, steps]
    for row in checks:
        assert ("ranks" in row) == ("state_mib" in row) == (name != "adamw")
    assert checks[1]["validation_loss"] < checks[0]["validation_loss"] < losses[1]


@pytest.mark.parametrize(
    ("name", "steps"),
    [("elastic", 24), ("split", 6), pytest.param("stochastic", 6, marks=pytest.mark.slow)],
)
def test_resume_gives_the_same_bits(run_of, work, name, steps):
    shorter = before_its_end(run_of(name), f"{name}-resumed", steps)
    assert train.main(arguments(work, shorter.name, *OPTIONS[name], "--resume")) == 0
    chex.assert_trees_all_equal(saved(shorter, steps), saved(run_of(name), steps))
    assert losses_of(shorter) == losses_of(run_of(name))


@pytest.mark.parametrize("name", ["split", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_weights_of_16_bits_learn_and_are_saved_as_such(run_of, name):
    state = saved(run_of(name))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"bfloat16"}
    remainders = jax.tree.leaves(state["opt_state"].get("remainder"))
    assert {leaf.dtype.name for leaf in remainders} == ({"int8"} if name == "split" else set())
    losses = losses_of(run_of(name))
    assert losses[6] < losses[1] - 0.01


def test_elastic_buffers_follow_the_ranks(run_of):
    """From 8 columns to 12."""
    factors = saved(run_of("elastic"), 24)["opt_state"][0]["q"]
    widths = {leaf.shape[-1] for leaf in jax.tree.leaves(factors) if leaf.ndim}
    assert 12 in widths
    # Wider buffers of 16 x 16 and 16 x 48 would not be smaller than the matrix.
    assert widths <= {7, 8, 11, 12}


def test_a_run_that_is_not_kept_goes_on_and_leaves_numbers_alone(work, run_of, at_step):
    """With an optimizer that no option names."""
    config = tyro.cli(settings.Config, args=arguments(work, "given"))

    def adamw(rate):
        return optax.adamw(rate, 0.9, 0.999, weight_decay=0.1, mask=optimizers.is_matrix)

    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(command.Terminated, match="after step 4"):
        train.train(config, optimizer=adamw, keep=False)
    config = dataclasses.replace(config, resume=True)
    result = train.train(config, optimizer=adamw, keep=False)
    rows = [row for row in rows_of(run_of("adamw")) if "validation_loss" in row]
    assert result.curve == [(row["step"], row["validation_loss"]) for row in rows]
    assert (result.settings["seed"], "optimizer" in result.settings) == (0, False)
    assert result.memory["state_mib"] == pytest.approx(result.memory["adamw_state_mib"], rel=1e-3)
    names = {path.name for path in (work / "given").iterdir()}
    assert names == {"metrics.jsonl", "process", "settings.json"}


def test_a_run_can_be_made_longer_and_not_shorter(work, run_of, capsys):
    longer = shutil.copytree(run_of("adamw"), work / "longer")
    command = arguments(work, "longer", *OPTIONS["adamw"], "--resume", "--steps")
    assert train.main([*command, "9"]) == 0
    assert list(losses_of(longer)) == list(range(1, 10))
    assert json.loads((longer / "settings.json").read_text())["steps"] == 9
    assert_refused(capsys, [*command, "7"], "other settings: --steps was 9, now 7\n")


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--data nowhere", ["nowhere: no such file"]),
        ("--heads 3", ["--heads 3", "--width 16"]),
        ("--accumulate 3", ["--accumulate 3", "--batch-size 4"]),
        ("--steps 0", ["--steps is 0"]),
        ("--warmup 6", ["--warmup 6", "--steps 6"]),
        ("--learning-rate -1", ["--learning-rate is -1"]),
        ("--vocabulary 100", ["--vocabulary 100", "256"]),
        ("--b1 2", ["--b1 is 2"]),
        ("--max-rank 0", ["max_rank", "0"]),
        ("--elastic", ["--elastic needs both ranks in columns"]),
        ("--elastic --initial-rank 9 --max-rank 8", ["got --initial-rank 9 and --max-rank 8"]),
        ("--resume", ["there is no checkpoint in"]),
        (f"--out {__file__}/run", [__file__, "Not a directory"]),
        ("--mesh data=2,rows=4", ["'rows=4'", "data, fsdp, tensor"]),
        ("--mesh data=2,data=4", ["'data=4'", "each once"]),
        ("--mesh data=-1", ["'data=-1'"]),
        ("--mesh fsdp=3", ["is of 3 devices", "of the 8 that are there"]),
        ("--mesh data=4,fsdp=2", ["into 8", "--batch-size 4"]),
        ("--mesh data=8 --batch-size 8 --accumulate 2", ["into 8", "--accumulate 2"]),
        ("--processes.coordinator here", ["here", "HOST:PORT"]),
        ("--processes.coordinator host:99999", ["host:99999", "HOST:PORT"]),
        ("--processes.coordinator host:99", ["host:99, None and None"]),
        ("--processes.count 2", ["None, 2 and None"]),
        ("--processes.coordinator h:1 --processes.count 2 --processes.index 2", ["h:1, 2 and 2"]),
    ],
)
def test_bad_options_are_refused_in_one_line(work, capsys, options, words):
    assert_refused(capsys, [*arguments(work, "refused"), *options.split()], *words)
    assert not (work / "refused").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            "--optimizer adafactor --b1 0.5",
            "--optimizer was adamw, now adafactor, --b1 was 0.9, now 0.5\n",
        ),
        (
            "--tokenizer sentencepiece --vocabulary 400",
            "--tokenizer was bytes, now sentencepiece, --vocabulary was 256, now 400\n",
        ),
        (f"--data {__file__}", "the text (--data) is another\n"),
    ],
)
def test_resume_names_the_options_that_differ_and_no_others(run_of, work, capsys, changed, words):
    command = [*arguments(work, run_of("adamw").name, *OPTIONS["adamw"]), "--resume"]
    words = f"the checkpoint is of other settings: {words}"
    assert_refused(capsys, [*command, *changed.split()], words)


def test_a_foreign_folder_is_left_alone_and_an_earlier_run_is_kept(run_of, work, capsys):
    (work / "foreign").mkdir()
    (work / "foreign" / "notes.txt").write_text("mine")
    assert_refused(capsys, arguments(work, "foreign"), "not a run's folder")
    earlier = shutil.copytree(run_of("adamw"), work / "earlier")
    with run_folder(earlier, False, {}):
        pass
    assert (work / "earlier.1" / "metrics.jsonl").exists()
    assert {path.name for path in earlier.iterdir()} == {"process", "settings.json"}


def test_a_loss_that_is_not_finite_stops_the_run(work, capsys):
    command = arguments(work, "diverged", "--optimizer", "adamw", "--learning-rate", 1e30)
    assert train.main(command) == 1
    assert "stopped: the" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_run_learns(tmp_path, capsys):
    assert train.main(["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]) == 0
    checks = [row["validation_loss"] for row in rows_of(tmp_path / "run") if "ranks" in row]
    assert checks[-1] < 3.3 < checks[0]
    assert "AdamW's" in capsys.readouterr().out


def test_the_last_rate_follows_the_first():
    halved = settings.resolve(settings.Config(model="117M", learning_rate=1.5e-4))
    assert halved.min_learning_rate == pytest.approx(2.5e-5)
