"""Types and magnitudes: half precision, float64, tiny, huge and zero gradients, unusual shapes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests.hardware import compiles_float16

SETTINGS = {
    "fixed": dict(max_rank=4, min_dim_size_to_factor=1),
    "adaptive": dict(initial_rank=1, max_rank=6, error_threshold=0.1, min_dim_size_to_factor=1),
    "qr": dict(max_rank=4, oversampling=5, orthogonalization="qr", min_dim_size_to_factor=1),
    "guided and corrected": dict(
        max_rank=4, cosine_guidance=True, bias_correction=True, min_dim_size_to_factor=1
    ),
    "paper": adapprox_jax.PAPER,
}


def settings_of(*names):
    """All settings; those that are not named are slow."""
    slow = {name: [pytest.mark.slow] for name in SETTINGS if name not in names}
    return pytest.mark.parametrize(
        "settings",
        [pytest.param(SETTINGS[name], id=name, marks=slow.get(name, ())) for name in SETTINGS],
    )


each_setting = settings_of(*SETTINGS)
RNG = np.random.default_rng(0)
SCALES = np.exp(RNG.normal(size=(24, 1)) + RNG.normal(size=(1, 40)))
ONES = np.ones((24, 40), np.float32)


def gradient(seed, shape=(24, 40), dtype=jnp.float32):
    scales = SCALES if shape[-2:] == SCALES.shape else 1
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scales, dtype)


COMPILED = {}  # init and jitted update by settings, so that runs alike compile once


def compiled(settings):
    """Initial states and updates at a rate of 1, without decay; eps and b1 are arguments too."""

    def update(grads, state, params, eps, b1):
        tx = adapprox_jax.adapprox(1.0, b1, eps=eps, weight_decay=0.0, **settings)
        return tx.update(grads, state, params)

    init = adapprox_jax.adapprox(1.0, **settings).init
    return COMPILED.setdefault(repr(settings), (jax.jit(init), jax.jit(update)))


def run(settings, grads, params, eps=1e-8, b1=0.9):
    """The last update and state of a run."""
    init, update = compiled(settings)
    state = init(params)
    for grad in grads:
        updates, state = update(grad, state, params, eps, b1)
    return updates, state


def all_finite(tree):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))


@settings_of("guided and corrected")  # in the others all that is their own is in float32
def test_half_precision_differs_from_float32_by_its_rounding_alone(settings):
    dtypes = [jnp.bfloat16, *([jnp.float16] if compiles_float16() else [])]
    grads = [[gradient(seed, dtype=dtype) for dtype in dtypes] for seed in range(5)]
    params = [np.ones((24, 40), dtype) for dtype in dtypes]
    all_updates, state = run(settings, grads, params)
    init, _ = compiled(settings)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, jax.eval_shape(init, params))
    for i, dtype in enumerate(dtypes):
        wide = [np.asarray(grad[i], np.float32) for grad in grads]
        expected, _ = run(settings, wide, ONES)
        assert all_updates[i].dtype == dtype
        assert state[0].q[i].dtype == state[0].u[i].dtype == jnp.float32
        epsilon = float(jnp.finfo(dtype).eps)
        difference = np.linalg.norm(np.asarray(all_updates[i], np.float32) - expected)
        # The average is kept in half precision too: a few roundings.
        assert difference < 4 * epsilon * np.linalg.norm(expected)


@each_setting
def test_float64_is_kept_in_x64_mode(settings):
    with jax.enable_x64(True):
        init, update = compiled(settings)
        params = tuple(jax.ShapeDtypeStruct((24, 40), t) for t in (jnp.float64, jnp.bfloat16))
        like = jax.eval_shape(init, params)
        updates, state = jax.eval_shape(update, params, like, params, 1e-8, 0.9)
        assert [leaf.dtype for leaf in updates] == [jnp.float64, jnp.bfloat16]
        for factors in (state[0].q, state[0].u):
            assert [leaf.dtype for leaf in factors] == [jnp.float64, jnp.float32]
        chex.assert_trees_all_equal_shapes_and_dtypes(state, like)


@each_setting
@pytest.mark.parametrize("exponent", [-66, -40, 50])
def test_magnitude_of_gradients(settings, exponent):
    """Without eps the updates do not depend on the scale, where squares do not vanish.

    Of powers of two, with which nothing rounds in another way.
    """
    grads, params = [gradient(seed) for seed in range(6)], ONES
    actual, state = run(settings, [g * 2.0**exponent for g in grads], params, eps=1e-30)
    assert all_finite((actual, state))
    if exponent > -66 or settings.get("approximate") != "moment":  # 2^-132 is no normal float32
        expected, _ = run(settings, grads, params, eps=1e-30)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@each_setting
def test_rows_that_get_no_gradient_stay_where_they_are(settings):
    """Of an embedding, of which each batch sees some rows and never all."""
    grads = []
    for seed in range(20):
        seen = np.random.default_rng(seed).choice(20, size=6, replace=False)
        mask = np.zeros((24, 1), np.float32)
        mask[seen] = 1
        grads.append(gradient(seed) * mask)
    updates, state = run(settings, grads, ONES, b1=0.0)
    assert all_finite((updates, state))
    assert not np.any(updates[20:])
    assert not np.any(updates[np.all(grads[-1] == 0, axis=1)])


@each_setting
def test_a_leaf_without_gradients_stays_and_may_begin_late(settings):
    zero = 0 * ONES
    updates, state = run(settings, [zero] * 25, ONES)
    assert not np.any(updates)
    assert all_finite(state)
    late, state = run(settings, [zero] * 5 + [gradient(0)] * 5, ONES)
    assert np.all(np.isfinite(late))
    assert np.any(late)
    back, state = run(settings, [gradient(0)] * 3 + [zero] * 25, ONES)
    assert all_finite((back, state))


DENSE = [(), (0,), (0, 5), (5, 0), (0, 24, 40), (3, 0, 40), (1, 1), (1, 40), (40, 1)]
FACTORED = [(2, 3), (5, 4), (9, 8), (3, 4, 5), (7, 7, 3, 64), (1, 24, 40)]
FACTORED += [(24, 1, 40), (2, 3, 24, 40)]
# For each of the settings those at which its own code could fail: where there are fewer rows than
# columns to work on, and stacks; and what is dense where code for it is its own.
SHAPES = {
    "fixed": [*DENSE, (2, 3), (7, 7, 3, 64)],
    "adaptive": [(5, 4)],
    "qr": [(9, 8)],
    "guided and corrected": DENSE,
    "paper": [(3, 4, 5)],
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_shape(name, every):
    """Where min(m, n) is below the rank plus oversampling, too."""
    shapes = [*DENSE, *FACTORED] if every else SHAPES[name]
    params = [np.ones(shape, np.float32) for shape in shapes]
    grads = [[gradient(seed, shape) for shape in shapes] for seed in range(3)]
    all_updates, state = run(SETTINGS[name], grads, params)
    assert all_finite(state)
    for shape, updates, q in zip(shapes, all_updates, state[0].q, strict=True):
        assert updates.shape == shape
        assert np.all(np.isfinite(updates)), shape
        assert np.all(updates != 0), shape
        assert (q != optax.MaskedNode()) == (shape in FACTORED), shape


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({**SETTINGS["adaptive"], "cosine_guidance": True}, id="adaptive and guided"),
        *(pytest.param(SETTINGS[name], id=name, marks=pytest.mark.slow) for name in SETTINGS),
    ],
)
def test_a_stack_along_any_axis_is_its_slices(settings):
    counts = [30, 3, 3]  # in front even of matrices with fewer rows than layers
    grads = [
        [gradient(seed, (n, 24, 40)) * np.geomspace(1, 100, n)[:, None, None] for n in counts]
        for seed in range(12)
    ]
    moved = [[np.moveaxis(stack, 0, axis) for axis, stack in enumerate(grad)] for grad in grads]
    numbers = [None, None, adapprox_jax.MatrixDimensionNumbers(0, 1)]
    stacked, state = run(
        {**settings, "weight_dimension_numbers": numbers},
        moved,
        jax.tree.map(np.ones_like, moved[0]),
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    for axis, count in enumerate(counts):
        for i in (0, 1, count - 1):
            alone, own = run(settings, [grad[axis][i] for grad in grads], ONES)
            close(np.moveaxis(stacked[axis], axis, 0)[i], alone)
            assert state[0].rank[axis][i] == own[0].rank[0]
            close(state[0].error[axis][i], own[0].error[0])


def test_ranks_are_worked_out_at_the_steps_that_choose_them_alone():
    """The branch of the adaptive rank stays a branch, in a stack of matrices, too."""
    calls = []

    def growth(error):
        jax.debug.callback(lambda _: calls.append(1), error)
        return jnp.asarray(2, jnp.int32)

    simple = np.outer(np.arange(1, 25), np.arange(1, 41)) * np.sign(gradient(0))
    settings = dict(initial_rank=1, max_rank=7, error_threshold=0.05, min_dim_size_to_factor=1)
    tx = adapprox_jax.scale_by_adapprox(**settings, rank_interval=4, rank_growth=growth)
    stack = np.stack([simple, gradient(0), simple])  # of rank 1, of full rank, of rank 1
    state, update, counts = tx.init(stack), jax.jit(tx.update), []
    for _ in range(5):
        _, state = update(stack, state)
        jax.block_until_ready(state)
        jax.effects_barrier()
        counts.append(len(calls))
    assert list(state.rank[0]) == [1, 7, 1]
    of_table = 3 * (7 + 1)  # for each matrix from every rank, 0 too, to the next
    assert counts == [of_table] * 4 + [2 * of_table]


PARAMS = {"a": jnp.ones((24, 40)), "b": jnp.ones(40)}


def misfit(grads=PARAMS, made_for=PARAMS, params=PARAMS, made_with=(), **settings):
    settings = {"max_rank": 4, "min_dim_size_to_factor": 1, **settings}
    made = adapprox_jax.adapprox(1e-3, **{**settings, **dict(made_with)})
    state = jax.eval_shape(made.init, made_for)
    # Traced only: what does not fit is found before anything runs.
    return jax.eval_shape(adapprox_jax.adapprox(1e-3, **settings).update, grads, state, params)


def test_gradients_that_do_not_fit_the_state_are_named():
    with pytest.raises(ValueError, match=r"\['b'\]: got none in the gradients; expected an array"):
        misfit(grads={"a": PARAMS["a"]})
    with pytest.raises(ValueError, match=r"\['c'\]: got an array in the gradients; expected none"):
        misfit(grads={**PARAMS, "c": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"the gradients are a tree .*; expected "):
        misfit(grads=[jnp.ones(3)], made_for=(jnp.ones(3),), params=(jnp.ones(3),))
    with pytest.raises(ValueError, match="the only leaf: the gradient of shape"):
        misfit(jnp.ones(7), jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match=r"\['b'\]: the gradient of shape \(7,\).* \(40,\)"):
        misfit(grads={**PARAMS, "b": jnp.ones(7)})
    with pytest.raises(ValueError, match=r"\['a'\]: .* \(24, 41\) .* factors of \(24, 40\)"):
        misfit(grads={**PARAMS, "a": jnp.ones((24, 41))})


def test_a_state_made_with_other_settings_is_named():
    stack = {"a": jnp.ones((3, 24, 40))}
    numbers = {"a": adapprox_jax.MatrixDimensionNumbers((0, 1), 2)}
    with pytest.raises(ValueError, match=r"\['a'\]: .*other weight_dimension_numbers"):
        misfit(stack, stack, stack, made_with={"weight_dimension_numbers": numbers})
    with pytest.raises(ValueError, match="guided_ema got a state of type EmptyState; expected"):
        misfit(made_with={"b1": 0.0})
    with pytest.raises(ValueError, match="scale_by_adapprox got a state of type tuple; expected"):
        adapprox_jax.scale_by_adapprox().update(PARAMS, (), PARAMS)


def test_settings_that_the_state_decides_may_change():
    """The width of the buffers, and which leaves are factored, are read from the state."""
    for made_with in ({"max_rank": 6}, {"min_dim_size_to_factor": 1000}, {"initial_rank": 1}):
        updates, _ = misfit(made_with=made_with)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)


def test_dimension_numbers_that_do_not_fit_are_shown():
    with pytest.raises(ValueError, match=r"weight_dimension_numbers is .*; allowed: None, "):
        misfit(weight_dimension_numbers={"a": None})


def test_missing_params_where_decay_needs_them():
    with pytest.raises(ValueError, match="params"):
        misfit(params=None)


def test_integers_that_decide_shapes_must_not_be_injected():
    tx = optax.inject_hyperparams(adapprox_jax.adapprox)(1e-3, max_rank=4)
    with pytest.raises(ValueError, match=r"is traced; .* static_args=adapprox_jax\.STATIC_ARGS"):
        jax.jit(tx.init)(PARAMS)
