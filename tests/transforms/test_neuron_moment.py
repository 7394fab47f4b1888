"""The size that `scale_by_neuron_moment` sets without another pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from tests.common import normal, run

SHAPES = {
    "kernel": (6, 4),
    "weight": (6, 4),  # outputs first
    "stack": (3, 6, 4),
    "query": (16, 2, 4),  # heads
    "window": (3, 3, 8, 16),
    "bias": (5,),
    "scalar": (),
}


@pytest.mark.parametrize(
    ("dtype", "eps"), [(jnp.float32, 1e-30), (jnp.float32, 0.1), (jnp.bfloat16, 1e-8)]
)
def test_matrix_rms_is_that_of_scale_to_matrix_rms(dtype, eps):
    grads = jax.tree.map(lambda x: jnp.asarray(10 * x, dtype), normal(SHAPES))
    grads["kernel"] = grads["kernel"].at[:, 1].set(0)
    grads["stack"] = grads["stack"].at[1].set(0)
    one = adapprox_jax.scale_by_neuron_moment(0.95, eps, matrix_rms=0.2)
    two = optax.chain(
        adapprox_jax.scale_by_neuron_moment(0.95, eps), adapprox_jax.scale_to_matrix_rms(0.2)
    )
    (_, actual), _ = run(one, [grads] * 2)
    (_, expected), _ = run(two, [grads] * 2)
    # Of two roundings to the type of the updates; else sums in another order.
    tolerance = 2 * float(jnp.finfo(dtype).eps) + 1e-5
    for name, x in actual.items():
        assert x.dtype == dtype
        wide = (np.asarray(tree[name], np.float32) for tree in (actual, expected))
        np.testing.assert_allclose(*wide, rtol=tolerance, err_msg=name)
