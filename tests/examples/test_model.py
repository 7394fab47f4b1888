import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.gpt2 import model as gpt

SMALL = gpt.GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=50)


@pytest.fixture(scope="module")
def model():
    return gpt.GPT(SMALL, rngs=nnx.Rngs(0))


forward = nnx.jit(lambda model, x: model(x))
loss = nnx.jit(gpt.loss)


def tokens(batch, length):
    return np.random.default_rng(0).integers(0, SMALL.vocabulary, (batch, length), np.int32)


def test_the_number_of_parameters_is_gpt2s():
    config = gpt.CONFIGS["117M"]
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # OpenAI's 124,439,808, with 47 more tokens: 50,304 is a multiple of 128.
    assert sum(leaf.size for leaf in leaves) == 124_439_808 + 47 * 768


def test_loss_is_the_mean_negative_log_probability(model):
    x = tokens(8, 9)
    logits = np.asarray(forward(model, x[:, :-1]), np.float64)
    chosen = np.take_along_axis(logits, np.asarray(x)[:, 1:, None], -1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - chosen)
    np.testing.assert_allclose(float(loss(model, x)), expected, rtol=1e-6)


def test_initial_scales_are_those_of_gpt2():
    config = dataclasses.replace(SMALL, width=64)
    model = nnx.jit(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))()
    block = model.blocks[0]
    for kernel in (block.qkv.kernel, block.expand.kernel, model.tokens.embedding):
        assert abs(np.std(np.asarray(kernel[...])) / 0.02 - 1) < 0.1
    for kernel in (block.projection.kernel, block.contract.kernel):
        assert abs(np.std(np.asarray(kernel[...])) / (0.02 / 4**0.5) - 1) < 0.1
    assert not block.qkv.bias[...].any()


def test_bfloat16_is_for_the_layers_alone(model):
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    half = gpt.GPT(config, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(half, nnx.Param)))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    x = tokens(8, 8)
    low, full = (np.asarray(forward(of, x)) for of in (half, model))
    assert low.dtype == np.float32
    np.testing.assert_allclose(low, full, atol=5e-3)
    assert (low != full).any()  # it did compute in another type
