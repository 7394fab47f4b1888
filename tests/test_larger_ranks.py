"""Ranks beyond the first size: for the leaves that need them, by code that leaves share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax

SHAPE, CAPACITY = (40, 56), 36  # sizes of the rank: 16 and 40


def by_two(error):
    return 2


def optimizer(**changes):
    settings = dict(
        initial_rank=1,
        max_rank=CAPACITY,
        rank_interval=2,
        rank_growth=by_two,
        rank_margin=0,
        min_dim_size_to_factor=1,
        b2=0.5,
        error_threshold=0.05,
    )
    return adapprox_jax.scale_by_adapprox(**settings | changes)


def of_rank(rank, seed, step=0, shape=SHAPE):
    """A gradient whose magnitude has this rank, and so has the root of averages of its squares."""
    rng = np.random.default_rng(seed)
    magnitude = rng.random((shape[0], rank)) ** 4 @ rng.random((rank, shape[1])) ** 4
    signs = np.random.default_rng(step).choice([-1, 1], shape)
    return (signs * magnitude).astype(np.float32)


def steps(gradients, **changes):
    tx = optimizer(**changes)
    state = tx.init(jax.tree.map(np.zeros_like, gradients[0]))
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(gradient, state)
    return updates, state


def three_kinds(step):
    """Leaves of one kind of which some need larger ranks, a stack that does in part, another."""
    return {
        "low": of_rank(3, 0, step),
        "high": of_rank(34, 1, step),
        "low again": of_rank(2, 2, step),
        "high again": of_rank(34, 3, step),
        "stack": np.stack([of_rank(2, 4, step), of_rank(34, 5, step)]),
        "other way": of_rank(34, 6, step, SHAPE[::-1]),
    }


@pytest.fixture(scope="module")
def together():
    return steps([three_kinds(step) for step in range(3)])


def test_each_leaf_has_the_rank_that_it_needs(together):
    _, state = together
    first = 16
    for name in ("low", "low again"):
        assert int(state.rank[name]) <= first
        assert not np.any(state.q[name][:, first:])
    for name in ("high", "high again", "other way"):
        assert first < int(state.rank[name]) <= CAPACITY
        assert np.any(state.u[name][:, first:])
    assert int(state.rank["stack"][0]) <= first < int(state.rank["stack"][1])
    for leaf in jax.tree.leaves(state.error):
        assert np.all(leaf <= 0.05)


@pytest.mark.parametrize("name", ["low", "high again", "stack", "other way"])
def test_leaves_are_worked_on_together_as_each_by_itself(together, name):
    updates, state = together
    alone = steps([{name: three_kinds(step)[name]} for step in range(3)])
    np.testing.assert_array_equal(state.rank[name], alone[1].rank[name])
    for field in ("error", "drift"):
        expected = np.asarray(getattr(alone[1], field)[name])
        np.testing.assert_allclose(getattr(state, field)[name], expected, rtol=1e-3, atol=1e-6)
    # Kernels of another shape round otherwise, in products of 56 numbers at most.
    largest = np.max(np.abs(alone[0][name]))
    np.testing.assert_allclose(updates[name], alone[0][name], atol=1e-4 * largest)
    products = [np.asarray(s.q[name]) @ np.swapaxes(s.u[name], -2, -1) for s in (state, alone[1])]
    np.testing.assert_allclose(*products, atol=1e-4 * np.max(np.abs(products[1])))


def test_a_rank_that_falls_leaves_zeros():
    """Where no matrix needs a larger size any more, but one had it."""
    _, state = steps([of_rank(34, 0)])
    assert int(state.rank) > 16
    _, state = steps([of_rank(34, 0), *(of_rank(1, 1),) * 12], b2=0.01)
    rank = int(state.rank)
    assert rank <= 16
    assert np.any(state.q[:, :rank])
    assert not np.any(state.q[:, rank:])
    assert not np.any(state.u[:, rank:])


def test_code_for_larger_ranks_does_not_grow_with_the_leaves():
    """Decompositions: one a leaf at the first size, one at the second."""
    counts = []
    for leaves in (2, 4):
        tx = optimizer()
        params = {str(i): jnp.zeros(SHAPE) for i in range(leaves)}
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state).compile().as_text()
        counts.append(text.count('custom_call_target="lapack_sgesdd_ffi"'))
    assert counts == [2 + 1, 4 + 1]
