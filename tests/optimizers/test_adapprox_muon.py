"""adapprox_muon: its parts, what it does with which leaf, Muon and AdaMuon as special cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import adapprox_jax
from adapprox_jax.linalg.newton_schulz import newton_schulz
from adapprox_jax.step import platform
from adapprox_jax.transforms.orthogonalize import _batches
from tests import reference, reference_muon
from tests.common import program_of, run, temporaries
from tests.step.test_phases import branches, gradients

SHAPES = {"wide": (24, 40), "tall": (40, 24), "stack": (3, 24, 40), "bias": (40,)}


# ----------------------------------------------------------------------------- orthogonalization


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_singular_values_end_near_one_at_any_scale_and_zeros_stay(scale):
    matrices = np.random.default_rng(0).normal(size=(3, 16, 40)).astype(np.float32) * scale
    *directions, of_zeros = newton_schulz(jnp.asarray(matrices).at[2].set(0))
    values = np.linalg.svd(directions, compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3))
    np.testing.assert_array_equal(of_zeros, 0)


@pytest.mark.parametrize("unroll", [False, True])
def test_a_tall_matrix_is_worked_on_as_it_lies(unroll):
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 40)), jnp.float32)
    tall = newton_schulz(wide.mT, unroll=unroll)
    np.testing.assert_allclose(tall.mT, newton_schulz(wide), atol=1e-5)


def test_nesterovs_momentum_outlives_the_count():
    """The count ends at the largest int32, which nothing may be added to."""
    tx = adapprox_jax.guided_ema(0.9, nesterov=True)
    step, left = jnp.int32(2**31 - 2), jnp.zeros([])
    state = tx.init(jnp.zeros(3))._replace(mu=jnp.ones(3), step=step, left=left)
    for _ in range(2):
        updates, state = tx.update(jnp.ones(3), state)
        np.testing.assert_allclose(updates, 1, rtol=1e-6)


def test_an_average_in_float32_takes_in_small_updates_in_float16():
    """0.001 times 2e-5 is 0 in float16."""
    tx = adapprox_jax.guided_ema(0.999, mu_dtype=jnp.float32)
    small = jnp.full(3, 2e-5, jnp.float16)
    _, state = tx.update(small, tx.init(small))
    np.testing.assert_allclose(state.mu, 0.001 * small.astype(jnp.float32), rtol=1e-4)


def test_little_is_lost_in_bfloat16():
    """With a X added to the product, and rounded once more, it was 0.06."""
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 160)), jnp.float32)
    exact = np.asarray(newton_schulz(matrices))
    rounded = np.asarray(newton_schulz(matrices, product_dtype=jnp.bfloat16), np.float32)
    assert np.linalg.norm(rounded - exact) < 0.04 * np.linalg.norm(exact)


@pytest.mark.all_platforms
def test_matrices_of_one_shape_are_worked_on_in_bounded_batches(monkeypatch):
    """Of a long stack in a loop, which is compiled once."""
    tx = adapprox_jax.orthogonalize()
    (grads,) = gradients(1, {"stack": (83, 24, 40), "one": (24, 40), "short": (3, 40, 24)})
    expected, _ = tx.update(grads, tx.init(grads))
    of_four = dataclasses.replace(platform.CPU, directions_at_once=4 * 24 * 40)
    monkeypatch.setattr(platform, "CPU", of_four)
    actual, _ = jax.jit(tx.update)(grads, tx.init(grads))
    for name in grads:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-5)

    stacks = [np.ones((size, 24, 40), np.float32) for size in (1, 1, 3, 1, 1, 1)]
    assert _batches(stacks, [[i] for i in range(6)], 2) == [[0, 1], [2], [3, 4], [5]]
    # On CPUs of the stack in a loop, of its rest and of two others; on GPUs and TPUs of two shapes,
    # of which one waits.
    traced = jax.make_jaxpr(lambda grads: tx.update(grads, tx.init(grads)))(grads)
    assert str(traced).count("optimization_barrier") == 4 + 3 + 3


def test_means_of_neurons_are_of_their_own_leaves():
    params = {"w": jnp.ones((4, 6))}
    columns = adapprox_jax.scale_by_neuron_moment()
    rows = adapprox_jax.scale_by_neuron_moment(
        weight_dimension_numbers=adapprox_jax.MatrixDimensionNumbers(rows=1, columns=0)
    )
    with pytest.raises(ValueError, match=r"'w'.*means of shape \(4, 1\); expected \(1, 6\)"):
        rows.update(params, columns.init(params))


# ----------------------------------------------------------------------------------- references


def test_without_second_moment_it_is_muon():
    grads = gradients(50, SHAPES)
    numbers = dict.fromkeys(SHAPES, optax.contrib.MuonDimensionNumbers(-2, -1)) | {"bias": None}
    muon = optax.contrib.muon(
        1e-2,
        ns_steps=4,
        consistent_rms=0.2,
        weight_decay=0.1,
        muon_weight_dimension_numbers=numbers,
    )
    ours = adapprox_jax.adapprox_muon(
        1e-2,
        b1=0.95,
        weight_decay=0.1,
        second_moment=False,
        newton_schulz_steps=4,
        orthogonalized=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    expected, _ = run(muon, grads)
    actual, _ = run(ours, grads)
    for one, other in zip(actual, expected, strict=True):
        for name in ("wide", "tall", "stack"):
            difference = np.linalg.norm(one[name] - other[name])
            assert difference <= 1e-5 * np.linalg.norm(other[name]), name


KEY = 3
FACTORED = reference.Settings(
    k_init=4, k_max=4, l=1, p=0, warm_start=True, root=True, b1=0.0, b2=0.95, clip=None, eps=0.1
)
CASES = {
    "exact, as AdaMuon": (
        reference_muon.Settings(exact=True),
        dict(second_moment=True, min_dim_size_to_factor=10**6),
    ),
    "low rank": (
        reference_muon.Settings(factored=FACTORED),
        dict(second_moment=True, max_rank=4, min_dim_size_to_factor=1, eps=0.1),
    ),
    "by neurons, as NorMuon": (reference_muon.Settings(neurons=1, eps=0.1), dict(eps=0.1)),
    "without Nesterov's momentum": (
        reference_muon.Settings(exact=True, nesterov=False),
        dict(second_moment=True, min_dim_size_to_factor=10**6, nesterov=False),
    ),
    "without an average": (reference_muon.Settings(b1=0.0, neurons=1), dict(b1=0.0)),
}


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("s", "keywords"), CASES.values(), ids=CASES)
def test_the_library_follows_the_reference(s, keywords, tall):
    if tall and s.neurons is not None:  # the library's outputs are then the reference's inputs
        s = dataclasses.replace(s, neurons=0)
    with jax.enable_x64(True):
        keywords = {"b1": 0.95, "weight_decay": 0.0, "key": KEY, **keywords}
        tx = adapprox_jax.adapprox_muon(-1.0, **keywords)
        rng = np.random.default_rng(0)
        sizes = np.exp(rng.normal(size=(24, 40)))
        turn = (lambda x: x.T) if tall else (lambda x: x)
        params = {"w": jnp.ones(turn(sizes).shape)}
        state, update = tx.init(params), jax.jit(tx.update)
        expected_state = reference_muon.init((24, 40), s)
        for t in range(1, 26):
            gradient = rng.normal(size=(24, 40)) * sizes
            key = jax.random.fold_in(jax.random.key(KEY), t)
            start = np.array(jax.random.normal(key, (4, 40), jnp.float64).T)
            expected, expected_state = reference_muon.step(gradient, expected_state, start, s)
            updates, state = update({"w": jnp.asarray(turn(gradient))}, state, params)
            difference = np.linalg.norm(turn(np.asarray(updates["w"])) - expected)
            assert difference <= 1e-8 * np.linalg.norm(expected), f"step {t}"


@pytest.mark.parametrize(
    ("rates", "mu_dtype", "decays"),
    [
        # Its first step is 0, where the functions of settings count from 1.
        ([1e-3, 6e-3, 1.2e-2, 3e-3], None, [0.95, 0.925, 0.85, 0.95]),
        ([6e-3, 1e-3], jnp.int8, [0.925, 0.95]),
        ([6e-3, 1.2e-2], "int4", [0.9, 0.85]),
        (-1.0, jnp.int4, [0.8, 0.8]),
    ],
)
def test_the_memory_is_longer_where_steps_are_smaller(rates, mu_dtype, decays):
    """Of a rate, or of a schedule of it. The state has the product of all decays so far."""
    rate = (lambda step: jnp.asarray(rates)[step]) if isinstance(rates, list) else rates
    grads = {"kernel": jnp.ones((8, 16))}
    tx = adapprox_jax.adapprox_muon(rate, mu_dtype=mu_dtype, orthogonalized={"kernel": True})
    state = tx.init(grads)
    for so_far in np.cumprod(decays):
        _, state = tx.update(grads, state, grads)
        kept = state[0].inner_states["orthogonalized"].inner_state[0]
        np.testing.assert_allclose(kept.left, so_far, rtol=1e-6)


def test_neurons_are_the_columns_or_what_is_named_so():
    grads = {"w": gradients(1, SHAPES)[0]["wide"], "none": np.zeros((0, 16), np.float32)}
    numbers = adapprox_jax.MatrixDimensionNumbers
    named = (
        (None, 0),
        (numbers(0, 1), 0),
        (numbers(rows=1, columns=0), 1),
        (numbers(np.int64(1), 0), 1),
    )
    for given, axis in named:
        tx = adapprox_jax.scale_by_neuron_moment(0.0, 0.0, given)
        updates, state = tx.update(grads, tx.init(grads))
        mean = np.mean(np.square(grads["w"]), axis=axis, keepdims=True)
        np.testing.assert_allclose(updates["w"], grads["w"] / np.sqrt(mean), rtol=1e-5)
        np.testing.assert_array_equal(state.nu[sorted(grads).index("none")], 0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_everything_else_is_adapprox(nesterov):
    grads = gradients(5, SHAPES)
    nothing = jax.tree.map(lambda _: False, grads[0])
    ours = adapprox_jax.adapprox_muon(
        1e-2,
        b2=0.99,
        adapprox_b1=0.8,
        nesterov=nesterov,
        orthogonalized=nothing,
        max_rank=4,
        adapprox_learning_rate_scale=0.25,
    )
    plain = adapprox_jax.adapprox(
        0.25e-2, b1=0.8, b2=0.99, weight_decay=4e-4, nesterov=nesterov, max_rank=4
    )
    for one, other in zip(run(ours, grads)[0], run(plain, grads)[0], strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), one, other)


def test_few_bits_follow_the_average_in_full():
    """Of noise alone, the hardest case: orthogonal directions weigh small and large ones alike."""
    shapes = {"w": (64, 96)}
    grads = gradients(30, shapes)
    exact = run(adapprox_jax.adapprox_muon(1.0, weight_decay=0.0), grads)[0][-1]["w"]
    for bits, least in ((8, 0.9995), (4, 0.987)):  # rounded by chance 4 bits give 0.981
        tx = adapprox_jax.adapprox_muon(1.0, weight_decay=0.0, mu_dtype=f"int{bits}")
        coded = run(tx, grads)[0][-1]["w"]
        cosine = np.sum(exact * coded) / np.linalg.norm(exact) / np.linalg.norm(coded)
        assert cosine > least, bits


# --------------------------------------------------------------------------------- which leaves


def test_hidden_matrices_are_known_by_their_names():
    hidden = {"w", "norm_mlp/kernel", "attention_head_0/w", "transformer/~/multi_head_attention/w"}
    others = {"head", "wte", "lm_head/kernel", "LMHead/kernel", "TokenEmbed_0/table"}
    chosen = adapprox_jax.hidden_matrices(dict.fromkeys(hidden | others, jnp.zeros((64, 64))))
    assert {name for name, is_hidden in chosen.items() if is_hidden} == hidden


def test_a_selection_is_a_tree_or_a_function():
    params = {"a": jnp.zeros((8, 8)), "b": {"c": jnp.zeros((8, 8)), "d": jnp.zeros(8)}}
    for chosen in (
        {"a": False, "b": {"c": True, "d": False}},
        lambda tree: {"a": False, "b": {"c": True, "d": False}},
    ):
        assert adapprox_jax.muon_report(params, chosen) == {
            "['a']": "adapprox",
            "['b']['c']": "orthogonalized: 8 x 8",
            "['b']['d']": "adapprox",
        }


# ---------------------------------------------------------------------------------- the others


def test_factors_are_reported_and_resized():
    params = {"wte": jnp.zeros((512, 64)), "w": jnp.zeros((64, 128)), "bias": jnp.zeros(64)}
    by_neurons = adapprox_jax.adapprox_muon(1e-3, max_rank=4).init(params)
    assert set(adapprox_jax.rank_report(by_neurons, params)) == {"['wte']"}
    tx = adapprox_jax.adapprox_muon(1e-3, mu_dtype="int4", second_moment=True, max_rank=4)
    wider = adapprox_jax.resize(tx.init(params), 8)
    report = adapprox_jax.rank_report(wider, params)
    assert {path: info.capacity for path, info in report.items()} == {"['wte']": 8, "['w']": 8}
    _, after = jax.eval_shape(tx.update, params, wider, params)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, wider)


def test_leaves_without_entries_pass():
    params = {"w": jnp.ones((8, 16)), "none": jnp.ones((0, 16)), "no layers": jnp.ones((0, 8, 16))}
    tx = adapprox_jax.orthogonalize()
    updates, _ = tx.update(params, tx.init(params))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.all_platforms
@pytest.mark.parametrize("second_moment", ["neurons", True])
def test_the_program_for_accelerators_has_no_branch_and_works_in_bfloat16(second_moment):
    params = {"w": jnp.zeros((70, 90)), "v": jnp.zeros((70, 90)), "bias": jnp.zeros(90)}
    tx = adapprox_jax.adapprox_muon(1e-3, mu_dtype="int4", second_moment=second_moment)
    text = program_of(tx, params, "cuda")
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    of_both = [line for line in products if "tensor<2x70x90xbf16>" in line]
    assert of_both, "matrices of one shape are worked on together"
    assert not branches(text)
    # Rounds of Cholesky QR, steps of Newton-Schulz: of known length.
    assert text.count("stablehlo.while") <= 2


def test_matrices_of_different_shapes_wait_for_each_other():
    """Of eight little more is in memory at once than of one."""
    tx = adapprox_jax.orthogonalize()
    one, eight = (
        temporaries(
            lambda updates: tx.update(updates, optax.EmptyState())[0],
            [jax.ShapeDtypeStruct((256 + 8 * i, 512), jnp.float32) for i in range(count)],
            donate_argnums=0,
        )
        for count in (1, 8)
    )
    assert eight < 2 * one  # without waiting six times as much
