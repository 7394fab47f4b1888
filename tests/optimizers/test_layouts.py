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


@pytest.mark.parametrize("name", ["kernel", "weight"])
def test_fused_matrices_are_orthogonal_each(name):
    """As if each were a leaf; of a stack and where outputs come first, too."""
    axis = -1 if name == "kernel" else -2
    rng = np.random.default_rng(0)

    def matrices(count, *shape):
        shape = shape if name == "kernel" else (*shape[:-2], shape[-1], shape[-2])
        return [rng.normal(size=shape).astype(np.float32) for _ in range(count)]

    separate = {
        "qkv": matrices(3, 2, 32, 32),
        "gate_up": matrices(2, 32, 48),
        "gate_up_proj": matrices(2, 48, 16),
        "other": matrices(1, 32, 96),  # of the shape of "gate_up", whole
    }
    fused = {module: {name: jnp.concatenate(x, axis)} for module, x in separate.items()}
    tx = adapprox_jax.orthogonalize()
    actual = jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])(fused)
    each = [[{name: x} for x in some] for some in separate.values()]
    expected, _ = tx.update(each, tx.init(each))
    for module, parts in zip(separate, expected, strict=True):
        whole = jnp.concatenate([part[name] for part in parts], axis)
        # The same products; a step of the iteration rounds to 2^-23 of entries of up to 6.
        np.testing.assert_allclose(actual[module][name], whole, atol=1e-4, err_msg=module)
