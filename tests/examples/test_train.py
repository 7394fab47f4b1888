"""The whole program on a small text and a very small model."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import signal

import jax
import optax
import pytest
import tyro

from examples.gpt2 import command, metrics, optimizers, train
from examples.gpt2 import config as settings
from examples.gpt2 import model as gpt
from examples.gpt2.folder import run_folder
from tests.examples.small import arguments, assert_equal_bits, error_line, rows_of, saved

ELASTIC = ["--elastic", "--initial-rank", 1, "--max-rank", 12, "--steps", 24]
ELASTIC += ["--error-threshold", 0.02, "--eval-every", 12, "--checkpoint-every", 12]
OPTIONS = {
    "adamw": ["--optimizer", "adamw"],
    "adapprox": ["--optimizer", "adapprox"],
    "elastic": ELASTIC,
    "split": ["--optimizer", "adapprox-muon", "--weights", "split", "--accumulate", 2],
    "stochastic": ["--optimizer", "adamw", "--weights", "bfloat16-stochastic"],
}


@pytest.fixture(scope="module")
def run_of(work):
    """Trains once with the options of a name, without an interruption, and tells the folder."""

    @functools.cache
    def run_of(name):
        assert train.main(arguments(work, name, *OPTIONS[name])) == 0
        return work / name

    return run_of


# Ranks that adapt in buffers that follow them are all that a fixed width has, and more.
@pytest.fixture(params=["adamw", pytest.param("adapprox", marks=pytest.mark.slow), "elastic"])
def trained(request, run_of):
    """An uninterrupted run: the name of its options and its folder."""
    return request.param, run_of(request.param)


def test_a_run_leaves_what_people_expect(trained):
    name, out = trained
    names = {path.name for path in out.iterdir()}
    files = {"curves.png", "metrics.jsonl", "process", "settings.json"}
    assert names == files | {"checkpoints"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of(out)
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    steps = 24 if name == "elastic" else 6
    assert list(losses) == list(range(1, steps + 1))
    assert abs(losses[1] - math.log(256)) < 0.1
    checks = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in checks] == [steps // 2, steps]
    for row in checks:
        assert ("ranks" in row) == (name != "adamw")
    assert checks[1]["validation_loss"] < checks[0]["validation_loss"] < losses[1]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("adamw", 6, marks=pytest.mark.slow),  # after Ctrl-C it does, as tested below
        pytest.param("adapprox", 6, marks=pytest.mark.slow),
        ("elastic", 24),
        ("split", 6),
        pytest.param("stochastic", 6, marks=pytest.mark.slow),
    ],
)
def test_resume_gives_the_same_bits(run_of, work, name, steps):
    shorter = work / f"{name}-resumed"
    shutil.copytree(run_of(name), shorter)
    shutil.rmtree(shorter / "checkpoints" / str(steps))  # as if ended after half of the steps
    assert train.main(arguments(work, shorter.name, *OPTIONS[name], "--resume")) == 0
    assert_equal_bits(saved(shorter, steps), saved(run_of(name), steps))
    losses = [row["step"] for row in rows_of(shorter) if "loss" in row]
    assert losses == list(range(1, steps + 1))


@pytest.mark.parametrize("name", ["split", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_weights_of_16_bits_learn_and_are_saved_as_such(run_of, name):
    state = saved(run_of(name))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"bfloat16"}
    remainders = jax.tree.leaves(state["opt_state"].get("remainder"))
    assert {leaf.dtype.name for leaf in remainders} == ({"int8"} if name == "split" else set())
    losses = [row["loss"] for row in rows_of(run_of(name)) if "loss" in row]
    assert losses[-1] < losses[0] - 0.01


def test_elastic_buffers_follow_the_ranks(run_of):
    """From 8 columns to 12, with the state's bytes in the records."""
    checks = [row for row in rows_of(run_of("elastic")) if "validation_loss" in row]
    factors = saved(run_of("elastic"), 24)["opt_state"][0]["q"]
    widths = {leaf.shape[-1] for leaf in jax.tree.leaves(factors) if leaf.ndim}
    assert 12 in widths
    # Wider buffers of 16 x 16 and 16 x 48 would not be smaller than the matrix.
    assert widths <= {7, 8, 11, 12}
    assert checks[-1]["state_mib"] > 0
    assert json.loads((run_of("elastic") / "settings.json").read_text())["elastic"]


def test_elastic_needs_adaptive_ranks(work, capsys):
    assert train.main(arguments(work, "fixed", "--elastic")) == 2
    assert "--elastic needs both ranks in columns" in capsys.readouterr().err


def test_ctrl_c_saves_and_resume_gives_the_same_bits(run_of, work, capsys, monkeypatch):
    """As the slow test beneath, within this process: the signal comes with the records of step 3,
    and is heard at the step after."""
    real = metrics.Metrics.record

    def record(rows, step, *others):
        real(rows, step, *others)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(metrics.Metrics, "record", record)
    handler = signal.getsignal(signal.SIGINT)
    command = arguments(work, "interrupted", *OPTIONS["adamw"])
    assert train.main(command) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    errors = capsys.readouterr().err
    assert "interrupted after step 4 of 6: --resume goes on from there" in errors
    assert "Traceback" not in errors
    steps = {int(path.name) for path in (work / "interrupted/checkpoints").iterdir()}
    assert steps == {3, 4}

    monkeypatch.undo()
    assert train.main([*command, "--resume"]) == 0
    assert_equal_bits(saved(work / "interrupted"), saved(run_of("adamw")))
    assert [row["step"] for row in rows_of(work / "interrupted") if "loss" in row] == [*range(1, 7)]


def test_a_run_that_is_not_kept_goes_on_and_leaves_numbers_alone(work, run_of, monkeypatch):
    """With an optimizer that no option names."""
    config = tyro.cli(settings.Config, args=arguments(work, "given"))

    def adamw(rate):
        return optax.adamw(rate, 0.9, 0.999, weight_decay=0.1, mask=optimizers.is_matrix)

    real = metrics.Metrics.validate

    def interrupted(rows, step, *others):
        real(rows, step, *others)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(metrics.Metrics, "validate", interrupted)
    with pytest.raises(command.Terminated, match="after step 4"):
        train.train(config, optimizer=adamw, keep=False)
    monkeypatch.undo()
    config = dataclasses.replace(config, resume=True)
    result = train.train(config, optimizer=adamw, keep=False)
    rows = [row for row in rows_of(run_of("adamw")) if "validation_loss" in row]
    assert result.curve == [(row["step"], row["validation_loss"]) for row in rows]
    assert (result.settings["seed"], "optimizer" in result.settings) == (0, False)
    assert result.memory["state_mib"] == pytest.approx(result.memory["adamw_state_mib"], rel=1e-3)
    names = {path.name for path in (work / "given").iterdir()}
    assert names == {"metrics.jsonl", "process", "settings.json"}


# ----------------------------------------------------------------------------------- bad input


def assert_refused(capsys, command, *words):
    assert train.main([str(part) for part in command]) == 2
    line = error_line(capsys)
    for word in words:
        assert word in line + "\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nowhere"], ["nowhere: no such file"]),
        (["--heads", 3], ["--heads 3", "--width 16"]),
        (["--accumulate", 3], ["--accumulate 3", "--batch-size 4"]),
        (["--steps", 0], ["--steps is 0"]),
        (["--warmup", 6], ["--warmup 6", "--steps 6"]),
        (["--learning-rate", -1], ["--learning-rate is -1"]),
        (["--vocabulary", 100], ["--vocabulary 100", "256"]),
        (["--b1", 2], ["--b1 is 2"]),
        (["--max-rank", 0], ["max_rank", "0"]),
        (["--error-threshold", -1, "--initial-rank", 1], ["error_threshold", "-1"]),
    ],
)
def test_bad_options_are_refused_in_one_line(work, capsys, options, words):
    assert_refused(capsys, [*arguments(work, "refused"), *options], *words)
    assert not (work / "refused").exists()


def test_resume_needs_a_checkpoint_of_the_same_settings(run_of, work, capsys):
    out = run_of("adamw")
    nowhere = arguments(work, "nowhere", "--resume")
    assert_refused(capsys, nowhere, "no checkpoint")
    (work / "empty/checkpoints").mkdir(parents=True)
    assert_refused(capsys, arguments(work, "empty", "--resume"), "no checkpoint")
    other = arguments(work, out.name, *OPTIONS["adamw"], "--resume", "--seed", 1)
    assert_refused(capsys, other, "other settings: --seed was 0, now 1\n")


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("elastic", ["--max-rank", 11], "--max-rank was 12, now 11\n"),
        ("elastic", ["--b1", 0.5], "--b1 was 0.9, now 0.5\n"),
        (
            "adamw",
            ["--optimizer", "adafactor", "--seed", 1],
            "--optimizer was adamw, now adafactor, --seed was 0, now 1\n",
        ),
        (
            "elastic",
            ["--tokenizer", "sentencepiece", "--vocabulary", 400],
            "--tokenizer was bytes, now sentencepiece, --vocabulary was 256, now 400\n",
        ),
        ("elastic", ["--data", pathlib.Path(__file__)], "the text (--data) is another"),
    ],
)
def test_resume_names_the_options_that_differ_and_no_others(
    run_of, work, capsys, name, changed, words
):
    command = arguments(work, run_of(name).name, *OPTIONS[name], "--resume", *changed)
    capsys.readouterr()
    assert_refused(capsys, command, f"the checkpoint is of other settings: {words}")


def test_a_foreign_folder_is_left_alone_and_an_earlier_run_is_kept(run_of, work, capsys):
    (work / "foreign").mkdir()
    (work / "foreign" / "notes.txt").write_text("mine")
    assert_refused(capsys, arguments(work, "foreign"), "not a run's folder")
    shutil.copytree(run_of("adamw"), work / "earlier")
    config = dataclasses.replace(settings.Config(), out=work / "earlier")
    with run_folder(config.out, config.resume, {}):
        pass
    kept = work / "earlier.1"
    assert (kept / "metrics.jsonl").exists()
    assert {path.name for path in (work / "earlier").iterdir()} == {"process", "settings.json"}


def test_a_loss_that_is_not_finite_stops_the_run(work, capsys):
    command = arguments(work, "diverged", "--optimizer", "adamw", "--learning-rate", 1e30)
    assert train.main(command) == 1
    assert "stopped: the" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the step


def test_presets_are_the_papers():
    for name, minimum in (("117M", 5e-5), ("345M", 3e-5)):
        config = settings.resolve(settings.Config(model=name))
        assert (config.batch_size, config.steps, config.warmup) == (128, 100_000, 1_000)
        assert config.learning_rate == 3e-4
        assert config.min_learning_rate == pytest.approx(minimum)
        assert settings.gpt_config(config) == gpt.CONFIGS[name]
    halved = settings.resolve(settings.Config(model="117M", learning_rate=1.5e-4))
    assert halved.min_learning_rate == pytest.approx(2.5e-5)
