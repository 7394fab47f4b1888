"""The whole program on a small text and a very small model."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from examples.gpt2 import checkpoints, step, train
from examples.gpt2 import config as settings
from examples.gpt2 import model as gpt
from examples.gpt2 import run as one_run
from tests.examples.small import arguments

ROOT = pathlib.Path(__file__).parents[2]


def saved(out, at=6):
    with contextlib.closing(checkpoints.open_checkpoints(out)) as manager:
        return manager.restore(at).state


def assert_equal_bits(first, second):
    first, second = (jax.tree_util.tree_leaves_with_path(tree) for tree in (first, second))
    assert [path for path, _ in first] == [path for path, _ in second]
    for (path, a), (_, b) in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


@pytest.fixture(scope="module", params=["adamw", "adapprox"])
def trained(request, work):
    """An uninterrupted run: its optimizer and folder."""
    assert train.main(arguments(work, request.param, "--optimizer", request.param)) == 0
    return request.param, work / request.param


def test_a_run_leaves_what_people_expect(trained):
    optimizer, out = trained
    names = {path.name for path in out.iterdir()}
    files = {"curves.png", "metrics.jsonl", "sample.txt", "settings.json"}
    assert names == files | {"checkpoints", "tensorboard"}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.*"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert abs(losses[1] - math.log(256)) < 0.1
    checks = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in checks] == [3, 6]
    for row in checks:
        assert row["perplexity"] == pytest.approx(math.exp(row["validation_loss"]))
        assert ("ranks" in row) == (optimizer == "adapprox")
    assert checks[1]["validation_loss"] < checks[0]["validation_loss"] < losses[1]


def test_resume_gives_the_same_bits(trained, work):
    optimizer, out = trained
    shorter = work / f"{optimizer}-resumed"
    shutil.copytree(out, shorter)
    shutil.rmtree(shorter / "checkpoints" / "6")  # as if ended after step 3
    rerun = arguments(work, shorter.name, "--optimizer", optimizer, "--resume")
    assert train.main(rerun) == 0
    assert_equal_bits(saved(shorter), saved(out))
    rows = [json.loads(line) for line in (shorter / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


ELASTIC = ["--elastic", "--adapprox.initial-rank", 1, "--adapprox.max-rank", 0.75, "--steps", 24]
ELASTIC += ["--adapprox.error-threshold", 0.02, "--eval-every", 12, "--checkpoint-every", 12]


@pytest.fixture(scope="module")
def elastic(work):
    assert train.main(arguments(work, "elastic", *ELASTIC)) == 0
    return work / "elastic"


def test_elastic_buffers_follow_the_ranks(elastic):
    """From 8 columns to 12, with the state's bytes in the records."""
    rows = [json.loads(line) for line in (elastic / "metrics.jsonl").read_text().splitlines()]
    checks = [row for row in rows if "validation_loss" in row]
    factors = saved(elastic, 24)["opt_state"][0]["q"]
    widths = {leaf.shape[-1] for leaf in jax.tree.leaves(factors) if leaf.ndim}
    assert 12 in widths
    # Wider buffers of 8 x 16, 16 x 16 and 16 x 48 would not be smaller than the matrix.
    assert widths <= {5, 7, 8, 11, 12}
    for row in checks:
        assert row["peak_state_mib"] >= row["state_mib"] > 0
        assert set(row["full"]) <= set(row["ranks"])
    assert json.loads((elastic / "settings.json").read_text())["elastic"]


def test_an_elastic_run_resumes_to_the_same_bits(elastic, work):
    shorter = work / "elastic-resumed"
    shutil.copytree(elastic, shorter)
    shutil.rmtree(shorter / "checkpoints" / "24")
    assert train.main(arguments(work, shorter.name, *ELASTIC, "--resume")) == 0
    assert_equal_bits(saved(shorter, 24), saved(elastic, 24))


def test_elastic_needs_adaptive_ranks(work, capsys):
    assert train.main(arguments(work, "fixed", "--elastic")) == 2
    assert "--elastic needs ranks that adapt" in capsys.readouterr().err


def test_a_checkpoint_of_other_parameters_names_them(elastic, work, capsys, monkeypatch):
    real = one_run.settings  # else the settings would be found to differ first
    monkeypatch.setattr(one_run, "settings", lambda *of: real(*of) | {"width": 16})
    shutil.copytree(elastic, work / "elastic-wide")
    wide = arguments(work, "elastic-wide", *ELASTIC, "--resume", "--width", 32)
    assert train.main(wide) == 2
    error = capsys.readouterr().err
    assert "['tokens']['embedding'] was [256, 16], now [256, 32]" in error


def test_ctrl_c_saves_and_resume_gives_the_same_bits(work):
    long = ["--steps", 800, "--eval-every", 5000, "--checkpoint-every", 5000]
    command = [*arguments(work, "stopped", *long), "--optimizer", "adamw"]
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.gpt2.train", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    metrics = work / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted after step" in errors
    [step] = [int(path.name) for path in (work / "stopped/checkpoints").iterdir()]
    assert 0 < step < 800

    assert train.main([*command, "--resume"]) == 0
    assert train.main([*arguments(work, "whole", *long), "--optimizer", "adamw"]) == 0
    assert_equal_bits(saved(work / "stopped", 800), saved(work / "whole", 800))


def test_a_text_of_one_long_line_is_trained_on(work):
    (work / "line.txt").write_text("one line without an end, " * 4000)
    options = ["--tokenizer", "sentencepiece", "--vocabulary", 300, "--optimizer", "adamw"]
    command = arguments(work, "line", "--data", work / "line.txt", "--steps", 3, *options)
    assert train.main(command) == 0
    assert "without" in (work / "line/sample.txt").read_text()  # the prompt


# ----------------------------------------------------------------------------------- bad input


def assert_refused(capsys, command, *words):
    code = train.main([str(part) for part in command])
    errors = capsys.readouterr().err
    assert code == 2
    assert len(errors.strip().splitlines()) == 1
    for word in words:
        assert word in errors


def test_bad_text_is_refused_in_one_line(work, capsys):
    (work / "short.txt").write_text("short")
    (work / "bad.txt").write_bytes(b"\xff" * 100)
    (work / "empty.txt").write_text("")
    for name, word in [
        ("nowhere", "no such file"),
        ("short.txt", "too short"),
        ("bad.txt", "not UTF-8"),
        ("empty.txt", "empty"),
    ]:
        command = [*arguments(work, "refused"), "--data", work / name]
        assert_refused(capsys, command, name, word)
    assert not (work / "refused").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads", 3], ["--heads 3", "--width 16"]),
        (["--accumulate", 3], ["--accumulate 3", "--batch-size 4"]),
        (["--steps", 0], ["--steps is 0"]),
        (["--warmup", 6], ["--warmup 6", "--steps 6"]),
        (["--learning-rate", -1], ["--learning-rate is -1"]),
        (["--vocabulary", 100], ["--vocabulary 100", "256"]),
        (["--hyper.b1", 2], ["b1", "2"]),
        (["--adapprox.power-iterations", 0], ["power_iterations", "0"]),
        (
            ["--adapprox.sampling-threshold", True, "--adapprox.error-threshold", -1],
            ["adapprox: at_least is -1"],
        ),
        (["--compare", "adamw", "--resume"], ["--compare", "--resume"]),
    ],
)
def test_bad_options_are_refused_in_one_line(work, capsys, options, words):
    assert_refused(capsys, [*arguments(work, "refused"), *options], *words)
    assert not (work / "refused").exists()


def test_resume_needs_a_checkpoint_of_the_same_settings(trained, work, capsys):
    optimizer, out = trained
    nowhere = arguments(work, "nowhere", "--resume")
    assert_refused(capsys, nowhere, "no checkpoint")
    (work / "empty/checkpoints").mkdir(parents=True, exist_ok=True)
    assert_refused(capsys, arguments(work, "empty", "--resume"), "no checkpoint")
    other = arguments(work, out.name, "--optimizer", optimizer, "--resume", "--seed", 1)
    assert_refused(capsys, other, "other settings: --seed was 0, now 1\n")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--adapprox.max-rank", 3], "--adapprox.max-rank was 4, now 3\n"),
        (["--hyper.b1", 0.5], "--hyper.b1 was 0.9, now 0.5\n"),
        (
            ["--optimizer", "adafactor", "--seed", 1],
            "--optimizer was adapprox, now adafactor, --seed was 0, now 1\n",
        ),
        (
            ["--tokenizer", "sentencepiece", "--vocabulary", 400],
            "--tokenizer was bytes, now sentencepiece, --vocabulary was 256, now 400\n",
        ),
        (["--data", pathlib.Path(__file__)], "the text (--data) was "),
    ],
)
def test_resume_names_the_options_that_differ_and_no_others(work, capsys, changed, words):
    if not (work / "resumed-with-others").exists():
        assert train.main(arguments(work, "resumed-with-others", "--steps", 3)) == 0
    capsys.readouterr()
    command = arguments(work, "resumed-with-others", "--steps", 3, "--resume", *changed)
    assert_refused(capsys, command, f"the checkpoint is of other settings: {words}")


def test_options_are_named_as_they_are_given():
    assert settings.option_of(("learning_rate",)) == "--learning-rate"
    adafactor = ("optimizer_settings", "ema", "decay")
    assert settings.option_of(adafactor) == "--hyper.b1"
    assert settings.option_of((*adafactor[:2], "debias")) == "the optimizer's ema.debias"


def test_a_foreign_folder_is_left_alone_and_an_earlier_run_is_kept(trained, work, capsys):
    (work / "foreign").mkdir(exist_ok=True)
    (work / "foreign" / "notes.txt").write_text("mine")
    assert_refused(capsys, arguments(work, "foreign"), "not a run's folder")
    shutil.copytree(trained[1], work / "earlier", dirs_exist_ok=True)
    config = dataclasses.replace(settings.Config(), out=work / "earlier")
    one_run.prepare_folder(config, {})
    kept = work / "earlier.1"
    assert (kept / "metrics.jsonl").exists()
    assert [path.name for path in (work / "earlier").iterdir()] == ["settings.json"]
    shutil.rmtree(kept)


def test_a_loss_that_is_not_finite_stops_the_run(work, capsys):
    command = arguments(work, "diverged", "--optimizer", "adamw", "--learning-rate", 1e30)
    assert train.main(command) == 1
    assert "stopped: the" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the step


def test_accumulation_equals_the_larger_batch():
    shape = gpt.GPTConfig(layers=1, width=16, heads=2, context=8, vocabulary=64)
    tokens = jax.random.randint(jax.random.key(0), (8, 9), 0, 64)
    results = []
    for parts in (1, 4):
        graphdef, params = nnx.split(gpt.GPT(shape, rngs=nnx.Rngs(0)), nnx.Param)
        params, tx = nnx.to_pure_dict(params), optax.sgd(1.0)
        take = step.train_step(graphdef, tx, parts)
        results.append(take(step.TrainState(params, tx.init(params)), tokens))
    (whole, whole_loss), (parts, parts_loss) = results
    np.testing.assert_allclose(whole_loss, parts_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, parts)


def test_presets_are_the_papers():
    for name, minimum in (("117M", 5e-5), ("345M", 3e-5)):
        config = settings.resolve(settings.Config(model=name))
        assert (config.batch_size, config.steps, config.warmup) == (128, 100_000, 1_000)
        assert config.learning_rate == 3e-4
        assert config.min_learning_rate == pytest.approx(minimum)
        assert settings.gpt_config(config) == gpt.CONFIGS[name]
    halved = settings.resolve(settings.Config(model="117M", learning_rate=1.5e-4))
    assert halved.min_learning_rate == pytest.approx(2.5e-5)
