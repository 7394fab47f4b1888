"""Types and magnitudes: half precision, float64, tiny, huge and zero gradients, unusual shapes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests.common import run
from tests.hardware import compiles_float16

SETTINGS = {
    "fixed": dict(max_rank=4),
    "adaptive": dict(initial_rank=1, max_rank=6, error_threshold=0.1),
    "qr": dict(max_rank=4, oversampling=5, orthogonalization="qr"),
    "guided and corrected": dict(max_rank=4, cosine_guidance=True, bias_correction=True),
    "paper": adapprox_jax.PAPER,
}
SETTINGS = {name: {**settings, "min_dim_size_to_factor": 1} for name, settings in SETTINGS.items()}
TRANSFORMATIONS = {
    name: adapprox_jax.adapprox(1.0, weight_decay=0.0, **settings)
    for name, settings in SETTINGS.items()
}
each_setting = pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
RNG = np.random.default_rng(0)
SCALES = np.exp(RNG.normal(size=(24, 1)) + RNG.normal(size=(1, 40)))


def gradient(seed, shape=(24, 40), dtype=jnp.float32):
    scales = SCALES if shape[-2:] == SCALES.shape else 1
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scales, dtype)


def test_half_precision_differs_from_float32_by_its_rounding_alone():
    tx = TRANSFORMATIONS["guided and corrected"]  # in the others all of their own is in float32
    dtypes = [jnp.bfloat16, *([jnp.float16] if compiles_float16() else [])]
    grads = [[gradient(seed, dtype=dtype) for dtype in dtypes] for seed in range(5)]
    all_updates, state = run(tx, grads)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, tx.init(grads[0]))
    for i, dtype in enumerate(dtypes):
        expected, _ = run(tx, [np.asarray(grad[i], np.float32) for grad in grads])
        assert all_updates[-1][i].dtype == dtype
        assert state[0].q[i].dtype == state[0].u[i].dtype == jnp.float32
        difference = np.linalg.norm(np.asarray(all_updates[-1][i], np.float32) - expected[-1])
        # The average is kept in half precision too: a few roundings.
        assert difference < 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(expected[-1])


@each_setting
def test_float64_is_kept_in_x64_mode(tx):
    with jax.enable_x64(True):
        params = tuple(jax.ShapeDtypeStruct((24, 40), t) for t in (jnp.float64, jnp.bfloat16))
        like = jax.eval_shape(tx.init, params)
        updates, state = jax.eval_shape(tx.update, params, like, params)
        assert [leaf.dtype for leaf in updates] == [jnp.float64, jnp.bfloat16]
        for factors in (state[0].q, state[0].u):
            assert [leaf.dtype for leaf in factors] == [jnp.float64, jnp.float32]
        chex.assert_trees_all_equal_shapes_and_dtypes(state, like)


@each_setting
def test_rows_and_leaves_without_gradients_stay_where_they_are(tx):
    """Of an embedding each batch sees some rows and never all; a leaf may begin late or end."""
    grads, zeros = [], [np.zeros((24, 40), np.float32)] * 25
    for seed in range(20):
        mask = np.zeros((24, 1), np.float32)
        mask[np.random.default_rng(seed).choice(20, size=6, replace=False)] = 1
        grads.append(gradient(seed) * mask)
    for given in (grads, zeros, zeros[:5] + [gradient(0)] * 5, [gradient(0)] * 3 + zeros):
        updates, state = run(tx, given)
        chex.assert_tree_all_finite((updates, state))
        assert np.all((updates[-1] != 0) == np.any([x != 0 for x in given], axis=(0, 2))[:, None])


# For each of the settings those at which its own code could fail: where there are fewer rows than
# columns to work on, and stacks; and what is dense where code for it is its own.
DENSE = [(), (0,), (0, 5), (5, 0), (0, 24, 40), (3, 0, 40), (1, 1), (1, 40), (40, 1)]
SHAPES = {
    "fixed": [*DENSE, (2, 3), (7, 7, 3, 64)],
    "adaptive": [(5, 4)],
    "qr": [(9, 8)],
    "guided and corrected": DENSE,
    "paper": [(3, 4, 5)],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_shape(name):
    """Where min(m, n) is below the rank plus oversampling, too."""
    shapes = SHAPES[name]
    grads = [[gradient(seed, shape) for shape in shapes] for seed in range(3)]
    all_updates, state = run(TRANSFORMATIONS[name], grads)
    chex.assert_tree_all_finite((all_updates[-1], state))
    for shape, updates, q in zip(shapes, all_updates[-1], state[0].q, strict=True):
        assert updates.shape == shape
        assert np.all(updates != 0), shape
        assert (q == optax.MaskedNode()) == (shape in DENSE), shape


def test_a_stack_along_any_axis_is_its_slices():
    settings = {**SETTINGS["adaptive"], "cosine_guidance": True}
    counts = [30, 3, 3]  # in front even of matrices with fewer rows than layers
    grads = [
        [
            gradient(seed, (n, 24, 40)) * np.geomspace(1, 100, n, dtype=np.float32)[:, None, None]
            for n in counts
        ]
        for seed in range(12)
    ]
    moved = [[np.moveaxis(stack, 0, axis) for axis, stack in enumerate(grad)] for grad in grads]
    numbers = [None, None, adapprox_jax.MatrixDimensionNumbers(0, 1)]
    stacked, state = run(
        adapprox_jax.adapprox(1.0, weight_dimension_numbers=numbers, **settings), moved
    )
    tx = adapprox_jax.adapprox(1.0, **settings)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    for axis, count in enumerate(counts):
        for i in (0, 1, count - 1):
            alone, own = run(tx, [grad[axis][i] for grad in grads])
            close(np.moveaxis(stacked[-1][axis], axis, 0)[i], alone[-1])
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


def test_integers_that_decide_shapes_must_not_be_injected():
    tx = optax.inject_hyperparams(adapprox_jax.adapprox)(1e-3, max_rank=4)
    with pytest.raises(ValueError, match=r"is traced; .* static_args=adapprox_jax\.STATIC_ARGS"):
        jax.jit(tx.init)(PARAMS)
