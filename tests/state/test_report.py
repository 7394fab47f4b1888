"""What a state holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax

PARAMS = {
    "layer": {"kernel": jnp.ones((24, 40)), "bias": jnp.ones(40)},
    "stack": jnp.ones((3, 24, 40)),
}


def test_report_names_shapes_ranks_and_bytes():
    tx = adapprox_jax.adapprox(1e-3, max_rank=4, min_dim_size_to_factor=1)
    state = tx.init(PARAMS)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), PARAMS)
    _, state = jax.jit(tx.update)(grads, state, PARAMS)
    report = adapprox_jax.rank_report(state, PARAMS)
    assert set(report) == {"['layer']['kernel']", "['stack']"}
    info = report["['layer']['kernel']"]
    assert info.shape == (24, 40)
    assert (info.rank, info.capacity) == (4, 4)
    assert info.nbytes == 4 * 4 * (24 + 40)
    assert info.dense_nbytes == 4 * 24 * 40
    assert 0 < info.error < 1
    assert info.drift >= info.error * 0.99
    stack = report["['stack']"]
    assert stack.rank.shape == stack.error.shape == stack.drift.shape == (3,)
    assert stack.nbytes == 3 * info.nbytes


@pytest.mark.parametrize(
    ("made_for", "given", "matrices"),
    [
        ((128, 96), (3,), "(96, 128)"),
        ((2, 128, 96), (3, 128, 96), "(2, 96, 128)"),
        ((128, 4, 32), (128, 4, 16), "(128, 128)"),
    ],
)
def test_parameters_of_other_shapes_are_named(made_for, given, matrices):
    state = adapprox_jax.adapprox(1e-3).init({"query": jnp.ones(made_for)})
    message = (
        f"['query'] has shape {given}; its state has factors of {matrices} (shorter side first);"
        " allowed: the parameters that the state was made for."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        adapprox_jax.rank_report(state, {"query": jnp.ones(given)})


@pytest.mark.parametrize(
    ("shape", "numbers", "matrices"),
    [
        ((128, 4, 32), None, (128, 128)),
        ((3, 128, 4, 32), None, (3, 128, 128)),
        ((128, 3, 96), adapprox_jax.MatrixDimensionNumbers(2, 0), (3, 96, 128)),
        ((4, 80, 16, 5), adapprox_jax.MatrixDimensionNumbers((0, 2), (3, 1)), (64, 400)),
    ],
)
def test_views_of_several_axes(shape, numbers, matrices):
    params = {"query": jnp.ones(shape)}
    state = adapprox_jax.scale_by_adapprox(weight_dimension_numbers=numbers).init(params)
    info = adapprox_jax.rank_report(state, jax.eval_shape(lambda: params))["['query']"]
    assert (info.shape, info.matrices) == (shape, matrices)


def test_members_along_any_axis():
    params = {"w": jnp.ones((3, 5, 80, 96))}
    state = jax.vmap(adapprox_jax.scale_by_adapprox().init, in_axes=1)(params)
    assert adapprox_jax.rank_report(state, params)["['w']"].matrices == (5, 3, 80, 96)


def test_states_in_other_containers():
    """A checkpoint may give a list back; numbers by name were those of an earlier version."""
    params = {"a": jnp.ones((64, 96)), "b": jnp.ones((64, 80)), "bias": jnp.ones(96)}
    tx = adapprox_jax.adapprox(1e-3)
    state = tx.init(params)

    def updated(**fields):
        return tx.update(params, [state[0]._replace(**fields), *state[1:]], params)

    actual = updated(rank=list(state[0].rank), error=list(state[0].error))
    jax.tree.map(np.testing.assert_array_equal, actual, tx.update(params, state, params))
    for bad in (dict(zip("ab", state[0].rank, strict=True)), state[0].rank[:1]):
        with pytest.raises(ValueError, match=r"the state's rank: got .*; expected a tuple of 2"):
            updated(rank=bad)
    of_neurons = adapprox_jax.scale_by_neuron_moment()
    with pytest.raises(ValueError, match="means of neurons: got 3; expected a tuple of 1"):
        of_neurons.update({"a": params["a"]}, of_neurons.init(params))


def test_codes_without_scales_are_refused():
    tx = adapprox_jax.guided_ema(mu_dtype="int8")
    params = {"a": jnp.ones((64, 96)), "b": jnp.ones((64, 80))}
    state = tx.init(params)
    part = {"a": optax.MaskedNode(), "b": state.scale["b"]}
    with pytest.raises(ValueError, match=r"\['a'\]: the state has codes without scales"):
        tx.update(params, state._replace(scale=part))


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [
        (adapprox_jax.adapprox(1e-3, mu_dtype="int4", initial_rank=1), "float32"),
        (adapprox_jax.adapprox_muon(1e-3, mu_dtype="int8"), "float32"),
        (adapprox_jax.adapprox_muon(1e-3, second_moment=True), "float32"),
        (adapprox_jax.split_weights(adapprox_jax.adapprox(1e-3)), "bfloat16"),
    ],
)
def test_rules_for_the_paths_of_parameters_fit_the_state(tx, dtype):
    """What lies under the path of a parameter has its number of axes, so that its spec fits.

    And four devices divide the axes that they divide of the parameter.
    """
    shapes = {"embedding": (512, 64), "mlp": (128, 256), "layers": (3, 128, 256), "bias": (256,)}
    params = {name: jnp.ones(shape, dtype) for name, shape in shapes.items()}
    seen = set()
    first = jax.eval_shape(tx.init, params)
    for state in (first, jax.eval_shape(tx.update, params, first, params)[1]):
        for path, array in jax.tree_util.tree_leaves_with_path(state):
            names = [key.key for key in path if getattr(key, "key", None) in shapes]
            for name in names:
                sides = zip(array.shape, shapes[name], strict=True)
                assert all(n % 4 == 0 or m % 4 for n, m in sides), path
            seen.update(names)
    assert seen == shapes.keys()


def test_two_states_of_one_leaf_are_refused_and_none_is_reported():
    params = {"w": jnp.ones((64, 96))}
    tx = optax.chain(*(adapprox_jax.scale_by_adapprox(max_rank=rank) for rank in (2, 4)))
    with pytest.raises(ValueError, match=r"'w'.* has factors in two states; allowed: one state"):
        adapprox_jax.rank_report(tx.init(params), params)
    assert adapprox_jax.rank_report(optax.adamw(1e-3).init(params), params) == {}
