"""adapprox_muon on a mesh: each device has its share of the matrices, and few bytes move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from benchmarks.collectives import collectives_of
from tests.common import abstract, abstract_state, mesh_of, normal, on_one_device, put

DEVICES = 8
SPECS = {
    "rows": P(None, ("x", "y"), None),
    "columns": P(None, None, ("x", "y")),
    "both": P(None, "x", "y"),
    "both transposed": P(None, "y", "x"),
    "of a stack": P(("y", "x"), None, None),
    "of a stack and columns": P("x", None, "y"),
    "copies": P(None, None, "y"),
    "copies of all": P(),
}


def directions_of(**settings):
    """A new function that makes updates orthogonal."""
    tx = adapprox_jax.orthogonalize(**settings)
    return jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])


def directions(params):
    """Its program."""
    shardings = {name: x.sharding for name, x in params.items()}
    return jax.jit(directions_of(), out_shardings=shardings).lower(params).compile()


def copies_moved(found, params):
    """Of all matrices, in float32 as CPUs move them; what a device keeps is counted, too."""
    matrices = sum(4 * x.size for x in params.values())
    return DEVICES * sum(one.nbytes for one in found) / matrices


def two_stacks(spec):
    """One of a spec, beside another that lies as most do and is turned."""
    return {"a": ((8, 64, 128), spec), "turned": ((16, 128, 64), P(None, "x", "y"))}


# At most: for each axis that divides matrices one there and one back, and one to each copy.
COPIES = {
    "rows": 4,
    "columns": 4,
    "both": 4,
    "both transposed": 4,
    "of a stack and columns": 8,
    "copies": 6,
    "copies of all": 10,
}
SLOW = COPIES.keys() - {"both", "copies"}
SMALL = 1e-3  # copies: sums that tell when a group is done
# Leaves, and how often all their numbers are moved at most.
MOVED = {name: (two_stacks(SPECS[name]), (most + 2 * 4) / 3) for name, most in COPIES.items()} | {
    "experts": ({"experts": ((8, 64, 128), P("y", "x", None))}, 2),
    "experts over all devices": ({"experts": ((8, 64, 128), P(("y", "x"), None, None))}, 4),
    "fused": ({"qkv": ((8, 64, 192), P(None, "x", "y"))}, 4),
    "fused, by columns": ({"qkv": ((8, 64, 192), P(None, None, ("x", "y")))}, 4),
    # Into and out of attention: those of several layers are one stack.
    "square": (
        {f"q_{layer}": ((64, 64), P("x", "y")) for layer in range(8)}
        | {f"o_{layer}": ((64, 64), P("y", "x")) for layer in range(8)},
        4,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MOVED]
)
def test_few_copies_move(mesh, in_phases, name):
    in_phases()
    leaves, most = MOVED[name]
    params = abstract(mesh, leaves)
    found = collectives_of(directions(params).as_text())
    assert copies_moved(found, params) <= most + SMALL
    if name.startswith(("fused", "square")):
        assert {one.kind for one in found} <= {"all-to-all", "all-reduce"}


@pytest.mark.parametrize(
    ("leaves", "of_one_device", "most"),
    [
        (two_stacks(SPECS["both"]), two_stacks(P()), 1.25 / DEVICES),
        # Two of each of four leaves: one for each device, instead of four times one with zeros.
        (dict.fromkeys("abcd", ((2, 64, 128), P(None, "x"))), {"a": ((1, 64, 128), P())}, 1.5),
    ],
    ids=["a large stack", "a few of several leaves"],
)
def test_nothing_is_done_twice(mesh, in_phases, leaves, of_one_device, most):
    in_phases()
    program = directions(abstract(mesh, leaves))
    with on_one_device():
        alone = directions(
            {name: jax.ShapeDtypeStruct(x, "float32") for name, (x, _) in of_one_device.items()}
        )
    flops = [one.cost_analysis()["flops"] for one in (program, alone)]
    assert flops[0] <= most * flops[1]


def test_what_makes_the_updates_is_divided_as_they_are(mesh, in_phases):
    """The compiler does not carry the exchange's axes into an average, or into what follows."""
    in_phases()
    tx = adapprox_jax.adapprox_muon(1e-3)
    params = abstract(mesh, {"up": ((8, 128, 512), P(None, "x", "y"))})
    shardings = adapprox_jax.state_shardings(tx, params)
    state = abstract_state(tx, params, shardings)
    placed = (jax.tree.map(lambda x: x.sharding, params), shardings)
    program = jax.jit(tx.update, out_shardings=placed).lower(params, state, params).compile()
    found = collectives_of(program.as_text())
    whole = [one for one in found if one.kind != "all-reduce"]
    assert {one.kind for one in whole} == {"all-to-all"}
    assert copies_moved(whole, params) <= 4 + SMALL


@pytest.mark.all_platforms
def test_programs_for_tpus_need_no_callbacks(mesh):
    """TPUs have no custom partitioning: such a program would not compile there."""
    params = abstract(mesh, {"up": ((8, 64, 128), P(None, "x", "y"))})
    lowered = directions_of().trace(params).lower(lowering_platforms=("tpu",))
    assert "custom_call" not in lowered.as_text()


@pytest.mark.parametrize("way", ["on CPUs", "on accelerators"])
def test_directions_are_those_of_one_device(mesh, request, way):
    if way == "on accelerators":
        request.getfixturevalue("in_phases")()
    leaves = {name: ((8 if "stack" in name else 3, 16, 32), SPECS[name]) for name in SPECS} | {
        "square": ((5, 32, 32), P(None, "x", "y")),
        "square turned": ((4, 32, 32), P(None, "y", "x")),
        "flat": ((32, 16), P("y", "x")),
        "uneven": ((18, 24), P("x", None)),
        "qkv": ((3, 16, 48), P(None, "x", "y")),
    }
    values = normal({name: shape for name, (shape, _) in leaves.items()})
    update = directions_of()
    actual = update(put(mesh, {name: spec for name, (_, spec) in leaves.items()}, values))
    with on_one_device():
        expected = update(values)
    for name in leaves:
        if way == "on CPUs":
            np.testing.assert_allclose(actual[name], expected[name], atol=1e-4, err_msg=name)
        else:
            # Three roundings to bfloat16 a step, of 2^-9, grow by up to 3.4 a step: 0.02 of entries
            # of size one. Which of them XLA leaves out differs from program to program.
            assert np.std(np.asarray(actual[name]) - np.asarray(expected[name])) < 0.04, name


def test_vmapped_and_differentiated_on_a_mesh(mesh):
    update = directions_of()
    value = np.random.default_rng(0).normal(size=(2, 4, 16, 32)).astype(np.float32)

    def total(updates):
        return jnp.sum(update(updates) ** 3)

    placed = jax.device_put(value, NamedSharding(mesh, P(None, None, "x", "y")))
    actual = [jax.jit(jax.vmap(total))(placed), jax.jit(jax.grad(total))(placed[0])]
    with on_one_device():
        expected = [jax.jit(jax.vmap(total))(value), jax.jit(jax.grad(total))(value[0])]
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * float(np.max(np.abs(y))))


def test_heads_that_an_axis_divides_in_part():
    """Two heads over eight devices: no names of axes say how the compiler divides them."""
    value = np.random.default_rng(0).normal(size=(16, 2, 8)).astype(np.float32)
    inputs = np.ones((4, 16), np.float32)
    update = directions_of(weight_dimension_numbers=adapprox_jax.MatrixDimensionNumbers(0, 2))

    def step(kernel, inputs):
        def loss(kernel):
            heads = inputs @ kernel.reshape(16, 16)
            if jax.sharding.get_abstract_mesh().size > 1:
                heads = jax.lax.with_sharding_constraint(heads, P(None, "x"))
            return jnp.sum(jax.nn.relu(heads) ** 2)

        return update(jax.grad(loss)(kernel))

    results = []
    for devices in (1, DEVICES):
        with jax.set_mesh(mesh_of((devices,), ("x",))):
            results.append(np.asarray(jax.jit(step)(value, inputs)))
    # All rows are alike: of rank one, so that rounding decides nothing but its direction's signs.
    np.testing.assert_allclose(*results, atol=1e-4)


def test_explicit_axes(mesh):
    explicit = mesh_of((2, 4), ("x", "y"), AxisType.Explicit)
    value = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)
    update = directions_of()
    with jax.set_mesh(explicit):
        placed = jax.device_put(value, NamedSharding(explicit, P(None, "x", "y")))
        program = update.lower(placed).compile()
        actual = update(placed)
        assert actual.sharding.spec == P(None, "x", "y")
    assert {one.kind for one in collectives_of(program.as_text())} <= {"all-to-all", "all-reduce"}
    with on_one_device():
        np.testing.assert_allclose(actual, update(value), atol=1e-4)
