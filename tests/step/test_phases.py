"""The step as accelerators take it, run here on the CPU, and as it is lowered for them."""

import dataclasses
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax.step import platform
from tests.common import assert_near, program_of, run

SHAPES = {"tall": (40, 24), "stack": (2, 24, 40), "vector": (40,)}
SETTINGS = {
    "moment": dict(max_rank=4, approximate="moment", eps_root=1e-8),
    "qr in bfloat16": dict(max_rank=4, orthogonalization="qr", factor_dtype=jnp.bfloat16),
    "many columns": dict(max_rank=20, eps_root=1e-2),  # cut to 14
    "adaptive": dict(
        b2=0.99, initial_rank=1, max_rank=14, error_threshold=0.3, rank_growth=lambda error: 3,
        rank_interval=5,
    ),
}  # fmt: skip


def gradients(steps, shapes, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {name: np.exp(rng.normal(size=shape)) for name, shape in shapes.items()}
    return [
        {name: (rng.normal(size=x.shape) * x).astype(np.float32) for name, x in sizes.items()}
        for _ in range(steps)
    ]


# The default ones on GPUs are in `test_reference`, and those on TPUs below.
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "gpu") for name in SETTINGS), ("adaptive", "tpu")],
)
def test_the_schedules_take_the_same_steps(name, kind, in_phases, monkeypatch):
    """More settings follow the reference (`test_reference`)."""
    monkeypatch.setattr(platform, "GPU", platform.MESH_OF_CPUS)  # which rounds no targets
    make = partial(adapprox_jax.scale_by_adapprox, min_dim_size_to_factor=1, **SETTINGS[name])
    grads = gradients(11, SHAPES)  # the error is measured at the last of them
    expected, expected_state = run(make(), grads)
    in_phases(kind)
    actual, state = run(make(), grads)
    assert_near(actual, expected, 1e-4)
    chex.assert_trees_all_equal(state.rank, expected_state.rank)
    chex.assert_trees_all_close(state.error, expected_state.error, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["moment", "many columns", "adaptive"])
def test_factors_of_targets_in_bfloat16_are_as_near_to_them(name, in_phases, monkeypatch):
    """On GPUs products read targets of that type; errors are those of targets in float32."""
    make = partial(adapprox_jax.scale_by_adapprox, min_dim_size_to_factor=1, **SETTINGS[name])
    grads = gradients(11, SHAPES)
    in_phases("gpu")
    rounded, state = run(make(), grads)
    monkeypatch.setattr(platform, "GPU", platform.MESH_OF_CPUS)
    exact, exact_state = run(make(), grads)
    for shape in ("tall", "stack"):
        # The first update does not read factors.
        np.testing.assert_array_equal(rounded[0][shape], exact[0][shape])
        off = np.linalg.norm(rounded[1][shape] - exact[1][shape])
        assert 1e-5 < off / np.linalg.norm(exact[1][shape]) < 2**-7
    # A rounding is of 2^-9 of an entry.
    chex.assert_trees_all_close(state.error, exact_state.error, rtol=2**-7, atol=0)
    chex.assert_trees_all_equal(state.rank, exact_state.rank)


@pytest.mark.parametrize(
    ("name", "bits"), [("adapprox", "int8"), ("adapprox", "int5"), ("adapprox_muon", "int4")]
)
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_averages_made_twice_are_those_made_once(name, bits, kind, in_phases, monkeypatch):
    """A number between two codes may get the other one.

    In 4 bits that is up to 0.5 of the mean size, so 0.008 of the norm of 4096 numbers, and some
    more after an orthogonalization. A few may.
    """
    make = partial(getattr(adapprox_jax, name), 1.0, max_rank=4, mu_dtype=bits)
    shapes = {"embedding": (128, 64), "mlp": (2, 64, 96), "table": (64, 64), "bias": (64,)}
    shapes |= {"no whole pieces": (96, 64)}
    grads = gradients(4, shapes)
    runs = []
    for twice in (False, True):
        like = {"gpu": platform.MESH_OF_CPUS, "tpu": platform.TPU}[kind]
        record = dataclasses.replace(like, makes_averages_twice=twice)
        monkeypatch.setattr(platform, kind.upper(), record)
        in_phases(kind)
        runs.append(run(make(), grads)[0])
    assert_near(*runs, 0.03)


# The clip on GPUs, and one that is traced: in `test_reference` and under `inject_hyperparams`.
@pytest.mark.parametrize("kind", ["cpu", "tpu"])
def test_the_clip_within_the_step_is_that_of_the_transformation(kind, in_phases):
    """Of vectors, matrices and stacks. Sums of a thousand squares differ by 1e-5 at most."""
    grads, threshold = gradients(3, SHAPES), 0.3
    scaled = adapprox_jax.scale_by_adapprox(max_rank=4, min_dim_size_to_factor=1)
    parts = optax.chain(scaled, adapprox_jax.clip_by_matrix_rms(threshold), optax.scale(-1.0))
    expected, _ = run(parts, grads)
    if kind != "cpu":
        in_phases(kind)
    whole = adapprox_jax.adapprox(
        1.0, b1=0.0, weight_decay=0.0, clipping_threshold=threshold, max_rank=4,
        min_dim_size_to_factor=1,
    )  # fmt: skip
    actual, _ = run(whole, grads)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    for update in jax.tree.leaves(expected):
        assert np.sqrt(np.mean(np.square(update))) < 0.301  # it clips


def test_batches_of_optimizers_take_their_own_steps(in_phases):
    in_phases()
    tx = adapprox_jax.scale_by_adapprox(max_rank=4, min_dim_size_to_factor=1)
    members = [gradients(3, SHAPES, seed) for seed in range(2)]
    batches = [
        jax.tree.map(lambda *x: np.stack(x), *of_step) for of_step in zip(*members, strict=True)
    ]
    state, update = jax.vmap(tx.init)(batches[0]), jax.jit(jax.vmap(tx.update))
    for batch in batches:
        updates, state = update(batch, state)
    for i, grads in enumerate(members):
        one = jax.tree.map(lambda x, i=i: x[i], updates)
        chex.assert_trees_all_close(one, run(tx, grads)[0][-1], rtol=1e-3, atol=1e-4)


def test_stacks_in_slices_are_the_same(monkeypatch):
    make = partial(adapprox_jax.scale_by_adapprox, max_rank=4, min_dim_size_to_factor=1)
    grads = gradients(3, {"stack": (5, 24, 40)})
    expected, _ = run(make(), grads)
    few = dataclasses.replace(platform.CPU, largest_slice=2 * 24 * 40)
    monkeypatch.setattr(platform, "CPU", few)
    actual, _ = run(make(), grads)
    chex.assert_trees_all_close(actual[-1], expected[-1], rtol=1e-4, atol=1e-6)


def lowered(kind, leaves=2, **settings):
    params = {str(i): jnp.zeros((70, 90)) for i in range(leaves)} | {"bias": jnp.zeros(90)}
    return program_of(adapprox_jax.adapprox(1e-3, **settings), params, kind)


def calls(text):
    return re.findall(
        r"stablehlo\.custom_call @(\w+)|\"?stablehlo\.(cholesky|triangular_solve)", text
    )


def branches(text):
    """Those that are left to be taken, and not decided by the platform: with a traced predicate."""
    taken = []
    for function in text.split("func.func")[1:]:
        constants = set(re.findall(r"(%\w+) = stablehlo\.constant", function))
        predicates = re.findall(r"stablehlo\.(?:case|if)\"?\((%\w+)\)", function)
        decided = re.findall(r"(%\w+) = \"stablehlo\.case\"\((%\w+)\)", function)
        known = constants | {result for result, predicate in decided if predicate in constants}
        taken += [predicate for predicate in predicates if predicate not in known]
    return taken


@pytest.mark.all_platforms
@pytest.mark.parametrize("kind", ["cuda", "tpu"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_rank": 16}, {"mu_dtype": "int8"}], ids=["default", "rank 16", "8 bits"]
)
def test_a_fixed_rank_has_no_branch_no_loop_and_no_svd_on_accelerators(settings, kind):
    text = lowered(kind, **settings)
    assert not branches(text)
    assert "stablehlo.while" not in text
    assert not re.search(r"(?i)gesvd|syev|jacobi|eigh|svd", text)
    if kind == "cuda":  # on a TPU they are parts of the compiler
        count = len(calls(text))
        assert 0 < count <= 20
        assert len(calls(lowered(kind, leaves=5, **settings))) == count


@pytest.mark.all_platforms
def test_adaptive_ranks_have_one_branch_on_accelerators():
    text = lowered("cuda", initial_rank=1, max_rank=24)
    of_more = lowered("cuda", leaves=5, initial_rank=1, max_rank=24)
    assert len(branches(text)) == len(branches(of_more)) == 1
    assert "stablehlo.while" not in text + of_more
    assert len(calls(text)) == len(calls(of_more)) <= 10


@pytest.mark.all_platforms
def test_small_leaves_are_summed_together_on_accelerators_and_one_by_one_on_cpus():
    """Where each slice of what was put together would be a kernel of its own to compile."""
    vectors = {str(i): jnp.arange(5.0) for i in range(3)}
    for kind, sums in (("cpu", 3), ("cuda", 1)):
        program = program_of(adapprox_jax.clip_by_matrix_rms(1.0), vectors, kind)
        assert program.count("stablehlo.reduce(") == sums
