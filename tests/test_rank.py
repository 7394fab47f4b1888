"""Capacities and the adaptive factorization of one matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adapprox_jax.low_rank import draw_start, products_of, start_columns
from adapprox_jax.rank import (
    adaptive_srsi,
    resolve_capacity,
    sigmoid_growth,
    warm_start,
    work_sizes,
    work_width,
)


@pytest.mark.parametrize(
    ("max_rank", "shape", "expected"),
    [
        (0.25, (768, 3072), 192),
        (0.25, (50304, 768), 192),
        (0.25, (7, 9), 1),  # rounded down
        (0.01, (7, 9), 1),  # at least 1
        (1.0, (7, 9), 7),
        (16, (768, 3072), 16),
        (16, (7, 9), 7),  # at most min(m, n)
    ],
)
def test_capacity(max_rank, shape, expected):
    assert resolve_capacity(max_rank, *shape) == expected


def test_growth_arguments_are_checked():
    with pytest.raises(ValueError, match="eta is 0; allowed: a number above 0"):
        sigmoid_growth(eta=0)
    with pytest.raises(ValueError, match=r"omega is 1\.0; allowed: a number below 0"):
        sigmoid_growth(omega=1.0)


SETTINGS = dict(
    initial_rank=1,
    error_threshold=0.05,
    rank_interval=10,
    rank_growth=lambda xi: jnp.asarray(1),
    rank_margin=0,
    power_iterations=5,
    rotate=True,
    orthogonalization="qr",
    factor_dtype=jnp.float32,
)


def decaying(shape=(24, 40), decay=0.6, seed=0):
    rng = np.random.default_rng(seed)
    k = min(shape)
    left = np.linalg.qr(rng.normal(size=(shape[0], k)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], k)))[0]
    return jnp.asarray((left * decay ** np.arange(k)) @ right.T, jnp.float32)


@functools.partial(jax.jit, static_argnames=(*SETTINGS, "warm", "oversampling"))
def factor_jitted(
    matrix, previous_u, rank, step, *, warm, oversampling, initial_rank, rotate, **settings
):
    (rows, columns), capacity = matrix.shape, previous_u.shape[1]
    width_of = functools.partial(work_width, oversampling=oversampling, rotate=rotate)
    sizes = work_sizes(capacity, rows, initial_rank)
    drawn = draw_start(jax.random.key(0), columns, width_of(sizes[-1], rows))

    def start_of(width):
        start = start_columns(drawn, width, matrix.dtype)
        return warm_start(start, previous_u, rank, 1.0) if warm else start

    products = products_of(matrix)
    factors, _ = adaptive_srsi(
        products,
        start_of,
        products.image(start_of(width_of(sizes[0], rows))),
        jnp.zeros((rows, capacity)),
        previous_u,
        rank,
        jnp.zeros(()),
        step,
        initial_rank=initial_rank,
        rotate=rotate,
        width_of=width_of,
        **settings,
    )
    return factors


def factor(matrix, capacity=12, step=1, rank=1, previous_u=None, **changes):
    warm = previous_u is not None
    previous_u = previous_u if warm else jnp.zeros((matrix.shape[1], capacity))
    settings = {**SETTINGS, "warm": warm, "oversampling": 5, **changes}
    return factor_jitted(matrix, previous_u, jnp.asarray(rank), jnp.asarray(step), **settings)


@pytest.mark.parametrize("threshold", [0.3, 0.05, 0.01])
def test_rank_is_the_smallest_below_the_threshold(threshold):
    """With steps of one and a known spectrum."""
    factors = factor(decaying(), error_threshold=threshold)
    spectrum = 0.6 ** np.arange(24)
    tails = np.array([np.linalg.norm(spectrum[k:]) for k in range(24)]) / np.linalg.norm(spectrum)
    assert int(factors.rank) == int(np.argmax(tails <= threshold))
    np.testing.assert_allclose(factors.error, tails[int(factors.rank)], rtol=0.02)


def test_rank_is_kept_between_choices():
    assert int(factor(decaying(), step=2, rank=3).rank) == 3
    assert int(factor(decaying(), step=11, rank=12).rank) == 6


def test_wider_buffers_change_nothing_but_zeros():
    narrow, wide = factor(decaying(), capacity=8), factor(decaying(), capacity=16)
    assert int(narrow.rank) == int(wide.rank) < 8
    np.testing.assert_allclose(narrow.q @ narrow.u.T, wide.q @ wide.u.T, atol=1e-5)
    assert not np.any(wide.q[:, 8:])
    assert not np.any(wide.u[:, 8:])


def test_warm_start_with_one_iteration_converges():
    """A matrix that stands still is factored as well as by many iterations, after a few steps."""
    matrix, fixed = decaying(decay=0.9), dict(initial_rank=8, power_iterations=1)
    cold = factor(matrix, capacity=8, **fixed)
    factors = cold
    for step in range(2, 8):
        factors = factor(matrix, 8, step, 8, previous_u=factors.u, **fixed)
    optimum = np.linalg.norm(0.9 ** np.arange(8, 24)) / np.linalg.norm(0.9 ** np.arange(24))
    assert float(cold.error) > 1.05 * optimum
    assert float(factors.error) < 1.01 * optimum


def test_error_counts_the_rounding_of_the_factors():
    factors = factor(decaying(), factor_dtype=jnp.bfloat16, error_threshold=0.0, capacity=20)
    assert factors.q.dtype == jnp.bfloat16
    product = factors.q.astype(jnp.float32) @ factors.u.astype(jnp.float32).T
    true = np.linalg.norm(decaying() - product) / np.linalg.norm(decaying())
    np.testing.assert_allclose(factors.error, true, rtol=0.01)
    assert float(factors.error) > 1e-4  # float32 factors of rank 20 have 4e-5


def test_a_margin_is_kept_beyond_the_rank_that_suffices():
    chosen = int(factor(decaying(), error_threshold=0.05).rank)
    factors = factor(decaying(), error_threshold=0.05, rank_margin=3)
    assert int(factors.rank) == chosen + 3
    # Its error is that of all columns kept, margin included.
    error = float(factor(decaying(), initial_rank=chosen + 3, error_threshold=1.0).error)
    np.testing.assert_allclose(float(factors.error), error, rtol=1e-3)
    assert int(factor(decaying(), error_threshold=0.0, rank_margin=3).rank) == 12
