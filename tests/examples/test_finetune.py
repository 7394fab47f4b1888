"""Fine-tuning from a checkpoint, on small data in the official forms."""

import functools
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx

import adapprox_jax
from examples.gpt2 import finetune, train
from examples.gpt2.finetuning import compare, glue, run
from examples.gpt2.finetuning.tasks import METRICS
from examples.gpt2.hugging_face import (
    CheckpointError,
    read_hugging_face,
    write_hugging_face,
)
from examples.gpt2.pretrained import read_pretrained
from tests.examples.task_files import (
    FORMS,
    GOOD,
    NAMES,
    NOUNS,
    TOWNS,
    write_cola,
    write_mnli,
    write_mrpc,
    write_squad,
    write_sst2,
)

MODEL = {"layers": 1, "width": 32, "heads": 2, "context": 64, "tokenizer": "bytes"}
SMALL = {"batch-size": 8, "adapprox.min-dim-size-to-factor": 16, "adapprox.max-rank": 4}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model that AdamW trained a little, and with both kinds of tasks."""
    work = tmp_path_factory.mktemp("finetune")
    lines = [f.format(n=n, w=w) for f in FORMS for n in NOUNS for w in GOOD] * 4
    lines += [f"Where is {n}? {n} is in {t}." for n in NAMES for t in TOWNS] * 4
    (work / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    shape = [part for name, value in MODEL.items() for part in (f"--{name}", value)]
    steps = ["--steps", 20, "--warmup", 5, "--batch-size", 8, "--eval-every", 20]
    places = ["--data", work / "text.txt", "--out", work / "adamw", "--cache", work / "cache"]
    options = [*shape, *steps, *places, "--optimizer", "adamw", "--sample-tokens", 2]
    options += ["--hyper.clip-norm", 1]  # a part of the chain without a state
    assert train.main(list(map(str, options))) == 0
    for task, write in (("sst2", write_sst2), ("squad", write_squad)):
        (work / task).mkdir()
        write(work / task)
    return work


def arguments(work, task, name, *extra):
    places = ["--checkpoint", work / "adamw", "--data", work / task, "--out", work / name]
    options = [part for option, value in SMALL.items() for part in (f"--{option}", value)]
    return list(map(str, ["--task", task, *places, "--cache", work / "cache", *options, *extra]))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_refused(capsys, options, *words):
    assert finetune.main(options) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    for word in words:
        assert word in line


def test_a_task_is_learnt_and_predicted_as_it_is_submitted(work):
    options = ["--epochs", 3, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    assert finetune.main(arguments(work, "sst2", "sst2-run", *options)) == 0
    scores = [r["validation_accuracy"] for r in rows_of(work / "sst2-run") if len(r) == 2]
    labels = [line[-1] for line in (work / "sst2/dev.tsv").read_text().splitlines()[1:]]
    majority = 100 * max(map(labels.count, "01")) / len(labels)
    assert max(scores) > majority + 25
    for split, count in (("validation", len(labels)), ("test", 5)):
        lines = (work / "sst2-run" / split / "SST-2.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        assert len(lines) == count + 1
    predicted = [
        line.split("\t")[1]
        for line in (work / "sst2-run/validation/SST-2.tsv").read_text().splitlines()[1:]
    ]
    right = np.mean([a == b for a, b in zip(predicted, labels, strict=True)])
    assert 100 * right == pytest.approx(max(scores))  # of the epoch that was kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "write", "submission", "labels"),
    [
        ("cola", write_cola, "CoLA.tsv", {"0", "1"}),
        ("mrpc", write_mrpc, "MRPC.tsv", {"0", "1"}),
        ("mnli", write_mnli, "MNLI-m.tsv", {"contradiction", "entailment", "neutral"}),
    ],
)
def test_other_tasks_from_files_to_submissions(work, task, write, submission, labels):
    (work / task).mkdir()
    write(work / task)
    options = ["--epochs", 1, "--learning-rate", 3e-3]
    assert finetune.main(arguments(work, task, f"{task}-run", *options)) == 0
    [row] = [r for r in rows_of(work / f"{task}-run") if "validation_accuracy" in r]
    assert set(row) == {"step", *(f"validation_{name}" for name in METRICS[task])}
    lines = (work / f"{task}-run" / "test" / submission).read_text().splitlines()
    assert lines[0] == "index\tprediction"
    rows = [line.split("\t") for line in lines[1:]]
    assert [index for index, _ in rows] == list("01234")
    assert {label for _, label in rows} <= labels


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_end(work, monkeypatch):
    options = ["--epochs", 2, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    assert finetune.main(arguments(work, "sst2", "whole", *options)) == 0
    take, calls = run.train_step, []

    def interrupted(*given):
        step = take(*given)

        def counted(*arguments):
            calls.append(None)
            if len(calls) == 32:
                signal.raise_signal(signal.SIGINT)
            return step(*arguments)

        return counted

    monkeypatch.setattr(run, "train_step", interrupted)
    assert finetune.main(arguments(work, "sst2", "parts", *options)) == 130
    monkeypatch.undo()
    assert finetune.main(arguments(work, "sst2", "parts", *options, "--resume")) == 0
    whole, parts = (
        [row["loss"] for row in rows_of(work / name) if "loss" in row]
        for name in ("whole", "parts")
    )
    np.testing.assert_array_equal(whole, parts)


def test_the_best_epoch_is_kept_and_predicts(work, monkeypatch, capsys):
    options = ["--epochs", 2, "--learning-rate", 3e-3, "--optimizer", "adamw"]
    make, predicted, falling = run.predictor, [], iter((90.0, 60.0))

    def recorded(*given):
        predict = make(*given)

        def kept(params, split):
            predicted.append(predict(params, split))
            return predicted[-1]

        return kept

    monkeypatch.setattr(run, "predictor", recorded)
    monkeypatch.setattr(glue, "score", lambda *_: {"accuracy": next(falling)})
    assert finetune.main(arguments(work, "sst2", "falling", *options)) == 0
    first, second, best, _ = predicted  # two epochs, then the best one of both splits
    np.testing.assert_array_equal(best, first)
    assert np.abs(second - first).max() > 0
    assert "best after step 32: accuracy 90.00" in capsys.readouterr().out
    # Known without the metrics, too.
    (work / "falling/metrics.jsonl").write_text("")
    assert finetune.main(arguments(work, "sst2", "falling", *options, "--resume")) == 0
    assert "best after step 32: accuracy 90.00" in capsys.readouterr().out
    shutil.rmtree(next((work / "falling/best").glob("32")) / "default")
    assert_refused(
        capsys,
        arguments(work, "sst2", "falling", *options, "--resume"),
        *("falling/best", "cannot be read"),
    )


def test_answers_are_marked_from_adams_state(work, monkeypatch):
    options = ["--epochs", 1, "--learning-rate", 3e-3, "--from-adam"]
    options += ["--adapprox.approximate", "moment"]
    options += ["--adapprox.min-dim-size-to-factor", 100]  # dense leaves compile sooner
    convert, given = adapprox_jax.from_adam, {}

    @functools.wraps(convert)
    def recorded(tx, moments, *arguments, **keywords):
        given.update(keywords, moments=moments)
        return convert(tx, moments, *arguments, **keywords)

    monkeypatch.setattr(adapprox_jax, "from_adam", recorded)
    assert finetune.main(arguments(work, "squad", "squad-run", *options)) == 0
    assert (given["approximate"], given["b2"], given["eps"]) == ("moment", 0.999, 1e-8)
    saved = read_pretrained(work / "adamw", cache=work / "cache", moments=True).adam.state
    for name in ("mu", "nu"):
        of_model = getattr(given["moments"], name)["gpt"]
        jax.tree.map(np.testing.assert_array_equal, of_model, getattr(saved, name))
    rows = rows_of(work / "squad-run")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    answers = json.loads((work / "squad-run/validation/predictions.json").read_text())
    questions = json.loads((work / "squad/dev-v1.1.json").read_text())["data"][0]["paragraphs"]
    asked = {q["id"]: p["context"] for p in questions for q in p["qas"]}
    assert answers.keys() == asked.keys()
    assert all(answer in asked[i] for i, answer in answers.items())


def test_the_rate_begins_anew_after_from_adam():
    """Though the state of AdamW is 20 steps old."""
    params = {"kernel": np.ones((8, 8), np.float32)}
    adam = optax.adamw(1e-3)
    old = optax.tree.set(adam.init(params), count=jnp.full([], 20, jnp.int32))
    tx = adapprox_jax.adapprox(optax.linear_schedule(1.0, 0.0, 10), min_dim_size_to_factor=1)
    new = run.schedules_at_zero(adapprox_jax.from_adam(tx, old, params))
    counts = {
        type(node).__name__: int(node.count)
        for node in jax.tree.leaves(new, is_leaf=lambda node: hasattr(node, "_fields"))
        if hasattr(node, "_fields") and "count" in node._fields
    }
    assert counts == {"ScaleByAdapproxState": 20, "ScaleByScheduleState": 0}


@pytest.mark.slow
def test_a_comparison_is_a_table_a_record_and_a_figure(work, capsys):
    options = ["--epochs", 1, "--compare", "adapprox", "came", "--seeds", 2]
    options += ["--learning-rates", 1e-3, 3e-3]
    assert finetune.main(arguments(work, "sst2", "compare", *options)) == 0
    out = work / "compare"
    record = json.loads((out / "sst2.json").read_text())
    assert set(record["summary"]) == {"adapprox", "came"}
    assert len((out / "results.jsonl").read_text().splitlines()) == 6
    assert (out / "sst2.png").stat().st_size > 1000
    assert "| adapprox, in the paper | 90.94 |" in capsys.readouterr().out
    assert finetune.main(arguments(work, "sst2", "compare", *options)) == 0
    assert len((out / "results.jsonl").read_text().splitlines()) == 6  # none was run again
    options = ["--epochs", 1, "--compare", "adapprox", "--seeds", 1, "--from-adam"]
    assert finetune.main(arguments(work, "sst2", "compare", *options)) == 0
    names = list(json.loads((out / "sst2.json").read_text())["summary"])
    assert names == ["adapprox", "came", "adapprox, AdamW's state"]
    summary = json.loads((out / "sst2.json").read_text())["summary"]
    assert len(summary["adapprox"]["grid"]) == 2
    again = ["--epochs", 1, "--compare", "adapprox", "--seeds", 1, "--learning-rates", 1e-3]
    assert finetune.main(arguments(work, "sst2", "compare", *again)) == 0
    assert json.loads((out / "sst2.json").read_text())["summary"] == summary  # no less than before
    capsys.readouterr()
    for other in (["--epochs", 2], ["--batch-size", 16]):
        changed = arguments(work, "sst2", "compare", *again, *other)
        assert_refused(capsys, changed, "sst2.json is of", "give another folder")
    changed = arguments(work, "sst2", "compare", *again, "--adapprox.max-rank", 2)
    assert_refused(capsys, changed, "has adapprox with other settings")


def test_the_table_has_an_average_where_all_tasks_are_there():
    def row(task, checkpoint="a"):
        means = dict(zip(METRICS[task], (80.0, 70.0), strict=False))
        return {"means": means, "standard_error": 0.5, "checkpoint": checkpoint}

    two = {"squad": {"adamw": row("squad")}, "cola": {"adamw": row("cola"), "muon": row("cola")}}
    lines = compare.results_table(two).splitlines()
    assert lines[0] == (
        "| optimizer | squad (f1) | squad (exact_match) | cola (accuracy) | cola (matthews) |"
    )
    assert lines[2] == "| adamw | 80.00 ± 0.50 | 70.00 | 80.00 ± 0.50 | 70.00 |"
    assert lines[3] == "| muon |  |  | 80.00 ± 0.50 | 70.00 |"
    assert "| adapprox, in the paper | 72.89 |  | 75.83 |  |" in lines
    diverged = row("sst2") | {"means": {"accuracy": None}, "standard_error": None}
    assert "| came | diverged |" in compare.results_table({"sst2": {"came": diverged}})
    whole = {
        task: {"adamw": row(task), "mixed": row(task, checkpoint=task), "came": row(task)}
        for task in METRICS
    }
    del whole["mrpc"]["came"]
    lines = compare.results_table(whole).splitlines()
    ends = {line.split(" | ")[0][2:]: line.split(" | ")[-1].strip(" |") for line in lines[2:]}
    assert (ends["adamw"], ends["mixed"], ends["came"]) == ("80.00", "", "")
    assert ends["adapprox, in the paper"] == "80.09"  # as the paper has it
    assert ends["came, in the paper"] == "72.69"


def test_both_kinds_of_checkpoints_give_the_same_model(work, tmp_path):
    ours = read_pretrained(work / "adamw", cache=work / "cache", moments=True)
    params = nnx.to_pure_dict(nnx.state(ours.model, nnx.Param))
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert jax.tree.map(lambda x: x.shape, ours.adam.state.nu) == shapes
    assert (int(ours.adam.state.count), ours.adam.b2) == (20, 0.999)
    write_hugging_face(tmp_path, ours.model)
    small = tokenizers.ByteLevelBPETokenizer()
    small.train_from_iterator(["a"], 257, special_tokens=["<|endoftext|>"])
    small.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the tokenizer has 257 tokens, the model's voc"):
        read_pretrained(tmp_path)
    back = read_hugging_face(tmp_path)
    tokens = np.arange(64)[None]
    np.testing.assert_allclose(ours.model(tokens), back(tokens), atol=1e-5)
    with pytest.raises(CheckpointError, match="transformers keeps no state of AdamW"):
        read_pretrained(tmp_path, moments=True)


def test_damaged_folders_of_runs(work, tmp_path):
    folder = shutil.copytree(work / "adamw", tmp_path / "run")
    used = json.loads((folder / "settings.json").read_text())
    for settings, message in [
        ("{", r"settings\.json: not the settings of a run of examples\.gpt2\.train"),
        (json.dumps({"task": "sst2"}), "not the settings of a run"),
        (json.dumps(used | {"width": 48}), r"checkpoints: cannot be read: .* has shape"),
        (json.dumps(used | {"layers": 0}), "layers is 0; allowed: integers from 1"),
        (json.dumps(used | {"layers": "1"}), "layers is '1'; allowed: integers from 1"),
        (json.dumps(used | {"layers": 2}), r"cannot be read: has 1 layers; settings\.json: 2"),
        (json.dumps(used | {"heads": 3}), "heads 3 does not divide width 32, and must"),
        (json.dumps(used | {"optimizer": "came"}), "was trained with came, and has no state"),
    ]:
        (folder / "settings.json").write_text(settings)
        with pytest.raises(CheckpointError, match=message):
            read_pretrained(folder, moments=True)
    shutil.rmtree(folder / "checkpoints")
    (folder / "settings.json").write_text(json.dumps(used))
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read"):
        read_pretrained(folder)
    assert not (folder / "checkpoints").exists()


def test_bad_input(work, tmp_path, capsys):
    def given(**changes):
        options = arguments(work, "sst2", "refused")
        for name, value in changes.items():
            options[options.index(f"--{name}") + 1] = str(value)
        return options

    assert_refused(capsys, given(checkpoint=tmp_path), "no checkpoint here; allowed: a folder with")
    assert_refused(capsys, given(data=tmp_path / "none"), "no such folder; --data takes one")
    assert_refused(capsys, given(data=tmp_path), "train.tsv: cannot be read: No such file")
    assert_refused(capsys, [*given(), "--length", "65"], "from 8 to the model's context, 64")
    assert_refused(capsys, [*given(), "--length", "2"], "from 8 to the model's context, 64")
    assert_refused(capsys, [*given(), "--seed", "-1"], "--seed is -1, and must be at least 0")
    assert_refused(capsys, [*given(), "--epochs", "0"], "--epochs is 0, and must be above 0")
    assert_refused(capsys, [*given(), "--batch-size", "999"], "there are 256 examples")
    assert_refused(capsys, [*given(), "--learning-rate", "inf"], "must be above 0 and finite")
    assert_refused(capsys, [*given(), "--seed", str(10**30)], "must be at most 2147483647")
    assert_refused(capsys, given(out=work / "adamw"), "has the checkpoint; give another folder")
    assert_refused(capsys, [*given(), "--examples", "0"], "--examples is 0, and must be above 0")
    assert_refused(capsys, [*given(), "--examples", "7"], "--batch-size is 8; there are 7 examples")
    assert_refused(capsys, [*given(), "--optimizer", "came", "--from-adam"], "came cannot begin")
    shutil.copytree(work / "sst2", tmp_path / "cut")
    whole = (tmp_path / "cut/train.tsv").read_bytes()
    (tmp_path / "cut/train.tsv").write_bytes(whole[: whole.rindex(b"\t")])
    assert_refused(
        capsys, given(data=tmp_path / "cut"), "line 257: has 1 fields; its columns are 2"
    )
    assert not (work / "refused").exists()
    with pytest.raises(SystemExit) as stopped:
        finetune.main(["--task", "qqp", "--checkpoint", "a", "--data", "b"])
    assert stopped.value.code == 2
