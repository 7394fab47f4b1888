"""Models whose weights have outputs first, and models that are their own parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax import MatrixDimensionNumbers

SETTINGS = {
    "adapprox": lambda: adapprox_jax.adapprox(1e-2),
    "adapprox cautious": lambda: adapprox_jax.adapprox(1e-2, cautious_weight_decay=True),
    "adapprox 4 bits": lambda: adapprox_jax.adapprox(1e-2, mu_dtype="int4"),
    "adapprox_muon": lambda: adapprox_jax.adapprox_muon(1e-2),
    "adapprox_muon cautious": lambda: adapprox_jax.adapprox_muon(1e-2, cautious_weight_decay=True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_whole_model_may_be_given_as_parameters(name):
    arrays = {"up": jnp.ones((64, 128)), "bias": jnp.ones(128), "act": None, "nothing": None}
    model = arrays | {"act": jnp.tanh}  # a function is a leaf, for which there is no gradient
    grads = jax.tree.map(lambda x: 0.1 * x, arrays)
    tx = SETTINGS[name]()
    updates, state = tx.update(grads, tx.init(arrays), model)
    expected, _ = tx.update(grads, tx.init(arrays), arrays)
    assert updates["act"] is None
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(arrays))


@pytest.mark.parametrize("name", ["weight", "kernel"])
def test_neurons_are_rows_where_outputs_come_first(name):
    params = {"layer": {name: jnp.ones((64, 128)), "bias": jnp.ones(64)}}
    given = None if name == "weight" else MatrixDimensionNumbers(rows=1, columns=0)
    tx = adapprox_jax.adapprox_muon(1e-2, weight_dimension_numbers=given)
    state = tx.init(params)
    assert (64, 1) in [leaf.shape for leaf in jax.tree.leaves(state)]
    report = adapprox_jax.muon_report(params, weight_dimension_numbers=given)
    assert report[f"['layer']['{name}']"] == "orthogonalized: 64 x 128, outputs first"
    updates, _ = tx.update(params, state, params)  # biases have no rows or columns
    assert jax.tree.all(jax.tree.map(lambda x: jnp.isfinite(x).all(), updates))
