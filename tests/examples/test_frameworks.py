"""The files of examples/frameworks: the check that they share, and the adapter that none runs."""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import adapprox_jax

FOLDER = pathlib.Path(__file__).parents[2] / "examples/frameworks"
RECORDS = FOLDER.parents[1] / "results/frameworks"


@pytest.fixture
def common(monkeypatch):
    """The shared module, whose package sets how many devices JAX is to simulate."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    return importlib.import_module("examples.frameworks.common")


def least_squares(common, forgets):
    """A framework whose checkpoints are a pickle, with or without the state of the optimizer."""

    def train(tx, steps, folder):
        params = {"kernel": jnp.ones((64, 96))}
        done, state, file = 0, tx.init(params), folder / "checkpoint.npy"
        if file.exists():
            done, params, saved = np.load(file, allow_pickle=True)
            state = state if forgets else saved
        inputs = jnp.asarray(common.tokens(0) / 256, jnp.float32)
        loss = lambda params: jnp.mean((inputs @ params["kernel"]) ** 2)  # noqa: E731
        update, losses = jax.jit(tx.update), []
        for _ in range(done, steps):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        np.save(file, np.array((steps, params, state), dtype=object), allow_pickle=True)
        return common.Trained(losses, params, state)

    return train


@pytest.mark.parametrize("forgets", [False, True])
def test_a_checkpoint_without_the_state_is_seen(forgets, common, monkeypatch, tmp_path):
    file = tmp_path / "optax.json"
    monkeypatch.setattr(sys, "argv", ["program", str(file)])
    monkeypatch.setattr(common, "STEPS", 4)
    monkeypatch.delitem(common.OPTIMIZERS, "adapprox")
    monkeypatch.delitem(common.OPTIMIZERS, "adapprox_muon 4 bits")
    said = pytest.raises(SystemExit, match=r"optax does not .*: AdamW")
    with said if forgets else contextlib.nullcontext():
        common.check("optax", least_squares(common, forgets))
    record = json.loads(file.read_text())
    assert [row["optimizer"] for row in record["rows"]] == list(common.OPTIMIZERS)
    for row in record["rows"]:
        assert row["resumes bit for bit"] != forgets
        assert row["last loss"] < row["first loss"]


def test_each_framework_has_a_file_of_a_screen_and_a_record():
    main = importlib.import_module("examples.frameworks.__main__")
    shared = {"__init__", "__main__", "common", "axlearn"}
    assert {file.stem for file in FOLDER.glob("*.py")} - shared == set(main.REQUIREMENTS)
    for name in main.REQUIREMENTS:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60, name
        record = json.loads((RECORDS / f"{name}.json").read_text())
        assert any(record["version"] in x for x in main.REQUIREMENTS[name]), name


@pytest.fixture
def forgotten():
    """An example that was imported with a stand-in is imported anew by whoever comes next."""
    yield
    sys.modules.pop("examples.frameworks.axlearn", None)


@pytest.mark.parametrize("mu_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("make", [adapprox_jax.adapprox, adapprox_jax.adapprox_muon])
def test_rules_for_paths_of_parameters_fit_the_state(make, mu_dtype):
    """As EasyDeL and eformer restore: a rule's spec is applied wherever its path is found."""
    rules = {"embedding": ("tensor", "fsdp"), "kernel": ("fsdp", "tensor"), "bias": ("tensor",)}
    sizes = {"fsdp": 4, "tensor": 2}
    shapes = {"embedding": (512, 256), "kernel": (256, 1024), "bias": (1024,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(make(1e-2, mu_dtype=mu_dtype).init, params)
    found = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        for name, spec in rules.items():
            if name in jax.tree_util.keystr(path):
                found += 1
                assert leaf.ndim == len(spec)
                assert all(n % sizes[axis] == 0 for n, axis in zip(leaf.shape, spec, strict=True))
    assert found >= len(params)


class OptParam(NamedTuple):
    value: Any
    factorization_spec: Any = None
    weight_decay_scale: Any = None


@dataclasses.dataclass
class Spec:
    shape: tuple[int, ...]
    dtype: Any
    mesh_axes: Any = None


class PartitionedGradientTransformation(NamedTuple):
    init: Any
    update: Any
    partition: Any


def test_axlearns_interface(monkeypatch, forgotten):
    for name in ("axlearn", "axlearn.common", "axlearn.common.optimizer_base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = sys.modules["axlearn.common.optimizer_base"]
    stand_in.OptParam, stand_in.OptStateSpec = OptParam, Spec
    stand_in.PartitionedGradientTransformation = PartitionedGradientTransformation
    partitioned = importlib.import_module("examples.frameworks.axlearn").partitioned
    plain = adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4")
    tx = partitioned(plain)
    arrays = {"mlp": jnp.ones((128, 256)), "bias": jnp.ones(256)}
    params = {name: OptParam(array) for name, array in arrays.items()}
    expected, expected_state = plain.update(arrays, plain.init(arrays), arrays)
    updates, state = tx.update(arrays, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, expected_state))
    specs = {
        "mlp": Spec((128, 256), jnp.float32, ("fsdp", "model")),
        "bias": Spec((256,), jnp.float32),
    }
    found = tx.partition(specs)
    is_spec = lambda x: isinstance(x, Spec)  # noqa: E731
    types = jax.tree.map(lambda s: (s.shape, s.dtype), found, is_leaf=is_spec)
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    codes = [s for s in jax.tree.leaves(found, is_leaf=is_spec) if s.dtype == jnp.int4]
    assert [s.mesh_axes for s in codes] == [PartitionSpec("fsdp", "model")]
