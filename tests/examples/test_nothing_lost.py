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

import chex
import jax
import numpy as np
import pytest

from examples.gpt2 import checkpoints, train
from examples.gpt2.folder import run_folder
from tests.examples.small import (
    ROOT,
    arguments,
    assert_refused,
    error_line,
    row_count,
    saved,
    wait_for_rows,
)

ADAMW = ("--optimizer", "adamw")


@pytest.fixture
def whole(run_of):
    """A run of six steps, with checkpoints of the third and the last."""
    return run_of("adamw")


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 0, "terminated")],
)
def test_a_signal_saves_and_resume_gives_the_same_bits(
    work, whole, at_step, capsys, number, code, word
):
    """It comes with the records of step 3, and is heard at the step after."""
    at_step(3, lambda: signal.raise_signal(number))
    handler = signal.getsignal(number)
    command = arguments(work, word, *ADAMW)
    assert train.main(command) == code
    assert signal.getsignal(number) is handler
    assert f"{word} after step 4 of 6: --resume goes on from there" in error_line(capsys)
    assert {path.name for path in (work / word / "checkpoints").iterdir()} == {"3", "4"}
    assert train.main([*command, "--resume"]) == 0
    chex.assert_trees_all_equal(saved(work / word), saved(whole))


def test_sigterm_with_nothing_to_save_is_no_success(work, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda config: signal.raise_signal(signal.SIGTERM))
    assert train.main(arguments(work, "early", *ADAMW)) == 128 + signal.SIGTERM
    assert error_line(capsys) == "terminated; nothing was saved"


def test_a_second_run_in_a_folder_is_refused_and_destroys_nothing(work, whole, capsys):
    busy = shutil.copytree(whole, work / "busy")
    before = {path: path.stat().st_mtime_ns for path in (busy / "checkpoints").rglob("*")}
    command = arguments(work, "busy", *ADAMW)
    holder = f"busy: process {os.getpid()} on "
    with run_folder(busy, True, {}):
        assert_refused(capsys, command, holder, "is at work there")
        assert_refused(capsys, [*command, "--resume"], holder, "is at work there")
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert train.main([*command, "--resume"]) == 0  # when it has ended


def flip_bits(folder):
    """Of the largest file, in which the numbers are."""
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(x ^ 0xFF for x in content[middle : middle + 64])
    file.write_bytes(content)


def delete_files(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()


def change_numbers(folder):
    """As if one that is read without an error were another than was saved."""
    file = folder / "beside" / "metadata"
    beside = json.loads(file.read_text())
    file.write_text(json.dumps(beside | {"fingerprint": beside["fingerprint"] ^ 1}))


@pytest.mark.parametrize("damage", [flip_bits, delete_files, change_numbers])
def test_of_damaged_checkpoints_the_last_good_one_is_used(work, whole, capsys, damage):
    out = shutil.copytree(whole, work / f"damaged-{damage.__name__}")
    damage(out / "checkpoints" / "6")
    capsys.readouterr()
    assert train.main([*arguments(work, out.name, *ADAMW), "--resume"]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert f"{out / 'checkpoints' / '6'}: cannot be used: " in said.out
    assert f"it is now {out / 'damaged-6'}" in said.out
    assert "going on after step 3" in said.out
    assert (out / "damaged-6").is_dir()
    chex.assert_trees_all_equal(saved(out), saved(whole))


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
        flip_bits(work / "ruined" / "checkpoints" / step)
    command = [*arguments(work, "ruined", *ADAMW), "--resume"]
    assert_refused(capsys, command, "there is no checkpoint in")


def test_a_full_disk_ends_in_a_line_and_the_last_checkpoint_is_whole(work, whole, at_step, capsys):
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
    assert train.main([*command, "--resume"]) == 0
    chex.assert_trees_all_equal(saved(work / "full"), saved(whole))


@pytest.mark.slow
def test_kill_at_twenty_random_moments(work):
    """Saves, which are at every third step, included."""
    options = [*ADAMW, "--steps", 1000, "--eval-every", 5000, "--checkpoint-every", 3]
    command = [sys.executable, "-m", "examples.gpt2.train", *arguments(work, "killed", *options)]
    out, dice = work / "killed", random.Random(0)
    for _ in range(20):
        is_whole = [path.name.isdecimal() for path in (out / "checkpoints").glob("*")]
        resume = ["--resume"] if any(is_whole) else []
        rows = row_count(out)
        process = subprocess.Popen([*command, *resume], cwd=ROOT)
        wait_for_rows(out, rows + 1, process)
        time.sleep(dice.uniform(0, 1.5))
        process.kill()
        process.wait()
    subprocess.run([*command, "--resume"], cwd=ROOT, check=True, timeout=600)
    assert train.main(arguments(work, "never-killed", *options)) == 0
    chex.assert_trees_all_equal(saved(out, 1000), saved(work / "never-killed", 1000))
