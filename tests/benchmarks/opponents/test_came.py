"""CAME against a table of what the authors' package does, over 50 steps.

`benchmarks/make_came_table.py` of commit 416fdbc made the table, with the package `came-pytorch`.
"""

import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.contenders import with_decay
from benchmarks.opponents.came import scale_by_came

TABLE = pathlib.Path(__file__).parents[2] / "data" / "came_pytorch.json"
SHAPES = {"matrix": (6, 10), "stack": (3, 4, 5), "vector": (7,), "single": (1,)}
SETTINGS = {
    "learning_rate": 0.003,
    "b1": 0.9,
    "b2": 0.999,
    "b3": 0.9999,
    "eps": 1e-30,
    "eps_instability": 1e-16,
    "clipping_threshold": 1.0,
    "weight_decay": 0.1,
}


def start() -> dict[str, np.ndarray]:
    """The first parameters, float32."""
    return _draw(0, lambda random, shape: 0.02 * random.standard_normal(shape))


def gradients(step: int) -> dict[str, np.ndarray]:
    """The gradients of a step, float32: sizes of steps, rows and columns lie decades apart.

    Args:
      step: From 1.

    Returns:
      A dict from the leaf's name to its gradient. In the first steps all leaves are clipped, later
      those of a large gradient after small ones.
    """

    def make(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
        # The same rows and columns are large at all steps.
        sizes = np.random.RandomState(len(shape)).uniform(-1, 1, shape[-1])
        rows = np.random.RandomState(9).uniform(-1, 1, shape[-2]) if len(shape) > 1 else [0]
        size = 10.0 ** (random.uniform(-4, 0) + np.add.outer(rows, sizes))
        return size.reshape(size.shape[-len(shape) :]) * random.standard_normal(shape)

    return _draw(step, make)


def _draw(seed: int, make: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    # RandomState's stream is frozen: it does not change between versions of NumPy.
    random = np.random.RandomState(seed)
    return {name: np.float32(make(random, shape)) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def table():
    record = json.loads(TABLE.read_text())
    assert record["settings"] == SETTINGS
    return {
        int(step): {name: np.reshape(x, SHAPES[name]) for name, x in params.items()}
        for step, params in record["params_after"].items()
    }


def run(steps, compiled, dtype, **changes):
    """Parameters after each step, without the parameters at the start."""
    settings = SETTINGS | changes
    decay = settings.pop("learning_rate"), settings.pop("weight_decay")
    tx = with_decay(scale_by_came(**settings), *decay)
    params = optax.tree.cast(start(), dtype)
    state = tx.init(params)
    update = jax.jit(tx.update) if compiled else tx.update
    for step in range(1, steps + 1):
        updates, state = update(optax.tree.cast(gradients(step), dtype), state, params)
        params = optax.apply_updates(params, updates)
        yield step, params


def distance(params, expected):
    """Relative to how far the leaf has come: the starts are equal in any case."""
    first = start()
    return {
        name: np.linalg.norm(np.asarray(params[name], np.float64) - expected[name])
        / np.linalg.norm(expected[name] - first[name])
        for name in SHAPES
    }


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def test_equals_the_authors_package(table):
    assert max(table) == 50
    for step, params in run(50, True, jnp.float32):
        if step in table:
            distances = distance(params, table[step])
            assert max(distances.values()) < 1e-5, (step, distances)


def test_equals_the_authors_package_in_float64(table):
    with jax.enable_x64(True):
        for step, params in run(50, True, jnp.float64):
            if step in table:
                assert max(distance(params, table[step]).values()) < 1e-11


def test_the_gradients_are_clipped_at_some_steps_alone():
    tx = scale_by_came(b1=0.0, clipping_threshold=1e9)  # the average is the unclipped update
    state, update = tx.init(start()), jax.jit(tx.update)
    clipped = {name: [] for name in SHAPES}
    for step in range(1, 51):
        _, state = update(gradients(step), state)
        for name, leaf in state.leaves.items():
            clipped[name].append(float(jnp.sqrt(jnp.mean(leaf.mu**2))) > 1)
    counts = {name: sum(flags) for name, flags in clipped.items()}
    assert all(5 < count < 45 for count in counts.values()), counts


def test_state():
    params = {"a": jnp.ones((2, 3, 4), jnp.bfloat16), "b": jnp.ones(5)}
    tx = scale_by_came()
    state = tx.init(params)
    shapes = {
        name: [None if x is None else x.shape for x in leaf] for name, leaf in state.leaves.items()
    }
    assert shapes == {
        "a": [(2, 3, 4), (2, 3), (2, 4), (2, 3), (2, 4), None],
        "b": [(5,), None, None, None, None, (5,)],
    }
    updates, new = jax.jit(tx.update)(params, state)
    assert dtypes(updates) == dtypes(params)
    assert dtypes(new) == dtypes(state)


def test_zero_gradients_give_zero_updates():
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(5)}
    tx = scale_by_came()
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params))
    assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
