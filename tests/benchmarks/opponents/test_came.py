"""CAME against a table of what the authors' package does, over 50 steps.

`benchmarks/make_came_table.py` of commit 416fdbc made the table, with the package `came-pytorch`.
"""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.contenders import with_decay
from benchmarks.opponents.came import scale_by_came

TABLE = pathlib.Path(__file__).parents[2] / "data" / "came_pytorch.json"
SHAPES = {"matrix": (6, 10), "stack": (3, 4, 5), "vector": (7,), "single": (1,)}


def gradients(step):
    """The gradients of a step, float32: sizes of steps, rows and columns lie decades apart.

    In the first steps all leaves are clipped, later those of a large gradient after small ones.
    """

    def make(random, shape):
        # The same rows and columns are large at all steps.
        sizes = np.random.RandomState(len(shape)).uniform(-1, 1, shape[-1])
        rows = np.random.RandomState(9).uniform(-1, 1, shape[-2]) if len(shape) > 1 else [0]
        size = 10.0 ** (random.uniform(-4, 0) + np.add.outer(rows, sizes))
        return size.reshape(size.shape[-len(shape) :]) * random.standard_normal(shape)

    return _draw(step, make)


def _draw(seed, make):
    # RandomState's stream is frozen: it does not change between versions of NumPy.
    random = np.random.RandomState(seed)
    return {name: np.float32(make(random, shape)) for name, shape in SHAPES.items()}


def test_equals_the_authors_package():
    """In float64. The distance is relative to how far a leaf has come from its start."""
    record = json.loads(TABLE.read_text())
    settings = record["settings"]
    decay = settings.pop("learning_rate"), settings.pop("weight_decay")
    with jax.enable_x64(True):
        tx = with_decay(scale_by_came(**settings), *decay)
        drawn = _draw(0, lambda random, shape: 0.02 * random.standard_normal(shape))
        first = params = optax.tree.cast(drawn, jnp.float64)
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(1, 51):
            grads = optax.tree.cast(gradients(step), jnp.float64)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            for name, expected in record["params_after"].get(str(step), {}).items():
                expected = np.reshape(expected, SHAPES[name])
                distance = np.linalg.norm(params[name] - expected)
                assert distance < 1e-11 * np.linalg.norm(expected - first[name]), (step, name)
    assert "50" in record["params_after"]


def test_types_are_kept_and_zeros_give_zeros():
    params = {"a": jnp.zeros((2, 3, 4), jnp.bfloat16), "b": jnp.zeros(5)}
    tx = scale_by_came()
    state = tx.init(params)
    updates, new = jax.jit(tx.update)(params, state)
    chex.assert_trees_all_equal(updates, params, strict=True)
    chex.assert_trees_all_equal_dtypes(new, state)
