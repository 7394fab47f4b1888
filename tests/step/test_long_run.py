"""A hundred thousand steps beside the exact second moment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax

ROWS, COLUMNS, CHUNKS, CHUNK = 24, 32, 100, 1000
SETTINGS = {
    "root at a fixed rank": dict(max_rank=4),
    "moment at an adaptive rank": dict(
        approximate="moment", initial_rank=1, max_rank=8, error_threshold=1e-3, rank_interval=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_long_run_stays_within_its_own_report(settings):
    """Finite, rank within bounds, and the distance from the exact second moment below `drift`.

    That is proven: the error is measured at every step.
    """
    tx = adapprox_jax.scale_by_adapprox(b2=0.999, min_dim_size_to_factor=1, **settings)
    is_root = settings.get("approximate", "root") == "root"
    keys = jax.random.split(jax.random.key(0), 2)
    log_scales = jax.random.normal(keys[0], (ROWS, COLUMNS))

    def one_step(carry, step):
        state, exact = carry
        # The scales of the gradients turn slowly, so that the factors have something to follow.
        scales = jnp.exp(jnp.roll(log_scales, step // 5000, axis=0))
        grad = scales * jax.random.normal(jax.random.fold_in(keys[1], step), (ROWS, COLUMNS))
        updates, state = tx.update(grad, state)
        exact = 0.999 * exact + 0.001 * grad**2
        return (state, exact), jnp.all(jnp.isfinite(updates))

    @jax.jit
    def chunk(carry, steps):
        carry, finite = jax.lax.scan(one_step, carry, steps)
        state, exact = carry
        kept = jnp.maximum(state.q @ state.u.T, 0)
        target = jnp.sqrt(exact) if is_root else exact
        distance = jnp.linalg.norm(kept - target)
        return carry, (
            jnp.all(finite),
            state.rank[0],
            distance,
            state.drift[0],
            jnp.linalg.norm(target),
        )

    zeros = jnp.zeros((ROWS, COLUMNS))
    carry, records = (tx.init(zeros), zeros), []
    for i in range(CHUNKS):
        carry, record = chunk(carry, jnp.arange(i * CHUNK, (i + 1) * CHUNK))
        records.append(jax.device_get(record))
    finite, rank, distance, drift, norm = map(np.array, zip(*records, strict=True))
    assert finite.all()
    assert ((rank >= 1) & (rank <= settings["max_rank"])).all()
    assert (distance <= drift * 1.001).all()
    assert (distance[-50:] <= 0.7 * norm[-50:]).all()  # and it is a second moment still
    assert int(carry[0].count) == CHUNKS * CHUNK
