"""Few bytes between devices: what the compiled text of a step on eight of them says."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import adapprox_jax
from benchmarks.collectives import collectives_of
from tests.common import abstract, abstract_state, mesh_of, on_one_device, put

SPECS = {
    "rows": P(("x", "y"), None),
    "columns": P(None, ("x", "y")),
    "both": P("x", "y"),
    "both transposed": P("y", "x"),
}
M, N, RANK = 256, 1024, 16
MOST = 1.2 * (M + N) * RANK  # numbers moved a matrix and step


@pytest.fixture
def mesh():
    mesh = mesh_of((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        yield mesh


def parameters(mesh, names, batch=(), copies=1):
    specs = {
        f"{name} {i}": P(*(None for _ in batch), *SPECS[name])
        for name in names
        for i in range(copies)
    }
    return abstract(mesh, dict.fromkeys(specs, (*batch, M, N)), specs)


def compiled(tx, params):
    """The step of an optimizer, with state and parameters in place."""
    shardings = adapprox_jax.state_shardings(tx, params)
    state = abstract_state(tx, params, shardings)
    of_params = {name: x.sharding for name, x in params.items()}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    placed = jax.jit(step, donate_argnums=(0, 1), out_shardings=(of_params, shardings))
    return placed.lower(params, state, params).compile()


def numbers_moved(found):
    """In float32, each time that they are moved."""
    return sum(one.nbytes for one in found) / 4


def of_step(tx, params):
    return collectives_of(compiled(tx, params).as_text())


@pytest.mark.parametrize("batch", [(), (3,)], ids=["plain", "stacked"])
@pytest.mark.parametrize("name", SPECS)
def test_a_step_moves_less_than_the_factors(mesh, name, batch):
    found = of_step(adapprox_jax.adapprox(1e-3, max_rank=RANK), parameters(mesh, [name], batch))
    matrices = int(np.prod(batch))
    assert all(one.times == 1 for one in found)
    assert 0 < numbers_moved(found) <= MOST * matrices
    assert {one.kind for one in found} == {"all-reduce"}
    assert len(found) <= 10


def test_leaves_divided_in_every_way_do_not_disturb_each_other(mesh):
    """Nothing is gathered, and more leaves take few collectives more: they share them."""
    tx = adapprox_jax.adapprox(1e-3, max_rank=RANK, mu_dtype="int8")
    few, many = (of_step(tx, parameters(mesh, SPECS, copies=copies)) for copies in (1, 2))
    for found, leaves in ((few, 4), (many, 8)):
        assert {one.kind for one in found} == {"all-reduce"}
        assert numbers_moved(found) <= MOST * leaves
    assert len(many) - len(few) <= 8
    assert len(few) <= 24  # those of different groups of devices cannot be one


@pytest.mark.parametrize("muon", [False, True], ids=["adapprox", "adapprox_muon"])
def test_the_mesh_is_known_by_the_arrays(muon):
    """Without `jax.set_mesh` as much is moved as with it."""
    mesh = mesh_of((2, 4), ("x", "y"))
    tx = adapprox_jax.adapprox_muon(1e-3) if muon else adapprox_jax.adapprox(1e-3)
    params = parameters(mesh, SPECS)
    alone = of_step(tx, params)
    with jax.set_mesh(mesh):
        expected = of_step(tx, params)
    assert alone == expected


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(max_rank=4), id="fixed", marks=pytest.mark.slow),
        pytest.param(dict(initial_rank=1, max_rank=8, error_threshold=0.1), id="adaptive"),
    ],
)
def test_updates_are_those_of_one_device(mesh, settings):
    tx = adapprox_jax.adapprox(1e-2, min_dim_size_to_factor=1, **settings)
    specs = {"a": P("x", "y"), "b": P("y", "x"), "c": P(None, "x", "y"), "d": P("y")}
    specs["heads"] = P("x", None, "y")
    shapes = {"a": (48, 64), "b": (64, 48), "c": (3, 48, 64), "d": (64,), "heads": (64, 4, 16)}

    rng = np.random.default_rng(0)
    given = [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in "123"]

    def two_updates(params, *grads, **keywords):
        state, update = jax.jit(tx.init, **keywords)(params), jax.jit(tx.update)
        for grad in grads:
            updates, state = update(grad, state, params)
        return jax.device_get((updates, state[0].rank))

    placed = [put(mesh, specs, tree) for tree in given]
    shardings = adapprox_jax.state_shardings(tx, placed[0])
    actual, ranks = two_updates(*placed, out_shardings=shardings)
    with on_one_device():
        expected, expected_ranks = two_updates(*given)
    for name in shapes:
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-4 * 1e-2, err_msg=name)
    for rank, expected_rank in zip(ranks, expected_ranks, strict=True):
        np.testing.assert_array_equal(rank, expected_rank)
