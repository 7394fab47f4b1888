"""Fine-tuning from a checkpoint, on small data."""

import json
import pathlib
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from flax import nnx

from examples.finetune import tasks, train
from examples.finetune.checkpoint import read_checkpoint
from examples.gpt2 import train as pretraining
from examples.gpt2.command import InputError
from examples.gpt2.model import GPT, loss
from tests.examples.small import error_line, rows_of
from tests.examples.task_files import FORMS, GOOD, NAMES, NOUNS, TOWNS, write_glue, write_squad

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "gpt2_transformers"
MODEL = {"layers": 1, "width": 32, "heads": 2, "context": 64, "tokenizer": "bytes"}
SMALL = {"batch-size": 8, "min-dim-size-to-factor": 16, "max-rank": 4}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model that was trained a little, and with both kinds of tasks."""
    work = tmp_path_factory.mktemp("finetune")
    lines = [f.format(n=n, w=w) for f in FORMS for n in NOUNS for w in GOOD] * 4
    lines += [f"Where is {n}? {n} is in {t}." for n in NAMES for t in TOWNS] * 4
    (work / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    shape = [part for name, value in MODEL.items() for part in (f"--{name}", value)]
    steps = ["--steps", 20, "--warmup", 5, "--batch-size", 8, "--eval-every", 20]
    places = ["--data", work / "text.txt", "--out", work / "adamw", "--cache", work / "cache"]
    options = [*shape, *steps, *places, "--optimizer", "adamw"]
    assert pretraining.main(list(map(str, options))) == 0
    write_glue(work / "sst2")
    write_squad(work / "squad")
    return work


def arguments(work, task, name, *extra):
    places = ["--checkpoint", work / "adamw", "--data", work / task, "--out", work / name]
    options = [part for option, value in SMALL.items() for part in (f"--{option}", value)]
    return list(map(str, ["--task", task, *places, "--cache", work / "cache", *options, *extra]))


def assert_refused(capsys, options, *words):
    assert train.main(options) == 2
    line = error_line(capsys)
    for word in words:
        assert word in line


def test_a_task_is_learnt_and_predicted_as_it_is_submitted(work):
    options = ["--epochs", 3, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    assert train.main(arguments(work, "sst2", "sst2-run", *options)) == 0
    scores = [r["validation_accuracy"] for r in rows_of(work / "sst2-run") if len(r) == 2]
    lines = (work / "sst2/validation.jsonl").read_text().splitlines()
    labels = [str(json.loads(line)["label"]) for line in lines]
    majority = 100 * max(map(labels.count, "01")) / len(labels)
    assert max(scores) > majority + 25
    predictions = work / "sst2-run" / "predictions"
    assert len((predictions / "test.tsv").read_text().splitlines()) == 6
    header, *lines = (predictions / "validation.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    predicted = [line.split("\t")[1] for line in lines]
    right = np.mean([a == b for a, b in zip(predicted, labels, strict=True)])
    assert 100 * right == pytest.approx(max(scores))  # of the epoch that was kept


@pytest.mark.slow
def test_answers_are_marked(work):
    options = ["--epochs", 1, "--learning-rate", 3e-3, "--min-dim-size-to-factor", 100]
    assert train.main(arguments(work, "squad", "squad-run", *options)) == 0
    losses = [row["loss"] for row in rows_of(work / "squad-run") if "loss" in row]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    answers = json.loads((work / "squad-run/predictions/validation.json").read_text())
    lines = (work / "squad/validation.jsonl").read_text().splitlines()
    asked = {row["id"]: row["context"] for row in map(json.loads, lines)}
    assert answers.keys() == asked.keys()
    assert all(answer in asked[i] for i, answer in answers.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "labels"), [("cola", {"0", "1"}), ("mrpc", {"0", "1"}), ("mnli", None)]
)
def test_other_tasks_from_files_to_submissions(work, task, labels):
    of = tasks.GLUE[task]
    write_glue(work / task, of.sentences, len(of.labels), of.suffix, train=96, validation=24)
    options = ["--epochs", 1, "--learning-rate", 3e-3]
    assert train.main(arguments(work, task, f"{task}-run", *options)) == 0
    [row] = [r for r in rows_of(work / f"{task}-run") if "validation_accuracy" in r]
    assert set(row) == {"step", *(f"validation_{name}" for name in of.metrics)}
    lines = (work / f"{task}-run" / "predictions" / "test.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    assert [index for index, _ in rows] == list("01234")
    assert {label for _, label in rows} <= (labels or set(of.labels))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_end(work, monkeypatch):
    options = ["--epochs", 2, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    assert train.main(arguments(work, "sst2", "whole", *options)) == 0
    take, calls = train.train_step, []

    def interrupted(*given):
        step = take(*given)

        def counted(*arguments):
            calls.append(None)
            if len(calls) == 32:
                signal.raise_signal(signal.SIGINT)
            return step(*arguments)

        return counted

    monkeypatch.setattr(train, "train_step", interrupted)
    assert train.main(arguments(work, "sst2", "parts", *options)) == 130
    monkeypatch.undo()
    assert train.main(arguments(work, "sst2", "parts", *options, "--resume")) == 0
    whole, parts = (
        [row["loss"] for row in rows_of(work / name) if "loss" in row]
        for name in ("whole", "parts")
    )
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_predicts(work, monkeypatch, capsys):
    options = ["--epochs", 2, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    make, predicted, falling = train._predictor, [], iter((0.9, 0.6))

    def recorded(*given):
        predict = make(*given)

        def kept(params, split):
            predicted.append(predict(params, split))
            return predicted[-1]

        return kept

    monkeypatch.setattr(train, "_predictor", recorded)
    monkeypatch.setitem(tasks._METRICS, "accuracy", lambda *_: next(falling))
    assert train.main(arguments(work, "sst2", "falling", *options)) == 0
    first, second, best, _ = predicted  # two epochs, then the best one of both splits
    np.testing.assert_array_equal(best, first)
    assert np.abs(second - first).max() > 0
    assert "best after step 32: accuracy 90.00" in capsys.readouterr().out
    # Known without the metrics, too.
    (work / "falling/metrics.jsonl").write_text("")
    assert train.main(arguments(work, "sst2", "falling", *options, "--resume")) == 0
    assert "best after step 32: accuracy 90.00" in capsys.readouterr().out
    shutil.rmtree(next((work / "falling/best").glob("32")) / "default")
    assert_refused(
        capsys,
        arguments(work, "sst2", "falling", *options, "--resume"),
        *("falling/best", "cannot be read"),
    )


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "model")
    large = tokenizers.ByteLevelBPETokenizer()
    large.train_from_iterator(["a"], 257, special_tokens=["<|endoftext|>"])
    large.save(str(tmp_path / "model/tokenizer.json"))
    with pytest.raises(InputError, match="the tokenizer has 257 tokens, the model's vocabulary 70"):
        read_checkpoint(tmp_path / "model")


def test_the_model_of_a_run_is_the_one_that_was_trained(work):
    model, tokenizer = read_checkpoint(work / "adamw")
    text = (work / "text.txt").read_bytes()[:65]
    tokens = np.array([tokenizer.encode_all([text.decode(errors="ignore")])[0].tokens[:65]])
    fresh = GPT(model.config, rngs=nnx.Rngs(0))
    assert loss(model, tokens) < loss(fresh, tokens) - 1


@pytest.fixture(scope="module")
def of_split_weights(work):
    shape = [part for name, value in MODEL.items() for part in (f"--{name}", value)]
    options = [*shape, "--steps", 3, "--warmup", 1, "--batch-size", 8, "--weights", "split"]
    options += ["--data", work / "text.txt", "--out", work / "split", "--cache", work / "cache"]
    assert pretraining.main(list(map(str, options))) == 0
    return work / "split"


@pytest.mark.slow
def test_split_weights_are_read_whole(of_split_weights):
    model, _ = read_checkpoint(of_split_weights)
    kernel = model.tokens.embedding[...]
    assert kernel.dtype == np.float32
    assert np.any(kernel != kernel.astype("bfloat16").astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("export", ["float32", "bfloat16"])
def test_split_weights_are_exported_as_asked(work, export):
    name = f"exported-{export}"
    extra = ["--weights", "split", "--export", export, "--epochs", 1, "--examples", 16]
    assert train.main(arguments(work, "sst2", name, *extra)) == 0
    [folder] = (work / name / "best").glob("[0-9]*")
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore((folder / "default").absolute())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(saved)} == {export}


def test_damaged_folders_of_runs(work, tmp_path):
    folder = shutil.copytree(work / "adamw", tmp_path / "run")
    used = json.loads((folder / "settings.json").read_text())
    for settings, message in [
        ("{", r"settings\.json: not the settings of a run of examples\.gpt2\.train"),
        (json.dumps({"task": "sst2"}), "not the settings of a run"),
        (json.dumps(used | {"width": 48}), "checkpoints: cannot be read: it has no .* of shape"),
        (json.dumps(used | {"layers": "1"}), "not the settings of a run"),
        (
            json.dumps(used | {"layers": 2}),
            r"checkpoints: cannot be read: it has no \['blocks'\]\[1\]",
        ),
    ]:
        (folder / "settings.json").write_text(settings)
        with pytest.raises(InputError, match=message):
            read_checkpoint(folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "settings.json").write_text(json.dumps(used))
    with pytest.raises(InputError, match="checkpoints: cannot be read"):
        read_checkpoint(folder)
    assert not (folder / "checkpoints").exists()


def test_bad_input(work, tmp_path, capsys):
    def given(**changes):
        options = arguments(work, "sst2", "refused")
        for name, value in changes.items():
            options[options.index(f"--{name}") + 1] = str(value)
        return options

    assert_refused(capsys, given(checkpoint=tmp_path), "no checkpoint here; allowed: a folder with")
    assert_refused(capsys, given(data=tmp_path / "none"), "no such folder; --data takes one")
    assert_refused(capsys, given(data=tmp_path), "has no file train.*")
    assert_refused(capsys, [*given(), "--length", "65"], "from 8 to the model's context, 64")
    assert_refused(capsys, [*given(), "--length", "2"], "from 8 to the model's context, 64")
    assert_refused(capsys, [*given(), "--seed", "-1"], "--seed is -1, and must be at least 0")
    assert_refused(capsys, [*given(), "--epochs", "0"], "--epochs is 0, and must be above 0")
    assert_refused(capsys, [*given(), "--batch-size", "999"], "there are 256 examples")
    assert_refused(capsys, [*given(), "--learning-rate", "inf"], "must be above 0 and finite")
    assert_refused(capsys, [*given(), "--seed", str(10**30)], "--seed is 1000")
    assert_refused(capsys, given(out=work / "adamw"), "has the checkpoint; give another folder")
    assert_refused(capsys, [*given(), "--examples", "0"], "--examples is 0, and must be above 0")
    assert_refused(capsys, [*given(), "--examples", "7"], "--batch-size is 8; there are 7 examples")
    assert not (work / "refused").exists()
    with pytest.raises(SystemExit) as stopped:
        train.main(["--task", "qqp", "--checkpoint", "a", "--data", "b"])
    assert stopped.value.code == 2
