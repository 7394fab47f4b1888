"""What the CPU that the tests run on cannot do."""

import functools

import jax
import jax.numpy as jnp
import pytest


@functools.cache
def compiles_float16():
    """Whether XLA has conversions to float16: without them no optimizer runs, Optax's neither."""
    try:
        jax.jit(lambda x: (x * x.astype(jnp.float32)).astype(jnp.float16))(jnp.ones(64, "float16"))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def marks_of(dtype):
    """Marks for a test that computes in a type."""
    is_missing = dtype == jnp.float16 and not compiles_float16()
    return [pytest.mark.skip(reason="XLA compiles no float16 for this CPU")] if is_missing else []
