"""A training on eight devices, of one process and of two, ends as one on a single device."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples.gpt2 import train
from examples.gpt2.command import InputError
from examples.gpt2.config import Config, resolve
from examples.gpt2.mesh import make_mesh
from tests.examples.small import (
    ALL_AXES,
    FOR_MESHES,
    OPTIONS,
    ROOT,
    arguments,
    before_its_end,
    row_count,
    rows_of,
    wait_for_rows,
)

# Sums over devices are taken in another order: some last bits of numbers of up to 6, and what six
# steps of Adam make of them.
TOLERANCE = 1e-4


def losses(out):
    return [row.get("loss", row.get("validation_loss")) for row in rows_of(out)]


def parameters(out):
    """On one device, wherever they were saved."""
    folder = (out / "checkpoints" / "6" / "state").absolute()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            checkpointer.metadata(folder).item_metadata.tree,
        )
        return jax.device_get(checkpointer.restore(folder, target)["params"])


def assert_alike(first, second):
    np.testing.assert_allclose(losses(first), losses(second), atol=TOLERANCE)
    first, second = parameters(first), parameters(second)
    chex.assert_trees_all_close(first, second, rtol=1e-7, atol=TOLERANCE)


@contextlib.contextmanager
def two_processes(*command, of_second=()):
    """Starts both, with four devices each; none is left at the end."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
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


def ended(started, code):
    """What each of them said: output and errors."""
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [code] * len(started), said
    return said


def test_eight_devices_learn_what_one_does(run_of):
    assert_alike(run_of("alone"), run_of("on-eight"))


@pytest.mark.slow
def test_no_device_holds_all(work, capsys):
    assert train.main(arguments(work, "divided", *FOR_MESHES, "--mesh", "fsdp=8")) == 0
    said = capsys.readouterr().out
    whole, each = re.search(r"optimizer state (\S+) MiB, (\S+) on each", said).groups()
    assert float(each) < float(whole) / 2  # of so small a model biases are a large part


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("adamw-alone", ALL_AXES[1]),
        pytest.param("alone", ALL_AXES[1], marks=pytest.mark.slow),
        pytest.param("alone", "tensor=8", marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_does(work, run_of, name, mesh):
    """Along "tensor" alone each of them needs all rows. AdamW compiles in a second."""
    out = work / f"{name}-{mesh}"
    with two_processes(*arguments(work, out.name, *OPTIONS[name], "--mesh", mesh)) as started:
        (first, _), (second, _) = ended(started, 0)
    assert "final validation loss" in first
    assert "validation loss" not in second  # one of them says it
    assert_alike(out, run_of(name))
    assert {"settings.json", "curves.png"} <= {path.name for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("on-eight", "fsdp=4,tensor=2"),
        ("on-eight", "None"),
        ("split-on-eight", "None"),
        ("stochastic-on-eight", "None"),
    ],
)
def test_goes_on_with_another_mesh(work, run_of, capsys, name, mesh):
    moved = before_its_end(run_of(name), f"{name}-then-{mesh}")
    command = arguments(work, moved.name, *OPTIONS[name], "--mesh", mesh, "--resume")
    assert train.main(command) == 0
    assert "going on after step 3" in capsys.readouterr().out
    # A weight at the middle of two bfloat16 may be rounded either way.
    np.testing.assert_allclose(losses(moved), losses(run_of(name)), atol=1e-3)
    if name == "on-eight":
        assert_alike(moved, run_of(name))


@pytest.mark.slow
def test_what_one_process_saved_two_go_on_from(work, run_of):
    more = before_its_end(run_of("alone"), "more")
    with two_processes(*arguments(work, "more", *OPTIONS["on-eight"], "--resume")) as started:
        (first, _), _ = ended(started, 0)
    assert "going on after step 3" in first
    assert_alike(more, run_of("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_when_one_is_lost_the_other_ends_and_the_restart_goes_on(work, lost):
    out = work / f"lost-{lost}"
    endless = ("--steps", 5000, "--eval-every", 5000, "--checkpoint-every", 10)
    command = arguments(work, out.name, *OPTIONS["on-eight"], *endless)
    with two_processes(*command) as started:
        wait_for_rows(out, 25, started[0])
        started[lost].kill()
        assert started[1 - lost].wait(60) != 0
    with two_processes(*command, "--resume") as started:
        wait_for_rows(out, row_count(out) + 20, started[0])
        for process in started:
            process.send_signal(signal.SIGTERM)
        (said, errors), _ = ended(started, 0)
    assert "going on after step " in said
    assert "terminated after step " in errors


@pytest.mark.slow
def test_processes_that_do_not_meet_say_so_within_a_minute(work):
    with two_processes(*arguments(work, "unmet", *OPTIONS["on-eight"])) as [first, second]:
        second.kill()
        assert first.wait(60) != 0
    assert not (work / "unmet").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "of_second", "words"),
    [
        ([], ["--steps", "9"], ["the processes were not all given the same options"] * 2),
        (["--resume"], [], ["there is no checkpoint in", "error: the first process says why"]),
    ],
)
def test_what_cannot_be_ends_all_in_a_line(work, options, of_second, words):
    command = arguments(work, "never", *OPTIONS["on-eight"], *options)
    with two_processes(*command, of_second=of_second) as started:
        errors = [errors for _, errors in ended(started, 2)]
    assert words[0] in errors[0]
    assert words[1] in errors[1]
    assert "Check failure" not in errors[1]
    assert not (work / "never").exists()


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="several processes need a mesh"):
        make_mesh(resolve(Config()))
