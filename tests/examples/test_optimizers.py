"""The optimizers that the programs offer."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2 import optimizers
from examples.gpt2.optimizers import Options, build

NAMES = typing.get_args(optimizers.Name)
PARAMS = {"hidden": jnp.ones((64, 128)), "bias": jnp.ones(128)}


def test_schedule_warms_up_and_ends_at_the_minimum():
    rate = optimizers.schedule(1.0, 0.1, warmup=9, steps=100)
    np.testing.assert_allclose([rate(0), rate(4), rate(9), rate(100)], [0.1, 0.5, 1.0, 0.1], 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_alone_decay_and_a_step_goes_down_the_gradient(name):
    tx = build(name, Options(weight_decay=0.5), 0.5)
    update = jax.jit(lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS)[0])
    updates = update(jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["hidden"], -0.25, rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], 0, atol=1e-12)
    grads = {"hidden": jax.random.normal(jax.random.key(0), (64, 128)), "bias": -jnp.ones(128)}
    updates = update(grads)
    assert np.sum((updates["hidden"] + 0.25) * grads["hidden"]) < 0
    assert np.sum(updates["bias"] * grads["bias"]) < 0


def test_gradients_are_clipped_together_where_a_norm_is_given():
    grads = jax.tree.map(lambda x: 1e3 * x, PARAMS)
    clipped = build("adamw", Options(clip_norm=1.0), 1.0)
    _, state = clipped.update(grads, clipped.init(PARAMS), PARAMS)
    mu = jax.tree.leaves(state[1][0].mu)
    assert np.sqrt(sum(np.sum(np.square(x)) for x in mu)) == pytest.approx(0.1, rel=1e-5)


def test_options_reach_adapprox():
    ours = build("adapprox", Options(max_rank=4, mu_dtype="int8"), 1.0)
    papers = build("adapprox-paper", Options(), 1.0)
    of_ours, of_papers = (jax.tree.leaves(jax.eval_shape(tx.init, PARAMS)) for tx in (ours, papers))
    assert {(64, 4), (128, 4)} <= {leaf.shape for leaf in of_ours}
    assert jnp.dtype("int8") in {leaf.dtype for leaf in of_ours}
    assert (64, 16) in {leaf.shape for leaf in of_papers}  # a quarter of 64 columns


def test_buffers_double_up_to_the_largest_rank():
    assert optimizers.widths(Options(initial_rank=1, max_rank=64)) == (8, 16, 32, 64)
    assert optimizers.widths(Options(initial_rank=20, max_rank=30)) == (20, 30)
