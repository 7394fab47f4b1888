"""What is traced and compiled: how often, how many passes, and at which precision."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from tests.common import program_of

MATRIX = jax.ShapeDtypeStruct((70, 90), jnp.float32)
SETTINGS = {
    "fixed": dict(max_rank=4),
    "adaptive": dict(initial_rank=1, max_rank=12, error_threshold=0.1),
    "moment": dict(max_rank=4, approximate="moment"),
    "4 bits": dict(max_rank=4, mu_dtype=jnp.int4),
}


def compilations(function):
    """How many programs XLA compiles while a function runs."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        function()
    finally:
        jax.monitoring.clear_event_listeners()
    return len(seen)


# Between two choices a rank that adapts takes the way of a fixed one.
@pytest.mark.parametrize("name", ["adaptive", "4 bits"])
def test_an_update_outside_of_jit_compiles_once_for_each_shape(name):
    """And another optimizer with equal settings compiles nothing, as under inject_hyperparams."""
    params = {"a": jnp.ones((70, 90)), "b": jnp.ones((70, 90)), "c": jnp.ones(90)}

    def step():
        tx = adapprox_jax.adapprox(1e-3, **SETTINGS[name])
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(params, state, params)
        jax.block_until_ready(updates)

    first = compilations(step)
    assert first > 0
    assert compilations(step) == 0


def compiled_for(params, **settings):
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings)
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params)).compile().as_text()


def test_without_eps_root_no_matrix_is_squared_and_rooted_once_more():
    """One root of a matrix in the whole program for a CPU."""

    def roots(**settings):
        text = compiled_for(MATRIX, **SETTINGS["adaptive"], **settings)
        return len(re.findall(r"= f32\[[0-9,]*70,90\]\S* sqrt\(", text))

    assert roots() == 1
    assert roots(eps_root=1e-8) == 2


def test_random_starts_are_worked_out_once_on_cpus_however_many_leaves():
    """XLA would work Gaussian columns out anew in the kernel of each leaf that reads them."""

    def normals(leaves):
        text = compiled_for([MATRIX] * leaves, **SETTINGS["adaptive"])
        return len(re.findall(r"op_name=\"[^\"]*erf_inv", text))

    assert normals(3) == normals(1) > 0


@pytest.mark.parametrize("name", ["fixed", "adaptive", "moment"])
def test_every_product_asks_for_full_precision(name):
    """TF32 and bfloat16 products, the default on GPUs and TPUs, lose small second moments."""
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **SETTINGS[name])
    products = re.findall(r"stablehlo.dot_general[^\n]*", program_of(tx, MATRIX))
    assert len(products) >= 5
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)


def test_an_update_can_be_differentiated():
    """Of two steps: the first one's update does not depend on its factorization."""
    with jax.enable_x64(True):
        tx = adapprox_jax.adapprox(1e-1, min_dim_size_to_factor=1, **SETTINGS["adaptive"])
        weights = np.random.default_rng(0).normal(size=(24, 40))

        @jax.jit
        def function(scale):
            grads = scale * weights
            _, state = tx.update(grads, tx.init(weights), weights)
            updates, _ = tx.update(grads**3, state, weights)
            return jnp.sum((weights + updates) ** 2 * scale)

        step = 1e-5
        expected = (function(1 + step) - function(1 - step)) / (2 * step)
        np.testing.assert_allclose(jax.jit(jax.grad(function))(1.0), expected, rtol=1e-6)


@pytest.mark.parametrize("exponent", [-36, 36])
def test_derivatives_do_not_depend_on_the_scale_of_gradients(exponent):
    """The power of two that squares are divided by is a constant: its own derivative overflows."""
    tx = adapprox_jax.scale_by_adapprox(
        eps=0.0, approximate="moment", max_rank=2, min_dim_size_to_factor=1
    )
    weights = np.random.default_rng(0).normal(size=(24, 40)).astype(np.float32)

    def energy(factor, scale):
        _, state = tx.update(scale * weights, tx.init(weights))
        updates, _ = tx.update(scale * factor * weights**3, state)
        return jnp.sum(jnp.square(updates))

    derivative = jax.jit(jax.grad(energy))
    np.testing.assert_allclose(derivative(1.0, 2.0**exponent), derivative(1.0, 1.0), rtol=1e-3)
