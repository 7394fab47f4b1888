"""Where the arrays of a state belong on a mesh, before they exist."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from adapprox_jax import state_shardings
from adapprox_jax.state.report import shaped_nbytes
from tests.common import abstract, mesh_of

LEAVES = {
    "kernel": ((256, 512), P("x", "y")),
    "tall": ((512, 256), P("x", "y")),
    "layers": ((4, 256, 512), P(None, "y", "x")),
    "experts": ((4, 256, 512), P("x", None, "y")),
    "embedding": ((1000, 128), P(("x", "y"), None)),
    "bias": ((512,), P("y")),
    "scalar": ((), P()),
}


@pytest.fixture
def mesh():
    """Not in use."""
    return mesh_of((2, 2), ("x", "y"))


def specs(shardings):
    """The axes of each sharding, without trailing axes that are not sharded."""

    def axes(sharding):
        spec = list(sharding.spec)
        while spec and spec[-1] is None:
            del spec[-1]
        return tuple(spec)

    return jax.tree.map(axes, shardings)


# Of q, which belongs to the shorter side, and of u.
EXPECTED = {
    "kernel": (("x",), ("y",)),
    "tall": (("y",), ("x",)),
    "layers": ((None, "y"), (None, "x")),
    "experts": (("x",), ("x", "y")),
    "embedding": ((), (("x", "y"),)),
    "bias": ((), ()),
    "scalar": ((), ()),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_factors_lie_as_the_sides_that_they_belong_to(kind):
    mesh = mesh_of((2, 2), ("x", "y"), kind)
    tx = adapprox_jax.adapprox(1e-3, mu_dtype="int8")
    shardings = state_shardings(tx, abstract(mesh, LEAVES))
    state, average = specs(shardings[0]), specs(shardings[1])
    assert {name: (state.q[name], state.u[name]) for name in LEAVES} == EXPECTED
    experts = sorted(LEAVES.keys() - {"bias", "scalar"}).index("experts")
    assert state.rank[experts] == state.error[experts] == state.drift[experts] == ("x",)
    assert (state.nu["bias"], state.count, state.key) == (("y",), (), ())
    for name, (_, spec) in LEAVES.items():
        assert average.mu[name] == specs(NamedSharding(mesh, spec)), name
    # Scales, too, along the last axis; a row of the embedding is whole.
    assert average.scale["kernel"] == ("x", "y")
    assert average.scale["experts"] == ("x", None, "y")
    assert {leaf.mesh for leaf in jax.tree.leaves(shardings)} == {mesh}


@pytest.mark.parametrize(
    "tx",
    [adapprox_jax.adapprox(1e-3, mu_dtype="int8"), adapprox_jax.adapprox_muon(1e-3)],
    ids=["adapprox", "adapprox_muon"],
)
def test_specs_are_known_without_a_mesh(mesh, tx):
    params = abstract(mesh, LEAVES)
    plain = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in params.items()}
    found = adapprox_jax.state_specs(tx, plain, {key: spec for key, (_, spec) in LEAVES.items()})
    assert found == jax.tree.map(lambda x: x.spec, state_shardings(tx, params))
    replicated = adapprox_jax.state_specs(tx, plain, P())
    assert not any(name for spec in jax.tree.leaves(replicated) for name in spec)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernel": P()}, r"^specs is .*; allowed: a tree of jax.sharding"),
        ({"kernel": "x", "bias": P()}, r"^specs is .*; allowed: a tree of jax.sharding"),
        ("x", r"^specs is .*; allowed: a tree of jax.sharding"),
        (P(None, "x"), r"^\['bias'\] has 1 axes and the spec .*; allowed: at"),
    ],
)
def test_specs_that_do_not_fit_are_named(given, message):
    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    with pytest.raises(ValueError, match=message):
        adapprox_jax.state_specs(adapprox_jax.adapprox(1e-3), params, given)


def test_what_does_not_lie_on_the_mesh_or_is_not_divided_by_it_is_on_all_devices(mesh):
    sharding = NamedSharding(mesh, P(("x", "y"), None))
    # 33 blocks of the average's codes.
    params = {"odd": jax.ShapeDtypeStruct((1056, 128), jnp.float32, sharding=sharding)}
    params["lone"] = jnp.ones((256, 512))
    tx = adapprox_jax.adapprox(1e-3, mu_dtype="int8")
    state, average = specs(state_shardings(tx, params))[:2]
    assert average.mu == {"odd": (("x", "y"),), "lone": ()}
    assert average.scale["odd"] == state.q["lone"] == state.u["lone"] == ()


OPTIMIZERS = {
    "adapprox": adapprox_jax.adapprox(1e-3),
    "adapprox_muon": adapprox_jax.adapprox_muon(1e-3, mu_dtype="int4"),
    "low-rank muon": adapprox_jax.adapprox_muon(1e-3, second_moment=True),
    "partition": optax.partition(
        {"ours": adapprox_jax.adapprox(1e-3), "theirs": optax.adamw(1e-3)},
        {name: "ours" if name in ("kernel", "layers") else "theirs" for name in LEAVES},
    ),
    "MultiSteps": optax.MultiSteps(adapprox_jax.adapprox(1e-3), 2),
    "inject": optax.inject_hyperparams(adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS)(
        1e-3
    ),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_born_there_and_no_device_holds_more_than_its_part(mesh, name):
    tx, params = OPTIMIZERS[name], abstract(mesh, LEAVES)
    shardings = state_shardings(tx, params)
    assert jax.tree.structure(shardings) == jax.tree.structure(jax.eval_shape(tx.init, params))
    compiled = jax.jit(tx.init, out_shardings=shardings).lower(params).compile()
    shapes = jax.eval_shape(tx.init, params)
    sizes = jax.tree.map(
        lambda x, s: shaped_nbytes(s.shard_shape(x.shape), x.dtype), shapes, shardings
    )
    memory = compiled.memory_analysis()
    # What a jitted function returns is a table of pointers, too, eight bytes an array.
    most = sum(jax.tree.leaves(sizes)) + 8 * len(jax.tree.leaves(sizes))
    assert memory.output_size_in_bytes <= most
    assert memory.temp_size_in_bytes <= 8192
    values = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in params.items()}
    state = compiled(values)
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_boxes_of_linen_lie_as_their_metadata_says(mesh):
    nn = pytest.importorskip("flax.linen")
    value = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    params = {"kernel": nn.Partitioned(value, names=("x", "y")), "plain": value}
    shardings = state_shardings(adapprox_jax.adapprox(1e-3), params, mesh)
    state = specs(shardings[0])
    assert (state.q["kernel"].value, state.q["plain"]) == (("x",), ())
    assert state.u["kernel"].names == ("y", None)
    boxed = {"kernel": nn.Partitioned(value, names=("batch", "y"))}
    with pytest.raises(ValueError, match=r"\['kernel'\] names the axis 'batch'; allowed: x, y"):
        state_shardings(adapprox_jax.adapprox(1e-3), boxed, mesh)


@pytest.mark.parametrize("given", [True, False])
def test_abstract_values_of_the_mesh_in_use_are_of_its_devices(mesh, given):
    params = {"kernel": on(mesh.abstract_mesh, "x", "y")}
    with jax.set_mesh(mesh):
        shardings = state_shardings(adapprox_jax.adapprox(1e-3), params, mesh if given else None)
    assert shardings[0].q["kernel"].mesh is mesh
    assert specs(shardings[0].q["kernel"]) == ("x",)


def on(mesh, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=sharding)


def test_what_tells_no_mesh_is_refused(mesh):
    tx = adapprox_jax.adapprox(1e-3)
    in_other_order = jax.sharding.Mesh(mesh.devices[::-1], ("x", "y"))
    two = {"a": on(mesh, "x"), "b": on(mesh_of((4,), ("z",)), "z")}
    one_in_the_abstract = {"a": on(mesh, "x"), "b": on(in_other_order, "x")}
    for arguments, message in [
        ((tx, {"w": 1.0}, mesh), r"\['w'\] is a float; allowed: an array or its shape"),
        ((tx, abstract(mesh, LEAVES), 8), r"mesh is 8; allowed: a jax.sharding.Mesh, or None"),
        ((tx, {"w": jnp.ones(3)}), "params lie on no mesh; allowed: parameters with Named"),
        ((tx, two), r"params lie on Mesh.* and Mesh.*; allowed: parameters"),
        ((tx, one_in_the_abstract), r"params lie on Mesh.* and Mesh.*; allowed: parameters"),
        ((two, tx), "tx"),
    ]:
        with pytest.raises(ValueError, match=message):
            state_shardings(*arguments)
