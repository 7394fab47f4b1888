"""The study of losses: its contenders, the search for rates, and going on after a stop."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import contenders, loss_study
from benchmarks.loss_study import CONTENDERS, tune
from examples.gpt2.train import DivergedError, Result

PARAMS = {
    "tokens": {"embedding": jnp.ones((256, 64))},
    "hidden": {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)},
}


def updates_of(make, seed=0, rate=1.0):
    """The first update along random gradients; along zeros where there is no seed."""
    leaves, treedef = jax.tree.flatten(PARAMS)
    keys = jax.random.split(jax.random.key(seed or 0), len(leaves))
    scale = 0.0 if seed is None else 1e-3
    grads = [scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    tx = make(optax.constant_schedule(rate))
    updates, _ = tx.update(treedef.unflatten(grads), tx.init(PARAMS), PARAMS)
    return updates


# One of each way in which a contender is made.
@pytest.mark.parametrize(
    "name",
    [
        "adapprox",
        "adapprox_muon 4 bits",
        "adapprox_muon b1 0.95, one rate, others without Nesterov",
        "adapprox_muon, b1 by rate",
        "adapprox_muon, b1 by rate, only hidden matrices decay",
        "AdamW 8 bits, b2 0.999, clipped",
        "Muon b1 0.8, other parameters x2, q k v separate",
    ],
)
def test_contenders_decay_matrices_alone(name):
    updates = updates_of(CONTENDERS[name].make, seed=None, rate=0.5)
    of_embeddings = 0 if name.endswith("only hidden matrices decay") else -0.05
    np.testing.assert_allclose(updates["tokens"]["embedding"], of_embeddings, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(updates["hidden"]["kernel"], -0.05, rtol=1e-5)
    np.testing.assert_allclose(updates["hidden"]["bias"], 0, atol=1e-12)


@pytest.mark.parametrize("name", ["adapprox 4 bits", "AdamW b2 0.999, clipped"])
def test_updates_of_other_parameters_are_multiplied_and_the_decay_is_not(name):
    plain = updates_of(CONTENDERS[name].make)
    faster = updates_of(CONTENDERS[f"{name}, other parameters x8"].make)
    kernel, embedding = faster["hidden"]["kernel"], faster["tokens"]["embedding"]
    np.testing.assert_allclose(kernel, plain["hidden"]["kernel"], rtol=1e-4, atol=1e-6)
    expected = 8 * (plain["tokens"]["embedding"] + 0.1) - 0.1
    np.testing.assert_allclose(embedding, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("best", [1.0, 1.35, 4.9, 0.11, 15.0])
def test_the_best_rate_has_a_worse_one_a_root_of_two_away_on_either_side(best):
    tried = {}

    def loss(rate):
        assert rate not in tried
        tried[rate] = math.inf if rate > 20 else math.log2(rate / best) ** 2
        return tried[rate]

    found = tune(loss, 1.0)
    assert abs(math.log2(found / best)) <= 0.25
    worse = [rate for rate in tried if abs(math.log2(rate / found)) == pytest.approx(0.5)]
    assert len(worse) == 2
    assert all(tried[rate] >= tried[found] for rate in worse)


def test_a_search_ends_where_every_run_diverges():
    with pytest.raises(ValueError, match=r"all runs near a peak rate of 0\.5 diverge"):
        tune(lambda rate: math.inf, 0.5)


@pytest.fixture
def pretended(monkeypatch):
    """Runs that are pretended: the best rate is 2e-3, and twice that diverges."""
    made = []

    def train(config, *, optimizer, keep):
        assert not keep
        assert not config.resume
        made.append((config.learning_rate, config.seed))
        if len(made) == 5:  # a checkpoint is half written
            (config.out / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
            raise KeyboardInterrupt("interrupted at step 3")
        if config.learning_rate > 4e-3:
            raise DivergedError("the loss is nan")
        loss = math.log2(config.learning_rate / 2e-3) ** 2 + config.seed
        used = {"learning_rate": config.learning_rate, "seed": config.seed}
        memory = {"state_mib": 1.0, "parameters": 2**18}
        return Result(used, loss, [(1, loss)], memory, 1.0)

    monkeypatch.setattr(loss_study, "train", train)
    return made


def test_a_study_goes_on_where_it_was_stopped(pretended, tmp_path, capsys):
    with pytest.raises(SystemExit, match="interrupted at step 3: the same command goes on"):
        loss_study.main(("adapprox",), seeds=2, folder=tmp_path)
    records = tmp_path / "runs.jsonl"
    assert len(records.read_text().splitlines()) == 4
    records.write_text(records.read_text() + '{"setting": "co')  # stopped while it wrote
    loss_study.main(("adapprox",), seeds=2, folder=tmp_path)
    assert len(set(pretended)) == len(pretended) - 1  # the one that was stopped was made again
    assert {seed for _, seed in pretended} == {0, 1}
    assert "| adapprox | 4.00 | 2 | 0.5562 ± 0.5000 |" in capsys.readouterr().out
    assert (tmp_path / "loss_against_bytes.png").read_bytes().startswith(b"\x89PNG")
    before = len(pretended)
    loss_study.main(("adapprox",), seeds=2, folder=tmp_path)
    assert len(pretended) == before


def test_given_rates_are_tried_alone_and_divergence_is_recorded(pretended, tmp_path, capsys):
    loss_study.main(("adapprox", "CAME"), seeds=1, rates=(2e-3, 8e-3), folder=tmp_path)
    assert pretended == [(2e-3, 0), (8e-3, 0)] * 2
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [row["validation_loss"] for row in rows] == [0.0, None] * 2
    assert "| CAME | 4.00 | 1 | 0.0000 | +0.0000 | 0.002 |" in capsys.readouterr().out


def test_a_fused_kernel_may_be_seen_as_three():
    fused = {"qkv": {"kernel": jax.random.normal(jax.random.key(0), (32, 96))}}
    parts = jnp.split(fused["qkv"]["kernel"], 3, 1)
    tx = contenders.muon()
    updates = contenders.on_separate_matrices(tx)
    actual, _ = updates.update(fused, updates.init(fused), fused)
    expected, _ = tx.update(parts, tx.init(parts), parts)
    np.testing.assert_array_equal(actual["qkv"]["kernel"], jnp.concatenate(expected, 1))


def test_muon_works_on_each_of_stacked_layers():
    stack = jax.random.normal(jax.random.key(0), (3, 16, 24))
    layers = {str(i): {"kernel": layer} for i, layer in enumerate(stack)}
    tx = contenders.muon()
    expected, actual = (
        tx.update(params, tx.init(params), params)[0]["blocks"]
        for params in ({"blocks": layers}, {"blocks": {"kernel": stack}})
    )
    of_layers = [expected[name]["kernel"] for name in layers]
    np.testing.assert_allclose(actual["kernel"], of_layers, atol=1e-4)  # 0.3 across layers
