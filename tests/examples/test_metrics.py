"""What is written and said of a run while it goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2 import elastic, metrics, optimizers
from examples.gpt2.config import Config
from examples.gpt2.step import TrainState


def validated(config, tmp_path, capsys):
    """The row and the words of one validation."""
    params = {"matrix": jnp.ones((16, 16)), "vector": jnp.ones(16)}
    tx = optimizers.build(config.optimizer, 1.0, config.hyper, config.adapprox)
    state = TrainState(params, tx.init(params))
    written = metrics.Metrics(tmp_path, 0)
    metrics.validate(written, 3, 2.0, state, elastic.fullness(config))
    written.close()
    return written.rows[-1], capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "adapprox"])
def test_no_matrix_is_said_to_be_full_where_ranks_are_fixed(optimizer, tmp_path, capsys):
    options = optimizers.AdapproxOptions(min_dim_size_to_factor=1, max_rank=4)
    row, words = validated(Config(optimizer=optimizer, adapprox=options), tmp_path, capsys)
    assert "step 3: validation loss 2.0000" in words
    assert "full" not in words
    assert "full" not in row
    assert ("ranks" in row) == (optimizer == "adapprox")


def test_full_matrices_are_counted_where_ranks_adapt(tmp_path, capsys):
    options = optimizers.AdapproxOptions(
        min_dim_size_to_factor=1, max_rank=4, initial_rank=4, rank_margin=1
    )
    row, words = validated(Config(adapprox=options), tmp_path, capsys)
    assert "mean rank 4.0, 1 of 1 matrices full" in words
    assert row["full"] == ["['matrix']"]


def test_a_state_is_told_in_bytes_and_shares():
    params = {"matrix": jnp.ones((64, 64)), "vector": jnp.ones(64)}
    tx = optimizers.build(
        "adapprox", 1.0, optimizers.Hyperparameters(), optimizers.AdapproxOptions()
    )
    sizes = metrics.memory(TrainState(params, tx.init(params)))
    assert sizes["parameters"] == 64 * 64 + 64
    np.testing.assert_allclose(sizes["factored_share"], 64 / 65)
    np.testing.assert_allclose(sizes["second_moment_ratio"], (2 * 64 * 8 + 64) / (64 * 65))
    leaves = jax.tree.leaves(optax.adamw(1.0).init(params))
    assert sizes["adamw_state_mib"] * metrics.MIB == sum(leaf.nbytes for leaf in leaves)
    assert "98.5% of the parameters in factored leaves" in metrics.describe(sizes)


def test_a_number_a_neuron_counts_as_a_second_moment():
    params = {"mlp": jnp.ones((64, 64)), "wte": jnp.ones((512, 64))}
    tx = optimizers.build(
        "adapprox-muon", 1.0, optimizers.Hyperparameters(), optimizers.AdapproxOptions()
    )
    sizes = metrics.memory(TrainState(params, tx.init(params)))
    np.testing.assert_allclose(sizes["factored_share"], 512 / 576)
    np.testing.assert_allclose(sizes["second_moment_ratio"], (64 + 576 * 8) / (576 * 64))
