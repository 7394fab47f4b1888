"""Factor buffers of other widths between steps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax import grow, rank_report, resize

PARAMS = {
    "kernel": np.ones((96, 128), np.float32),
    "bias": np.ones(5, np.float32),
    "stack": np.ones((2, 64, 80), np.float32),
}
ADAPTIVE = dict(
    initial_rank=1, max_rank=16, error_threshold=0.2, rank_interval=3, rank_growth=lambda error: 2
)
FIXED = dict(max_rank=4)


def gradients(t):
    """Of ranks 3 in magnitude, with random signs."""
    rng = np.random.default_rng(t)

    def make(p):
        if p.ndim < 2:
            return rng.normal(size=p.shape)
        rows = np.exp(2 * rng.normal(size=(*p.shape[:-1], 3)))
        columns = np.exp(2 * rng.normal(size=(*p.shape[:-2], 3, p.shape[-1])))
        return rows @ columns * rng.choice([-1, 1], p.shape)

    return {name: make(p).astype(np.float32) for name, p in PARAMS.items()}


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@functools.cache  # compiled once for all tests
def trained(kind):
    tx = adapprox_jax.adapprox(1e-2, **{"adaptive": ADAPTIVE, "fixed": FIXED}[kind])
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for t in range(7):
        _, state = update(gradients(t), state, PARAMS)
    return update, state


def capacities(state, params=PARAMS):
    return {name: info.capacity for name, info in rank_report(state, params).items()}


def test_wider_buffers_change_nothing_in_the_next_updates():
    update, state = trained("adaptive")
    wide = resize(state, 24)
    assert set(capacities(wide).values()) == {24}
    for t in range(7, 10):
        expected, state = update(gradients(t), state, PARAMS)
        actual, wide = update(gradients(t), wide, PARAMS)
        if t == 7:
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
        assert_close(actual, expected)  # the next factors come from code for other widths
        for name, info in rank_report(state, PARAMS).items():
            np.testing.assert_array_equal(info.rank, rank_report(wide, PARAMS)[name].rank)


def test_a_fraction_is_of_the_shorter_side_also_of_abstract_states():
    state = jax.eval_shape(adapprox_jax.scale_by_adapprox().init, PARAMS)
    wide = resize(state, 0.5)
    assert (wide.q["kernel"].shape, wide.u["kernel"].shape) == ((96, 48), (128, 48))
    assert wide.u["stack"].shape == (2, 80, 32)
    # The factors stay smaller than the 96 x 128 numbers that they stand for.
    assert resize(state, 96).q["kernel"].shape == (96, 54)


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_fixed_rank_follows_its_buffers_and_uses_new_columns_at_once(accelerator, request):
    update, state = trained("fixed")
    expected, _ = update(gradients(7), state, PARAMS)
    if accelerator:
        request.getfixturevalue("in_phases")()
    tx = adapprox_jax.adapprox(1e-2, max_rank=12)
    actual, wide = jax.jit(tx.update)(gradients(7), resize(state, 12), PARAMS)
    for name, other in {} if accelerator else expected.items():
        # More columns of zeros in a product may change the order in which it is added up.
        rounding = 12 * np.finfo(np.float32).eps * np.max(np.abs(other))
        np.testing.assert_allclose(actual[name], other, rtol=0, atol=rounding)
    for name in ("kernel", "stack"):
        np.testing.assert_allclose(np.linalg.norm(wide[0].q[name], axis=-2), 1, atol=1e-3)
        assert np.all(np.linalg.norm(wide[0].u[name], axis=-2) > 0)
    assert {int(np.max(info.rank)) for info in rank_report(wide, PARAMS).values()} == {12}


def test_dropping_empty_columns_changes_nothing():
    update, state = trained("adaptive")
    used = {name: int(np.max(info.rank)) for name, info in rank_report(state, PARAMS).items()}
    assert max(used.values()) < 16
    narrow = resize(state, used)
    assert capacities(narrow) == used
    expected, _ = update(gradients(8), state, PARAMS)
    actual, _ = update(gradients(8), narrow, PARAMS)
    assert_close(actual, expected)
    back = resize(narrow, 16)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert jax.tree.map(jax.typeof, back) == jax.tree.map(jax.typeof, state)  # no other program


def test_columns_in_use_are_not_dropped_unasked():
    _, state = trained("fixed")
    message = (
        r"\['kernel'\]: 4 columns are in use, 2 were asked for, and [\d.]+% of the norm would be"
        " lost; allowed: at least 4, or truncate=True"
    )
    with pytest.raises(ValueError, match=message):
        resize(state, 2)


@pytest.mark.parametrize("approximate", ["root", "moment"])
def test_truncation_reports_what_is_lost(approximate):
    """The error is the true one, as if the smaller rank had been chosen."""
    tx = adapprox_jax.scale_by_adapprox(
        initial_rank=12, max_rank=16, rank_interval=1, error_threshold=1.0, approximate=approximate
    )
    params = {"kernel": PARAMS["kernel"]}
    rng = np.random.default_rng(5)
    grads = {"kernel": rng.normal(size=(96, 128)).astype(np.float32)}
    _, state = jax.jit(tx.update)(grads, tx.init(params))
    cut = resize(state, 5, truncate=True)
    target = 0.001 * grads["kernel"] ** 2
    target = np.sqrt(target) if approximate == "root" else target
    left = np.linalg.norm(target - np.asarray(cut.q["kernel"]) @ np.asarray(cut.u["kernel"]).T)
    np.testing.assert_allclose(cut.error[0], left / np.linalg.norm(target), rtol=1e-3)
    assert int(cut.rank[0]) == 5
    assert float(cut.drift[0]) >= float(left) * 0.999
    # A bound of distances: they add up, even where they are orthogonal.
    lost = np.linalg.norm(np.asarray(state.u["kernel"])[:, 5:])
    np.testing.assert_allclose(cut.drift[0], state.drift[0] + lost, rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (0, "max_rank is 0; allowed: an integer of at least 1, or a float in (0, 1]"),
        ({"['stack']": jnp.array(8)}, "max_rank[\"['stack']\"] is an array of JAX; allowed: a Py"),
        ({"kernel": 4}, "max_rank has 'kernel'; allowed: \"['kernel']\", \"['stack']\"."),
        ({"['bias']": 4}, "max_rank has \"['bias']\"; allowed"),
    ],
)
def test_bad_widths_are_named(width, message):
    _, state = trained("adaptive")
    with pytest.raises(ValueError, match=re.escape(message)):
        resize(state, width)


def test_a_state_without_factors_is_an_error():
    with pytest.raises(ValueError, match="opt_state holds no factored leaf of Adapprox"):
        resize(optax.adamw(1e-3).init(PARAMS), 4)


def test_a_full_leaf_is_reported():
    _, state = trained("fixed")
    info = rank_report(state, PARAMS)["['kernel']"]
    assert info.is_full()
    assert info.is_full(info.error / 2)
    assert not info.is_full(1.0)
    assert not rank_report(resize(state, 5), PARAMS)["['kernel']"].is_full()


def test_growth_goes_one_size_at_a_time_for_all_that_are_full():
    """So that a run compiles its step once for each size."""
    tx = adapprox_jax.scale_by_adapprox(initial_rank=4, max_rank=4)
    params = {"kernel": jnp.ones((96, 128)), "other": jnp.ones((64, 80))}
    state, widths = tx.init(params), [4, 4]
    for is_full, expected in (((1, 0), [8, 4]), ((1, 1), [16, 16]), ((1, 1), [16, 16])):
        ranks = [width if full else 1 for full, width in zip(is_full, widths, strict=True)]
        state = state._replace(rank=tuple(map(jnp.int32, ranks)))
        assert grow(state, params, (4, 8, 16), error_threshold=0.1) is state  # of small errors
        state = grow(state, params, (4, 8, 16))
        widths = list(capacities(state, params).values())
        assert widths == expected
    with pytest.raises(
        ValueError, match=r"sizes\[1\] is an array of JAX; allowed: a Python number"
    ):
        grow(state, params, (4, jnp.array(8)))
