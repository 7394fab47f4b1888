"""Tiles change nothing but the memory that is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adapprox_jax
from adapprox_jax.linalg import tiles
from adapprox_jax.step import platform

SETTINGS = {
    "fixed": dict(max_rank=4),
    "five iterations": dict(max_rank=4, power_iterations=5, warm_start=False, approximate="moment"),
    "adaptive": dict(initial_rank=1, max_rank=20, rank_interval=2, error_threshold=0.3),
    "bfloat16 factors": dict(max_rank=4, factor_dtype=jnp.bfloat16, approximate="moment"),
}

of_newer_compilers = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="the XLA of JAX 0.8 plans larger temporaries"
)


@pytest.fixture
def in_tiles(monkeypatch):
    """Takes matrices for large that have more than a hundred entries."""

    def switch(entries_of_a_tile):
        small = dataclasses.replace(platform.CPU, largest_whole=100)
        monkeypatch.setattr(platform, "CPU", small)
        monkeypatch.setattr(tiles, "_TILE", entries_of_a_tile)

    return switch


def test_results_of_the_shape_of_the_first_array_are_kept_apart():
    array = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    twice, negative, total = tiles.in_tiles(
        lambda x, factor: (factor * x, -x, jnp.sum(x)), 3, array, np.float32(2)
    )
    np.testing.assert_array_equal(twice, 2 * array)
    np.testing.assert_array_equal(negative, -array)
    np.testing.assert_array_equal(total, np.sum(array))


def three_updates(shape, settings, dtype=jnp.float32):
    tx = adapprox_jax.scale_by_adapprox(min_dim_size_to_factor=1, **settings)
    state = tx.init(np.zeros(shape, np.float32))
    update = jax.jit(tx.update)
    rng = np.random.default_rng(9)
    scale = np.exp(rng.normal(size=shape))
    for _ in range(3):
        gradient = (scale * rng.normal(size=shape)).astype(dtype)
        updates, state = update(gradient, state)
    return np.asarray(updates, np.float32), state


# Each setting along one axis: what depends on the axis is the same code for all. Rounding does not
# know of tiles.
ALONG = {"fixed": (96, 24), "five iterations": (24, 96), "adaptive": (24, 96)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if ALONG.get(name) == shape else pytest.mark.slow)
        for name in SETTINGS
        for shape in [(24, 96), (96, 24), (97, 24)]
    ],
)
def test_updates_in_tiles_are_those_of_the_whole(name, shape, in_tiles):
    settings = SETTINGS[name]
    expected, expected_state = three_updates(shape, settings)
    in_tiles(500)
    assert (tiles.tile_count(shape, 100) > 1) == (97 not in shape)  # a prime has no divisors
    actual, state = three_updates(shape, settings)
    assert int(state.rank[0]) == int(expected_state.rank[0])
    np.testing.assert_allclose(state.error[0], expected_state.error[0], rtol=1e-3)
    # Ill-conditioned random columns turn rounding into 1e-3 of a factor's smallest entries.
    difference = np.linalg.norm(actual - expected)
    assert difference <= 1e-3 * np.linalg.norm(expected)


def test_updates_in_tiles_have_the_type_of_gradients_in_bfloat16(in_tiles):
    expected, _ = three_updates((24, 96), SETTINGS["fixed"], jnp.bfloat16)
    in_tiles(500)
    actual, _ = three_updates((24, 96), SETTINGS["fixed"], jnp.bfloat16)
    # A rounding in float32 may change the last of the 8 bits of any entry.
    assert np.linalg.norm(actual - expected) <= 2**-8 * np.linalg.norm(expected)


@of_newer_compilers
@pytest.mark.parametrize(
    "settings", [{}, dict(approximate="moment", power_iterations=2)], ids=["root", "moment"]
)
def test_a_matrix_in_tiles_has_no_temporary_of_its_size(settings, in_tiles):
    in_tiles(2**14)
    matrix = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    tx = adapprox_jax.scale_by_adapprox(**settings)
    lowered = jax.jit(tx.update, donate_argnums=1).lower(matrix, jax.eval_shape(tx.init, matrix))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 512 * 1024 * 4 / 2


@of_newer_compilers
def test_the_update_of_a_matrix_in_tiles_takes_the_memory_of_its_gradient(in_tiles):
    """A gradient that nothing else reads is overwritten, so that a training step has no more."""
    in_tiles(2**14)
    tx = adapprox_jax.adapprox(1e-3)
    matrix = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    half = jax.ShapeDtypeStruct((512, 4), jnp.float32), jax.ShapeDtypeStruct((1024, 4), jnp.float32)

    def step(params, state, halves):
        gradient = jnp.einsum("mk,nk->mn", *halves)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, matrix)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(matrix, state, half).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 512 * 1024 * 4


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
    ],
)
def test_tile_counts(shape, expected):
    assert tiles.tile_count(shape, platform.CPU.largest_whole) == expected
    assert tiles.tile_count(shape, None) == 1


@of_newer_compilers
@pytest.mark.parametrize(
    "settings",
    [pytest.param(dict(max_rank=4), marks=pytest.mark.slow), dict(initial_rank=1, max_rank=4)],
)
def test_temporaries_are_those_of_one_leaf_and_not_of_all(settings):
    """Of XLA's plan: with all leaves at once it would hold a matrix or two of each."""
    params = {str(i): jax.ShapeDtypeStruct((256, 512), jnp.float32) for i in range(4)}
    tx = adapprox_jax.adapprox(1e-3, **settings)

    def temporaries(params):
        compiled = (
            jax.jit(tx.update, donate_argnums=(0, 1))
            .lower(params, jax.eval_shape(tx.init, params), params)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(params) <= temporaries({"0": params["0"]}) + 2 * 256 * 512 * 4


def test_averages_in_codes_are_decoded_one_leaf_after_the_other():
    """All at once, before the first leaf, they took a matrix in float32 for each."""

    def temporaries(leaves):
        params = {str(i): jax.ShapeDtypeStruct((256, 512), jnp.float32) for i in range(leaves)}
        tx = adapprox_jax.adapprox(1e-3, max_rank=4, mu_dtype=jnp.int8)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            params, jax.eval_shape(tx.init, params), params
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) <= temporaries(2) + 2 * 256 * 512 * 4
