"""adapprox_muon on a mesh: each device has its share of the matrices, and few bytes move."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adapprox_jax
from benchmarks.collectives import collectives_of
from tests.common import abstract, abstract_state, mesh_of, on_one_device, put

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


@pytest.fixture
def mesh():
    mesh = mesh_of((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        yield mesh


def directions(params):
    """The program that makes updates orthogonal."""
    tx = adapprox_jax.orthogonalize()
    shardings = {name: getattr(x, "sharding", None) for name, x in params.items()}
    update = jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    if None not in shardings.values():
        update = jax.jit(update, out_shardings=shardings)
    return update.lower(params).compile()


def copies_moved(found, params):
    """Of all matrices, in float32 as CPUs move them; what a device keeps is counted, too."""
    matrices = sum(4 * x.size for x in params.values())
    return DEVICES * sum(one.nbytes for one in found) / matrices


SMALL = 1e-3  # copies: sums that tell when a group is done
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
FAST = ("both", "copies")  # the others are of the slow suite


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in COPIES],
)
def test_few_copies_move_and_nothing_is_done_twice(mesh, in_phases, name):
    in_phases()
    shapes = {name: (8, 64, 128), "turned": (16, 128, 64)}
    params = abstract(mesh, shapes, {name: SPECS[name], "turned": P(None, "x", "y")})
    program = directions(params)
    moved = copies_moved(collectives_of(program.as_text()), params)
    assert moved <= (COPIES[name] + 2 * 4) / 3 + SMALL
    with on_one_device():
        alone = directions({k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()})
    flops = [one.cost_analysis()["flops"] for one in (program, alone)]
    assert flops[0] <= 1.25 * flops[1] / DEVICES


def test_matrices_that_are_divided_in_two_ways_are_not_put_together(mesh, in_phases):
    """Square ones into and out of attention; those of several layers are one stack."""
    in_phases()
    shapes = {f"{name}_{layer}": (64, 64) for name in ("q", "o") for layer in range(8)}
    specs = {name: P("x", "y") if name[0] == "q" else P("y", "x") for name in shapes}
    params = abstract(mesh, shapes, specs)
    found = collectives_of(directions(params).as_text())
    assert {one.kind for one in found} <= {"all-to-all", "all-reduce"}
    assert copies_moved(found, params) <= 4 + SMALL


def test_few_matrices_of_several_leaves_are_worked_on_at_once(mesh, in_phases):
    """Two of each of four leaves: one for each device, instead of four times one with zeros."""
    in_phases()
    params = abstract(
        mesh, dict.fromkeys("abcd", (2, 64, 128)), dict.fromkeys("abcd", P(None, "x"))
    )
    with on_one_device():
        alone = directions({"a": jax.ShapeDtypeStruct((1, 64, 128), jnp.float32)})
    flops = [one.cost_analysis()["flops"] for one in (directions(params), alone)]
    assert flops[0] <= 1.5 * flops[1]


def test_what_makes_the_updates_is_divided_as_they_are(mesh, in_phases):
    """The compiler does not carry the exchange's axes into an average, or into what follows."""
    in_phases()
    tx = adapprox_jax.adapprox_muon(1e-3)
    params = abstract(mesh, {"up": (8, 128, 512)}, {"up": P(None, "x", "y")})
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
    tx = adapprox_jax.orthogonalize()
    params = abstract(mesh, {"up": (8, 64, 128)}, {"up": P(None, "x", "y")})
    update = jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    lowered = update.trace(params).lower(lowering_platforms=("tpu",))
    assert "custom_call" not in lowered.as_text()


def test_experts_are_not_gathered(mesh, in_phases):
    in_phases()
    shapes = {"experts": (8, 64, 128)}
    for spec, copies in ((P("y", "x", None), 2), (P(("y", "x"), None, None), 4)):
        found = collectives_of(directions(abstract(mesh, shapes, {"experts": spec})).as_text())
        assert copies_moved(found, abstract(mesh, shapes, {"experts": spec})) <= copies + SMALL


@pytest.mark.parametrize("spec", [P(None, "x", "y"), P(None, None, ("x", "y"))])
def test_fused_matrices_come_apart_where_they_are_whole(mesh, in_phases, spec):
    in_phases()
    params = abstract(mesh, {"qkv": (8, 64, 192)}, {"qkv": spec})
    found = collectives_of(directions(params).as_text())
    assert {one.kind for one in found} <= {"all-to-all", "all-reduce"}
    assert copies_moved(found, params) <= 4 + SMALL


@pytest.mark.parametrize("way", ["on CPUs", "on accelerators"])
def test_directions_are_those_of_one_device(mesh, request, way):
    if way == "on accelerators":
        request.getfixturevalue("in_phases")()
    rng = np.random.default_rng(0)
    shapes = {name: (8 if "stack" in name else 3, 16, 32) for name in SPECS}
    specs = {**SPECS, "square": P(None, "x", "y"), "square turned": P(None, "y", "x")}
    shapes |= {"square": (5, 32, 32), "square turned": (4, 32, 32), "flat": (32, 16)}
    specs["flat"] = P("y", "x")
    shapes["uneven"], specs["uneven"] = (18, 24), P("x", None)
    shapes["qkv"], specs["qkv"] = (3, 16, 48), P(None, "x", "y")
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tx = adapprox_jax.orthogonalize()
    update = jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    actual = update(put(mesh, specs, values))
    with on_one_device():
        expected = update(values)
    for name in shapes:
        if way == "on CPUs":
            np.testing.assert_allclose(actual[name], expected[name], atol=1e-4, err_msg=name)
        else:
            # Three roundings to bfloat16 a step, of 2^-9, grow by up to 3.4 a step: 0.02 of entries
            # of size one. Which of them XLA leaves out differs from program to program.
            assert np.std(np.asarray(actual[name]) - np.asarray(expected[name])) < 0.04, name


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        pytest.param(dict(mu_dtype="int4"), marks=pytest.mark.slow),
        pytest.param(dict(second_moment=True, max_rank=2), marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device(mesh, settings):
    tx = adapprox_jax.adapprox_muon(1e-2, min_dim_size_to_factor=8, **settings)
    shapes = {"up": (3, 16, 64), "down": (3, 64, 16), "embedding": (96, 16), "bias": (16,)}
    specs = {"up": P(None, "x", "y"), "down": P(None, "y", "x"), "embedding": P("y", "x")}
    specs["bias"] = P()

    rng = np.random.default_rng(0)
    given = [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in "1234"]

    def steps(params, *all_grads, **keywords):
        state = jax.jit(tx.init, **keywords)(params)

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for grads in all_grads:
            params, state = step(params, state, grads)
        return jax.device_get(params)

    placed = [put(mesh, specs, tree) for tree in given]
    actual = steps(*placed, out_shardings=adapprox_jax.state_shardings(tx, placed[0]))
    with on_one_device():
        expected = steps(*given)
    for name in shapes:
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5, err_msg=name)


def test_vmapped_and_differentiated_on_a_mesh(mesh):
    tx = adapprox_jax.orthogonalize()
    value = np.random.default_rng(0).normal(size=(2, 4, 16, 32)).astype(np.float32)

    def total(updates):
        out, _ = tx.update({"w": updates}, tx.init({"w": updates}))
        return jnp.sum(out["w"] ** 3)

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
    tx = adapprox_jax.orthogonalize(
        weight_dimension_numbers=adapprox_jax.MatrixDimensionNumbers(0, 2)
    )

    def step(kernel, inputs):
        def loss(kernel):
            heads = inputs @ kernel.reshape(16, 16)
            if jax.sharding.get_abstract_mesh().size > 1:
                heads = jax.lax.with_sharding_constraint(heads, P(None, "x"))
            return jnp.sum(jax.nn.relu(heads) ** 2)

        grads = jax.grad(loss)(kernel)
        return tx.update(grads, tx.init(grads))[0]

    results = []
    for devices in (1, DEVICES):
        with jax.set_mesh(mesh_of((devices,), ("x",))):
            results.append(np.asarray(jax.jit(step)(value, inputs)))
    # All rows are alike: of rank one, so that rounding decides nothing but its direction's signs.
    np.testing.assert_allclose(*results, atol=1e-4)


def test_explicit_axes(mesh):
    explicit = mesh_of((2, 4), ("x", "y"), AxisType.Explicit)
    value = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)
    tx = adapprox_jax.orthogonalize()
    update = jax.jit(lambda updates: tx.update(updates, tx.init(updates))[0])
    with jax.set_mesh(explicit):
        placed = jax.device_put(value, NamedSharding(explicit, P(None, "x", "y")))
        program = update.lower(placed).compile()
        actual = update(placed)
        assert actual.sharding.spec == P(None, "x", "y")
    assert {one.kind for one in collectives_of(program.as_text())} <= {"all-to-all", "all-reduce"}
    with on_one_device():
        np.testing.assert_allclose(actual, update(value), atol=1e-4)
    assert math.prod(explicit.axis_sizes) == DEVICES
