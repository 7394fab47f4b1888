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


def run(tx, grads, params=PARAMS, update=None):
    state, update = tx.init(params), update or jax.jit(tx.update)
    history = []
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
        history.append(state[0])
    return params, history


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
    actual, _ = run(ours, grads)
    expected, _ = run(optax.adamw(1e-2, b1=0.0, weight_decay=0.1), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)


@pytest.mark.parametrize("settings", [FACTORED, adapprox_jax.PAPER], ids=["factored", "paper"])
def test_one_compilation_serves_a_run_in_which_ranks_change(settings):
    settings = {**settings, "error_threshold": 0.4}
    tx = adapprox_jax.adapprox(optax.linear_schedule(1e-2, 1e-3, 30), **settings)
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(tx.update, 1))
    _, history = run(tx, gradients(31), update=update)
    assert len({int(state.rank[0]) for state in history}) > 1


class WithAndWithoutJit(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_the_same_updates(self):
        tx = adapprox_jax.adapprox(1e-2, cosine_guidance=True, **FACTORED)
        actual, _ = run(tx, gradients(2), update=self.variant(tx.update))
        expected, _ = run(tx, gradients(2))
        chex.assert_trees_all_close(actual, expected, rtol=1e-5)


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
    others = jax.export.export(jax.jit(tx.update), platforms=[platform])
    assert "@LayoutConstraint" not in others(PARAMS, tx.init(PARAMS), PARAMS).mlir_module()


def test_the_state_may_be_donated_and_made_again():
    tx = adapprox_jax.adapprox(1e-2, key=jax.random.PRNGKey(0), **FACTORED)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(2):
        _, state = update(gradients(1)[0], tx.init(PARAMS), PARAMS)
        update(gradients(1)[0], state, PARAMS)


def test_without_momentum_no_first_moment_is_kept():
    tx = adapprox_jax.adapprox(1e-2, b1=0.0, **FACTORED)
    state = tx.init(PARAMS)
    _, new = jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
    assert (24, 40) not in [leaf.shape for leaf in jax.tree.leaves(state)]


def test_mu_dtype():
    tx = adapprox_jax.adapprox(1e-2, mu_dtype=jnp.bfloat16, **FACTORED)
    _, state = jax.eval_shape(tx.update, gradients(1)[0], tx.init(PARAMS), PARAMS)
    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_parameters_have_float32_factors(dtype):
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    tx = adapprox_jax.adapprox(1e-2, **FACTORED)
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert new[0].q["kernel"].dtype == jnp.float32
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new)


def test_weight_decay_is_decoupled_and_masked():
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    tx = adapprox_jax.adapprox(0.5, weight_decay=0.1, mask={"kernel": True, "bias": False})
    updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
    assert not np.any(updates["bias"])


def test_learning_rate_may_be_a_schedule():
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.1})
    grads = gradients(2)
    scheduled, plain = (adapprox_jax.adapprox(x, weight_decay=0.0) for x in (schedule, 1.0))
    states = scheduled.init(PARAMS), plain.init(PARAMS)
    for grad, factor in zip(grads, (1.0, 0.1), strict=True):
        first = jax.jit(scheduled.update)(grad, states[0], PARAMS)
        second = jax.jit(plain.update)(grad, states[1], PARAMS)
        states = first[1], second[1]
        np.testing.assert_allclose(first[0]["kernel"], factor * second[0]["kernel"], rtol=1e-5)


def test_a_nan_gradient_shows_in_its_leaf_alone_and_leaves_its_factors():
    grads = gradients(1)[0]
    bad = {**grads, "kernel": grads["kernel"].at[3, 4].set(jnp.nan)}
    tx = adapprox_jax.adapprox(1e-2, **FACTORED)
    updates, state = jax.jit(tx.update)(bad, tx.init(PARAMS), PARAMS)
    assert np.all(np.isnan(updates["kernel"]))
    np.testing.assert_array_equal(state[0].q["kernel"], tx.init(PARAMS)[0].q["kernel"])
    assert np.all(np.isfinite(updates["bias"]))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1)])
def test_leaves_of_unusual_shapes_stay_dense(shape):
    params = jnp.ones(shape)
    tx = adapprox_jax.adapprox(1e-2, **FACTORED)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates.shape == state[0].nu.shape == shape
    assert np.all(np.isfinite(updates))


def test_keys_as_seeds_raw_and_typed_keys():
    grads = gradients(3)
    keys = (3, jax.random.key(3), jax.random.PRNGKey(3))
    seed, typed, raw = (
        run(adapprox_jax.adapprox(1e-2, warm_start=False, key=key, **FACTORED), grads)[0]
        for key in keys
    )
    chex.assert_trees_all_equal(seed, typed, raw)
    other = adapprox_jax.adapprox(1e-2, warm_start=False, key=4, **FACTORED)
    assert np.any(run(other, grads)[0]["kernel"] != seed["kernel"])


def test_small_matrices_stay_dense_by_default_and_wide_buffers_are_cut():
    by_default = adapprox_jax.scale_by_adapprox().init(PARAMS)
    assert by_default.nu["kernel"].shape == (24, 40)
    wide = adapprox_jax.scale_by_adapprox(max_rank=20, min_dim_size_to_factor=1).init(PARAMS)
    assert wide.q["kernel"].shape == (24, 14)  # 15 columns of 24 + 40 are 960, as 24 x 40 are


BAD = [
    (dict(eps=-1e-8), r"eps is -1e-08; allowed: a finite number of at least 0"),
    (dict(eps_root=-1.0), r"eps_root is -1\.0; allowed"),
    (dict(b1=1.0), r"b1 is 1\.0; allowed: a number in \[0, 1\)"),
    (dict(b1=-0.1), r"b1 is -0\.1; allowed"),
    (dict(b2=1.0), r"b2 is 1\.0; allowed: a number in \[0, 1\)"),
    (dict(b2=float("nan")), r"b2 is nan; allowed"),
    (dict(initial_rank=0), r"initial_rank is 0; allowed: an integer of at least 1"),
    (dict(initial_rank=8, max_rank=4), r"max_rank is 4; allowed: .* initial_rank = 8"),
    (
        dict(max_rank=1.5),
        r"max_rank is 1\.5; allowed: an integer of at least 1, or a float in \(0, 1\]",
    ),
    (dict(max_rank=0.0), r"max_rank is 0\.0; allowed"),
    (dict(error_threshold=-0.1), r"error_threshold is -0\.1; allowed"),
    (dict(rank_interval=0), r"rank_interval is 0; allowed: an integer from 1 to"),
    (dict(rank_interval=2.5), r"rank_interval is 2\.5; allowed: an integer"),
    (dict(power_iterations=0), r"power_iterations is 0; allowed: an integer of at least 1"),
    (dict(oversampling=-1), r"oversampling is -1; allowed"),
    (dict(approximate="log"), r"approximate is 'log'; allowed: 'moment', 'root'"),
    (dict(orthogonalization="svd"), r"orthogonalization is 'svd'; allowed: 'qr', 'cholesky'"),
    (dict(min_dim_size_to_factor=0), r"min_dim_size_to_factor is 0; allowed"),
    (dict(clipping_threshold=0.0), r"clipping_threshold is 0\.0; allowed: a number above 0"),
    (dict(eps="small"), r"eps is 'small'; allowed: a finite number of at least 0"),
    (dict(rank_growth=5), r"rank_growth is 5; allowed: a function, or None"),
    (
        dict(mu_dtype=jnp.int16),
        r"mu_dtype is int16; allowed: None, floating-point types of 16 bits or",
    ),
    (dict(mu_dtype=jnp.float8_e4m3fn), r"mu_dtype is float8_e4m3fn; allowed: None, floating-point"),
    (dict(mu_dtype="int3", b1=0.0), r"mu_dtype is 'int3'; allowed: None, floating-point types"),
    (dict(factor_dtype=jnp.float16), r"factor_dtype is float16; allowed: bfloat16"),
    (dict(key=1.5), r"key is 1\.5; allowed: an integer seed or a JAX random key"),
    (dict(weight_decay=-0.1), r"weight_decay is -0\.1; allowed"),
    (dict(guidance_max_scale=0.5), r"guidance_max_scale is 0\.5; allowed"),
    (dict(cosine_guidance=True, b1=0.0), r"b1 is 0\.0; allowed: .* where cosine_guidance is on"),
    (dict(learning_rate=None), r"learning_rate is None; allowed: a finite number, or a function"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD, ids=[next(iter(k)) for k, _ in BAD])
def test_bad_hyperparameters_are_named_when_the_optimizer_is_made(keywords, message):
    with pytest.raises(ValueError, match=message):
        adapprox_jax.adapprox(**{"learning_rate": 1e-3, **keywords})


def test_guidance_reaches_the_average_with_its_cap():
    """The first update is parallel to the average, so that its factor is the cap."""
    grads, keywords = gradients(1)[0], dict(weight_decay=0.0, guidance_max_scale=4.0)
    plain, guided = (
        adapprox_jax.adapprox(1.0, cosine_guidance=guidance, nesterov=False, **keywords)
        for guidance in (False, True)
    )
    plain, guided = (
        jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)[0]["kernel"] for tx in (plain, guided)
    )
    np.testing.assert_allclose(guided, 4 * plain, rtol=1e-4)


def test_unknown_keywords_are_an_error():
    with pytest.raises(TypeError, match="beta2"):
        adapprox_jax.adapprox(1e-3, beta2=0.9)
