"""The library against the plain NumPy algorithm, over whole trajectories."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from tests import reference

SHAPE = (24, 40)
STEPS = 60
KEY = 6
FIXED = dict(k_init=6, k_max=6)
ADAPTIVE = dict(k_init=1, k_max=12, xi_thresh=0.08, growth=(20.0, -10.0, -2.5, -0.9))
ROOT = dict(root=True)
VARIANTS = {
    "fixed": FIXED,
    "fixed-root": {**FIXED, **ROOT},
    "fixed-slow": dict(**FIXED, b2=0.999),
    "fixed-root-slow": {**FIXED, **ROOT, "b2": 0.999},
    "fixed-printed": dict(**FIXED, rotate=False),
    "fixed-warm": dict(**FIXED, warm_start=True, l=1),
    "fixed-root-warm": dict(**FIXED, **ROOT, warm_start=True, l=1),
    "fixed-no-momentum": dict(**FIXED, b1=0.0),
    "fixed-nesterov": dict(**FIXED, nesterov=True),
    "fixed-guidance": dict(**FIXED, guidance=True, max_scale=2.0),
    "fixed-decay": dict(**FIXED, weight_decay=0.1),
    "fixed-bias-correction": dict(**FIXED, bias_correction=True, clip=None),
    "fixed-root-increasing": dict(**FIXED, **ROOT, exponent=0.8, clip=None),
    "fixed-cautious": dict(**FIXED, weight_decay=0.1, cautious=True),
    "adaptive": ADAPTIVE,
    "adaptive-root": {**ADAPTIVE, **ROOT, "xi_thresh": 0.1},
    "adaptive-printed": dict(**ADAPTIVE, rotate=False),
    "adaptive-warm": dict(**ADAPTIVE, warm_start=True, l=2),
    "adaptive-root-no-momentum": {**ADAPTIVE, **ROOT, "xi_thresh": 0.1, "b1": 0.0},
    "adaptive-all": dict(
        **ADAPTIVE, guidance=True, weight_decay=0.1, bias_correction=True, eps_root=1e-10
    ),
    "adaptive-root-all": {
        **ADAPTIVE, **ROOT, "xi_thresh": 0.1, "guidance": True, "weight_decay": 0.1,
        "bias_correction": True,
    },
}  # fmt: skip


growth = functools.cache(adapprox_jax.sigmoid_growth)  # what is compiled is known by its identity


@functools.cache
def starts(n: int, width: int, dtype) -> np.ndarray:
    """The random starts of all steps, as the library draws them."""

    def one(t):
        return jax.random.normal(jax.random.fold_in(jax.random.key(KEY), t), (width, n), dtype).T

    drawn = jax.jit(lambda: jax.lax.map(one, np.arange(1, STEPS + 1)))()
    return np.asarray(drawn, np.float64)


@functools.cache
def structured_gradients(decades: float, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Gradients with scales along rows and columns and directions that come and go.

    Their squares span twice `decades` along the rows and as much along the columns. At step 31
    they grow tenfold: one noisy square then outweighs the average, and ranks rise.
    """
    rng = np.random.default_rng(0)
    m, n = shape
    rows, columns = rng.uniform(-0.5, 0.5, (m, 1)), rng.uniform(-0.5, 0.5, (1, n))
    scales = 10.0 ** (decades * (rows + columns))
    left, right = np.exp(rng.normal(size=(6, m, 1))), np.exp(rng.normal(size=(6, 1, n)))
    gradients = []
    for t in range(STEPS):
        on = np.array([1, t < 25, t < 15, 20 <= t < 45, t >= 40, 30 <= t < 50])
        variance = 0.1 + sum(3.0 * o * x * y for o, x, y in zip(on, left, right, strict=True))
        sizes = np.sqrt(variance) * scales * (10 if t >= 30 else 1)
        gradients.append(rng.normal(size=shape) * sizes)
    return np.asarray(gradients)


def optimizer(s: reference.Settings, number=float, **keywords):
    """The library's optimizer; `number` makes arrays of what need not be known when compiling."""
    return adapprox_jax.adapprox(
        1.0,
        s.b1,
        number(s.b2) if s.exponent is None else adapprox_jax.increasing_decay(s.exponent),
        s.eps,
        s.eps_root,
        weight_decay=s.weight_decay,
        clipping_threshold=s.clip,
        nesterov=s.nesterov,
        cosine_guidance=s.guidance,
        guidance_max_scale=s.max_scale,
        bias_correction=s.bias_correction,
        cautious_weight_decay=s.cautious,
        initial_rank=s.k_init,
        max_rank=s.k_max,
        error_threshold=number(s.xi_thresh),
        rank_interval=s.interval,
        rank_growth=growth(*s.growth),
        power_iterations=s.l,
        oversampling=s.p,
        rotate=s.rotate,
        warm_start=s.warm_start,
        approximate="root" if s.root else "moment",
        min_dim_size_to_factor=1,
        key=KEY,
        **keywords,
    )


def compare(
    s: reference.Settings,
    dtype,
    tolerance: float,
    decades: float = 1.0,
    shape: tuple[int, int] = SHAPE,
    tall: bool = False,
    by_itself: bool = True,
    **keywords,
) -> list[int]:
    """Runs both over all steps, the library on the transpose if `tall`; returns the ranks.

    In float64 the library compiles its step by itself, with the numbers as arguments, so that one
    program serves all variants with the same code; in float32, or if not `by_itself`, the whole
    update, for its numbers. In float32 the reference begins each step with the library's state:
    over a trajectory the smallest entries of V would multiply what was rounded, for some seeds more
    than tenfold.
    """
    weights = np.full(shape, 0.5)
    params = np.asarray(weights.T if tall else weights, dtype)
    if dtype == jnp.float64 and by_itself:
        tx = optimizer(s, jnp.asarray, **keywords)
        update = tx.update
    else:
        tx = optimizer(s, **keywords)
        update = jax.jit(tx.update)
    state = tx.init(params)
    expected_state = reference.init(shape, s)
    ranks = []
    for t, gradient in enumerate(structured_gradients(decades, shape), start=1):
        start = starts(shape[1], min(shape), dtype)[t - 1]
        expected, expected_state = reference.step(gradient, weights, expected_state, start, s)
        given = np.asarray(gradient.T if tall else gradient, dtype)
        actual, state = update(given, state, params)
        actual = np.asarray(actual).T if tall else np.asarray(actual)
        difference = np.linalg.norm(-actual.astype(np.float64) - expected)
        assert difference <= tolerance * np.linalg.norm(expected), f"step {t}"
        assert int(state[0].rank[0]) == expected_state.k, f"step {t}"
        assert not np.any(state[0].q[:, expected_state.k :]), f"step {t}"
        if (t - 1) % s.interval == 0:
            np.testing.assert_allclose(state[0].error[0], expected_state.xi, rtol=1e-2, atol=1e-6)
        for xi in expected_state.tried:  # else rounding could decide the rank
            assert abs(xi / s.xi_thresh - 1) > 1e-3, f"step {t}: {xi} is too near the threshold"
        ranks.append(expected_state.k)
        if dtype == jnp.float32:
            kept = from_library(state, expected_state.k)
            distance = np.linalg.norm(
                kept["q"] @ kept["u"].T - expected_state.q @ expected_state.u.T
            )
            assert distance <= tolerance * np.linalg.norm(expected_state.u), f"step {t}"
            expected_state = dataclasses.replace(expected_state, **kept)
    return ranks


def from_library(state, rank: int) -> dict[str, np.ndarray]:
    """The library's factors and average, as the reference has them."""
    kept = dict(q=state[0].q[:, :rank], u=state[0].u[:, :rank])
    if isinstance(state[1], adapprox_jax.GuidedEmaState):
        kept["m"] = state[1].mu
    return {name: np.asarray(x, np.float64) for name, x in kept.items()}


def settings_of(name, **changes):
    return reference.Settings(**{"b2": 0.95, **VARIANTS[name], **changes})


# Of every other variant float64, below, proves the algorithm, and these the float32 arithmetic.
@pytest.mark.parametrize("name", ["fixed-root-warm", "adaptive", "adaptive-root-all"])
def test_the_library_follows_the_reference_in_float32(name):
    s = settings_of(name)
    ranks = compare(s, jnp.float32, 3e-5)
    if s.k_init < s.k_max:
        steps = np.sign(np.diff(ranks))
        assert {-1, 1} <= set(steps), f"the ranks should move both ways: {ranks}"


def test_householder_follows_the_reference_in_float32():
    compare(settings_of("fixed"), jnp.float32, 3e-5, orthogonalization="qr")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_follows_the_reference_in_float64(name):
    with jax.enable_x64(True):
        compare(settings_of(name), jnp.float64, 1e-8)


@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        # Scales whose small ends are below what float32 keeps of a product.
        ("fixed", {}, dict(decades=2.5)),
        ("adaptive", dict(b2=0.999), dict(decades=2.5)),
        ("adaptive-root-all", {}, dict(decades=2.5)),
        ("adaptive-root-all", {}, dict(tall=True)),
    ],
)
def test_other_matrices_follow_the_reference_in_float64(name, changes, more):
    with jax.enable_x64(True):
        compare(settings_of(name, **changes), jnp.float64, 1e-8, **more)


@pytest.mark.parametrize(
    "name",
    [
        *("fixed-root-warm", "fixed-printed", "fixed-bias-correction"),
        *("fixed-root-increasing", "adaptive-printed"),
    ],
)
def test_the_way_of_accelerators_follows_the_reference_in_float64(name, in_phases):
    """Adaptive ranks that are turned work on other columns there (docs/algorithm.md)."""
    in_phases()
    with jax.enable_x64(True):
        compare(settings_of(name), jnp.float64, 1e-8, by_itself=False)


def test_ranks_that_cross_16_columns_follow_the_reference():
    """There the library takes code of another size, and goes back to the first."""
    s = settings_of("adaptive-root", k_max=28, xi_thresh=0.05, l=2)
    with jax.enable_x64(True):
        ranks = compare(s, jnp.float64, 1e-8, shape=(48, 80), tall=True)
    crossings = np.diff((np.asarray(ranks) > 16).astype(int))
    assert {-1, 1} <= set(crossings), ranks
