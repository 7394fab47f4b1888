"""`jax.shard_map` with its default checks: what varies over devices is part of a type there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import adapprox_jax
from tests.common import normal

ADAPTIVE = dict(initial_rank=1, max_rank=18, error_threshold=0.1, rank_growth=lambda xi: 1)
FEW_BITS = dict(max_rank=4, power_iterations=2, factor_dtype=jnp.bfloat16, mu_dtype=jnp.int8)
MESH = Mesh(np.array(jax.devices()[:4]), ("x",))
VARIES, REPLICATED = PartitionSpec("x"), PartitionSpec()


SHAPES = {"own": (4, 64, 80), "shared": (64, 80), "vector": (4, 80)}  # "own": one for each device


@pytest.mark.parametrize("settings", [ADAPTIVE, FEW_BITS], ids=["adaptive", "few bits"])
def test_updates_of_each_device_are_its_own(settings):
    """Of leaves that vary and of leaves that do not, side by side, as on one device alone."""
    tx = adapprox_jax.adapprox(1.0, weight_decay=0.0, **{"min_dim_size_to_factor": 1, **settings})
    specs = {"own": VARIES, "shared": REPLICATED, "vector": VARIES}

    def two_steps(first, second):
        # "shared" varies over no device, and must not come to by waiting for another leaf.
        first, second = (
            {name: x[0] if specs[name] == VARIES else x for name, x in grads.items()}
            for grads in (first, second)
        )
        state = tx.init(first)
        _, state = tx.update(first, state, first)
        updates, state = tx.update(second, state, first)
        return {name: x[None] if specs[name] == VARIES else x for name, x in updates.items()}

    both = normal(SHAPES, 0), normal(SHAPES, 1)
    init, update = jax.jit(tx.init), jax.jit(tx.update)
    mapped = jax.shard_map(two_steps, mesh=MESH, in_specs=(specs, specs), out_specs=specs)
    actual = jax.jit(mapped)(*both)
    for device in range(4):
        first, second = (
            {name: x[device] if specs[name] == VARIES else x for name, x in grads.items()}
            for grads in both
        )
        _, state = update(first, init(first), first)
        expected, _ = update(second, state, first)
        for name in specs:
            part = actual[name][device] if specs[name] == VARIES else actual[name]
            if "factor_dtype" in settings:
                # Where float32 rounds otherwise a bfloat16 may be rounded to its other neighbour.
                difference = np.linalg.norm(part - expected[name])
                assert difference <= 2.0**-8 * np.linalg.norm(expected[name])
            else:
                np.testing.assert_allclose(part, expected[name], rtol=1e-4, atol=1e-5)


def test_a_state_that_varies_takes_gradients_that_do_not():
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **ADAPTIVE)

    def one_step(own, shared):
        _, state = tx.update(own[0], tx.init(shared))
        updates, _ = tx.update(shared, state)
        return updates[None]

    own, shared, _ = normal(SHAPES).values()
    step = jax.shard_map(one_step, mesh=MESH, in_specs=(VARIES, REPLICATED), out_specs=VARIES)
    updates = jax.jit(step)(own, shared)
    assert updates.shape == (4, 64, 80)
    assert np.all(np.isfinite(updates))
