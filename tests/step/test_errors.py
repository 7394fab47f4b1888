"""The error reported is that of the factors, and a rank that rises is followed at once."""

from functools import partial

import numpy as np
import pytest

import adapprox_jax
from tests.common import compiled

SETTINGS = {
    "default": {},
    "Householder": dict(orthogonalization="qr"),
    "oversampled": dict(oversampling=3),
    "adaptive": dict(initial_rank=1, max_rank=8),
    "adaptive at every step": dict(initial_rank=1, max_rank=8, rank_interval=1),
}


def few_rows(rng, shape, count, size=1.0):
    grad = np.zeros(shape, np.float32)
    grad[rng.choice(shape[0], count, replace=False)] = size * rng.normal(size=(count, shape[1]))
    return grad


def gradients(kind, shape):
    rng = np.random.default_rng(0)
    if kind == "dense":
        return [rng.normal(size=shape).astype(np.float32) for _ in range(4)]
    if kind == "zero, then rows":
        return [np.zeros(shape, np.float32), *(few_rows(rng, shape, 3) for _ in range(2))]
    if kind == "constant, then rows":
        ones = np.ones(shape, np.float32)
        return [ones, *(few_rows(rng, shape, 1, 100.0) for _ in range(5))]
    if kind == "rows that grow":
        return [few_rows(rng, shape, 1, 10.0**step) for step in range(6)]
    return [few_rows(rng, shape, 2) for _ in range(4)]


KINDS = ["rows", "dense", "zero, then rows", "constant, then rows", "rows that grow"]


@pytest.mark.parametrize(
    ("way", "name", "shape"),
    [
        *(("CPU", name, (64, 256)) for name in ("default", "Householder", "adaptive")),
        *(("CPU", "Householder", shape) for shape in ((256, 64), (17, 40))),
        ("accelerator", "default", (64, 256)),
        pytest.param("CPU", "oversampled", (17, 40), marks=pytest.mark.slow),
        pytest.param("accelerator", "adaptive at every step", (17, 40), marks=pytest.mark.slow),
    ],
    indirect=["way"],
)
def test_the_error_is_that_of_the_factors(name, shape, way):
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **SETTINGS[name])
    for kind in KINDS:
        check_errors(tx, name, gradients(kind, shape), shape)


def check_errors(tx, name, grads, shape):
    state, update = tx.init(grads[0]), compiled(tx)
    last = np.zeros(shape)
    for grad in grads:
        _, state = update(grad, state)
        target = np.sqrt(0.999 * last**2 + 0.001 * np.square(grad, dtype=float))
        q, u, norm = np.asarray(state.q, float), np.asarray(state.u, float), np.linalg.norm(target)
        product = q @ u.T if shape[0] <= shape[1] else u @ q.T
        error = np.linalg.norm(target - product) / (norm or 1)
        # Float32: of a target that is nearly held the residual is rounding, some 1e-6.
        np.testing.assert_allclose(float(state.error[0]), error, rtol=1e-2, atol=1e-5)
        values = np.linalg.svd(target, compute_uv=False)
        best = np.linalg.norm(values[int(state.rank[0]) :]) / (norm or 1)
        if best < 1e-6 and "adaptive" not in name:
            assert error <= 0.01, "the buffer holds the target"
        last = np.maximum(product, 0)


@pytest.mark.parametrize("orthogonalization", ["cholesky", "qr"])
@pytest.mark.parametrize("kind", ["constant, then rows", "rows that grow"])
def test_a_rank_that_rises_is_followed_whatever_is_drawn(kind, orthogonalization):
    """Columns of the last u that depend on each other leave none for what is new."""
    make = partial(adapprox_jax.scale_by_adapprox, orthogonalization=orthogonalization)
    grads, update = gradients(kind, (256, 64)), compiled(make())
    for key in range(40):
        state = make(key=key).init(grads[0])
        for grad in grads:
            _, state = update(grad, state)
            assert state.error[0] <= 0.005, key
