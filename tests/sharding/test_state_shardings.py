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
from tests import common
from tests.common import mesh_of

SHAPES = {
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
    return mesh_of((2, 2), ("x", "y"))


def abstract(mesh, names=tuple(SHAPES)):
    shapes, specs = ({name: SHAPES[name][i] for name in names} for i in (0, 1))
    return common.abstract(mesh, shapes, specs)


def specs(shardings):
    """The axes of each sharding, without trailing axes that are not sharded."""

    def axes(sharding):
        spec = list(sharding.spec)
        while spec and spec[-1] is None:
            del spec[-1]
        return tuple(spec)

    return jax.tree.map(axes, shardings)


EXPECTED_Q = {
    "kernel": ("x",),
    "tall": ("y",),  # q belongs to the shorter side
    "layers": (None, "y"),
    "experts": ("x",),
    "embedding": (),
    "bias": (),
    "scalar": (),
}
EXPECTED_U = {
    "kernel": ("y",),
    "tall": ("x",),
    "layers": (None, "x"),
    "experts": ("x", "y"),
    "embedding": (("x", "y"),),
    "bias": (),
    "scalar": (),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_factors_lie_as_the_sides_that_they_belong_to(kind):
    mesh = mesh_of((2, 2), ("x", "y"), kind)
    shardings = state_shardings(adapprox_jax.adapprox(1e-3, mu_dtype="int8"), abstract(mesh))
    state, average = specs(shardings[0]), specs(shardings[1])
    assert state.q == EXPECTED_Q
    assert state.u == EXPECTED_U
    experts = sorted(SHAPES.keys() - {"bias", "scalar"}).index("experts")
    assert state.rank[experts] == state.error[experts] == state.drift[experts] == ("x",)
    assert (state.nu["bias"], state.count, state.key) == (("y",), (), ())
    for name, (_, spec) in SHAPES.items():
        assert average.mu[name] == specs(NamedSharding(mesh, spec)), name
    # Scales, too, along the last axis; a row of the embedding is whole.
    assert average.scale["kernel"] == ("x", "y")
    assert average.scale["experts"] == ("x", None, "y")
    assert {leaf.mesh for leaf in jax.tree.leaves(shardings)} == {mesh}


@pytest.mark.parametrize("name", ["adapprox", "8 bits", "muon"])
def test_specs_are_known_without_a_mesh(mesh, name):
    tx = {
        "adapprox": adapprox_jax.adapprox(1e-3),
        "8 bits": adapprox_jax.adapprox(1e-3, mu_dtype="int8"),
        "muon": adapprox_jax.adapprox_muon(1e-3),
    }[name]
    params = abstract(mesh)
    plain = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in params.items()}
    found = adapprox_jax.state_specs(tx, plain, {key: spec for key, (_, spec) in SHAPES.items()})
    assert found == jax.tree.map(lambda x: x.spec, state_shardings(tx, params))
    replicated = adapprox_jax.state_specs(tx, plain, P())
    assert not any(name for spec in jax.tree.leaves(replicated) for name in spec)


@pytest.mark.parametrize("given", [{"kernel": P()}, {"kernel": "x", "bias": P()}, "x", None])
def test_specs_that_do_not_fit_are_named(given):
    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    with pytest.raises(ValueError, match=r"^specs is .*; allowed: a tree of jax.sharding"):
        adapprox_jax.state_specs(adapprox_jax.adapprox(1e-3), params, given)


def test_a_spec_of_more_axes_than_the_leaf_is_named():
    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    with pytest.raises(ValueError, match=r"^\['bias'\] has 1 axes and the spec .*; allowed: at"):
        adapprox_jax.state_specs(adapprox_jax.adapprox(1e-3), params, P(None, "x"))


def test_an_axis_that_the_devices_do_not_divide_is_on_all_of_them(mesh):
    sharding = NamedSharding(mesh, P(("x", "y"), None))
    # 33 blocks of the average's codes.
    params = {"odd": jax.ShapeDtypeStruct((1056, 128), jnp.float32, sharding=sharding)}
    average = specs(state_shardings(adapprox_jax.adapprox(1e-3, mu_dtype="int8"), params)[1])
    assert average.mu["odd"] == (("x", "y"),)
    assert average.scale["odd"] == ()


OPTIMIZERS = {
    "adapprox": adapprox_jax.adapprox(1e-3),
    "adapprox_muon": adapprox_jax.adapprox_muon(1e-3, mu_dtype="int4"),
    "low-rank muon": adapprox_jax.adapprox_muon(1e-3, second_moment=True),
    "masked": optax.masked(
        adapprox_jax.adapprox(1e-3), {name: name in ("kernel", "bias") for name in SHAPES}
    ),
    "partition": optax.partition(
        {"ours": adapprox_jax.adapprox(1e-3), "theirs": optax.adamw(1e-3)},
        {name: "ours" if name in ("kernel", "layers") else "theirs" for name in SHAPES},
    ),
    "MultiSteps": optax.MultiSteps(adapprox_jax.adapprox(1e-3), 2),
    "inject": optax.inject_hyperparams(adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS)(
        1e-3
    ),
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_born_there_and_no_device_holds_more_than_its_part(mesh, name):
    tx, params = OPTIMIZERS[name], abstract(mesh)
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


def test_parameters_on_one_device_count_as_replicated(mesh):
    params = {**abstract(mesh, ["kernel"]), "lone": jnp.ones((256, 512))}
    state = specs(state_shardings(adapprox_jax.adapprox(1e-3), params)[0])
    assert (state.q["kernel"], state.q["lone"]) == (("x",), ())


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


def test_variables_of_nnx_lie_as_their_metadata_says(mesh):
    nnx = pytest.importorskip("flax.nnx")
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"))

    def variables():
        return nnx.state(nnx.Linear(256, 512, kernel_init=kernel, rngs=nnx.Rngs(0)), nnx.Param)

    with nnx.use_eager_sharding(False):
        unplaced = jax.eval_shape(variables)
    with jax.set_mesh(mesh):
        placed = variables()
    for params, given in ((unplaced, mesh), (placed, None)):
        state = state_shardings(adapprox_jax.adapprox(1e-3), params, given)[0]
        assert specs(state.q["kernel"].get_value()) == ("x",)
        assert specs(state.u["kernel"].get_value()) == ("y",)


@pytest.mark.parametrize("given", [True, False])
def test_abstract_values_of_the_mesh_in_use_are_of_its_devices(mesh, given):
    sharding = NamedSharding(mesh.abstract_mesh, P("x", "y"))
    params = {"kernel": jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=sharding)}
    with jax.set_mesh(mesh):
        shardings = state_shardings(adapprox_jax.adapprox(1e-3), params, mesh if given else None)
    assert shardings[0].q["kernel"].mesh is mesh
    assert specs(shardings[0].q["kernel"]) == ("x",)


def test_what_is_no_array_and_no_mesh_is_named(mesh):
    tx = adapprox_jax.adapprox(1e-3)
    with pytest.raises(ValueError, match=r"\['w'\] is a float; allowed: an array or its shape"):
        state_shardings(tx, {"w": 1.0}, mesh)
    with pytest.raises(ValueError, match=r"mesh is 8; allowed: a jax.sharding.Mesh, or None"):
        state_shardings(tx, abstract(mesh), 8)


def test_what_tells_no_mesh_is_refused(mesh):
    tx, shape = adapprox_jax.adapprox(1e-3), (256, 512)
    with pytest.raises(ValueError, match=r"params lie on no mesh; allowed: parameters with Named"):
        state_shardings(tx, {"kernel": jnp.ones(shape)})
    other = mesh_of((4,), ("z",))
    two = {
        "a": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("x"))),
        "b": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(other, P("z"))),
    }
    with pytest.raises(ValueError, match=r"params lie on Mesh.* and Mesh.*; allowed: parameters"):
        state_shardings(tx, two)
    devices = jax.devices()[:4]  # of two meshes that are one in the abstract
    for name, some in ("a", devices), ("b", devices[::-1]):
        other = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=some)
        two[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(other, P("x")))
    with pytest.raises(ValueError, match=r"params lie on Mesh.* and Mesh.*; allowed: parameters"):
        state_shardings(tx, two)
    with pytest.raises(ValueError, match="tx"):
        state_shardings(two, tx)
