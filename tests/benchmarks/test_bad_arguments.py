"""Arguments that a benchmark cannot use end it in a line, before anything is written."""

from functools import partial

import pytest

from benchmarks import (
    at_scale,
    device_program,
    loss_study,
    on_device,
    scale,
    singular_values,
    srsi,
    training_memory,
    update_speed,
)

MESHES = "allowed: pairs of numbers such as 8x4"
WIDTHS = "allowed: width from 512 in steps of 64, steps rising"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(at_scale.main, names=("adam",)), r"\['adam'\]; allowed: adapprox; "),
        (at_scale.main, "JAX sees no accelerator here; --cpu takes the CPU"),
        (partial(device_program.main, rows=("adam",)), r"rows has \['adam'\]; allowed: adamw; "),
        (partial(loss_study.main, ("Lion",)), r"contenders are \['Lion'\]; allowed: adapprox; "),
        (partial(loss_study.main, ()), r"contenders are \[\]; allowed: "),
        (partial(loss_study.main, ("CAME",), seeds=0), "seeds=0, .*; allowed: at least 1 seed"),
        (partial(loss_study.main, ("CAME",), rates=(0.0,)), "seed, and rates above 0"),
        (partial(on_device.main, seconds=0), "seconds is 0; allowed: a number above 0"),
        (partial(scale.main, meshes=("12",)), rf"meshes=\('12',\); {MESHES}"),
        (partial(scale.main, meshes=()), MESHES),
        (partial(scale.main, optimizers=("sgd",)), r"optimizers has \['sgd'\]; allowed: adamw; "),
        (partial(singular_values.main, width=100), WIDTHS),
        (partial(singular_values.main, steps=(5, 2)), WIDTHS),
        (partial(singular_values.main, steps=(0, 2)), WIDTHS),
        (partial(srsi.main, width=100, ranks=(1,)), f"width=100, .*; {WIDTHS}"),
        (partial(srsi.main, ranks=(0, 2)), r"ranks=\(0, 2\); allowed: from 1, ranks to width"),
        (partial(training_memory.main, rows=("adam",)), "allowed: AdamW, float32; "),
        (partial(update_speed.main, contenders=("sgd",)), r"\['sgd'\]; allowed: adamw; "),
        (
            partial(update_speed.main, contenders=("adamw, x",)),
            r"'adamw, x', has \['x'\]; allowed: stacked; bfloat16; split",
        ),
        (partial(update_speed.main, cycles=0), "cycles=0, .*; allowed: integers of at least 1"),
        (partial(update_speed.main, cpu=False), "--no-cpu needs an accelerator"),
    ],
)
def test_bad_arguments_are_named(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        call()
    assert not list(tmp_path.iterdir())
