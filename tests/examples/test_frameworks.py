"""The files of examples/frameworks: the check that they share, and the adapter that none runs."""

import collections
import contextlib
import dataclasses
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import adapprox_jax


@pytest.mark.parametrize("forgets", [False, True])
def test_a_checkpoint_without_the_state_is_seen(forgets, monkeypatch, tmp_path):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # the package sets them when it is imported
    common = importlib.import_module("examples.frameworks.common")

    def train(tx, steps, folder):
        """Its state counts steps, from the checkpoint on if that has none of it."""
        checkpoint = folder / "checkpoint"
        done = int(checkpoint.read_text()) if checkpoint.exists() else 0
        checkpoint.write_text(str(steps))
        count = steps - done if forgets else steps
        return common.Trained([3.0, 2.0], {"w": jnp.ones(8)}, {"count": jnp.asarray(count)})

    file = tmp_path / "optax.json"
    monkeypatch.setattr(sys, "argv", ["program", str(file)])
    said = pytest.raises(SystemExit, match=r"optax does not .*: AdamW")
    with said if forgets else contextlib.nullcontext():
        common.check("optax", train)
    rows = json.loads(file.read_text())["rows"]
    assert [row["optimizer"] for row in rows] == list(common.OPTIMIZERS)
    assert {row["resumes bit for bit"] for row in rows} == {not forgets}


def test_axlearns_interface(monkeypatch):
    Spec = dataclasses.make_dataclass("Spec", ["shape", "dtype", "mesh_axes"])
    stand_in = SimpleNamespace(
        OptStateSpec=Spec,
        OptParam=collections.namedtuple("OptParam", ["value"]),
        PartitionedGradientTransformation=collections.namedtuple(
            "PartitionedGradientTransformation", ["init", "update", "partition"]
        ),
    )
    for name in ("axlearn", "axlearn.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "axlearn.common.optimizer_base", stand_in)
    partitioned = importlib.import_module("examples.frameworks.axlearn").partitioned
    plain = optax.adamw(1e-2)
    tx = partitioned(plain)
    arrays = {"mlp": jnp.ones((128, 256)), "bias": jnp.ones(256)}
    params = {name: stand_in.OptParam(array) for name, array in arrays.items()}
    expected, expected_state = plain.update(arrays, plain.init(arrays), arrays)
    updates, state = tx.update(arrays, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, expected_state))
    ours = adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4")
    axes = {"mlp": ("fsdp", "model"), "bias": None}
    specs = {name: Spec(x.shape, x.dtype, axes[name]) for name, x in arrays.items()}
    found = partitioned(ours).partition(specs)
    types = jax.tree.map(lambda spec: (spec.shape, spec.dtype), found)
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(ours.init, arrays))
    codes = [spec for spec in jax.tree.leaves(found) if spec.dtype == jnp.int4]
    assert [spec.mesh_axes for spec in codes] == [PartitionSpec("fsdp", "model")]
