"""Tiles change nothing but the memory that is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.linalg import tiles
from adapprox_jax.step import platform
from tests.common import assert_near, run, stepping, temporaries

SETTINGS = {
    "fixed": dict(max_rank=4),
    "five iterations": dict(max_rank=4, power_iterations=5, warm_start=False, approximate="moment"),
    "adaptive": dict(initial_rank=1, max_rank=20, rank_interval=2, error_threshold=0.3),
}

of_newer_compilers = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="the XLA of JAX 0.8 plans larger temporaries"
)


MATRIX = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
BYTES = 512 * 1024 * 4


@pytest.fixture
def in_tiles(monkeypatch):
    """Takes matrices for large that have more than a hundred entries."""

    def switch(entries_of_a_tile):
        small = dataclasses.replace(platform.CPU, largest_whole=100)
        monkeypatch.setattr(platform, "CPU", small)
        monkeypatch.setattr(tiles, "_TILE", entries_of_a_tile)

    return switch


def three_updates(shape, settings, dtype):
    rng = np.random.default_rng(9)
    scale = np.exp(rng.normal(size=shape))
    grads = [(scale * rng.normal(size=shape)).astype(dtype) for _ in range(3)]
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings)
    updates, state = run(tx, grads, state=tx.init(np.zeros(shape, np.float32)))
    return np.asarray(updates[-1], np.float32), state


# Each setting along one axis: what depends on the axis is the same code for all.
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "most"),
    [
        # Ill-conditioned random columns turn rounding into 1e-3 of a factor's smallest entries.
        ("fixed", (96, 24), jnp.float32, 1e-3),
        ("five iterations", (24, 96), jnp.float32, 1e-3),
        # A rounding in float32 may change the last of the 8 bits of any entry.
        ("adaptive", (24, 96), jnp.bfloat16, 2**-8),
    ],
)
def test_updates_in_tiles_are_those_of_the_whole(name, shape, dtype, most, in_tiles):
    expected, expected_state = three_updates(shape, SETTINGS[name], dtype)
    in_tiles(500)
    assert tiles.tile_count(shape, 100) > 1
    actual, state = three_updates(shape, SETTINGS[name], dtype)
    assert int(state.rank[0]) == int(expected_state.rank[0])
    np.testing.assert_allclose(state.error[0], expected_state.error[0], rtol=1e-3)
    assert_near(actual, expected, most)


def update_memory(tx, params, **options):
    return temporaries(tx.update, params, jax.eval_shape(tx.init, params), params, **options)


@of_newer_compilers
def test_a_matrix_in_tiles_has_no_temporary_of_its_size(in_tiles):
    in_tiles(2**14)
    tx = adapprox_jax.scale_by_adapprox(approximate="moment", power_iterations=2)
    assert update_memory(tx, MATRIX, donate_argnums=1) < BYTES / 2


@of_newer_compilers
def test_the_update_of_a_matrix_in_tiles_takes_the_memory_of_its_gradient(in_tiles):
    """A gradient that nothing else reads is overwritten, so that a training step has no more."""
    in_tiles(2**14)
    tx = adapprox_jax.adapprox(1e-3)
    halves = [jax.ShapeDtypeStruct((side, 4), jnp.float32) for side in MATRIX.shape]

    def step(params, state, halves):
        gradient = jnp.einsum("mk,nk->mn", *halves)
        return stepping(tx)(params, state, gradient)

    state = jax.eval_shape(tx.init, MATRIX)
    assert temporaries(step, MATRIX, state, halves, donate_argnums=(0, 1)) < 1.5 * BYTES


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((768, 3072), 1),
        ((50304, 768), 32),  # tiles of 1572 rows, 4.6 MiB
        ((50257, 768), 29),  # the only divisor that fits
        ((50021, 768), 1),  # a prime
        ((768, 50021), 32),
        ((4096, 16384), 64),
        ((16384, 4096), 64),
        ((16, 2**20), 16),
        ((2, 2**23), 2),
    ],
)
def test_tile_counts(shape, expected):
    assert tiles.tile_count(shape, platform.CPU.largest_whole) == expected
    assert tiles.tile_count(shape, None) == 1


@of_newer_compilers
def test_temporaries_are_those_of_few_leaves_and_not_of_all():
    """At once they would hold a matrix or two of each: of the step, and of averages in codes."""
    tx = adapprox_jax.adapprox(1e-3, initial_rank=1, max_rank=4, mu_dtype=jnp.int8)
    few, many = (
        update_memory(tx, {str(i): MATRIX for i in range(count)}, donate_argnums=(0, 1))
        for count in (2, 6)
    )
    assert many <= few + 2 * BYTES
