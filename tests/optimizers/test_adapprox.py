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

PARAMS = {"kernel": np.ones((24, 40), np.float32), "bias": np.ones(40, np.float32)}
FACTORED = dict(min_dim_size_to_factor=1, initial_rank=1, max_rank=6, error_threshold=0.1)


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=(24, 1)) + rng.normal(size=(1, 40)))
    return [
        {
            "kernel": jnp.asarray(rng.normal(size=(24, 40)) * sizes),
            "bias": jnp.asarray(rng.normal(size=40)),
        }
        for _ in range(steps)
    ]


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
    grads = gradients(10)
    ours = adapprox_jax.adapprox(
        1e-2, b1=0.0, weight_decay=0.1, clipping_threshold=None, bias_correction=True
    )
    actual, _ = trained(ours, PARAMS, grads)
    expected, _ = trained(optax.adamw(1e-2, b1=0.0, weight_decay=0.1), PARAMS, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)


@pytest.mark.parametrize("settings", [FACTORED, adapprox_jax.PAPER], ids=["factored", "paper"])
def test_one_compilation_serves_a_run_in_which_ranks_change(settings):
    settings = {**settings, "error_threshold": 0.4}
    tx = adapprox_jax.adapprox(optax.linear_schedule(1e-2, 1e-3, 30), **settings)
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(tx.update, 1))
    state, ranks = tx.init(PARAMS), set()
    for grad in gradients(31):
        _, state = update(grad, state, PARAMS)
        ranks.add(int(state[0].rank[0]))
    assert len(ranks) > 1


@pytest.mark.all_platforms
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("orthogonalization", ["qr", "cholesky"])
def test_lowers_for(platform, orthogonalization):
    tx = adapprox_jax.adapprox(1e-2, orthogonalization=orthogonalization, **FACTORED)
    params = {**PARAMS, "of whole lanes": jnp.ones((24, 128))}
    state = jax.eval_shape(tx.init, params)
    # On TPUs products are laid out by rows where these fill the lanes. JAX does not promise that
    # this stays as it is.
    layouts = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    checks = [layouts] if platform == "tpu" else []
    export = jax.export.export(jax.jit(tx.update), platforms=[platform], disabled_checks=checks)
    exported = export(params, state, params)
    assert exported.platforms == (platform,)
    found = exported.mlir_module().count("call @LayoutConstraint")
    assert bool(found) == (platform == "tpu")
    if platform == "tpu":
        others = jax.export.export(jax.jit(tx.update), platforms=[platform])
        assert "@LayoutConstraint" not in others(PARAMS, tx.init(PARAMS), PARAMS).mlir_module()


def test_the_state_may_be_donated_and_made_again():
    tx = adapprox_jax.adapprox(1e-2, key=jax.random.PRNGKey(0), **FACTORED)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
        _, state = update(gradients(1)[0], tx.init(PARAMS), PARAMS)
        update(gradients(1)[0], state, PARAMS)


def test_mu_dtype():
    tx = adapprox_jax.adapprox(1e-2, mu_dtype=jnp.bfloat16, **FACTORED)
    _, state = jax.eval_shape(tx.update, gradients(1)[0], tx.init(PARAMS), PARAMS)
    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16


def test_weight_decay_is_decoupled_and_masked():
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    tx = adapprox_jax.adapprox(0.5, weight_decay=0.1, mask={"kernel": True, "bias": False})
    updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
    assert not np.any(updates["bias"])


def test_keys_as_seeds_raw_and_typed_keys():
    grads = gradients(3)
    keys = (3, jax.random.key(3), jax.random.PRNGKey(3))
    *same, other = (
        trained(adapprox_jax.adapprox(1e-2, warm_start=False, key=key, **FACTORED), PARAMS, grads)[
            0
        ]
        for key in (*keys, 4)
    )
    chex.assert_trees_all_equal(*same)
    assert np.any(other["kernel"] != same[0]["kernel"])


def test_small_matrices_stay_dense_by_default_and_wide_buffers_are_cut():
    by_default = adapprox_jax.scale_by_adapprox().init(PARAMS)
    assert by_default.nu["kernel"].shape == (24, 40)
    wide = adapprox_jax.scale_by_adapprox(max_rank=20, min_dim_size_to_factor=1).init(PARAMS)
    assert wide.q["kernel"].shape == (24, 14)  # 15 columns of 24 + 40 are 960, as 24 x 40 are
