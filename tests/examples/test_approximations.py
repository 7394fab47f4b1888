"""What approximations of a second moment are worth: the moment kept whole and approximated."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.opponents.approximations import (
    KINDS,
    approximate_moment,
    scale_by_approximated_moment,
)


def moments(shape=(24, 40), seed=0):
    """Positive matrices over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    rows, columns = np.exp(rng.normal(size=shape[0])), np.exp(rng.normal(size=shape[1]))
    return jnp.asarray(np.outer(rows, columns) * rng.exponential(size=shape), jnp.float32)


@pytest.mark.parametrize("kind", ["moment", "root", "fourth-root"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_it_is_the_truncated_decomposition_of_the_target(kind, shape):
    moment = moments(shape)
    power = {"moment": 1, "root": 2, "fourth-root": 4}[kind]
    target = np.asarray(moment, np.float64) ** (1 / power)
    left, values, right = np.linalg.svd(target, full_matrices=False)
    expected = np.maximum((left[:, :5] * values[:5]) @ right[:5], 0) ** power
    # float32 Gram matrices: 1e-7 of the largest entry, and the power multiplies it.
    found = approximate_moment(moment, KINDS[kind], 5)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.max())


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_full_rank_nothing_is_lost(kind):
    # No entry is small enough beside its row and column to be cut off.
    moment = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (24, 40)), jnp.float32)
    rank = min(moment.shape) + KINDS[kind].whitened
    found = approximate_moment(moment, KINDS[kind], rank)
    np.testing.assert_allclose(found, moment, rtol=1e-4)


@pytest.mark.parametrize("kind", ["whitened-moment", "whitened-root"])
def test_means_of_rows_and_columns_count_as_one_rank(kind):
    rows, columns = np.exp(np.linspace(-3, 3, 24)), np.exp(np.linspace(2, -2, 40))
    moment = jnp.asarray(np.outer(rows, columns), jnp.float32)
    found = approximate_moment(moment, KINDS[kind], 2)
    np.testing.assert_allclose(found, moment, rtol=1e-4)
    assert not np.any(approximate_moment(jnp.zeros((24, 40)), KINDS[kind], 2))


def test_the_first_update_is_by_the_exact_moment_and_small_leaves_stay_exact():
    tx = scale_by_approximated_moment(0.75, 0.0, "root", 1, 16)
    grads = {"matrix": jnp.sqrt(moments()), "small": jnp.arange(1.0, 13).reshape(3, 4)}
    state = tx.init(grads)
    updates, state = tx.update(grads, state)
    np.testing.assert_allclose(updates["matrix"], 2.0, rtol=1e-6)  # 1 / sqrt(1 - 0.75)
    np.testing.assert_allclose(state.nu["small"], grads["small"] ** 2 / 4, rtol=1e-6)
    assert np.linalg.matrix_rank(np.sqrt(state.nu["matrix"]), tol=1e-3) == 1


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [
        ("cube", 8, "approximate is 'cube'; allowed: moment, root"),
        ("root", 0, "max_rank is 0; allowed: an integer of at least 1"),
        ("whitened-root", 1, "max_rank is 1; allowed: an integer of at least 2"),
    ],
)
def test_what_cannot_be_asked_for_is_named(kind, rank, words):
    with pytest.raises(ValueError, match=words):
        scale_by_approximated_moment(0.9, 1e-8, kind, rank, 64)
