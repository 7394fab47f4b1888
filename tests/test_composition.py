"""adapprox under what Optax and JAX put around an optimizer: the same training as without."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax import MatrixDimensionNumbers
from tests.common import run as updates_of
from tests.common import stepping, trained

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


def run(tx, grads, params=PARAMS, state=None):
    return trained(tx, params, grads, state)


def assert_same(actual, expected, rtol=1e-4):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=1e-6)


def assert_same_factors(actual, expected):
    """Rounding may give columns another sign."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual.q, expected.q)
    chex.assert_trees_all_equal(actual.rank, expected.rank)
    assert_same(approximations(actual), approximations(expected))


def is_ours(node):
    return isinstance(node, adapprox_jax.ScaleByAdapproxState)


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


AROUND = {
    "partition": lambda tx: optax.partition({"matrix": tx, "rest": tx}, labels),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
    "named_chain": lambda _: optax.named_chain(  # the parts, with the defaults of the whole
        ("second_moment", adapprox_jax.scale_by_adapprox(**ADAPTIVE)),
        ("clip", adapprox_jax.clip_by_matrix_rms(1.0)),
        ("average", adapprox_jax.guided_ema(0.9, nesterov=True)),
        ("decay", optax.add_decayed_weights(1e-4)),
        ("rate", optax.scale_by_learning_rate(1e-2)),
    ),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "inject_hyperparams": lambda _: inject(1e-2, **ADAPTIVE),
}
WRAPPERS = AROUND | {
    "masked": lambda tx: optax.masked(tx, is_matrix),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau()),
    "population": population,
}
# MultiSteps takes a step with the mean of two gradients, and one that is not finite is left out.
SECOND = {"multi_steps": 1.0, "apply_if_finite": jnp.nan}


@pytest.mark.parametrize("wrapper", AROUND)
def test_a_wrapper_trains_as_without_it(wrapper):
    """Inside jax.lax.scan."""
    tx, grads = WRAPPERS[wrapper](PLAIN), gradients(3)
    if wrapper in SECOND:
        factor = SECOND[wrapper]
        grads = [each for g in grads for each in (g, jax.tree.map(lambda x: factor * x, g))]

    def body(carry, grad):
        return stepping(tx)(*carry, grad), None

    start = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    (actual, state), _ = jax.jit(functools.partial(jax.lax.scan, body))(start, stacked(grads))
    if wrapper == "schedule_free":
        actual = state.z  # our own sequence; what is returned lies between it and its mean
    expected, plain = run(PLAIN, gradients(3))
    assert_same(actual, expected)
    assert_same_factors(next(filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours))), plain[0])


def test_fields_of_the_state_are_found_by_their_names():
    _, state = run(PLAIN, gradients(1))
    for name, value in {**state[0]._asdict(), "mu": state[1].mu}.items():
        if name != "count":  # Optax counts steps, too
            chex.assert_trees_all_equal(optax.tree.get(state, name), value)


def test_a_rank_that_is_set_is_kept_until_the_next_choice():
    """Factors are cut to a rank that optax.tree.set has put into the state."""
    params, state = run(PLAIN, gradients(1))
    assert optax.tree.get(state, "rank") == (6,)
    state = optax.tree.set(state, rank=(jnp.int32(2),))
    _, state = run(PLAIN, gradients(1, seed=1), params, state)
    report = adapprox_jax.rank_report(state, PARAMS)
    assert report["['kernel']"].rank == 2
    assert np.linalg.matrix_rank(approximations(state[0])["kernel"]) == 2


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
    nu = dense if masked else {**dense, "bias": "bias"}
    expected = dict.fromkeys(mapped[0]._fields, "other") | {"q": factored, "u": factored, "nu": nu}
    assert mapped[0]._asdict() == expected
    assert mapped[1].mu == (factored if masked else names)


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
        assert_same_factors(member(state[0], index), plain[0])
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
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: saved))
    chex.assert_trees_all_equal(back, saved, strict=True)
    chex.assert_trees_all_equal(run(tx, grads[1:], *back), run(tx, grads[1:], *saved))


def test_inject_hyperparams_leaves_types_alone():
    """A type such as jnp.bfloat16, which is callable, is not taken for a schedule."""
    keywords = dict(mu_dtype=jnp.bfloat16, factor_dtype=jnp.bfloat16, **FIXED)
    state = inject(1e-2, **keywords).init(PARAMS).inner_state
    plain = adapprox_jax.adapprox(1e-2, **keywords).init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, plain)


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
    injected = optax.inject_hyperparams(make)(learning_rate=1e-2, **settings)
    (actual,), state = updates_of(injected, [OF_MUON], OF_MUON)
    assert {"learning_rate", "b2", "weight_decay"} <= set(state.hyperparams)
    (expected,), _ = updates_of(make(1e-2, **settings), [OF_MUON], OF_MUON)
    # 1 - b2 in float32 is off by 6e-5.
    chex.assert_trees_all_close(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["adapprox", "adapprox_muon"])
def test_the_state_of_another_optimizer_is_named(name):
    tx = getattr(adapprox_jax, name)(1e-2)
    for other in (optax.adamw, adapprox_jax.adapprox, adapprox_jax.adapprox_muon):
        if other.__name__ != name:
            state = other(1e-2).init(OF_MUON)
            with pytest.raises(ValueError, match=rf"^{name} got (a|the) state of .*") as raised:
                tx.update(OF_MUON, state, OF_MUON)
            assert "\n" not in str(raised.value)
