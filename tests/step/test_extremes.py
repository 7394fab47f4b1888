"""Gradients that grow by many orders of magnitude, and subspaces that begin late."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax

RNG = np.random.default_rng(0)
SCALES = np.exp(RNG.normal(size=(24, 1)) + RNG.normal(size=(1, 40))).astype(np.float32)


def gradient(seed):
    return np.random.default_rng(seed).normal(size=(24, 40)).astype(np.float32) * SCALES


@functools.cache
def compiled(**settings):
    """The first state, and the update of gradients, a state and b2."""

    def transformation(b2):
        return adapprox_jax.scale_by_adapprox(b2, **{"min_dim_size_to_factor": 1, **settings})

    update = jax.jit(lambda grads, state, b2: transformation(b2).update(grads, state))
    return transformation(0.9).init(np.zeros((24, 40), np.float32)), update


@pytest.mark.parametrize("growth", [1e8, 1e10, 1e11, 1e15])
@pytest.mark.parametrize(
    "settings",
    [
        dict(approximate="moment", max_rank=4),
        dict(approximate="root", max_rank=4),
        pytest.param(adapprox_jax.PAPER, marks=pytest.mark.slow),
    ],
    ids=["moment", "root", "paper"],
)
def test_gradients_that_grow_leave_everything_finite(settings, growth):
    """And the second moment follows them: soon what was before does not matter."""
    state, update = compiled(**settings)
    for seed in range(12):
        size = growth if seed >= 6 else 1.0
        updates, state = update(gradient(seed) * np.float32(size), state, 0.9)
        for leaf in jax.tree.leaves((updates, state)):
            assert np.all(np.isfinite(np.asarray(leaf, np.float64)))
    # V is 1 - b2^6 of what it would be, had gradients always been so large.
    assert 0.3 < np.sqrt(np.mean(np.square(updates))) < 3


def test_a_dense_leaf_moves_again_after_a_gradient_whose_square_overflows():
    """Its second moment falls as Adam's would; from infinity it never would."""
    tx = adapprox_jax.scale_by_adapprox(b2=0.5)
    ones = np.ones(8, np.float32)
    state, update = tx.init(ones), jax.jit(tx.update)
    for size in (1.0, 1e20, *[1.0] * 140):
        updates, state = update(np.float32(size) * ones, state)
        assert np.all(np.isfinite(updates))
        assert np.all(np.isfinite(state.nu))
    np.testing.assert_allclose(updates, 1.0, rtol=1e-3)


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-30])
@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_updates_are_bounded_where_squares_are_out_of_range(approximate, eps, accelerator, request):
    """Of matrices and vectors, with zeros beside, and ones that are nothing beside the largest."""
    if accelerator:
        request.getfixturevalue("in_phases")()
    tx = adapprox_jax.scale_by_adapprox(approximate=approximate, eps=eps)
    update = jax.jit(tx.update)
    for largest in (1e-20, 1e9, 1e30):
        grads = {"matrix": np.ones((64, 80), np.float32), "vector": np.ones(9, np.float32)}
        for grad in grads.values():
            grad[0] = 0
            grad[1:2] = largest
        state = tx.init(grads)
        for _ in range(2):
            updates, state = update(grads, state)
            for name, scaled in updates.items():
                # Three operations on float32 round the bound.
                assert np.max(np.abs(scaled)) <= (1 + 2.0**-20) / np.sqrt(1e-3)
                assert np.all(np.asarray(scaled)[grads[name] == 0] == 0)


@pytest.mark.parametrize("accelerator", [False, True])
def test_one_huge_entry_leaves_later_updates_within_their_bound(accelerator, request):
    """No update exceeds that of its own gradient alone, g / sqrt((1 - b2) g^2)."""
    if accelerator:
        request.getfixturevalue("in_phases")()
    tx = adapprox_jax.scale_by_adapprox(b2=0.999, min_dim_size_to_factor=1)
    rng = np.random.default_rng(0)
    sizes = (1, 1, 1e-3, 1e-3)
    grads = [(size * rng.normal(size=(64, 96))).astype(np.float32) for size in sizes]
    grads[1][3, 5] = 1e16
    state, update = tx.init(grads[0]), jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state)
        assert np.max(np.abs(updates)) <= 1.001 / np.sqrt(0.001)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_dense_leaf_hides_no_gradient_that_is_not_finite(bad):
    tx = adapprox_jax.scale_by_adapprox()
    updates, _ = tx.update(jnp.asarray([1.0, bad]), tx.init(jnp.ones(2)))
    assert np.isfinite(updates[0])
    assert not np.isfinite(updates[1])


@pytest.mark.parametrize(
    ("approximate", "changes"),
    [
        ("root", {}),
        ("moment", {}),
        pytest.param("root", {"orthogonalization": "qr"}, marks=pytest.mark.slow),
        pytest.param("moment", {"orthogonalization": "qr"}, marks=pytest.mark.slow),
    ],
)
def test_a_block_of_gradients_that_begins_late_is_found(approximate, changes):
    """From the last factors alone, without oversampling: their span maps to itself.

    What begins late is larger than what was before, and would be seen by any random start.
    """
    late = np.zeros((24, 40), bool)
    late[12:, 20:] = True
    early = np.zeros((24, 40), bool)
    early[:12, :20] = True
    (state, update), exact = compiled(approximate=approximate, max_rank=4, **changes), 0.0
    ones = np.abs(RNG.normal(size=(24, 40))).astype(np.float32) + 1
    for t in range(400):
        grad = ones * (0.03 * early + late * (t >= 20))
        exact = 0.99 * exact + 0.01 * np.square(grad, dtype=np.float64)
        _, state = update(grad, state, 0.99)
    product = np.maximum(np.asarray(state.q) @ np.asarray(state.u, np.float64).T, 0)
    kept = product**2 if approximate == "root" else product
    assert 0.9 < np.median(kept[late] / exact[late]) < 1.1


def test_a_nan_in_one_leaf_stays_there():
    """Though every leaf waits for the one before it."""
    params = {name: np.zeros((24, 40), np.float32) for name in "abc"}
    tx = adapprox_jax.scale_by_adapprox(max_rank=4, min_dim_size_to_factor=1)
    grads = {name: gradient(i) for i, name in enumerate("abc")}
    update = jax.jit(tx.update)
    expected, expected_state = update(grads, tx.init(params))
    for bad in (jnp.nan, jnp.inf):
        spoiled = {**grads, "a": grads["a"].copy()}
        spoiled["a"][0, 0] = bad
        updates, state = update(spoiled, tx.init(params))
        assert np.any(np.isnan(updates["a"]))
        np.testing.assert_array_equal(state.q["a"], tx.init(params).q["a"])
        for name in "bc":
            np.testing.assert_array_equal(updates[name], expected[name])
            np.testing.assert_array_equal(state.q[name], expected_state.q[name])
            np.testing.assert_array_equal(state.u[name], expected_state.u[name])


@pytest.mark.parametrize(
    "optimizer",
    [
        adapprox_jax.adapprox,
        functools.partial(adapprox_jax.adapprox, approximate="moment"),
        adapprox_jax.adapprox_muon,
        functools.partial(adapprox_jax.adapprox_muon, second_moment=True),
    ],
    ids=["adapprox", "adapprox of V itself", "adapprox_muon", "adapprox_muon with factors"],
)
@pytest.mark.parametrize("accelerator", [False, True])
def test_updates_of_zero_gradients_and_of_gradients_up_to_1e36_are_finite(
    optimizer, accelerator, request
):
    """As long as none is much more than 1e18 times as large as all before it (`scale_of`).

    Of matrices with factors, and of vectors and small matrices without.
    """
    if accelerator:
        request.getfixturevalue("in_phases")()
    tx = optimizer(1e-2, max_rank=4, min_dim_size_to_factor=8)
    params = {"kernel": SCALES, "small": SCALES[:4, :4], "bias": SCALES[0]}
    update = jax.jit(tx.update)
    for sizes in ((0, 1e36, 0), (1, 1e18, 1e36), (1e22, 1, 1)):
        state = tx.init(params)
        for seed, size in enumerate(sizes):
            unit = gradient(seed) / np.max(np.abs(gradient(seed))) * np.float32(size)
            grads = {"kernel": unit, "small": unit[:4, :4], "bias": unit[0]}
            updates, state = update(grads, state, params)
            for leaf in jax.tree.leaves((updates, state)):
                assert np.all(np.isfinite(np.asarray(leaf, np.float64))), sizes


@pytest.mark.parametrize("way", ["CPU", pytest.param("accelerator", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(128, 50304), pytest.param((16384, 64), marks=pytest.mark.slow)])
@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_a_step_out_of_range_leaves_large_factors_as_they_were(approximate, shape, way, request):
    if way == "accelerator":
        request.getfixturevalue("in_phases")()
    tx = adapprox_jax.scale_by_adapprox(approximate=approximate)
    grads = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    state, update = tx.init(grads), jax.jit(tx.update)
    for size in (1.0, 1e34, 1e36, np.nan, 1.0):
        updates, state = update(grads * np.float32(size), state)
        assert np.isnan(size) or np.max(np.abs(updates)) <= 1.001 / np.sqrt(1 - 0.999)
        assert all(np.all(np.isfinite(x)) for x in (state.q, state.u, *state.error, *state.drift))


MISSED = {
    "default": {},
    "moment": dict(approximate="moment"),
    "qr": dict(orthogonalization="qr"),
    "adaptive": dict(initial_rank=1),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.slow] * (kind == "tpu" and name != "default"))
        for kind in ("cpu", "gpu", "tpu")
        for name in MISSED
    ],
)
def test_entries_that_the_last_factors_miss_are_followed(name, kind, in_phases):
    """Even where rows and columns of the new entry were zero before, and the buffers are full."""
    if kind != "cpu":
        in_phases(kind)
    tx = adapprox_jax.scale_by_adapprox(0.9, min_dim_size_to_factor=1, max_rank=2, **MISSED[name])
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
