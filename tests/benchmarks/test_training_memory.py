"""What whole training steps take, of a small model compiled for a CPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("tyro")

from benchmarks import training_memory
from benchmarks.scale import LLAMAS, parameters


def test_the_model_learns():
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), devices=jax.devices()[:1])
    shapes = parameters(LLAMAS["tiny"]._replace(layers=1, vocabulary=32), mesh)
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    params = {n: 0.02 * jax.random.normal(keys[n], x.shape) for n, x in shapes.items()}
    params |= {n: jnp.ones(x.shape) for n, x in shapes.items() if "norm" in n}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)))

    def loss(params, tokens):
        return training_memory.loss(params, tokens, jnp.float32)

    start = float(loss(params, tokens))
    assert abs(start - np.log(32)) < 0.5
    step = jax.jit(lambda p: jax.tree.map(lambda w, g: w - 0.5 * g, p, jax.grad(loss)(p, tokens)))
    for _ in range(60):
        params = step(params)
    assert float(loss(params, tokens)) < 0.7 * start


def test_a_table_and_a_picture(tmp_path, capsys):
    path, rows = tmp_path / "tiny.json", ("AdamW, float32", "AdamW, split weights")
    training_memory.main("cpu", "tiny", 1, 16, rows, path)
    records = json.loads(path.read_text())["records"]
    assert records["AdamW, split weights"]["weights_mib"] * 2 == pytest.approx(
        records["AdamW, float32"]["weights_mib"]
    )
    assert "AdamW, split weights" in capsys.readouterr().out
    training_memory.draw(records, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    refused = training_memory.table({"v5p": {"AdamW": {"refused": "too much"}}})
    assert "does not fit" in refused


def test_bad_rows():
    with pytest.raises(SystemExit, match=r"rows has \['adam'\]; allowed: AdamW, float32; "):
        training_memory.main(rows=("adam",))
