"""What happens to a run is not the end of its work: signals, damage, full disks, two at once."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

import jax

from examples.gpt2 import checkpoints, metrics, train
from examples.gpt2.folder import run_folder
from tests.examples.small import ROOT, arguments, assert_equal_bits, error_line, rows_of, saved

ADAMW = ("--optimizer", "adamw")


@pytest.fixture(scope="module")
def whole(work):
    """A run of six steps, with checkpoints of the third and the last."""
    assert train.main(arguments(work, "whole", *ADAMW)) == 0
    return work / "whole"


@pytest.fixture
def at_step(monkeypatch):
    """Does something when the losses of a step are recorded."""
    real = metrics.Metrics.record

    def at_step(chosen, action):
        def record(rows, step, *others):
            real(rows, step, *others)
            if step == chosen:
                action()

        monkeypatch.setattr(metrics.Metrics, "record", record)

    return at_step


def test_sigterm_saves_and_exits_with_0(work, whole, at_step, monkeypatch, capsys):
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    command = arguments(work, "terminated", *ADAMW)
    assert train.main(command) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "terminated after step 4 of 6: --resume goes on from there" in error_line(capsys)
    monkeypatch.undo()
    assert train.main([*command, "--resume"]) == 0
    assert_equal_bits(saved(work / "terminated"), saved(whole))


def test_sigterm_with_nothing_to_save_is_no_success(work, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda config: signal.raise_signal(signal.SIGTERM))
    assert train.main(arguments(work, "early", *ADAMW)) == 128 + signal.SIGTERM
    assert error_line(capsys) == "terminated; nothing was saved"


def test_a_second_run_in_a_folder_is_refused_and_destroys_nothing(work, whole, capsys):
    shutil.copytree(whole, work / "busy")
    before = {path: path.stat().st_mtime_ns for path in (work / "busy/checkpoints").rglob("*")}
    with run_folder(work / "busy", True, {}):
        for extra in ([], ["--resume"]):
            assert train.main([*arguments(work, "busy", *ADAMW), *extra]) == 2
            line = error_line(capsys)
            assert f"busy: process {os.getpid()} on " in line
            assert "is at work there" in line
    assert before == {
        path: path.stat().st_mtime_ns for path in (work / "busy/checkpoints").rglob("*")
    }
    assert train.main([*arguments(work, "busy", *ADAMW), "--resume"]) == 0  # when it has ended


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(folder):
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(x ^ 0xFF for x in content[middle : middle + 64])
    file.write_bytes(content)


def half_delete(folder):
    for file in sorted(p for p in folder.rglob("*") if p.is_file())[::2]:
        file.unlink()


def delete_files(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()


def change_numbers(folder):
    """As if one that is read without an error were another than was saved."""
    file = folder / "beside" / "metadata"
    beside = json.loads(file.read_text())
    file.write_text(json.dumps(beside | {"fingerprint": beside["fingerprint"] ^ 1}))


@pytest.mark.parametrize(
    "damage",
    [
        *(pytest.param(damage, marks=pytest.mark.slow) for damage in (truncate, half_delete)),
        *(flip, delete_files, change_numbers),
    ],
)
def test_of_damaged_checkpoints_the_last_good_one_is_used(work, whole, capsys, damage):
    out = work / f"damaged-{damage.__name__}"
    shutil.copytree(whole, out)
    damage(out / "checkpoints" / "6")
    capsys.readouterr()
    assert train.main([*arguments(work, out.name, *ADAMW), "--resume"]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert f"{out / 'checkpoints' / '6'}: cannot be used: " in said.out
    assert f"it is now {out / 'damaged-6'}" in said.out
    assert "going on after step 3" in said.out
    assert (out / "damaged-6").is_dir()
    assert_equal_bits(saved(out), saved(whole))


def test_a_fingerprint_follows_every_bit():
    tree = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.zeros(3, np.int8)}
    known = {int(checkpoints._fingerprint(tree))}
    for name, index in (("a", (0, 0)), ("a", (3, 5)), ("b", 2)):
        changed = jax.tree.map(np.copy, tree)
        changed[name].view(np.uint8 if name == "b" else np.uint32)[index] ^= 1
        known.add(int(checkpoints._fingerprint(changed)))
    known.add(int(checkpoints._fingerprint({"a": tree["a"][::-1], "b": tree["b"]})))
    assert len(known) == 5


def test_without_a_good_checkpoint_it_ends_in_a_line(work, whole, capsys):
    shutil.copytree(whole, work / "ruined")
    for step in ("3", "6"):
        flip(work / "ruined" / "checkpoints" / step)
    capsys.readouterr()
    assert train.main([*arguments(work, "ruined", *ADAMW), "--resume"]) == 2
    assert "there is no checkpoint in" in error_line(capsys)


def test_a_full_disk_ends_in_a_line_and_the_last_checkpoint_is_whole(
    work, whole, at_step, monkeypatch, capsys
):
    """As far as a process can tell: no file may grow beyond some size from the fourth step on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    command = arguments(work, "full", *ADAMW, "--eval-every", 4, "--checkpoint-every", 3)
    at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard)))
    try:
        code = train.main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capsys.readouterr().err
    assert code == 2
    assert "a checkpoint cannot be written" in errors or "File too large" in errors
    monkeypatch.undo()
    assert train.main([*command, "--resume"]) == 0
    assert_equal_bits(saved(work / "full"), saved(whole))


@pytest.mark.parametrize(
    ("out", "words"), [("text.py/run", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_folders_that_cannot_be_made_are_named(work, capsys, out, words):
    assert train.main(arguments(work, out, *ADAMW)) == 2
    line = error_line(capsys)
    assert words in line
    assert out.split("/")[0] in line


def test_a_run_can_be_made_longer_and_not_shorter(work, whole, capsys):
    shutil.copytree(whole, work / "longer")
    assert train.main([*arguments(work, "longer", *ADAMW, "--steps", 9), "--resume"]) == 0
    assert [row["step"] for row in rows_of(work / "longer") if "loss" in row] == list(range(1, 10))
    assert json.loads((work / "longer" / "settings.json").read_text())["steps"] == 9
    capsys.readouterr()
    assert train.main([*arguments(work, "longer", *ADAMW, "--steps", 7), "--resume"]) == 2
    assert "other settings: --steps was 9, now 7" in error_line(capsys)


@pytest.mark.slow
def test_kill_at_twenty_random_moments(work):
    """Saves, which are at every third step, included."""
    options = [*ADAMW, "--steps", 1000, "--eval-every", 5000, "--checkpoint-every", 3]
    command = [sys.executable, "-m", "examples.gpt2.train", *arguments(work, "killed", *options)]
    dice = random.Random(0)
    kills = 0
    while True:
        resumes = (work / "killed" / "checkpoints").is_dir()
        process = subprocess.Popen(
            [*command, *(["--resume"] if resumes else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if kills == 20:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
            break
        metrics = work / "killed" / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.stat().st_size > size:
                break
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 1.5))
        process.kill()
        process.communicate()
        kills += 1
    assert train.main(arguments(work, "never-killed", *options)) == 0
    assert_equal_bits(saved(work / "killed", 1000), saved(work / "never-killed", 1000))
