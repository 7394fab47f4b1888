"""Leaves that a CPU steps together, so that they share code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.params.matrix_view import matrix_view
from adapprox_jax.settings import RankRule, Settings, Storage, Subspace
from adapprox_jax.state.layout import init_leaf
from adapprox_jax.step.factorize import MOST_TOGETHER
from adapprox_jax.step.groups import groups_of

SETTINGS = dict(initial_rank=1, max_rank=40, rank_interval=3, error_threshold=0.02)


def groups(shapes, initial_rank=1, **dtypes):
    rule = RankRule(initial_rank, 40, 10, lambda xi: jnp.asarray(1), 0)
    subspace = Subspace(1, 0, True, True, "cholesky")
    settings = Settings(rule, subspace, Storage(1, None), "root")
    params = [
        jax.ShapeDtypeStruct(s, dtypes.get(str(i), jnp.float32)) for i, s in enumerate(shapes)
    ]
    found = []

    def trace(params):
        states = [init_leaf(param, None, rule, settings.storage) for param in params]
        views = [matrix_view(param.shape, None) for param in params]
        found.extend(groups_of(params, states, views, settings))

    jax.eval_shape(trace, params)
    return found


def test_matrices_of_one_shape_go_together():
    assert groups([(64, 96), (96, 64), (64, 96), (64,), (64, 96), (64,)]) == [
        [0, 2, 4],
        [1],
        [3],
        [5],
    ]


def test_groups_are_of_equal_size_and_hold_little():
    assert [len(x) for x in groups([(64, 96)] * (MOST_TOGETHER + 2))] == [4, 4]
    assert [len(x) for x in groups([(768, 2304)] * 12)] == [3] * 4
    assert [len(x) for x in groups([(1024, 4096)] * 4)] == [2, 2]  # large ones in pairs
    assert [len(x) for x in groups([(50304, 768)] * 2)] == [1, 1]  # tiles
    assert [len(x) for x in groups([(4, 64, 96)] * 2)] == [1, 1]  # stacks have a loop of their own


def test_leaves_that_differ_or_have_fixed_ranks_go_alone():
    assert groups([(64, 96)] * 2, initial_rank=None) == [[0], [1]]
    assert groups([(64, 96)] * 3, **{"1": jnp.bfloat16}) == [[0, 2], [1]]


def gradients(step):
    """Of magnitudes of rank 1, 3, ...: ranks of 1 to more than 16 are chosen."""
    found = {}
    for i, rank in enumerate((1, 3, 30, 6, 20)):
        rng = np.random.default_rng(i)
        magnitude = np.exp(rng.normal(size=(64, rank))) @ np.exp(rng.normal(size=(rank, 96)))
        sign = np.random.default_rng([i, step]).choice([-1, 1], size=(64, 96))
        found[str(i)] = (magnitude * sign).astype(np.float32)
    return found


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("jitted", [True, False])
def test_a_step_is_the_same_in_company_and_alone(jitted, dtype):
    """Also where the matrices of a group need code for different sizes of the rank."""
    tx = adapprox_jax.scale_by_adapprox(**SETTINGS, factor_dtype=dtype)
    update = jax.jit(tx.update) if jitted else tx.update
    params = jax.tree.map(jnp.zeros_like, gradients(0))
    together = tx.init(params)
    alone = {name: tx.init({"one": params[name]}) for name in params}
    for step in range(5):
        grads = gradients(step)
        scaled, together = update(grads, together)
        for name, grad in grads.items():
            expected, alone[name] = update({"one": grad}, alone[name])
            assert int(together.rank[name]) == int(alone[name].rank["one"])
            if dtype is None:  # else a rounding apart is a bit of bfloat16 apart
                difference = np.linalg.norm(scaled[name] - expected["one"])
                assert difference <= 1e-4 * np.linalg.norm(expected["one"])
                for field in ("error", "drift"):
                    actual, wanted = getattr(together, field), getattr(alone[name], field)
                    np.testing.assert_allclose(actual[name], wanted["one"], rtol=1e-3, atol=1e-4)
    ranks = [int(rank) for rank in together.rank.values()]
    assert min(ranks) < 16 < max(ranks)


def test_a_matrix_without_columns_does_not_keep_others_from_their_step():
    tx = adapprox_jax.scale_by_adapprox(**SETTINGS)
    params = jax.tree.map(jnp.zeros_like, gradients(0))
    _, state = tx.update(gradients(0), tx.init(params))
    damaged = state._replace(rank=state.rank | {"0": jnp.int32(0)})
    _, expected = tx.update(gradients(1), state)
    _, actual = tx.update(gradients(1), damaged)
    for name in ("1", "2", "3", "4"):
        np.testing.assert_allclose(actual.u[name], expected.u[name], rtol=1e-4, atol=1e-4)
    assert int(actual.rank["0"]) == 1


def test_code_for_chosen_ranks_grows_with_groups_and_not_with_leaves():
    def decompositions(leaves):
        params = {str(i): jax.ShapeDtypeStruct((64, 96), jnp.float32) for i in range(leaves)}
        tx = adapprox_jax.scale_by_adapprox(**SETTINGS)
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params))
        return lowered.compile().as_text().count('custom_call_target="lapack_sgesdd')

    assert decompositions(1) == decompositions(MOST_TOGETHER) > 0
    assert decompositions(2 * MOST_TOGETHER) == 2 * decompositions(1)
