"""The optimizers of the GPT-2 program, and what the records say of them."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from examples.gpt2 import optimizers

HYPER = optimizers.Hyperparameters(b1=0.8, b2=0.99, weight_decay=0.25)


def settings(name, **options):
    return optimizers.settings(name, HYPER, optimizers.AdapproxOptions(**options))


def arguments(function):
    return {name for name in inspect.signature(function).parameters if name != "learning_rate"}


def test_schedule_warms_up_and_ends_at_the_minimum():
    rate = optimizers.schedule(1.0, 0.1, warmup=9, steps=100)
    np.testing.assert_allclose([rate(0), rate(4), rate(9), rate(100)], [0.1, 0.5, 1.0, 0.1], 1e-5)


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_optimizers_decay_matrices_alone(name):
    options = optimizers.AdapproxOptions(min_dim_size_to_factor=1)
    tx = optimizers.build(name, 1.0, optimizers.Hyperparameters(weight_decay=0.5), options)
    params = {"matrix": jnp.ones((8, 8)), "vector": jnp.ones(8)}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.5)
    np.testing.assert_allclose(updates["vector"], 0.0, atol=1e-12)


# ------------------------------------------------------------------------------------ settings


def test_adapproxs_settings_are_all_its_arguments():
    used = settings("adapprox", max_rank=7, mu_dtype="int8")
    # Records from before it existed lack what is off unless it is given.
    assert set(used) == arguments(adapprox_jax.adapprox) - {"cautious_weight_decay"}
    assert settings("adapprox", cautious_weight_decay=True)["cautious_weight_decay"] is True
    assert (used["b1"], used["b2"], used["weight_decay"]) == (0.8, 0.99, 0.25)
    assert (used["max_rank"], used["mu_dtype"], used["mask"]) == (7, "int8", "matrices")
    assert used["rank_growth"] is None
    assert used["rotate"] is inspect.signature(adapprox_jax.adapprox).parameters["rotate"].default


def test_adamws_settings_are_all_its_arguments():
    used = settings("adamw", max_rank=7)
    assert set(used) == arguments(optax.adamw)
    assert (used["b1"], used["b2"], used["weight_decay"]) == (0.8, 0.99, 0.25)
    assert (used["eps"], used["mu_dtype"], used["mask"]) == (1e-8, None, "matrices")


def test_adafactors_settings_are_those_of_its_parts_and_its_own_decay():
    used = settings("adafactor", max_rank=7)
    assert used["decay"] == "1 - t^-0.8"
    rms, ema = used["scale_by_factored_rms"], used["ema"]
    assert set(rms) == arguments(optax.scale_by_factored_rms)
    assert (rms["decay_rate"], rms["min_dim_size_to_factor"]) == (0.8, 128)
    assert used["clip_by_block_rms"] == {"threshold": 1.0}
    assert (ema["decay"], ema["debias"]) == (0.8, False)
    assert used["add_decayed_weights"] == {"weight_decay": 0.25, "mask": "matrices"}
    assert 0.99 not in rms.values()


def test_adafactors_second_moment_decays_as_its_settings_say():
    decay = inspect.signature(optax.scale_by_factored_rms).parameters["decay_rate_fn"].default
    for step in (1, 10, 1000):
        np.testing.assert_allclose(decay(step - 1, 0.8), 1 - step**-0.8, rtol=1e-5)


def test_adafactor_b2_decays_by_a_constant():
    used = settings("adafactor-b2")
    rms = used["scale_by_factored_rms"]
    assert (rms["decay_rate"], rms["decay_rate_fn"]) == (0.99, "constant_decay")
    assert "decay" not in used
    tx = optimizers.build("adafactor-b2", 1.0, HYPER, optimizers.AdapproxOptions())
    params = jnp.ones(3)
    state = tx.init(params)
    for expected in (0.01, 0.0199):
        _, state = tx.update(params, state, params)
        np.testing.assert_allclose(state[0].v, expected, rtol=1e-5)


def test_an_increasing_b2_is_named_with_its_exponent():
    assert settings("adapprox", b2_exponent=0.8)["b2"] == "increasing_decay(exponent=0.8)"
    assert settings("adapprox-muon", b2_exponent=0.5)["b2"] == "increasing_decay(exponent=0.5)"


@pytest.mark.parametrize(
    ("decays", "decayed"),
    [
        ("matrices", {"embedding", "mlp"}),
        ("hidden", {"mlp"}),
        ("everything", {"embedding", "mlp", "b"}),
    ],
)
def test_decay_reaches_what_it_is_told_to(decays, decayed):
    params = {"embedding": jnp.ones((16, 8)), "mlp": jnp.ones((8, 8)), "b": jnp.ones(8)}
    hyper = optimizers.Hyperparameters(weight_decay=0.5, decays=decays)
    for name in ("adapprox", "adapprox-muon", "adamw", "muon", "came"):
        tx = optimizers.build(name, 1.0, hyper, optimizers.AdapproxOptions())
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        assert {leaf for leaf, x in updates.items() if np.any(x)} == decayed, name


def test_gradients_are_clipped_together_where_a_norm_is_given():
    params = {"a": jnp.full(4, 3.0), "b": jnp.full(4, 4.0)}  # of norm 10
    hyper = optimizers.Hyperparameters(clip_norm=1.0)
    options = optimizers.AdapproxOptions()
    for name in ("adamw", "adapprox"):
        clipped, plain = (
            optimizers.build(name, 1.0, of, options) for of in (hyper, optimizers.Hyperparameters())
        )
        _, state = clipped.update(params, clipped.init(params), params)
        small = jax.tree.map(lambda x: x / 10, params)
        _, expected = plain.update(small, plain.init(params), params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state[1], expected)
        assert optimizers.settings(name, hyper, options)["clip_by_global_norm"] == 1.0


def test_galore_projects_hidden_matrices_to_a_quarter_of_their_shorter_side():
    params = {"embedding": jnp.ones((256, 64)), "mlp": jnp.ones((64, 128)), "b": jnp.ones(8)}
    tx = optimizers.build("galore", 1e-3, HYPER, optimizers.AdapproxOptions())
    state = jax.eval_shape(tx.init, params)
    moments = state[0].base_optimizer_state.mu
    assert {name: x.shape for name, x in moments.items()} == {
        "embedding": (256, 64),
        "mlp": (64, 16),
        "b": (8,),
    }


def test_functions_are_named_with_what_they_were_made_with():
    used = settings("adapprox", error_threshold=0.05, sampling_threshold=True, initial_rank=1)
    assert used["error_threshold"] == "sampling_threshold(at_least=0.05, b2=0.99)"
    assert used["rank_growth"] == "one_column"
    growth = settings("adapprox-paper")["rank_growth"]
    assert growth == "sigmoid_growth(eta=200.0, omega=-10.0, phi=-2.5, tau=-9.0)"


def test_paper_is_the_papers_settings_with_guidance_unless_told_otherwise():
    used = settings("adapprox-paper", max_rank=7)
    assert used["cosine_guidance"] is True
    assert used["max_rank"] == 7
    assert used["power_iterations"] == adapprox_jax.PAPER["power_iterations"]


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_settings_go_through_json_as_they_are(name):
    options = {} if name == "adapprox-dense" else {"sampling_threshold": True}
    used = settings(name, **options)
    assert json.loads(json.dumps(used)) == used


@pytest.mark.parametrize(
    "of", [settings, lambda name: optimizers.build(name, 1.0, HYPER, optimizers.AdapproxOptions())]
)
def test_an_unknown_optimizer_is_refused(of):
    with pytest.raises(ValueError, match=r"optimizer must be one of adapprox, .*, got 'sgd'"):
        of("sgd")


def test_muons_b1_is_that_of_its_matrices_and_its_b2_that_of_adam():
    hyper = optimizers.Hyperparameters()
    options = optimizers.AdapproxOptions(muon_b1=0.5, muon_b2=0.999)
    used = optimizers.settings("muon", hyper, options)["muon"]
    assert (used["beta"], used["adam_b1"], used["adam_b2"]) == (0.5, 0.9, 0.999)
    assert (
        optimizers.settings("muon", hyper, optimizers.AdapproxOptions())["muon"]["adam_b2"] == 0.95
    )


def test_muons_rate_elsewhere_is_that_of_adam():
    params = {"embedding": jnp.ones((16, 8)), "mlp": jnp.ones((8, 8))}
    moved = {}
    for rate in (None, 0.25):
        options = optimizers.AdapproxOptions(rate_elsewhere=rate)
        tx = optimizers.build("muon", 1.0, optimizers.Hyperparameters(weight_decay=0.0), options)
        moved[rate], _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(moved[0.25]["embedding"], 0.25 * moved[None]["embedding"])
    np.testing.assert_array_equal(moved[0.25]["mlp"], moved[None]["mlp"])


@pytest.mark.parametrize("name", ["adapprox", "adamw", "adafactor"])
def test_a_rate_elsewhere_multiplies_updates_but_not_the_decay(name):
    params = {"hidden": jnp.ones((128, 128)), "tokens": jnp.full((128, 128), 2.0)}
    grads = jax.tree.map(lambda x: x * 0.5, params)

    def updates(rate_elsewhere, weight_decay):
        hyper = optimizers.Hyperparameters(weight_decay=weight_decay)
        options = optimizers.AdapproxOptions(rate_elsewhere=rate_elsewhere)
        tx = optimizers.build(name, 0.25, hyper, options)
        return tx.update(grads, tx.init(params), params)[0]

    plain, scaled = updates(None, 0.5), updates(8.0, 0.5)
    undecayed = updates(None, 0.0)
    np.testing.assert_allclose(scaled["hidden"], plain["hidden"], rtol=1e-6)
    np.testing.assert_allclose(
        scaled["tokens"], 8 * undecayed["tokens"] - 0.25 * 0.5 * params["tokens"], rtol=1e-6
    )
    options = optimizers.AdapproxOptions(rate_elsewhere=8.0)
    assert optimizers.settings(name, HYPER, options)["rate_elsewhere"] == 8.0


def test_the_embedding_can_have_a_rank_of_its_own():
    params = {"tokens": jnp.ones((128, 256)), "hidden": jnp.ones((128, 256))}
    options = optimizers.AdapproxOptions(max_rank=4, embedding_rank=16)
    state = optimizers.build("adapprox", 1e-3, HYPER, options).init(params)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert {(128, 16), (256, 16), (128, 4), (256, 4)} <= shapes
    assert settings("adapprox", embedding_rank=16)["embedding_rank"] == 16


def test_what_the_dense_adapprox_lacks_is_refused():
    with pytest.raises(ValueError, match="power_iterations is no option of adapprox-dense"):
        settings("adapprox-dense", power_iterations=2)


def test_an_infinite_threshold_is_a_word_in_the_records():
    assert settings("adapprox", clipping_threshold=float("inf"))["clipping_threshold"] == "inf"
