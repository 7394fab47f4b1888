"""The second moment that factors stand for, beside the exact one."""

import jax
import jax.numpy as jnp
import numpy as np


def beside_exact(tx, gradient_at, steps, every=50, b2=0.999):
    """A state, the second moment that it stands for and the exact one, each so many steps."""

    def one_step(carry, t):
        state, exact = carry
        grad = gradient_at(t)
        updates, state = tx.update(grad, state)
        return (state, b2 * exact + (1 - b2) * grad**2), jnp.all(jnp.isfinite(updates))

    advance = jax.jit(lambda carry, times: jax.lax.scan(one_step, carry, times))
    zeros = jnp.zeros(jax.eval_shape(gradient_at, 0).shape)
    carry = tx.init(zeros), zeros
    for times in np.arange(steps).reshape(-1, every):
        carry, finite = advance(carry, times)
        assert np.all(finite)
        state, exact = carry
        q, u = (np.asarray(factor, np.float64) for factor in (state.q, state.u))
        yield state, np.maximum(q @ u.T, 0), np.asarray(exact, np.float64)
