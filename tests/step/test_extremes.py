"""Gradients that grow by many orders of magnitude, and subspaces that begin late."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from tests.common import run
from tests.step.second_moments import beside_exact
from tests.step.test_numbers import gradient

SETTINGS = {
    "default": {},
    "moment": dict(approximate="moment"),
    "qr": dict(orthogonalization="qr"),
    "adaptive": dict(initial_rank=1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_updates_do_not_depend_on_the_magnitude_of_gradients(name, way):
    """Without eps, where squares do not vanish, and of powers of two, which round nothing."""
    tx = adapprox_jax.scale_by_adapprox(
        eps=1e-30, max_rank=4, min_dim_size_to_factor=1, **SETTINGS[name]
    )
    grads = [gradient(seed) for seed in range(6)]
    expected, _ = run(tx, grads)
    for exponent in (-66, -40, 50):
        updates, _ = run(tx, [grad * 2.0**exponent for grad in grads])
        assert np.all(np.isfinite(updates))
        if exponent > -66 or name != "moment":  # 2^-132 is no normal float32
            np.testing.assert_allclose(updates[-1], expected[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("approximate", ["moment", "root"])
def test_gradients_that_grow_leave_everything_finite(approximate):
    """And the second moment follows them: soon what was before does not matter."""
    tx = adapprox_jax.scale_by_adapprox(
        0.9, approximate=approximate, max_rank=4, min_dim_size_to_factor=1
    )
    for growth in (1e8, 1e10, 1e11, 1e15):
        sizes = np.float32([1] * 6 + [growth] * 6)
        updates, state = run(tx, [size * gradient(seed) for seed, size in enumerate(sizes)])
        chex.assert_tree_all_finite((updates, state))
        # V is 1 - b2^6 of what it would be, had gradients always been so large.
        assert 0.3 < np.sqrt(np.mean(np.square(updates[-1]))) < 3


def test_a_dense_leaf_moves_again_after_a_gradient_whose_square_overflows():
    """Its second moment falls as Adam's would; from infinity it never would."""
    grads = [np.full(8, size, np.float32) for size in (1.0, 1e20, *[1.0] * 140)]
    updates, _ = run(adapprox_jax.scale_by_adapprox(b2=0.5), grads)
    assert np.all(np.isfinite(updates))
    np.testing.assert_allclose(updates[-1], 1.0, rtol=1e-3)


@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_updates_are_bounded_where_squares_are_out_of_range(approximate, way):
    """Of matrices and vectors, with zeros beside, and ones that are nothing beside the largest."""

    def transformation(eps):
        return adapprox_jax.scale_by_adapprox(approximate=approximate, eps=eps)

    update = jax.jit(lambda grads, state, eps: transformation(eps).update(grads, state))
    for largest, eps in itertools.product((1e-20, 1e9, 1e30), (1e-8, 1e-30)):
        grads = {"matrix": np.ones((64, 80), np.float32), "vector": np.ones(9, np.float32)}
        for grad in grads.values():
            grad[0] = 0
            grad[1:2] = largest
        state = transformation(eps).init(grads)
        for _ in range(2):
            updates, state = update(grads, state, eps)
            for name, scaled in updates.items():
                # Three operations on float32 round the bound.
                assert np.max(np.abs(scaled)) <= (1 + 2.0**-20) / np.sqrt(1e-3)
                assert np.all(np.asarray(scaled)[grads[name] == 0] == 0)


def test_one_huge_entry_leaves_later_updates_within_their_bound(way):
    """No update exceeds that of its own gradient alone, g / sqrt((1 - b2) g^2)."""
    rng = np.random.default_rng(0)
    sizes = (1, 1, 1e-3, 1e-3)
    grads = [(size * rng.normal(size=(64, 96))).astype(np.float32) for size in sizes]
    grads[1][3, 5] = 1e16
    updates, _ = run(adapprox_jax.scale_by_adapprox(b2=0.999), grads)
    assert np.max(np.abs(updates)) <= 1.001 / np.sqrt(0.001)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_dense_leaf_hides_no_gradient_that_is_not_finite(bad):
    tx = adapprox_jax.scale_by_adapprox()
    updates, _ = tx.update(jnp.asarray([1.0, bad]), tx.init(jnp.ones(2)))
    assert np.isfinite(updates[0])
    assert not np.isfinite(updates[1])


@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_a_block_of_gradients_that_begins_late_is_found(approximate):
    """From the last factors alone, without oversampling: their span maps to itself.

    What begins late is larger than what was before, and would be seen by any random start.
    """
    late = np.zeros((24, 40), bool)
    late[12:, 20:] = True
    early = late[::-1, ::-1]
    sizes = np.abs(np.random.default_rng(0).normal(size=(24, 40))).astype(np.float32) + 1
    tx = adapprox_jax.scale_by_adapprox(
        0.99, approximate=approximate, max_rank=4, min_dim_size_to_factor=1
    )

    def gradient_at(t):
        return sizes * (0.03 * early + late * (t >= 20))

    ((_, kept, exact),) = beside_exact(tx, gradient_at, 400, every=400, b2=0.99)
    kept = kept**2 if approximate == "root" else kept
    assert 0.9 < np.median(kept[late] / exact[late]) < 1.1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_leaf_that_is_not_finite_spoils_no_other(bad, way):
    """Though each waits for the one before it, or what is small is one array for all of them."""
    tx = adapprox_jax.scale_by_adapprox(
        initial_rank=1, max_rank=4, rank_interval=2, min_dim_size_to_factor=1
    )
    grads = [{name: gradient(10 * t + i) for i, name in enumerate("abc")} for t in range(3)]
    expected, expected_state = run(tx, grads)
    grads[0]["a"] = grads[0]["a"].copy()
    grads[0]["a"][0, 0] = bad
    _, first = run(tx, grads[:1])
    np.testing.assert_array_equal(first.q["a"], tx.init(grads[0]).q["a"])
    updates, state = run(tx, grads)
    assert np.any(np.isnan(updates[0]["a"]))
    for name in "bc":
        np.testing.assert_array_equal(updates[-1][name], expected[-1][name])
        np.testing.assert_array_equal(state.q[name], expected_state.q[name])
        np.testing.assert_array_equal(state.u[name], expected_state.u[name])
    np.testing.assert_array_equal(state.drift[1:], expected_state.drift[1:])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("adapprox", settings) for settings in ({}, dict(approximate="moment"))),
        *(("adapprox_muon", settings) for settings in ({}, dict(second_moment=True))),
    ],
)
def test_updates_of_zero_gradients_and_of_gradients_up_to_1e36_are_finite(name, settings, way):
    """As long as none is much more than 1e18 times as large as all before it (`scale_of`).

    Of matrices with factors, and of vectors and small matrices without.
    """
    tx = getattr(adapprox_jax, name)(1e-2, max_rank=4, min_dim_size_to_factor=8, **settings)
    for sizes in ((0, 1e36, 0), (1, 1e18, 1e36), (1e22, 1, 1)):
        state = None
        for seed, size in enumerate(sizes):
            unit = gradient(seed) / np.max(np.abs(gradient(seed))) * np.float32(size)
            grads = {"kernel": unit, "small": unit[:4, :4], "bias": unit[0]}
            updates, state = run(tx, [grads], state=state)
            chex.assert_tree_all_finite((updates, state))


@pytest.mark.parametrize(
    "way", ["CPU", pytest.param("accelerator", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_a_step_out_of_range_leaves_large_factors_as_they_were(approximate, way):
    tx = adapprox_jax.scale_by_adapprox(approximate=approximate)
    grads = np.random.default_rng(0).normal(size=(128, 50304)).astype(np.float32)
    state, update = tx.init(grads), jax.jit(tx.update)
    for size in (1.0, 1e34, 1e36, np.nan, 1.0):
        updates, state = update(grads * np.float32(size), state)
        assert np.isnan(size) or np.max(np.abs(updates)) <= 1.001 / np.sqrt(1 - 0.999)
        assert all(np.all(np.isfinite(x)) for x in (state.q, state.u, *state.error, *state.drift))


@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(("cpu", "gpu"), SETTINGS), ("tpu", "default")],
)
def test_entries_that_the_last_factors_miss_are_followed(name, kind, in_phases):
    """Even where rows and columns of the new entry were zero before, and the buffers are full."""
    if kind != "cpu":
        in_phases(kind)
    tx = adapprox_jax.scale_by_adapprox(0.9, min_dim_size_to_factor=1, max_rank=2, **SETTINGS[name])
    before, after = np.zeros((2, 5, 9), np.float32)
    before[1, 2] = before[2, 3] = 1e-6
    after[3, 4] = 1e-6
    first, update = tx.init(before), jax.jit(tx.update)
    _, first = update(before, first)
    # With 1e22 squares of what is missed are infinite, in units of what the factors hold.
    for growth in (2, 1e4, 1e22):
        state = first
        for _ in range(40):
            updates, state = update(np.float32(growth) * after, state)
        # V is 1 - b2^40 of what it would be, had the entry always been so large; seen 20 steps
        # late, twice as late as it is, 1 - b2^20.
        assert updates[3, 4] <= (1 - 0.9**20) ** -0.5
        assert state.error[0] <= 0.01
