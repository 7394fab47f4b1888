"""Capacities and the adaptive factorization of one matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adapprox_jax.schedules import sigmoid_growth
from adapprox_jax.settings import Settings, resolve_capacity
from adapprox_jax.state.layout import LeafState
from adapprox_jax.step import phases
from adapprox_jax.step.matrix import Plan
from adapprox_jax.step.platform import CPU
from adapprox_jax.step.rank_choice import choose_rank
from adapprox_jax.step.scalars import StepScalars


@pytest.mark.parametrize(
    ("max_rank", "shape", "expected"),
    [
        (0.25, (768, 3072), 192),
        (0.25, (50304, 768), 192),
        (0.25, (7, 9), 1),  # rounded down
        (0.01, (7, 9), 1),  # at least 1
        (16, (768, 3072), 16),
        (1.0, (1, 9), 0),  # no factors are smaller than a vector
        (400, (256, 512), 170),  # the widest that is smaller than the matrix
        (1.0, (7, 9), 3),
    ],
)
def test_capacity(max_rank, shape, expected):
    assert resolve_capacity(max_rank, *shape) == expected


def test_growth_arguments_are_checked():
    with pytest.raises(ValueError, match="eta is 0; allowed: a number above 0"):
        sigmoid_growth(eta=0)
    with pytest.raises(ValueError, match=r"omega is 1\.0; allowed: a number below 0"):
        sigmoid_growth(omega=1.0)
    for name, value in (("phi", "x"), ("tau", float("nan"))):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed: a finite number"):
            sigmoid_growth(**{name: value})


SETTINGS = Settings(
    initial_rank=1,
    max_rank=12,
    rank_growth=lambda xi: jnp.asarray(1),
    power_iterations=5,
    oversampling=5,
    approximate="moment",
    orthogonalization="qr",
    min_dim_size_to_factor=1,
)


def decaying(shape=(24, 40), decay=0.6, seed=0):
    rng = np.random.default_rng(seed)
    k = min(shape)
    left = np.linalg.qr(rng.normal(size=(shape[0], k)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], k)))[0]
    return ((left * decay ** np.arange(k)) @ right.T).astype(np.float32)


def given_target(plan, matrix):
    """In place of a second moment: a target with any spectrum."""
    return matrix.grad / plan.approximation.of_scale(matrix.scale)


@functools.partial(jax.jit, static_argnames="settings")
def factor_jitted(matrix, previous, step, error_threshold, *, settings):
    (rows, columns), capacity = matrix.shape, previous.q.shape[1]
    width = settings.width(capacity, rows)
    scalars = StepScalars(
        step=step,
        draws=jax.random.normal(jax.random.key(0), (width, columns)),
        rounding=None,
        b2=0.999,
        eps=0.0,
        eps_root=0.0,
        correction=1.0,
        error_threshold=error_threshold,
    )
    plan = Plan(scalars, settings, CPU, axis=0, batch=1, width=width, capacity=capacity)
    last = jax.tree.map(lambda x: x[None], previous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "target_of", given_target)
        chooses = settings.chooses_at(step)
        [(_, state, _)] = phases.step_stacks([plan], [matrix[None]], [last], [None], chooses)
    return jax.tree.map(lambda x: x[0], state)


def factor(
    matrix,
    capacity=12,
    step=1,
    rank=1,
    previous_u=None,
    error_threshold=0.05,
    dtype=jnp.float32,
    **changes,
):
    (rows, columns), warm = matrix.shape, previous_u is not None
    previous_u = previous_u if warm else np.zeros((columns, capacity), dtype)
    q, zero = np.zeros((rows, capacity), dtype), np.float32(0)
    previous = LeafState(q, previous_u, np.int32(rank), zero, zero)
    widest = max(capacity, 12)
    settings = dataclasses.replace(SETTINGS, max_rank=widest, warm_start=warm, **changes)
    return factor_jitted(matrix, previous, np.int32(step), error_threshold, settings=settings)


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
    narrow, wide = factor(decaying()), factor(decaying(), capacity=16)
    assert int(narrow.rank) == int(wide.rank) < 12
    products = [np.asarray(f.q) @ np.asarray(f.u).T for f in (narrow, wide)]
    np.testing.assert_allclose(*products, atol=1e-5)
    assert not np.any(np.asarray(wide.q)[:, 12:])
    assert not np.any(np.asarray(wide.u)[:, 12:])


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
    factors = factor(decaying(), dtype=jnp.bfloat16, error_threshold=0.0, capacity=20)
    assert factors.q.dtype == jnp.bfloat16
    product = np.asarray(factors.q, np.float32) @ np.asarray(factors.u, np.float32).T
    true = np.linalg.norm(decaying() - product) / np.linalg.norm(decaying())
    np.testing.assert_allclose(factors.error, true, rtol=0.01)
    assert float(factors.error) > 1e-4  # float32 factors of rank 20 have 4e-5


def energies_of(*singular_values):
    return jnp.square(jnp.asarray(singular_values, jnp.float32))


def chosen(first=1, capacity=8, threshold=0.1, **changes):
    """Of singular values 1, 0.5, 0.25, ... and nothing beyond."""
    energies = energies_of(*0.5 ** np.arange(8.0))
    settings = dataclasses.replace(SETTINGS, initial_rank=first, **changes)
    return int(choose_rank(energies, 0.0, capacity, threshold, settings))


def test_the_rank_chosen_is_the_first_whose_error_is_low_enough():
    tails = np.sqrt(np.cumsum((0.25 ** np.arange(8.0))[::-1])[::-1] / (4 / 3))
    assert chosen() == np.argmax(tails <= 0.1)
    assert chosen(6) == 6  # from the first on
    assert chosen(threshold=0.0) == 8  # the residual is zero only there
    assert chosen(capacity=3) == 3


def ranks_by_a_loop(energies, residual, first, capacity, threshold, growth):
    """Algorithm 2 as it is printed."""
    rank = min(first, capacity)
    while rank < capacity:
        beyond = residual + energies[max(rank, 1) :].sum()
        error = np.sqrt(beyond / (residual + energies.sum()))
        if not (error > threshold or np.isnan(threshold)):
            break
        rank = min(rank + max(int(growth(error)), 1), capacity)
    return rank


@pytest.mark.parametrize("first", [1, 4])
def test_the_table_leads_to_the_rank_of_the_loop(first):
    rng = np.random.default_rng(0)
    growths = (lambda error: 0, lambda error: 3, lambda error: jnp.floor(9 * error), jnp.exp)
    capacity = 13
    for growth in growths:
        settings = Settings(first, capacity, 1, growth)
        by_table = jax.jit(functools.partial(choose_rank, capacity=capacity, settings=settings))
        for _ in range(5):
            energies = np.sort(rng.exponential(size=16).astype(np.float32) ** 4)[::-1]
            residual = np.float32(0.01 * energies.sum())
            for threshold in (0.0, 0.11, 0.2, 0.4, 0.8, 2.0, np.nan):
                by_loop = ranks_by_a_loop(energies, residual, first, capacity, threshold, growth)
                assert int(by_table(energies, residual, error_threshold=threshold)) == by_loop


def test_a_threshold_of_nan_gives_the_largest_rank():
    """And not the smallest: what cannot be told to be good enough is not."""
    assert chosen(threshold=float("nan")) == 8


@pytest.mark.parametrize("growth", [3, 2.7, 1e30, 2**31, -5, float("nan")])
def test_any_number_can_be_a_growth(growth):
    assert chosen(threshold=0.0, rank_growth=lambda error: growth) == 8
    assert chosen(threshold=0.0, rank_growth=lambda error: float(growth) + 0 * error) == 8


@pytest.mark.parametrize(
    ("growth", "given"), [(jnp.ones(3), r"float32\[3\]"), ("many", "'many'"), (1j, "complex64")]
)
def test_a_growth_that_is_no_number_is_named(growth, given):
    with pytest.raises(ValueError, match=f"rank_growth gave {given}.*; allowed: one real number"):
        chosen(rank_growth=lambda error: growth)
