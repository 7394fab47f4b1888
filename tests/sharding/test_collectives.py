"""Few bytes between devices: what the compiled text of a step on eight of them says."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import adapprox_jax
from benchmarks.collectives import collectives_of
from tests.common import abstract, abstract_state, mesh_of, stepping

SPECS = {
    "rows": P(("x", "y"), None),
    "columns": P(None, ("x", "y")),
    "both": P("x", "y"),
    "both transposed": P("y", "x"),
}
M, N, RANK = 256, 1024, 16
MOST = 1.2 * (M + N) * RANK  # numbers moved a matrix and step


def parameters(mesh, names, batch=(), copies=1):
    leaves = {
        f"{name} {i}": ((*batch, M, N), P(*(None for _ in batch), *SPECS[name]))
        for name in names
        for i in range(copies)
    }
    return abstract(mesh, leaves)


def of_step(tx, params):
    """The collectives of a step of an optimizer, with state and parameters in place."""
    shardings = adapprox_jax.state_shardings(tx, params)
    state = abstract_state(tx, params, shardings)
    of_params = {name: x.sharding for name, x in params.items()}
    placed = jax.jit(stepping(tx), donate_argnums=(0, 1), out_shardings=(of_params, shardings))
    return collectives_of(placed.lower(params, state, params).compile().as_text())


@pytest.mark.parametrize(
    ("name", "batch"),
    [("rows", ()), ("columns", (3,)), ("both", (3,)), ("both transposed", ())],
)
def test_a_step_moves_less_than_the_factors(mesh, name, batch):
    found = of_step(adapprox_jax.adapprox(1e-3, max_rank=RANK), parameters(mesh, [name], batch))
    assert all(one.times == 1 for one in found)
    assert 0 < sum(one.nbytes for one in found) / 4 <= MOST * np.prod(batch)  # in float32
    assert {one.kind for one in found} == {"all-reduce"}
    assert len(found) <= 10


def test_leaves_divided_in_every_way_share_their_collectives(mesh):
    tx = adapprox_jax.adapprox(1e-3, max_rank=RANK, mu_dtype="int8")
    few, many = (of_step(tx, parameters(mesh, SPECS, copies=copies)) for copies in (1, 2))
    assert {one.kind for one in few + many} == {"all-reduce"}
    assert sum(one.nbytes for one in many) / 4 <= 8 * MOST
    assert len(many) - len(few) <= 8
    assert len(few) <= 24  # those of different groups of devices cannot be one


@pytest.mark.parametrize("muon", [False, True], ids=["adapprox", "adapprox_muon"])
def test_the_mesh_is_known_by_the_arrays(muon):
    """Without `jax.set_mesh` as much is moved as with it."""
    mesh = mesh_of((2, 4), ("x", "y"))
    tx = adapprox_jax.adapprox_muon(1e-3) if muon else adapprox_jax.adapprox(1e-3)
    params = parameters(mesh, ["rows", "both transposed"])
    alone = of_step(tx, params)
    with jax.set_mesh(mesh):
        expected = of_step(tx, params)
    assert alone == expected
