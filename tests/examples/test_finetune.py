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
from examples.gpt2.model import loss
from tests.examples.small import assert_refused, losses_of, options_of, rows_of
from tests.examples.task_files import FORMS, GOOD, NAMES, NOUNS, TOWNS, write_glue, write_squad

FIXTURE = pathlib.Path(__file__).parents[1] / "data" / "gpt2_transformers"
MODEL = {"layers": 1, "width": 32, "heads": 2, "context": 64, "tokenizer": "bytes"}
PRETRAINING = {"steps": 20, "warmup": 1, "batch-size": 8, "eval-every": 20, "optimizer": "adamw"}
SMALL = {"batch-size": 8, "min-dim-size-to-factor": 16, "max-rank": 4, "learning-rate": 3e-3}
ADAMW = ("--optimizer", "adamw", "--epochs", "2")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model that was trained a little, and with both kinds of tasks."""
    work = tmp_path_factory.mktemp("finetune")
    lines = [f.format(n=n, w=w) for f in FORMS for n in NOUNS for w in GOOD] * 4
    lines += [f"Where is {n}? {n} is in {t}." for n in NAMES for t in TOWNS] * 4
    (work / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    pretrain(work, "adamw")
    write_glue(work / "sst2")
    write_squad(work / "squad")
    return work


def pretrain(work, name, **settings):
    places = {"data": work / "text.txt", "out": work / name, "cache": work / "cache"}
    assert pretraining.main(options_of({**MODEL, **PRETRAINING, **places, **settings})) == 0


def arguments(work, task, name, *extra, checkpoint="adamw"):
    places = {"checkpoint": work / checkpoint, "data": work / task, "out": work / name}
    options = options_of({"task": task, **places, "cache": work / "cache", **SMALL})
    return [*options, *map(str, extra)]


def finetune(*given, **places):
    assert train.main(arguments(*given, **places)) == 0


def test_a_task_is_learnt_and_predicted_as_it_is_submitted(work):
    finetune(work, "sst2", "sst2-run", *ADAMW)
    scores = [r["validation_accuracy"] for r in rows_of(work / "sst2-run") if len(r) == 2]
    labels = [str(row["label"]) for row in rows_of(work / "sst2", "validation.jsonl")]
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
    finetune(work, "squad", "squad-run", "--epochs", 1, "--min-dim-size-to-factor", 100)
    losses = list(losses_of(work / "squad-run").values())
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    answers = json.loads((work / "squad-run/predictions/validation.json").read_text())
    asked = {row["id"]: row["context"] for row in rows_of(work / "squad", "validation.jsonl")}
    assert answers.keys() == asked.keys()
    assert all(answer in asked[i] for i, answer in answers.items())


@pytest.mark.slow
def test_pairs_of_sentences_and_three_labels(work):
    mnli = tasks.GLUE["mnli"]
    write_glue(work / "mnli", mnli.sentences, 3, mnli.suffix, train=96, validation=24)
    finetune(work, "mnli", "mnli-run", "--epochs", 1)
    assert len([row for row in rows_of(work / "mnli-run") if "validation_accuracy" in row]) == 1
    lines = (work / "mnli-run" / "predictions" / "test.tsv").read_text().splitlines()
    indices, labels = zip(*(line.split("\t") for line in lines[1:]), strict=True)
    assert indices == tuple("01234")
    assert set(labels) <= set(mnli.labels)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_end(work, at_step):
    finetune(work, "sst2", "whole", *ADAMW)
    at_step(30, lambda: signal.raise_signal(signal.SIGINT))
    assert train.main(arguments(work, "sst2", "parts", *ADAMW)) == 130
    finetune(work, "sst2", "parts", *ADAMW, "--resume")
    assert losses_of(work / "parts") == losses_of(work / "whole")


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_predicts(work, monkeypatch, capsys):
    make, predicted, falling = train._predictor, [], iter((0.9, 0.6))

    def recorded(*given):
        predict = make(*given)
        return lambda *asked: predicted.append(predict(*asked)) or predicted[-1]

    monkeypatch.setattr(train, "_predictor", recorded)
    monkeypatch.setitem(tasks._METRICS, "accuracy", lambda *_: next(falling))
    finetune(work, "sst2", "falling", *ADAMW)
    first, second, best, _ = predicted  # two epochs, then the best one of both splits
    np.testing.assert_array_equal(best, first)
    assert np.abs(second - first).max() > 0
    assert "best after step 32: accuracy 90.00" in capsys.readouterr().out
    shutil.rmtree(work / "falling/best/32/default")
    again = arguments(work, "sst2", "falling", *ADAMW, "--resume")
    assert_refused(capsys, again, "falling/best", "cannot be read", main=train.main)


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
    assert nnx.jit(loss)(model, tokens) < np.log(256) - 1


def has_more_bits_than_bfloat16(kernel):
    return np.any(kernel != kernel.astype("bfloat16").astype(np.float32))


@pytest.mark.slow
def test_split_weights_are_read_whole_and_exported_as_asked(work):
    pretrain(work, "split", weights="split", steps=3)
    model, _ = read_checkpoint(work / "split")
    assert has_more_bits_than_bfloat16(model.tokens.embedding[...])
    for export in ("float32", "bfloat16"):
        extra = ["--weights", "split", "--export", export, "--epochs", 1, "--examples", 16]
        finetune(work, "sst2", export, *extra, checkpoint="split")
        [folder] = (work / export / "best").glob("[0-9]*")
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.restore((folder / "default").absolute())
        assert {leaf.dtype.name for leaf in jax.tree.leaves(saved)} == {export}
        if export == "float32":
            assert has_more_bits_than_bfloat16(saved["gpt"]["tokens"]["embedding"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", r"settings\.json: not the settings of a run of examples\.gpt2\.train"),
        ('{"task": "sst2"}', "not the settings of a run"),
        ({"layers": "1"}, "not the settings of a run"),
        ({"width": 48}, "checkpoints: cannot be read: it has no .* of shape"),
        ({"layers": 2}, r"checkpoints: cannot be read: it has no \['blocks'\]\[1\]"),
        (None, "checkpoints: cannot be read"),
    ],
)
def test_damaged_folders_of_runs(work, tmp_path, changes, message):
    folder = shutil.copytree(work / "adamw", tmp_path / "run")
    file = folder / "settings.json"
    if isinstance(changes, dict):
        changes = json.dumps(json.loads(file.read_text()) | changes)
    if changes is None:
        shutil.rmtree(folder / "checkpoints")
    else:
        file.write_text(changes)
    with pytest.raises(InputError, match=message):
        read_checkpoint(folder)
    assert (folder / "checkpoints").exists() == (changes is not None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": "nowhere"}, "no checkpoint here; allowed: a folder with"),
        ({"checkpoint": "nowhere", "out": "nowhere"}, "has the checkpoint; give another folder"),
        ({"length": 65}, "from 8 to the model's context, 64"),
        ({"length": 2}, "from 8 to the model's context, 64"),
        ({"seed": -1}, "--seed is -1, and must be at least 0"),
        ({"seed": 10**30}, "--seed is 1000"),
        ({"epochs": 0}, "--epochs is 0, and must be above 0"),
        ({"batch-size": 999}, "there are 256 examples"),
        ({"learning-rate": "inf"}, "must be above 0 and finite"),
        ({"examples": 0}, "--examples is 0, and must be above 0"),
        ({"examples": 7}, "--batch-size is 8; there are 7 examples"),
    ],
)
def test_bad_input(work, capsys, options, words):
    given = [*arguments(work, "sst2", "refused"), *options_of(options)]
    assert_refused(capsys, given, words, main=train.main)
    assert not (work / "refused").exists()
