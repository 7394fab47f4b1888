"""A training on eight devices, of one process and of two, ends as one on a single device."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("grain")

import jax
import orbax.checkpoint as ocp

from examples.gpt2 import train
from examples.gpt2.command import InputError
from examples.gpt2.config import Config, mesh_sizes, resolve
from examples.gpt2.mesh import make_mesh
from tests.examples.small import ROOT, arguments, error_line, rows_of

ALL_AXES = ("--mesh", "data=2,fsdp=2,tensor=2")
# Sums over devices are taken in another order: some last bits of numbers of up to 6, and what six
# steps of Adam make of them.
TOLERANCE = 1e-4


def small(work, name, *extra):
    """Enough rows for four devices, and matrices that are factored."""
    return arguments(work, name, "--batch-size", 8, *extra)


def losses(out):
    return [row.get("loss", row.get("validation_loss")) for row in rows_of(out)]


def parameters(out, step=6):
    """On one device, wherever they were saved."""
    folder = (out / "checkpoints" / str(step) / "state").absolute()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            checkpointer.metadata(folder).item_metadata.tree,
        )
        return jax.device_get(checkpointer.restore(folder, target)["params"])


def assert_alike(first, second):
    np.testing.assert_allclose(losses(first), losses(second), atol=TOLERANCE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE),
        parameters(first),
        parameters(second),
    )


@pytest.fixture(scope="module")
def alone(work):
    """A run on one device."""
    assert train.main(small(work, "alone")) == 0
    return work / "alone"


@pytest.fixture(scope="module")
def on_eight(work):
    """The same run on eight."""
    assert train.main(small(work, "on-eight", *ALL_AXES)) == 0
    return work / "on-eight"


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def two_processes(*command, of_second=()):
    """Starts both, with four devices each; none is left at the end."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    port = free_port()
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.gpt2.train", *command),
                *("--processes.coordinator", f"127.0.0.1:{port}", "--processes.count", "2"),
                *("--processes.index", str(index), *(of_second if index else ())),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def said_by(process, timeout=300):
    """What it said, and its exit code."""
    out, errors = process.communicate(timeout=timeout)
    return out, errors, process.returncode


def run_in_two_processes(*command):
    with two_processes(*command) as started:
        return [said_by(process) for process in started]


def test_eight_devices_learn_what_one_does(alone, on_eight):
    assert_alike(alone, on_eight)


@pytest.mark.slow
def test_no_device_holds_all(work, capsys):
    assert train.main(small(work, "divided", "--mesh", "fsdp=8", "--steps", 3)) == 0
    said = capsys.readouterr().out
    whole = float(said.split("optimizer state ")[1].split(" MiB")[0])
    each = float(said.split(" MiB, ")[1].split(" on each")[0])
    assert each < whole / 2  # of so small a model biases are a large part


def test_two_processes_learn_what_one_does(work, on_eight):
    first, second = run_in_two_processes(*small(work, "two", *ALL_AXES))
    assert (first[2], second[2]) == (0, 0), first[1] + second[1]
    assert "final validation loss" in first[0]
    assert "validation loss" not in second[0]  # one of them says it
    np.testing.assert_allclose(losses(work / "two"), losses(on_eight), atol=1e-5)
    for name in ("settings.json", "curves.png"):
        assert (work / "two" / name).exists()


@pytest.mark.slow
def test_processes_with_the_same_rows(work, alone):
    """Along "tensor" alone each of them needs all rows."""
    ended = run_in_two_processes(*small(work, "same-rows", "--mesh", "tensor=8"))
    assert [code for *_, code in ended] == [0, 0], ended
    assert_alike(work / "same-rows", alone)


@pytest.mark.slow
def test_goes_on_with_other_meshes_and_numbers_of_processes(work, on_eight, capsys):
    for name, options in {"fewer": ("--mesh", "fsdp=4,tensor=2"), "single": ()}.items():
        shutil.copytree(on_eight, work / name)
        shutil.rmtree(work / name / "checkpoints" / "6")
        assert train.main([*small(work, name, *options), "--resume"]) == 0
        assert "going on after step 3" in capsys.readouterr().out
        assert_alike(work / name, on_eight)


@pytest.mark.slow
def test_what_one_process_saved_two_go_on_from(work, alone):
    shutil.copytree(alone, work / "more")
    shutil.rmtree(work / "more" / "checkpoints" / "6")
    ended = run_in_two_processes(*small(work, "more", *ALL_AXES), "--resume")
    assert [code for *_, code in ended] == [0, 0], ended
    assert "going on after step 3" in ended[0][0]
    assert_alike(work / "more", alone)


def wait_for_rows(file, count, process):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{file} has no {count} lines")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_when_one_is_lost_the_other_ends_and_the_restart_goes_on(work, lost):
    name = f"lost-{lost}"
    command = small(work, name, *ALL_AXES, "--steps", 5000, "--eval-every", 5000)
    command += ["--checkpoint-every", "10"]
    metrics = work / name / "metrics.jsonl"
    with two_processes(*command) as started:
        wait_for_rows(metrics, 25, started[0])
        started[lost].kill()
        begin = time.monotonic()
        _, errors, code = said_by(started[1 - lost])
        assert time.monotonic() - begin < 60
    assert code != 0, errors
    rows = len(metrics.read_text().splitlines())
    with two_processes(*command, "--resume") as started:
        wait_for_rows(metrics, rows + 20, started[0])
        for process in started:
            process.send_signal(signal.SIGTERM)
        ended = [said_by(process) for process in started]
    assert [code for *_, code in ended] == [0, 0], ended
    assert "going on after step " in ended[0][0]
    assert "terminated after step " in ended[0][1]


@pytest.mark.slow
def test_processes_that_do_not_meet_say_so_within_a_minute(work):
    command = small(work, "unmet", "--mesh", "data=8")
    with two_processes(*command) as [first, second]:
        second.kill()
        begin = time.monotonic()
        _, errors, code = said_by(first)
    assert time.monotonic() - begin < 60
    assert code != 0, errors
    assert not (work / "unmet").exists()


@pytest.mark.slow
def test_processes_given_different_options_end(work):
    command = small(work, "different", *ALL_AXES)
    with two_processes(*command, of_second=("--steps", "9", "--seed", "1")) as started:
        ended = [said_by(process) for process in started]
    for _, errors, code in ended:
        assert code == 2
        assert "the processes were not all given the same options" in errors
    assert not (work / "different").exists()


@pytest.mark.slow
def test_what_the_first_process_finds_ends_the_others_in_a_line(work):
    command = small(work, "nothing-there", *ALL_AXES, "--resume")
    first, second = run_in_two_processes(*command)
    assert (first[2], second[2]) == (2, 2)
    assert "there is no checkpoint in" in first[1]
    assert "error: the first process says why" in second[1]
    assert "Check failure" not in second[1]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["split", "bfloat16-stochastic"])
def test_weights_of_16_bits_go_on_from_eight_devices_on_one(work, weights):
    options = ["--weights", weights, "--optimizer", "adamw"]
    moved = f"{weights}-moved"
    assert train.main(small(work, weights, *options)) == 0
    assert train.main(small(work, moved, *options, *ALL_AXES)) == 0
    shutil.rmtree(work / moved / "checkpoints" / "6")
    assert train.main(small(work, moved, *options, "--resume")) == 0
    # A weight at the middle of two bfloat16 may be rounded either way.
    np.testing.assert_allclose(losses(work / weights), losses(work / moved), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "data=2,rows=4"], ["'rows=4'", "data, fsdp, tensor"]),
        (["--mesh", "data=2,data=4"], ["'data=4'", "each once"]),
        (["--mesh", "data=-1"], ["'data=-1'"]),
        (["--mesh", "fsdp=3"], ["is of 3 devices", "of the 8 that are there"]),
        (["--mesh", "data=4,fsdp=2", "--batch-size", "4"], ["into 8", "--batch-size 4"]),
        (["--mesh", "data=8", "--accumulate", "2"], ["into 8", "--accumulate 2"]),
        (["--processes.coordinator", "here"], ["here", "HOST:PORT"]),
        (["--processes.coordinator", "host:99999"], ["host:99999", "HOST:PORT"]),
        (["--processes.coordinator", "host:99"], ["host:99, None and None"]),
        (["--processes.count", "2"], ["None, 2 and None"]),
        (
            ["--processes.coordinator", "h:1", "--processes.count", "2", "--processes.index", "2"],
            ["h:1, 2 and 2"],
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(work, capsys, options, words):
    assert train.main(small(work, "never", *options)) == 2
    line = error_line(capsys)
    for word in words:
        assert word in line
    assert not (work / "never").exists()


def test_axes_left_out_are_1():
    assert mesh_sizes("tensor=4,data=2") == {"data": 2, "fsdp": 1, "tensor": 4}


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="several processes need a mesh"):
        make_mesh(resolve(Config()))
