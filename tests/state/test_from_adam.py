"""Adam's states turned into Adapprox's."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax import MatrixDimensionNumbers, from_adam
from tests.common import mesh_of

RATE = 3e-3


def problem():
    """A network of two layers and a stack, with noisy batches: loss(params, step)."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(64, 64)) * np.exp(rng.normal(size=64))
    params = {
        "hidden": 0.1 * rng.normal(size=(64, 128)),
        "stack": 0.1 * rng.normal(size=(2, 128, 128)),
        "out": np.zeros((128, 64)),
        "bias": np.zeros(64),
    }
    params, teacher = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, teacher))

    def loss(params, step):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (64, 64))
        h = jnp.tanh(x @ params["hidden"])
        for matrix in params["stack"]:
            h = h + jnp.tanh(h @ matrix)
        return jnp.mean((h @ params["out"] + params["bias"][None] - jnp.tanh(x @ teacher)) ** 2)

    return params, loss


def step_of(tx, loss):
    @jax.jit
    def step(params, state, t):
        value, grads = jax.value_and_grad(loss)(params, t)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, updates

    return step


def train(step, params, state, steps):
    losses = []
    for t in steps:
        params, state, value, _ = step(params, state, t)
        losses.append(float(value))
    return params, state, np.array(losses)


@pytest.fixture(scope="module")
def with_adam():
    params, loss = problem()
    adamw = optax.adamw(RATE)
    return *train(step_of(adamw, loss), params, adamw.init(params), range(150)), loss


@pytest.fixture(scope="module")
def adams_next(with_adam):
    """Adam's next losses, and its next update, with and without Nesterov's momentum."""
    params, state, _, loss = with_adam
    steps = [step_of(optax.adamw(RATE, nesterov=nesterov), loss) for nesterov in (False, True)]
    losses = train(steps[0], params, state, range(150, 200))[2]
    return losses, [step(params, state, 150)[3] for step in steps]


@pytest.mark.parametrize(
    ("approximate", "mu_dtype", "nesterov"),
    [("root", None, True), ("moment", jnp.int8, False)],
)
def test_a_run_goes_on_without_a_bump(with_adam, adams_next, approximate, mu_dtype, nesterov):
    """As low as Adam's own next steps, and the first one nearly along Adam's, and as long.

    Adapprox averages updates and Adam gradients, so that their paths differ a little.
    """
    params, state, before, loss = with_adam
    adams_losses, along = adams_next[0], adams_next[1][nesterov]
    settings = dict(mu_dtype=mu_dtype, nesterov=nesterov, approximate=approximate, max_rank=16)
    tx = adapprox_jax.adapprox(RATE, **settings)
    new = from_adam(tx, state, params, approximate=approximate, nesterov=nesterov)
    like = tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, like)
    step = step_of(tx, loss)
    _, _, actual = train(step, params, new, range(150, 200))
    for part in (slice(0, 10), slice(10, 50)):
        assert actual[part].mean() <= 1.02 * adams_losses[part].mean()
    assert actual.max() <= 1.05 * before[-50:].max()
    update = step(params, new, 150)[3]
    assert cosine(update, along) > 0.9
    assert 0.7 < optax.tree.norm(update) / optax.tree.norm(along) < 1.1
    assert cosine(step(params, like, 150)[3], along) < 0.7  # from an empty state


def cosine(a, b):
    return float(optax.tree.vdot(a, b) / optax.tree.norm(a) / optax.tree.norm(b))


def test_factors_are_the_best_of_their_rank(with_adam):
    params, state, _, _ = with_adam
    tx = adapprox_jax.adapprox(RATE, max_rank=8)
    new = from_adam(tx, state, params)
    nu_hat = optax.tree.get(state, "nu")["hidden"] / (1 - 0.999**150)
    root = np.sqrt(np.asarray(nu_hat, np.float64))
    spectrum = np.linalg.svd(root, compute_uv=False)
    best = np.sqrt(np.sum(spectrum[8:] ** 2)) / np.linalg.norm(root)
    info = adapprox_jax.rank_report(new, params)["['hidden']"]
    np.testing.assert_allclose(info.error, best, rtol=0.02)


def test_dense_leaves_counts_and_schedules_go_on_exactly(with_adam):
    params, state, _, _ = with_adam
    tx = adapprox_jax.adapprox(optax.linear_schedule(1e-2, 0.0, 300), clipping_threshold=1e6)
    new = from_adam(tx, state, params, clipping_threshold=None)
    assert {int(c) for _, c in optax.tree.get_all_with_path(new, "count")} == {150}
    adam = state[0]
    nu_hat, mu_hat = adam.nu["bias"] / (1 - 0.999**150), adam.mu["bias"] / (1 - 0.9**150)
    average = optax.tree.get(new, "mu")["bias"]
    np.testing.assert_allclose(average, mu_hat / (jnp.sqrt(nu_hat) + 1e-8), rtol=1e-4)


def test_a_state_from_a_checkpoint_by_its_parts(with_adam):
    """Somebody's count, mu and nu suffice; before the first step they are zero."""
    params, state, _, _ = with_adam
    tx = adapprox_jax.adapprox(RATE)
    parts = optax.ScaleByAdamState(*jax.device_get(state[0]))
    chex.assert_trees_all_equal(from_adam(tx, parts, params), from_adam(tx, state, params))
    params = {name: params[name] for name in ("hidden", "bias")}
    fresh = from_adam(tx, optax.adam(RATE).init(params), params)
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), fresh, params)
    chex.assert_tree_all_finite(updates)


def test_eps_and_the_axes_of_matrices_are_those_given():
    params = {"w": jnp.ones((2, 64, 64))}
    mu = {"w": params["w"].at[1].set(3.0)}
    adam = optax.ScaleByAdamState(jnp.asarray(10_000), mu, params)

    def average(**changes):
        tx = adapprox_jax.adapprox(
            RATE, weight_dimension_numbers=changes.get("weight_dimension_numbers")
        )
        return optax.tree.get(from_adam(tx, adam, params, **changes), "mu")["w"]

    np.testing.assert_allclose(average(eps=1.0, clipping_threshold=None), mu["w"] / 2, rtol=1e-4)
    clipped = average()
    np.testing.assert_allclose(clipped[1], clipped[0], rtol=1e-4)  # each slice by itself
    clipped = average(weight_dimension_numbers=MatrixDimensionNumbers((0, 1), 2))
    np.testing.assert_allclose(clipped[1], 3 * clipped[0], rtol=1e-4)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_dense_second_moment_is_corrected_where_the_optimizer_does_not_correct_it(corrected):
    params = {"a": jnp.ones((64, 96)), "bias": jnp.ones(96)}
    adam, grads = optax.adam(RATE, b2=0.99), jax.tree.map(lambda x: 2 * x, params)
    _, adam_state = adam.update(grads, adam.init(params))
    tx = adapprox_jax.adapprox(RATE, b2=0.99, bias_correction=corrected)
    state = from_adam(tx, adam_state, params, b2=0.99, bias_correction=corrected)
    # One gradient of 2: its square, or a hundredth of it.
    np.testing.assert_allclose(state[0].nu["bias"], 0.04 if corrected else 4.0, rtol=1e-4)
    jax.jit(tx.update, donate_argnums=1)(grads, state, params)
    assert int(adam_state[0].count) == 1
    assert adam_state[0].nu["bias"].shape == (96,)  # neither was given away


def test_an_adam_of_other_leaves_goes_on_as_it_is(with_adam):
    params, state, _, _ = with_adam
    parts = {"matrix": adapprox_jax.adapprox(RATE), "rest": optax.adamw(RATE)}
    labels = {"hidden": "matrix", "stack": "matrix", "out": "rest", "bias": "rest"}
    tx = optax.partition(parts, labels)
    new = from_adam(tx, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(tx.init(params))
    rest = new.inner_states["rest"].inner_state[0]
    assert int(rest.count) == 150
    for name in ("out", "bias"):
        for field in ("mu", "nu"):
            actual, expected = getattr(rest, field)[name], getattr(state[0], field)[name]
            np.testing.assert_array_equal(actual, expected)


class Params(NamedTuple):
    """A parameter may be called as a field of states is."""

    kernel: jax.Array
    count: jax.Array


SCHEDULE = optax.constant_schedule(RATE)
INJECT = optax.inject_hyperparams(adapprox_jax.adapprox, static_args=adapprox_jax.STATIC_ARGS)
COUNTS = {  # those of schedules go on, wherever they are, and those of other things begin anew
    "schedule": (adapprox_jax.adapprox(SCHEDULE, mu_dtype="int8"), [1, 1]),
    "injected": (INJECT(SCHEDULE), [1, 1, 1]),
    "decay": (adapprox_jax.adapprox(RATE, weight_decay=SCHEDULE), [1, 1]),
    "cautious": (
        adapprox_jax.adapprox(RATE, weight_decay=SCHEDULE, cautious_weight_decay=True),
        [1, 1],
    ),
    "momentum": (optax.chain(adapprox_jax.adapprox_muon(RATE), optax.ema(0.9)), [0, 1]),
    "plateau": (
        optax.chain(adapprox_jax.adapprox(RATE), optax.contrib.reduce_on_plateau()),
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_of_steps_where_they_were(name):
    tx, expected = COUNTS[name]
    params = Params(jnp.ones((64, 96)), jnp.ones((64, 96)))
    _, adam_state = optax.adam(RATE).update(params, optax.adam(RATE).init(params))
    state = from_adam(tx, adam_state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))
    counts = jax.tree.leaves([x for _, x in optax.tree.get_all_with_path(state, "count")])
    assert sorted(int(x) for x in counts if x.ndim == 0) == expected


def test_explicit_meshes():
    mesh = mesh_of((4,), ("data",), jax.sharding.AxisType.Explicit)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        params = {name: jnp.ones((64, 96), device=rows) for name in ("kernel", "other")}
        adam, tx = optax.adam(RATE), adapprox_jax.adapprox(RATE)
        _, adam_state = adam.update(params, adam.init(params))
        state = from_adam(tx, adam_state, params)
        types = [jax.typeof(x) for x in jax.tree.leaves(tx.init(params))]
        assert [jax.typeof(x) for x in jax.tree.leaves(state)] == types
        resized = adapprox_jax.resize(state, 4, truncate=True)
        assert jax.typeof(resized[0].error[0]) == jax.typeof(state[0].error[0])


@pytest.mark.parametrize("mu_dtype", [None, "int5"])
def test_hidden_matrices_go_on_with_adams_average_of_gradients(with_adam, mu_dtype):
    """And everything else as with `adapprox`: Adam has no second moment of directions."""
    params, state, _, loss = with_adam
    chosen = {"hidden": True, "stack": True, "out": False, "bias": False}
    tx = adapprox_jax.adapprox_muon(
        RATE, orthogonalized=chosen, mu_dtype=mu_dtype, second_moment=True
    )
    new = from_adam(tx, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, tx.init(params))
    assert {int(c) for _, c in optax.tree.get_all_with_path(new, "count")} == {150}
    alone = adapprox_jax.adapprox(RATE, mu_dtype=mu_dtype)
    expected = from_adam(alone, state, params)
    parts = new[0]
    for name in ("out", "bias"):
        for field in ("q", "u", "nu", "mu"):
            actual = optax.tree.get(parts.inner_states["adapprox"], field)[name]
            np.testing.assert_array_equal(actual, optax.tree.get(expected, field)[name])
    # The first direction is that of Adam's gradients and the new one.
    grads = jax.grad(loss)(params, 150)
    ahead = {}
    for name in ("hidden", "stack"):
        average = 0.95 * state[0].mu[name] + 0.05 * grads[name]
        ahead[name] = 0.95 * average / (1 - 0.95**152) + 0.05 * grads[name] / (1 - 0.95**151)
    orthogonal, _ = adapprox_jax.orthogonalize().update(ahead, optax.EmptyState())
    updates = step_of(tx, loss)(params, new, 150)[3]
    for name in ("hidden", "stack"):
        # The second moment of this one direction is its square, or nearly: signs remain.
        # Small directions drown in the codes' rounding, and count like all others.
        least = 0.9 if mu_dtype is None else 0.6
        assert cosine(-updates[name], jnp.sign(orthogonal[name])) > least
