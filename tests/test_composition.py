"""adapprox under what Optax and JAX put around an optimizer: the same training as without."""

import functools
import warnings
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax import MatrixDimensionNumbers
from tests.common import checkpointed, stepping, trained

PARAMS = {"kernel": np.ones((24, 40), np.float32), "bias": np.ones(40, np.float32)}
WITH_STACK = {**PARAMS, "stack": np.ones((2, 24, 16), np.float32)}
OF_MUON = {
    name: np.ones(shape, np.float32)
    for name, shape in {"kernel": (64, 96), "wte": (512, 64), "bias": (96,)}.items()
}

FIXED = dict(min_dim_size_to_factor=1, max_rank=4)
ADAPTIVE = dict(
    min_dim_size_to_factor=1,
    initial_rank=1,
    max_rank=6,
    error_threshold=0.1,
    rank_interval=2,
    rank_growth=jnp.ones_like,
)
# Made once, because what is compiled for it is kept. A rank that adapts has all that a fixed one
# has, and values that change.
PLAIN = adapprox_jax.adapprox(1e-2, **ADAPTIVE)


def gradients(steps, params=PARAMS, seed=0, noise=1.0):
    """Gradients whose matrices are of rank 1 without noise."""
    rng = np.random.default_rng(seed)

    def sizes(param):
        return np.exp(rng.normal(size=(*param.shape[:-1], 1)) + rng.normal(size=param.shape[-1:]))

    def noisy(size):
        return jnp.asarray(size * (1 + noise * rng.normal(size=size.shape)), jnp.float32)

    all_sizes = jax.tree.map(sizes, params)
    return [jax.tree.map(noisy, all_sizes) for _ in range(steps)]


def run(tx, grads, params=PARAMS, state=None, **extra):
    return trained(tx, params, grads, state, **extra)


def assert_same(actual, expected, rtol=1e-4):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=1e-6)


def assert_same_state(actual, expected):
    """Two `ScaleByAdapproxState`s hold the same; rounding may give columns another sign."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual.rank, expected.rank)
    assert_same(approximations(actual), approximations(expected))
    assert_same(actual.nu, expected.nu)


def approximations(state):
    return jax.tree.map(lambda q, u: q @ jnp.swapaxes(u, -1, -2), state.q, state.u)


def is_matrix(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", tree)


def inject(learning_rate, **keywords):
    factory = optax.inject_hyperparams(adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS)
    return factory(learning_rate, **keywords)


def population(tx):
    """Trains models at once that are stacked along the first axis of every leaf."""
    return optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def member(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def test_partition():
    """Adapprox on matrices beside AdamW on the rest: each as if it were alone."""
    grads, transforms = gradients(3), {"matrix": PLAIN, "rest": optax.adamw(1e-2)}
    actual, state = run(optax.partition(transforms, labels), grads)
    expected, plain = run(PLAIN, grads)
    assert_same(actual["kernel"], expected["kernel"])
    assert state.inner_states["matrix"].inner_state[0].rank == plain[0].rank
    expected, _ = run(optax.adamw(1e-2), grads)
    assert_same(actual["bias"], expected["bias"])


def test_apply_if_finite():
    """A step that is not finite changes nothing, and training goes on as if it had not been."""
    grads = gradients(3)
    tx = optax.apply_if_finite(PLAIN, max_consecutive_errors=5)
    before, state = run(tx, grads[:2])
    for value in (jnp.nan, jnp.inf):
        bad = {**grads[0], "kernel": grads[0]["kernel"].at[3, 4].set(value)}
        params, after = run(tx, [bad], before, state)
        chex.assert_trees_all_equal((params, after.inner_state), (before, state.inner_state))
        state = after
    assert state.total_notfinite == 2
    actual, state = run(tx, grads[2:], params, state)
    expected, plain = run(PLAIN, grads)
    assert_same(actual, expected)
    assert_same_state(state.inner_state[0], plain[0])


def test_schedule_free():
    """Under schedule_free the three sequences are those of its definition with our updates."""
    beta, grads = 0.9, gradients(4)
    base = adapprox_jax.adapprox(1e-2, b1=0.0, **FIXED)
    actual, state = run(optax.contrib.schedule_free(base, learning_rate=1e-2, b1=beta), grads)
    x = y = z = PARAMS
    plain, update = base.init(PARAMS), jax.jit(base.update)
    for t, grad in enumerate(grads, start=1):
        updates, plain = update(grad, plain, y)
        z = optax.apply_updates(z, updates)
        x = jax.tree.map(lambda x, z, t=t: (1 - 1 / t) * x + z / t, x, z)
        y = jax.tree.map(lambda x, z: beta * x + (1 - beta) * z, x, z)
    assert_same(actual, y)
    assert_same(optax.contrib.schedule_free_eval_params(state, actual), x)
    assert_same_state(state.base_optimizer_state[0], plain[0])


def test_named_chain():
    """The parts of adapprox under names are adapprox, each with its state under its name."""
    tx = optax.named_chain(
        ("second_moment", adapprox_jax.scale_by_adapprox(**ADAPTIVE)),
        ("clip", adapprox_jax.clip_by_matrix_rms(1.0)),
        ("average", adapprox_jax.guided_ema(0.9, nesterov=True)),
        ("decay", optax.add_decayed_weights(1e-4)),
        ("rate", optax.scale_by_learning_rate(1e-2)),
    )
    grads = gradients(3)
    actual, state = run(tx, grads)
    expected, plain = run(PLAIN, grads)
    assert_same(actual, expected)
    assert_same_state(state["second_moment"], plain[0])
    assert_same(state["average"], plain[1])


def test_fields_of_the_state_are_found_by_their_names():
    _, state = run(PLAIN, gradients(1))
    for name, value in {**state[0]._asdict(), "mu": state[1].mu}.items():
        if name != "count":  # Optax counts steps, too
            chex.assert_trees_all_equal(optax.tree.get(state, name), value)


def test_a_rank_that_is_set_is_kept_until_the_next_choice():
    """Factors are cut to a rank that optax.tree.set has put into the state."""
    params, state = run(PLAIN, gradients(1))
    ranks = optax.tree.get(state, "rank")
    assert ranks == (6,)
    state = optax.tree.set(state, rank=(jnp.int32(2),))
    _, state = run(PLAIN, gradients(1, seed=1), params, state)
    report = adapprox_jax.rank_report(state, PARAMS)
    assert report["['kernel']"].rank == 2
    assert np.linalg.matrix_rank(approximations(state[0])["kernel"]) == 2


def test_multi_steps():
    """Four small steps whose gradients have the mean of a large one equal the large one."""
    small = gradients(8)
    large = [jax.tree.map(lambda *g: sum(g) / 4, *small[i : i + 4]) for i in (0, 4)]
    tx = optax.MultiSteps(PLAIN, every_k_schedule=4)
    params, state = run(tx, small[:3])
    chex.assert_trees_all_equal(params, PARAMS)
    actual, state = run(tx, small[3:], params, state)
    expected, plain = run(PLAIN, large)
    assert_same(actual, expected)
    assert_same_state(state.inner_opt_state[0], plain[0])


NUMBERS = {
    "kernel": MatrixDimensionNumbers(1, 0),
    "stack": MatrixDimensionNumbers((0, 1), 2),
    "bias": None,
}


@pytest.mark.parametrize(
    "numbers", [None, NUMBERS, lambda _: NUMBERS], ids=["default", "tree", "function"]
)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_map_params(masked, numbers):
    """Every tree of the state that follows the parameters is seen as one, the rest is not."""
    tx = adapprox_jax.adapprox(
        1e-2, weight_dimension_numbers=numbers, cosine_guidance=True, **FIXED
    )
    tx = optax.masked(tx, is_matrix(WITH_STACK)) if masked else tx
    names = {name: name for name in WITH_STACK}

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    mapped = optax.tree.map_params(
        tx,
        lambda leaf, name: leaf if is_masked(leaf) else name,
        tx.init(WITH_STACK),
        names,
        transform_non_params=lambda _: "other",
        is_leaf=is_masked,
    )
    mapped = mapped.inner_state if masked else mapped
    factored = {**names, "bias": optax.MaskedNode()}
    dense = dict.fromkeys(names, optax.MaskedNode())
    for field, tree in mapped[0]._asdict().items():
        expected = {
            "q": factored,
            "u": factored,
            "nu": dense if masked else {**dense, "bias": "bias"},
        }
        assert tree == expected.get(field, "other"), field
    assert mapped[1].mu == (factored if masked else names)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_map_params_leaves_a_state_that_goes_on(masked):
    """A map that changes nothing, in the middle of a run, changes nothing."""
    numbers = {"kernel": NUMBERS["kernel"], "bias": None}
    tx = adapprox_jax.adapprox(1e-2, weight_dimension_numbers=numbers, **ADAPTIVE)
    tx, grads = optax.masked(tx, is_matrix) if masked else tx, gradients(3)
    params, state = run(tx, grads[:2])
    mapped = optax.tree.map_params(tx, lambda leaf: leaf, state)
    chex.assert_trees_all_equal(run(tx, grads[2:], params, mapped), run(tx, grads))


@functools.cache
def trained_population():
    """Three models trained at once and alone: parameters and states of both."""
    tx = adapprox_jax.adapprox(1e-2, orthogonalization="qr", **ADAPTIVE)
    params = [jax.tree.map(lambda p, i=i: p + i, WITH_STACK) for i in range(3)]
    grads = [gradients(3, WITH_STACK, i, noise) for i, noise in enumerate((1.0, 0.3, 0.0))]
    together = run(population(tx), list(map(stacked, zip(*grads, strict=True))), stacked(params))
    return together, [run(tx, g, p) for g, p in zip(grads, params, strict=True)]


def test_vmap_over_a_population():
    """Models trained at once by jax.vmap end as those trained alone, each at its own ranks."""
    (actual, state), alone = trained_population()
    for index, (expected, plain) in enumerate(alone):
        assert_same(member(actual, index), expected)
        assert_same_state(member(state[0], index), plain[0])
    assert len(set(np.asarray(state[0].rank[0]).tolist())) == 3


def test_vmap_over_a_population_of_muon_in_codes():
    tx = adapprox_jax.adapprox_muon(1e-2, mu_dtype="int8")
    grads = [gradients(3, OF_MUON, seed) for seed in range(2)]
    together = list(map(stacked, zip(*grads, strict=True)))
    actual, _ = run(population(tx), together, stacked([OF_MUON] * 2))
    for index, of_member in enumerate(grads):
        expected, _ = run(tx, of_member, OF_MUON)
        for name, start in OF_MUON.items():  # rounding may change a few codes by one
            difference = np.linalg.norm(actual[name][index] - expected[name])
            assert difference <= 0.01 * np.linalg.norm(expected[name] - start), name


def test_scan():
    """A run inside jax.lax.scan is a run in a Python loop, with the same ranks on the way."""
    grads = gradients(4)

    def body(carry, grad):
        carry = stepping(PLAIN)(*carry, grad)
        return carry, carry[1][0].rank

    start = jax.tree.map(jnp.asarray, PARAMS), PLAIN.init(PARAMS)
    (actual, state), ranks = jax.jit(partial(jax.lax.scan, body))(start, stacked(grads))
    for index in range(4):
        expected, plain = run(PLAIN, grads[: index + 1])
        chex.assert_trees_all_equal(member(ranks, index), plain[0].rank)
    assert_same(actual, expected)
    assert_same_state(state[0], plain[0])


def test_donation():
    """Parameters and state may give their memory to the next step, and training is the same."""
    update = jax.jit(stepping(PLAIN), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.array, PARAMS), PLAIN.init(PARAMS)
    grads = gradients(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated")  # what JAX cannot use
        for grad in grads:
            given = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 2]
            params, state = update(params, state, grad)
            # All but the key and the placeholders, which are passed on as they are.
            assert all(leaf.is_deleted() for leaf in given)
    # To rounding: a program that reuses memory may be fused otherwise.
    chex.assert_trees_all_close((params, state), run(PLAIN, grads), rtol=1e-5)


KEPT = {
    "guided": adapprox_jax.adapprox(1e-2, mu_dtype="int8", cosine_guidance=True),
    "by neurons": adapprox_jax.adapprox_muon(1e-2),
    "factors": adapprox_jax.adapprox_muon(1e-2, mu_dtype="int5", second_moment=True),
    "split": adapprox_jax.split_weights(adapprox_jax.adapprox_muon(1e-2, mu_dtype="int4")),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_run_goes_on_from_a_checkpoint(name, tmp_path):
    """With every bit."""
    tx, params, grads = KEPT[name], OF_MUON, gradients(2, OF_MUON)
    params, state = adapprox_jax.split(tx, params) if name == "split" else (params, tx.init(params))
    saved = run(tx, grads[:1], params, state)
    back = checkpointed(saved, tmp_path)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, saved)
    chex.assert_trees_all_equal(back, saved)
    chex.assert_trees_all_equal(run(tx, grads[1:], *back), run(tx, grads[1:], *saved))


OTHERS = dict(b1=0.8, b2=0.99, weight_decay=0.1)


@pytest.mark.parametrize("changed", ["in the state", "by a schedule"])
def test_inject_hyperparams(changed):
    """A rate changed in mid-run is followed from there on, as that of a plain schedule."""
    schedule, grads = optax.piecewise_constant_schedule(1e-2, {2: 0.1}), gradients(4)
    if changed == "in the state":
        tx = inject(1e-2, **OTHERS, **ADAPTIVE)
        params, state = run(tx, grads[:2])
        state.hyperparams["learning_rate"] = jnp.asarray(1e-3)
        actual, state = run(tx, grads[2:], params, state)
    else:
        actual, state = run(inject(schedule, **OTHERS, **ADAPTIVE), grads)
    expected, plain = run(adapprox_jax.adapprox(schedule, **OTHERS, **ADAPTIVE), grads)
    assert_same(actual, expected)
    assert_same_state(state.inner_state[0], plain[0])


@pytest.mark.parametrize("name", ["mu_dtype", "factor_dtype"])
def test_inject_hyperparams_leaves_types_alone(name):
    """A type such as jnp.bfloat16, which is callable, is not taken for a schedule."""
    keywords = {name: jnp.bfloat16, **FIXED}
    state = inject(1e-2, **keywords).init(PARAMS).inner_state
    plain = adapprox_jax.adapprox(1e-2, **keywords).init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, plain)


WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, is_matrix),
    "partition": lambda tx: optax.partition({"matrix": tx, "rest": optax.adamw(1e-2)}, labels),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("adapprox", tx)),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 4),
    "inject_hyperparams": lambda _: inject(1e-2, **ADAPTIVE),
    "population": population,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reports_of_nested_states(wrapper):
    """The report names the factored leaves, and no others; all bytes of the state are counted."""
    tx = WRAPPERS[wrapper](PLAIN)
    params = stacked([WITH_STACK] * 3) if wrapper == "population" else WITH_STACK
    state = tx.init(params)
    expected = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert adapprox_jax.state_nbytes(tx, params) == expected
    assert adapprox_jax.state_nbytes(tx, jax.eval_shape(lambda: params)) == expected
    report = adapprox_jax.rank_report(state, params)
    assert set(report) == {"['kernel']", "['stack']"}
    if wrapper != "population":
        plain = adapprox_jax.rank_report(PLAIN.init(params), params)
        chex.assert_trees_all_equal(report, plain)


def test_rank_report_of_a_population():
    """The report of stacked models holds those of the models, one after the other."""
    (params, state), alone = trained_population()
    members = [adapprox_jax.rank_report(plain, params) for params, plain in alone]
    for name, info in adapprox_jax.rank_report(state, params).items():
        infos = [report[name] for report in members]
        assert info.shape == (3, *infos[0].shape)
        assert info.capacity == infos[0].capacity
        for field in ("nbytes", "dense_nbytes"):
            assert getattr(info, field) == sum(getattr(i, field) for i in infos)
        for field in ("rank", "error", "drift"):
            expected = [getattr(i, field) for i in infos]
            np.testing.assert_allclose(getattr(info, field), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (adapprox_jax.adapprox, {}),
        (adapprox_jax.adapprox_muon, {"mu_dtype": "int4", "weight_decay": 0.1}),
    ],
)
def test_hyperparameters_are_injected_without_static_arguments(make, settings):
    params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(64)}
    injected = optax.inject_hyperparams(make)(learning_rate=1e-2, **settings)
    state = injected.init(params)
    assert {"learning_rate", "b2", "weight_decay"} <= set(state.hyperparams)
    plain = make(1e-2, **settings)
    updates, after = jax.jit(injected.update)(params, state, params)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    # 1 - b2 in float32 is off by 6e-5.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), updates, expected)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("adapprox", "adamw"),
        ("adapprox", "adapprox_muon"),
        ("adapprox_muon", "adamw"),
        ("adapprox_muon", "adapprox"),
    ],
)
def test_the_state_of_another_optimizer_is_named(name, other):
    params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(64)}
    state = getattr(optax if other == "adamw" else adapprox_jax, other)(1e-2).init(params)
    with pytest.raises(ValueError, match=rf"^{name} got (a|the) state of .*") as raised:
        getattr(adapprox_jax, name)(1e-2).update(params, state, params)
    assert "\n" not in str(raised.value)
