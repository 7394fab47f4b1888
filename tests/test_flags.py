"""Every setting under JAX's strict flags, under another random generator, and without jit."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax

SHAPES = {
    "kernel": (64, 256),
    "stack": (2, 64, 70),
    "tall": (200, 64),
    "bias": (256,),
    "scalar": (),
}
ADAPTIVE = dict(initial_rank=1, max_rank=16, error_threshold=0.3)
CHANGING = dict(
    b1=lambda step: 1 - 1 / (step + 1),
    b2=adapprox_jax.increasing_decay(),
    weight_decay=lambda step: 0.1,
)
SETTINGS = {
    "default": {},
    "8 bits": dict(mu_dtype=jnp.int8),
    "5 bits": dict(mu_dtype="int5"),
    "4 bits": dict(mu_dtype=jnp.int4),
    "bfloat16": dict(mu_dtype=jnp.bfloat16, factor_dtype=jnp.bfloat16),
    "adaptive": ADAPTIVE,
    "adaptive, bfloat16": {**ADAPTIVE, "factor_dtype": jnp.bfloat16},
    "paper": adapprox_jax.PAPER,
    "moment": dict(approximate="moment", power_iterations=2, oversampling=3),
    "Householder": dict(orthogonalization="qr"),
    "bias correction": dict(bias_correction=True, clipping_threshold=None, eps_root=1e-12),
    "functions of the step": {**CHANGING, "cautious_weight_decay": True},
    "guided": dict(cosine_guidance=True),
    "muon": {},
    "muon, 4 bits": dict(mu_dtype=jnp.int4),
    "muon, factors": dict(second_moment=True),
    "muon, no second moment": dict(second_moment=False, nesterov=False),
}


@contextlib.contextmanager
def strict_flags():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def made(name, rate=1e-3):
    make = adapprox_jax.adapprox_muon if name.startswith("muon") else adapprox_jax.adapprox
    return make(rate, **SETTINGS[name])


def parameters(**dtypes):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape), dtypes.get(name, jnp.float32))
        for name, shape in SHAPES.items()
    }


@pytest.mark.all_platforms
@pytest.mark.parametrize("name", SETTINGS)
def test_strict_flags(name):
    """Where a step is traced, it is traced for every platform. Leaves of two types side by side."""
    tx, half = made(name, rate=lambda step: 1e-3), jnp.bfloat16
    params = parameters(stack=half, tall=half, scalar=half)
    for x64 in (False, True) if name in ("default", "muon, 4 bits") else (True,):
        with strict_flags(), jax.enable_x64(x64):
            updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)


def test_strict_flags_of_functions():
    params = {name: parameters()[name] for name in ("kernel", "stack", "bias")}
    matrix = params["kernel"]
    with strict_flags():
        for orthogonalization in ("qr", "cholesky"):
            adapprox_jax.srsi(matrix, 3, 0, orthogonalization=orthogonalization)
        for bits in (8, 5, 4):
            adapprox_jax.dequantize(*adapprox_jax.quantize(matrix, bits), matrix.shape)
        adam = optax.adam(1e-3).init(params)
        adapprox_jax.from_adam(adapprox_jax.adapprox_muon(1e-3), adam, params)
        state = adapprox_jax.from_adam(adapprox_jax.adapprox(1e-3), adam, params)
        adapprox_jax.rank_report(adapprox_jax.resize(state, 16), params)
        adapprox_jax.grow(state, params, (8, 12))


@pytest.mark.parametrize("generators", [(None, "unsafe_rbg"), ("rbg", None), ("rbg", "unsafe_rbg")])
def test_a_state_goes_on_under_another_generator(generators):
    params, tx = parameters()["kernel"], adapprox_jax.adapprox(1e-3, mu_dtype=jnp.int8)
    state = None
    for generator in generators:
        with jax.default_prng_impl(generator or "threefry2x32"):
            state = tx.init(params) if state is None else state
            _, state = jax.jit(tx.update)(params, state, params)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state[0].u))


# The others have no code of their own outside of what is compiled for these.
@pytest.mark.parametrize(
    "name",
    [
        *("default", "4 bits", "adaptive, bfloat16", "paper", "bias correction"),
        *("functions of the step", "muon, 4 bits", "muon, factors"),
    ],
)
def test_without_jit_nothing_is_compiled_from_the_third_step_on(name, caplog):
    """And strict flags hold."""
    tx, params = made(name), {name: parameters()[name] for name in ("kernel", "stack", "bias")}
    state = tx.init(params)
    for step in range(4):
        if step == 2:
            jax.block_until_ready(state)
            caplog.set_level(logging.WARNING, logger="jax")
            caplog.clear()
        with jax.log_compiles(step >= 2), strict_flags():
            _, state = tx.update(params, state, params)
    assert not [record.message for record in caplog.records if "Compiling" in record.message]
