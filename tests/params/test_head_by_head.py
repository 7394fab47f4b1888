"""Each attention head as a matrix by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from tests.params.test_named_arrays import Axis, NamedArray


def test_heads_are_matrices_where_the_user_says_so():
    params = {
        "q_proj": {"kernel": jnp.ones((64, 128))},
        "k_proj": {"weight": jnp.ones((32, 64))},
        "attn": {"query": {"kernel": jnp.ones((64, 8, 16)), "bias": jnp.ones((8, 16))}},
        "c_attn": {"kernel": jnp.ones((2, 64, 192))},
        "mlp": {"kernel": jnp.ones((64, 256))},
    }
    report = adapprox_jax.muon_report(params, None, adapprox_jax.head_by_head(16))
    assert {path.split("'")[1]: what for path, what in report.items() if "bias" not in path} == {
        "q_proj": "orthogonalized: 8 of 64 x 16",
        "k_proj": "orthogonalized: 2 of 16 x 64, outputs first",
        "attn": "orthogonalized: 8 of 64 x 16",
        "c_attn": "orthogonalized: 24 of 64 x 16",
        "mlp": "orthogonalized: 64 x 256",
    }


@pytest.mark.parametrize("head_size", [None, 24])
def test_heads_without_an_axis_need_a_size_that_divides(head_size):
    params = {"q_proj": {"kernel": jnp.ones((64, 128))}}
    tx = adapprox_jax.adapprox_muon(
        1e-2, weight_dimension_numbers=adapprox_jax.head_by_head(head_size)
    )
    with pytest.raises(ValueError, match=rf"q_proj.*\(64, 128\).*head_size is {head_size}.*128"):
        tx.init(params)


def test_a_model_trains_head_by_head():
    """Under a partition, which shows a function only some of the leaves, and where heads lie."""
    rng = np.random.default_rng(0)
    heads = [rng.normal(size=(64, 16)).astype(np.float32) for _ in range(4)]
    axes = (Axis("embed", 64), Axis("heads", 4), Axis("head_size", 16))
    kernel = jnp.stack(heads, 1)
    params = {
        "query": {"kernel": kernel, "bias": jnp.ones((4, 16))},
        "k_proj": {"kernel": jnp.concatenate(heads, 1)},
        "v_proj": {"weight": NamedArray(kernel, axes)},
        "embedding": jnp.ones((96, 64)),
    }
    tx = adapprox_jax.adapprox_muon(
        1e-2, second_moment=False, weight_dimension_numbers=adapprox_jax.head_by_head(16)
    )
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    alone = {"some": heads}
    plain = adapprox_jax.adapprox_muon(1e-2, second_moment=False)
    expected = jnp.stack(plain.update(alone, plain.init(alone), alone)[0]["some"], 1)
    # The same products in another order: 2^-23 of entries of up to 6, a few times over.
    close = functools.partial(np.testing.assert_allclose, desired=expected, atol=1e-6)
    close(updates["query"]["kernel"])
    close(updates["k_proj"]["kernel"].reshape(64, 4, 16))
    close(updates["v_proj"]["weight"].array)
