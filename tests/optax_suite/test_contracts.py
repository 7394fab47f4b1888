"""Optax's acceptance suite for contributed optimizers, run with adapprox as one more of them.

The suite comes with the installed Optax. Its tests are parametrized over Optax's own optimizers
where they are defined; the functions beneath take any optimizer that `optax.contrib` holds.
"""

import inspect
import itertools
import unittest

import jax.numpy as jnp
import optax
import pytest
from optax.contrib import _common_test as suite

import adapprox_jax
from tests.hardware import marks_of

CONTRACTS = {
    inspect.unwrap(method).__name__: inspect.unwrap(method)
    for name, method in vars(suite.ContribTest).items()
    if name.startswith("test")
}

# What each contract is asked of, besides the optimizer.
PARAMETERS = {
    "test_optimizers_accept_extra_args": {"wrap": [True, False]},
    "test_optimizers": {
        "target": [
            suite._setup_parabola,
            suite._setup_rosenbrock,
            suite._setup_matrix_parabola,
            suite._setup_mixed_tensor_target,
        ],
        "dtype": ["float32"],
    },
    "test_optimizers_can_be_wrapped_in_inject_hyperparams": {},
    "test_preserve_dtype": {"dtype": ["bfloat16", "float32"]},
    "test_gradient_accumulation": {"dtype": ["bfloat16", "float32"]},
    "test_state_shape_dtype_shard_stability": {
        "dtype": [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
    },
    "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such": {},
}


def register(monkeypatch, optimizer):
    """Puts an optimizer where the suite looks for it and names its static arguments."""
    inject = optax.inject_hyperparams
    monkeypatch.setattr(optax.contrib, "adapprox", optimizer, raising=False)
    monkeypatch.setattr(
        suite._inject,
        "inject_hyperparams",
        lambda factory, static: inject(factory, (*static, *adapprox_jax.STATIC_ARGS)),
    )


def run_contract(contract, settings, **parameters):
    """Runs one test of the suite; that it does not apply to adapprox is a failure."""
    try:
        CONTRACTS[contract](
            suite.ContribTest(),
            opt_name="adapprox",
            opt_kwargs={"learning_rate": 1e-2, **settings},
            wrapper_name=None,
            wrapper_kwargs=None,
            **parameters,
        )
    except unittest.SkipTest as reason:
        pytest.fail(f"skipped: {reason}")


def cases():
    """Every contract with every combination of its parameters."""
    for contract, values in PARAMETERS.items():
        for combination in itertools.product(*values.values()):
            names = [getattr(value, "__name__", str(value)) for value in combination]
            parameters = dict(zip(values, combination, strict=True))
            marks = marks_of(parameters.get("dtype"))
            yield pytest.param(contract, parameters, id="-".join([contract, *names]), marks=marks)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    register(monkeypatch, adapprox_jax.adapprox)


def test_every_contract_of_the_suite_is_run():
    """A contract that a newer Optax adds is noticed."""
    assert set(PARAMETERS) == set(CONTRACTS)


@pytest.mark.parametrize(("contract", "parameters"), list(cases()))
def test_contract(contract, parameters):
    """Optax's contract holds for adapprox."""
    run_contract(contract, {}, **parameters)
