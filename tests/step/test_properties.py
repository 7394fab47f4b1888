"""What holds for every shape, setting and gradient: drawn by hypothesis, the same in every run."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.params.matrix_view import matrix_view, to_matrices, view_shape

SETTINGS = [
    {},
    dict(max_rank=2, oversampling=2),
    dict(power_iterations=2, warm_start=False, orthogonalization="qr"),
    dict(approximate="moment", orthogonalization="qr"),
    dict(approximate="moment", initial_rank=1, max_rank=6, rank_interval=2, error_threshold=0.1),
    dict(initial_rank=1, max_rank=0.5, rank_interval=1),
    dict(factor_dtype=jnp.bfloat16),
    dict(eps_root=1e-12, bias_correction=True),
    dict(rotate=False, oversampling=1),
]
# Gradients whose entries are of about one.
KINDS = {
    "dense": lambda rng, shape: rng.normal(size=shape),
    "sparse": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.1),
    "one entry": lambda rng, shape: rng.permutation(np.eye(1, math.prod(shape))[0]).reshape(shape),
    "constant": lambda rng, shape: np.ones(shape),
    "repeated": lambda rng, shape: np.random.default_rng(0).normal(size=shape),
    "rank one": lambda rng, shape: functools.reduce(
        np.multiply.outer, [rng.normal(size=n) for n in shape]
    ),
    "zero": lambda rng, shape: np.zeros(shape),
}


@st.composite
def runs(draw):
    """Settings, and gradients of one shape."""
    axes = draw(st.integers(1, 4))
    longest = {1: 40, 2: 40, 3: 12, 4: 6}[axes]
    shape = tuple(draw(st.integers(1, longest)) for _ in range(axes))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    grads = []
    for kind in draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4)):
        scale = 10.0 ** draw(st.integers(-30, 30))
        grads.append((scale * KINDS[kind](rng, shape)).astype(np.float32))
    return draw(st.sampled_from(SETTINGS)), grads


def matrices(array, shape):
    """(..., m, n) with m at most n, in float64."""
    view = matrix_view(shape)
    stack = to_matrices(np.asarray(array, np.float64), view)
    found = stack.reshape(view_shape(shape, view)[0] + stack.shape[1:])
    return found if found.shape[-2] <= found.shape[-1] else np.swapaxes(found, -1, -2)


def product(state):
    q, u = (np.asarray(factor, np.float64) for factor in (state.q, state.u))
    return q @ np.swapaxes(u, -1, -2)


def check_step(settings, grad, largest, updates, last, state):
    shape = grad.shape
    assert np.all(np.isfinite(updates))
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, last)
    is_factored = bool(state.rank)
    is_moment = settings.get("approximate") == "moment"
    if (is_moment or not is_factored) and largest > 1e18:
        return  # V is beyond the range of float32
    # G / sqrt(b2 V + (1 - b2) G^2), and the first with a corrected V is one.
    assert np.max(np.abs(updates), initial=0) <= 1.001 * 1000**0.5
    if not is_factored:
        return
    g = np.abs(matrices(grad, shape))
    old, new = np.maximum(product(last), 0), product(state)
    target = 0.999 * old + 0.001 * g**2 if is_moment else np.sqrt(0.999 * old**2 + 0.001 * g**2)
    norm = np.linalg.norm(target, axis=(-2, -1))
    true = np.linalg.norm(target - new, axis=(-2, -1)) / np.where(norm == 0, 1, norm)
    # Products of numbers below that vanish.
    difference = np.abs(np.asarray(state.error[0], float) - true)[norm > 1e-26]
    assert np.all(difference <= 0.01), (settings, shape, true, state.error[0])
    assert np.all(np.asarray(state.rank[0]) >= 1)


@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_steps(examples, way):
    @hypothesis.settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        suppress_health_check=list(hypothesis.HealthCheck),
        database=None,
        phases=[hypothesis.Phase.generate],  # to shrink an example takes minutes
    )
    @hypothesis.given(runs())
    def check(run):
        settings, grads = run
        tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings)
        state, update = tx.init(grads[0]), jax.jit(tx.update)
        largest = 0
        for grad in grads:
            updates, new = update(grad, state)
            largest = max(largest, np.max(np.abs(grad)))
            check_step(settings, grad, largest, np.asarray(updates, np.float64), state, new)
            state = new

    check()
