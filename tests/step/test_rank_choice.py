"""Capacities, and the choice of the rank of one matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adapprox_jax.schedules import increasing_decay, sigmoid_growth
from adapprox_jax.settings import Settings, resolve_capacity
from adapprox_jax.step.rank_choice import choose_rank


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
    with pytest.raises(ValueError, match="exponent is 1; allowed: a number above 0 and below 1"):
        increasing_decay(1)


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


def chosen(threshold, rank_growth):
    """Of singular values 1, 0.5, 0.25, ... and nothing beyond."""
    energies = jnp.asarray(0.25 ** np.arange(8.0), jnp.float32)
    return int(choose_rank(energies, 0.0, 8, threshold, Settings(1, 12, 1, rank_growth)))


@pytest.mark.parametrize("growth", [3, 2.7, 1e30, 2**31, -5, float("nan")])
def test_any_number_can_be_a_growth(growth):
    assert chosen(0.0, lambda error: growth) == 8
    assert chosen(0.0, lambda error: float(growth) + 0 * error) == 8


@pytest.mark.parametrize(
    ("growth", "given"), [(jnp.ones(3), r"float32\[3\]"), ("many", "'many'"), (1j, "complex64")]
)
def test_a_growth_that_is_no_number_is_named(growth, given):
    with pytest.raises(ValueError, match=f"rank_growth gave {given}.*; allowed: one real number"):
        chosen(0.1, lambda error: growth)
