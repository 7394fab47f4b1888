"""adapprox as a user holds it: in the place of optax.adamw."""

import inspect

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests.common import trained
from tests.step.test_phases import gradients

SHAPES = {"kernel": (24, 40), "bias": (40,)}
PARAMS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
FACTORED = dict(min_dim_size_to_factor=1, initial_rank=1, max_rank=6, error_threshold=0.1)


def test_positions_and_defaults_are_those_of_adamw():
    ours = inspect.signature(adapprox_jax.adapprox).parameters
    theirs = inspect.signature(optax.adamw).parameters
    shared = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(shared)] == shared
    assert all(ours[name].default == theirs[name].default for name in shared)


def test_defaults_are_those_of_the_parts():
    ours = inspect.signature(adapprox_jax.adapprox).parameters
    theirs = inspect.signature(adapprox_jax.scale_by_adapprox).parameters
    assert {name: ours[name].default for name in theirs} == {
        name: p.default for name, p in theirs.items()
    }
    average = inspect.signature(adapprox_jax.guided_ema).parameters
    assert ours["guidance_max_scale"].default == average["max_scale"].default


def test_stands_where_adamw_stood():
    """On leaves that stay dense, with Adam's correction and no clip, it is Adam with the average
    taken after the division; with b1 = 0 the two are the same."""
    grads = gradients(10, SHAPES)
    ours = adapprox_jax.adapprox(
        1e-2, b1=0.0, weight_decay=0.1, clipping_threshold=None, bias_correction=True
    )
    actual, _ = trained(ours, PARAMS, grads)
    expected, _ = trained(optax.adamw(1e-2, b1=0.0, weight_decay=0.1), PARAMS, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)


@pytest.mark.parametrize("settings", [FACTORED, adapprox_jax.PAPER], ids=["factored", "paper"])
def test_one_compilation_serves_a_run_in_which_ranks_change(settings):
    settings = {**settings, "error_threshold": 0.1}
    tx = adapprox_jax.adapprox(optax.linear_schedule(1e-2, 1e-3, 30), **settings)
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(tx.update, 1))
    state, ranks = tx.init(PARAMS), set()
    for grad in [PARAMS] * 11 + gradients(10, SHAPES):  # of rank 1, and then of more
        _, state = update(grad, state, PARAMS)
        ranks.add(int(state[0].rank[0]))
    assert len(ranks) > 1


@pytest.mark.all_platforms
@pytest.mark.parametrize(
    ("platform", "columns"), [("cpu", 128), ("cuda", 128), ("tpu", 128), ("tpu", 120)]
)
@pytest.mark.parametrize("orthogonalization", ["qr", "cholesky"])
def test_lowers_for(platform, columns, orthogonalization):
    """On TPUs products are laid out by rows where these fill the lanes."""
    tx = adapprox_jax.adapprox(1e-2, orthogonalization=orthogonalization, **FACTORED)
    params = {**PARAMS, "other": jnp.ones((24, columns))}
    # JAX does not promise that this stays as it is.
    layouts = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    export = jax.export.export(jax.jit(tx.update), platforms=[platform], disabled_checks=[layouts])
    text = export(params, jax.eval_shape(tx.init, params), params).mlir_module()
    assert ("call @LayoutConstraint" in text) == (platform == "tpu" and columns == 128)


def test_the_state_may_be_donated_and_made_again():
    tx = adapprox_jax.adapprox(1e-2, key=jax.random.PRNGKey(0), **FACTORED)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
        _, state = update(PARAMS, tx.init(PARAMS), PARAMS)
        update(PARAMS, state, PARAMS)


def test_keys_as_seeds_raw_and_typed_keys():
    def parameters(key):
        tx = adapprox_jax.adapprox(1e-2, warm_start=False, key=key, **FACTORED)
        return trained(tx, PARAMS, gradients(3, SHAPES))[0]

    *same, other = map(parameters, (3, jax.random.key(3), jax.random.PRNGKey(3), 4))
    chex.assert_trees_all_equal(*same)
    assert np.any(other["kernel"] != same[0]["kernel"])


def test_small_matrices_stay_dense_by_default():
    assert adapprox_jax.scale_by_adapprox().init(PARAMS).nu["kernel"].shape == (24, 40)
