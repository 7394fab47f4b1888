"""The nine places where the paper cannot be followed, in the order of docs/algorithm.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests import common
from tests.step.second_moments import beside_exact

KEY = jax.random.key(0)
srsi = jax.jit(
    adapprox_jax.srsi,
    static_argnames=("rank", "power_iterations", "oversampling", "rotate", "orthogonalization"),
)


def lognormal(shape, seed=0, scale=1.0):
    return np.exp(scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def gradients(shape, steps, seed=0):
    """Independent gradients with fixed log-normal sizes."""
    rng = np.random.default_rng(seed)
    sizes = lognormal(shape, seed + 1)
    return [(rng.normal(size=shape) * sizes).astype(np.float32) for _ in range(steps)]


def run(tx, grads, params=None):
    params = jax.tree.map(np.zeros_like, grads[0]) if params is None else params
    state, update = tx.init(params), tx.update
    for grad in grads:
        updates, state = update(grad, state, params)
        yield updates, state


NUMBERS = {"b2": 0.999, "eps": 1e-8, "error_threshold": 0.01}


def small(**settings):
    """The transformation, of which one compiled program serves all tests that differ in numbers."""
    numbers = {name: settings.pop(name, default) for name, default in NUMBERS.items()}
    init, update = compiled(**{"approximate": "root", **settings})
    return optax.GradientTransformation(
        init, lambda grads, state, params=None: update(grads, state, numbers)
    )


@functools.cache
def compiled(**settings):
    def with_numbers(numbers):
        return adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings, **numbers)

    update = jax.jit(lambda grads, state, numbers: with_numbers(numbers).update(grads, state))
    return with_numbers(NUMBERS).init, update


# 1. f is negative as printed.


def test_1_growth_rises_from_6_to_190():
    f = adapprox_jax.sigmoid_growth()
    assert [int(f(xi)) for xi in (0.0, 0.01, 0.5, 1.0)] == [6, 7, 175, 190]
    values = [int(f(xi)) for xi in np.linspace(0, 1, 101)]
    assert values == sorted(values)


def test_1_growth_is_never_negative():
    assert int(adapprox_jax.sigmoid_growth(tau=-1000.0)(0.5)) == 0


# 2. The loop never stops at k_max, raises k after the last factorization, and skips Delta s = 1.


def test_2_factors_hold_as_many_columns_as_the_rank_says():
    tx = small(initial_rank=1, max_rank=10, error_threshold=0.2, rank_growth=lambda xi: 2)
    ranks = set()
    for _, state in run(tx, gradients((24, 40), 25)):
        rank = int(state.rank[0])
        ranks.add(rank)
        assert np.count_nonzero(np.any(np.asarray(state.q), axis=0)) == rank
        assert np.count_nonzero(np.any(np.asarray(state.u), axis=0)) == rank
    assert len(ranks) > 1


# 3. Q U^T has entries below zero.


@pytest.mark.parametrize("approximate", ["moment", "root"])
def test_3_low_rank_products_go_below_zero_and_are_cut_off(approximate):
    """Of the root, too, where an entry below zero would be squared to one above."""
    q, u = srsi(lognormal((24, 40), scale=2.0), 4, KEY)
    product = np.asarray(q, np.float64) @ np.asarray(u, np.float64).T
    assert product.min() < 0
    tx = small(max_rank=4, b2=0.5, approximate=approximate)
    (grad,) = gradients((24, 40), 1)
    updates, _ = tx.update(grad, tx.init(grad)._replace(q=q, u=u))
    kept = np.maximum(product, 0) ** (2 if approximate == "root" else 1)
    expected = grad / np.sqrt(0.5 * kept + 0.5 * grad.astype(np.float64) ** 2)
    np.testing.assert_allclose(updates, expected, rtol=1e-4)


# 4. The guidance divides by eps at the first step.


def test_4_first_guided_update_is_capped_and_the_average_is_stored_plain():
    update = jnp.asarray(lognormal((8, 8)))
    tx = adapprox_jax.guided_ema(0.9, cosine_guidance=True, max_scale=3.0)
    emitted, state = tx.update(update, tx.init(update))
    np.testing.assert_allclose(emitted, 3 * 0.1 * update, rtol=1e-5)
    np.testing.assert_allclose(state.mu, 0.1 * update, rtol=1e-5)


def test_4_rounding_cannot_turn_the_guidance_negative():
    tx = adapprox_jax.guided_ema(0.9, cosine_guidance=True, eps=0.0, max_scale=10.0)
    for seed in range(50):  # cosines of parallel vectors, some above 1 in float32
        update = jnp.asarray(lognormal((37,), seed))
        emitted, _ = tx.update(update, tx.init(update))
        np.testing.assert_allclose(emitted, update, rtol=1e-5)  # 0.1 times the cap of 10


# 5. There is no bias correction.


def test_5_first_update_is_thirty_times_too_large_without_correction():
    (grad,) = gradients((24, 40), 1)
    for settings, size in (({}, 1 / np.sqrt(1 - 0.999)), ({"bias_correction": True}, 1.0)):
        updates, _ = next(run(small(max_rank=4, **settings), [grad]))
        np.testing.assert_allclose(np.abs(updates), size, rtol=1e-3)


# 6. Zero gradients, and gradients whose squares overflow or vanish.


def test_6_guidance_is_one_where_nothing_moves():
    tx = adapprox_jax.guided_ema(0.9, cosine_guidance=True, max_scale=3.0)
    state = tx.init(jnp.ones(4))._replace(mu=jnp.ones(4))
    emitted, _ = tx.update(jnp.zeros(4), state)
    np.testing.assert_allclose(emitted, 0.9, rtol=1e-6)


# 7. Oversampling as printed does nothing.


def test_7_printed_oversampling_changes_nothing():
    matrix = lognormal((40, 60))
    plain, more = (
        [np.asarray(x) for x in srsi(matrix, 6, KEY, oversampling=columns, rotate=False)]
        for columns in (0, 5)
    )
    np.testing.assert_allclose(plain[0] @ plain[1].T, more[0] @ more[1].T, atol=1e-4)


def test_7_oversampling_with_rotation_lowers_the_error():
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(64, 64)))[0] for _ in range(2))
    matrix = (left * 0.9 ** np.arange(64) @ right.T).astype(np.float32)
    optimum = np.linalg.norm(0.9 ** np.arange(8, 64))

    def mean_error(rotate):
        errors = []
        settings = dict(rank=8, power_iterations=1, rotate=rotate)
        factor = jax.jit(lambda key: adapprox_jax.srsi(matrix, key=key, **settings))
        for seed in range(20):
            q, u = map(np.asarray, factor(jax.random.key(seed)))
            errors.append(np.linalg.norm(matrix - q @ u.T) / optimum)
        return np.mean(errors)

    assert mean_error(rotate=False) > 1.4
    assert mean_error(rotate=True) < 1.25


# 8. xi sees one step only.


ADAPTIVE = dict(
    approximate="moment", initial_rank=1, max_rank=8, error_threshold=1e-3, rank_interval=1
)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (dict(approximate="moment", max_rank=4), 1000),
        (dict(approximate="root", max_rank=4), 1000),
        pytest.param(dict(approximate="root", max_rank=4), 100_000, marks=pytest.mark.slow),
        pytest.param(ADAPTIVE, 100_000, marks=pytest.mark.slow),
    ],
)
def test_8_drift_bounds_the_distance_that_the_error_does_not_see(settings, steps):
    """Beside the exact second moment; also that the bound is of use."""
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings)
    is_long, is_root = steps > 1000, settings["approximate"] == "root"
    sizes = lognormal((24, 32) if is_long else (64, 64))

    def gradient_at(t):
        # In a long run the sizes turn slowly, so that the factors have something to follow.
        turned = jnp.roll(sizes, t // 5000, axis=0)
        return turned * jax.random.normal(jax.random.fold_in(KEY, t), sizes.shape)

    for i, (state, kept, exact) in enumerate(beside_exact(tx, gradient_at, steps)):
        target = np.sqrt(exact) if is_root else exact
        distance = np.linalg.norm(kept - target)
        assert distance <= 1.001 * float(state.drift[0])
        assert 1 <= int(state.rank[0]) <= settings["max_rank"]
        if is_long and 50 * i >= steps / 2:
            assert distance <= 0.7 * np.linalg.norm(target)  # it is a second moment still
    relative = distance / np.linalg.norm(target)
    if not is_long:
        assert float(state.error[0]) < 0.01 < 0.2 < relative
        product = np.asarray(state.q, np.float64) @ np.asarray(state.u, np.float64).T
        drift = float(state.drift[0]) / np.linalg.norm(product)
        assert drift < (6 if is_root else 4) * relative


@pytest.mark.parametrize(
    ("approximate", "settings"),
    [
        ("root", dict(max_rank=4)),
        ("moment", dict(initial_rank=3, max_rank=12)),
    ],
)
def test_8_one_step_adds_what_it_left_out_to_what_remains_of_the_drift(approximate, settings):
    """D_t = decay D_(t-1) + ||target - q u^T||, exactly where the error is measured."""
    with jax.enable_x64(True):
        tx = small(
            b2=0.7, rank_interval=1, approximate=approximate, error_threshold=1.0, **settings
        )
        *_, (_, state) = run(tx, [g.astype(np.float64) for g in gradients((24, 40), 3)])
        state = state._replace(drift=(jnp.asarray(7.0, jnp.float32),))
        previous = np.maximum(np.asarray(state.q) @ np.asarray(state.u).T, 0)
        grad = gradients((24, 40), 4)[3].astype(np.float64)
        _, state = tx.update(grad, state)
        if approximate == "root":
            target, decay = np.sqrt(0.7 * previous**2 + 0.3 * grad**2), np.sqrt(0.7)
        else:
            target, decay = 0.7 * previous + 0.3 * grad**2, 0.7
        left_out = np.linalg.norm(target - np.asarray(state.q) @ np.asarray(state.u).T)
        assert int(state.rank[0]) < 12  # fewer columns than were worked on
        np.testing.assert_allclose(state.drift[0], decay * 7 + left_out, rtol=1e-5)


def test_8_reported_drift_is_relative():
    params = {"w": np.zeros((64, 64), np.float32)}
    tx = small(max_rank=4)
    *_, (_, state) = run(tx, [{"w": grad} for grad in gradients((64, 64), 20)], params)
    info = adapprox_jax.rank_report(state, params)["['w']"]
    norm = np.linalg.norm(np.asarray(state.q["w"]) @ np.asarray(state.u["w"]).T)
    np.testing.assert_allclose(info.drift, state.drift[0] / norm, rtol=1e-4)
    assert info.drift > info.error


@pytest.mark.parametrize(("small_part", "dtype"), [(1e-4, None), (1e-2, jnp.bfloat16)])
def test_8_error_in_the_state_is_that_of_its_own_factors(small_part, dtype):
    """To 1 percent, of a second moment that is rank 4 and a small rest."""
    rng = np.random.default_rng(0)
    moment = np.exp(rng.normal(size=(24, 4))) @ np.exp(rng.normal(size=(4, 40)))
    moment = moment * (1 + small_part * rng.normal(size=(24, 40)).clip(-3, 3))
    tx = small(max_rank=4, power_iterations=5, approximate="moment", b2=0.0, factor_dtype=dtype)
    _, state = next(run(tx, [np.sqrt(moment).astype(np.float32)]))
    product = np.asarray(state.q, np.float64) @ np.asarray(state.u, np.float64).T
    moment = np.sqrt(moment).astype(np.float32).astype(np.float64) ** 2
    true = np.linalg.norm(moment - product) / np.linalg.norm(moment)
    np.testing.assert_allclose(state.error[0], true, rtol=0.01)
    assert 0.1 * small_part < true < small_part


# 9. Anything that is not a matrix.


def test_9_vectors_and_scalars_keep_a_dense_second_moment():
    rng = np.random.default_rng(0)
    shapes = {"vector": (300,), "scalar": (), "row": (1, 300)}
    grads = [{k: np.float32(rng.normal(size=x)) for k, x in shapes.items()} for _ in range(5)]
    actual, state = common.run(adapprox_jax.scale_by_adapprox(bias_correction=True), grads)
    expected, _ = common.run(optax.scale_by_adam(b1=0.0), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)
    assert state.nu["vector"].shape == (300,)
    assert state.q["vector"] == optax.MaskedNode()
