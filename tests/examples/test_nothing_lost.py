"""What happens to a run is not the end of its work: signals, damage, full disks, two at once."""

import json
import os
import pathlib
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

from examples.gpt2 import checkpoints, loop, train
from examples.gpt2.folder import run_folder
from tests.examples.small import arguments

ROOT = pathlib.Path(__file__).parents[2]
ADAMW = ("--optimizer", "adamw")


def saved(out, at=6):
    with checkpoints.open_checkpoints(out) as manager:
        return manager.restore(at).state


def assert_equal_bits(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def whole(work):
    """A run of six steps, with checkpoints of the third and the last."""
    assert train.main(arguments(work, "whole", *ADAMW)) == 0
    return work / "whole"


@pytest.fixture
def at_step(monkeypatch):
    """Does something when the losses of a step are recorded."""
    real = loop.record

    def at_step(chosen, action):
        def record(metrics, step, *others):
            real(metrics, step, *others)
            if step == chosen:
                action()

        monkeypatch.setattr(loop, "record", record)

    return at_step


def error_line(capsys):
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1, errors
    return lines[0]


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
    monkeypatch.setattr(train, "run", lambda config: signal.raise_signal(signal.SIGTERM))
    assert train.main(arguments(work, "early", *ADAMW)) == 128 + signal.SIGTERM
    assert error_line(capsys) == "terminated; nothing was saved"


def compared(work, name):
    [row] = (work / name / "results.jsonl").read_text().splitlines()
    return json.loads(row)


def test_a_comparison_goes_on_within_a_run(work, at_step, monkeypatch, capsys):
    def command(name):
        return arguments(work, name, "--compare", "adamw", "--seeds", 1)

    assert train.main(command("uninterrupted")) == 0
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    assert train.main(command("compared")) == 0
    line = error_line(capsys)
    assert "terminated after step 4 of 6: the same command goes on from there" in line
    monkeypatch.undo()
    steps = []
    at_step_of = loop.record
    monkeypatch.setattr(
        loop,
        "record",
        lambda metrics, step, *rest: (steps.append(step), at_step_of(metrics, step, *rest)),
    )
    assert train.main(command("compared")) == 0
    assert min(steps) > 4
    whole, in_pieces = compared(work, "uninterrupted"), compared(work, "compared")
    assert in_pieces["curve"] == whole["curve"]
    assert in_pieces["seconds"] > 0
    assert not list((work / "compared").glob("*/checkpoints"))


def test_a_comparison_does_not_go_on_from_a_run_with_other_settings(work, at_step, monkeypatch):
    command = arguments(work, "changed", "--compare", "adamw", "--seeds", 1)
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    assert train.main(command) == 0
    monkeypatch.undo()
    assert train.main([*command, "--hyper.b2", "0.99"]) == 0
    changed = arguments(work, "anew", "--compare", "adamw", "--seeds", 1, "--hyper.b2", "0.99")
    assert train.main(changed) == 0
    assert compared(work, "changed")["curve"] == compared(work, "anew")["curve"]


def test_a_whole_checkpoint_stays_where_it_is_when_it_cannot_be_used(
    work, whole, monkeypatch, capsys
):
    shutil.copytree(whole, work / "unlucky")

    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED:\nout of memory")

    monkeypatch.setattr(checkpoints, "_restored", fail)
    capsys.readouterr()
    assert train.main([*arguments(work, "unlucky", *ADAMW), "--resume"]) == 2
    words = "6 is as it was saved, and cannot be used: RESOURCE_EXHAUSTED: out of memory"
    assert words in error_line(capsys)
    assert not (work / "unlucky" / "damaged").exists()
    assert (work / "unlucky" / "checkpoints" / "6").is_dir()


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


def delete_metadata(folder):
    for file in folder.rglob("*"):
        if file.is_file() and file.name != checkpoints.CHECKSUMS:
            file.unlink()


def garble_the_rest(folder):
    """Damage from before there were checksums."""
    (folder / checkpoints.CHECKSUMS).unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\0" * 10)


@pytest.mark.parametrize("damage", [truncate, flip, half_delete, delete_metadata, garble_the_rest])
def test_of_damaged_checkpoints_the_last_good_one_is_used(work, whole, capsys, damage):
    out = work / f"damaged-{damage.__name__}"
    shutil.copytree(whole, out)
    damage(out / "checkpoints" / "6")
    capsys.readouterr()
    assert train.main([*arguments(work, out.name, *ADAMW), "--resume"]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert f"{out / 'checkpoints' / '6'}: " in said.out
    assert f"it is now in {out / 'damaged'}" in said.out
    assert "going on after step 3" in said.out
    assert (out / "damaged" / "6").is_dir()
    assert_equal_bits(saved(out), saved(whole))


def test_without_a_good_checkpoint_it_ends_in_a_line(work, whole, capsys):
    shutil.copytree(whole, work / "ruined")
    for step in ("3", "6"):
        flip(work / "ruined" / "checkpoints" / step)
    capsys.readouterr()
    assert train.main([*arguments(work, "ruined", *ADAMW), "--resume"]) == 2
    assert "there is no checkpoint in" in error_line(capsys)


def test_an_altered_file_is_named(whole, tmp_path):
    shutil.copytree(whole / "checkpoints" / "6", tmp_path / "6")
    assert checkpoints.damage_of(tmp_path / "6") is None
    name = largest_file(tmp_path / "6").relative_to(tmp_path / "6").as_posix()
    flip(tmp_path / "6")
    assert checkpoints.damage_of(tmp_path / "6") == f"{name} was altered"


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
    assert "the checkpoint of step 6 cannot be written" in errors or "File too large" in errors
    monkeypatch.undo()
    assert checkpoints.damage_of(work / "full" / "checkpoints" / "3") is None
    assert train.main([*command, "--resume"]) == 0
    assert_equal_bits(saved(work / "full"), saved(whole))


def test_a_text_that_is_cut_while_in_use_ends_in_a_line(work, at_step, capsys):
    cache = work / "cut-cache"
    command = arguments(work, "cut", *ADAMW, "--cache", cache, "--steps", 2000, "--eval-every", 900)

    def cut():
        [file] = cache.glob("*/train.tokens")
        os.truncate(file, 100)

    at_step(10, cut)
    assert train.main(command) == 2
    assert "train.tokens: was cut while it was in use" in error_line(capsys)
    # And when it is found to be cut.
    assert train.main(command) == 2
    assert "train.tokens: has 100 bytes" in error_line(capsys)


@pytest.mark.parametrize("file", ["meta.json", "train.tokens"])
def test_a_damaged_cache_is_named(work, capsys, file):
    cache = work / f"cache-{file}"
    command = arguments(work, f"of-{file}", *ADAMW, "--cache", cache)
    assert train.main(command) == 0
    [path] = cache.glob(f"*/{file}")
    path.write_text("{") if file == "meta.json" else path.unlink()
    capsys.readouterr()
    assert train.main(command) == 2
    line = error_line(capsys)
    assert f"{path.parent}: damaged" in line
    assert f"remove {path.parent}" in line


@pytest.mark.parametrize(
    ("out", "words"), [("text.py/run", "Not a directory"), ("x" * 300, "File name too long")]
)
def test_folders_that_cannot_be_made_are_named(work, capsys, out, words):
    assert train.main(arguments(work, out, *ADAMW)) == 2
    line = error_line(capsys)
    assert words in line
    assert out.split("/")[0] in line


def test_lost_losses_are_not_passed_over(work, whole, capsys):
    shutil.copytree(whole, work / "unrecorded")
    (work / "unrecorded" / "metrics.jsonl").unlink()
    command = [*arguments(work, "unrecorded", *ADAMW, "--steps", 9), "--resume"]
    capsys.readouterr()
    assert train.main(command) == 2
    assert "metrics.jsonl is missing, with the losses up to step 6" in error_line(capsys)
    (work / "unrecorded" / "metrics.jsonl").touch()
    done = [*arguments(work, "unrecorded", *ADAMW), "--resume"]
    assert train.main(done) == 0  # with no step left to take
    assert train.main(command) == 0


def test_a_run_can_be_made_longer_and_not_shorter(work, whole, capsys):
    shutil.copytree(whole, work / "longer")
    assert train.main([*arguments(work, "longer", *ADAMW, "--steps", 9), "--resume"]) == 0
    rows = [json.loads(x) for x in (work / "longer" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 10))
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
