"""CAME against a table of what the authors' package does, over 50 steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.make_came_table import SETTINGS, SHAPES, TABLE, gradients, start
from examples.opponents.came import ScaleByCameState, came, scale_by_came


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
    tx = came(**SETTINGS | changes)
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_equals_the_authors_package(table, compiled):
    assert max(table) == 50
    for step, params in run(50, compiled, jnp.float32):
        if step in table:
            distances = distance(params, table[step])
            assert max(distances.values()) < 1e-5, (step, distances)


def test_equals_the_authors_package_in_float64(table):
    with jax.enable_x64(True):
        for step, params in run(50, True, jnp.float64):
            if step in table:
                assert max(distance(params, table[step]).values()) < 1e-11


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        (dict(clipping_threshold=1e9), SHAPES),
        (dict(clipping_threshold=1e-9), ("vector", "single")),  # factored ones lose their size
        (dict(b3=0.999), ("matrix", "stack")),
        (dict(weight_decay=0.0), SHAPES),
    ],
)
def test_the_table_tells_settings_apart(table, changes, leaves):
    *_, (step, params) = run(10, True, jnp.float32, **changes)
    distances = distance(params, table[step])
    assert all(distances[name] > 1e-4 for name in leaves), distances


def test_the_gradients_are_clipped_at_some_steps_alone():
    tx = scale_by_came(b1=0.0, clipping_threshold=1e9)  # the average is the unclipped update
    state, update = tx.init(start()), jax.jit(tx.update)
    clipped = {name: [] for name in SHAPES}
    for step in range(1, 51):
        _, state = update(gradients(step), state)
        for name, mu in state.mu.items():
            clipped[name].append(float(jnp.sqrt(jnp.mean(mu**2))) > 1)
    counts = {name: sum(flags) for name, flags in clipped.items()}
    assert all(5 < count < 45 for count in counts.values()), counts


def test_state():
    params = {"a": jnp.ones((2, 3, 4), jnp.bfloat16), "b": jnp.ones(5)}
    tx = scale_by_came()
    state = tx.init(params)
    assert isinstance(state, ScaleByCameState)
    shapes = {
        field: tuple(leaf.shape for leaf in jax.tree.leaves(tree))
        for field, tree in state._asdict().items()
    }
    assert shapes == {
        "mu": ((2, 3, 4), (5,)),
        "row": ((2, 3), (1,)),
        "column": ((2, 4), (1,)),
        "instability_row": ((2, 3), (1,)),
        "instability_column": ((2, 4), (1,)),
        "nu": ((1,), (5,)),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(b1=1.0), r"b1 is 1.0; allowed: a number in \[0, 1\)\."),
        (dict(b3=-0.1), r"b3 is -0.1; allowed: a number in \[0, 1\)\."),
        (dict(eps=0), r"eps is 0; allowed: a number above 0\."),
        (dict(clipping_threshold=0.0), r"clipping_threshold is 0.0; allowed: a number above 0\."),
        (dict(weight_decay=-1), r"weight_decay is -1; allowed: a number of at least 0\."),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        came(1e-3, **arguments)
