"""Optax's acceptance suite for contributed optimizers, run with adapprox as one more of them.

The suite comes with the installed Optax. Its tests are parametrized over Optax's own optimizers
where they are defined; the functions beneath take any optimizer that `optax.contrib` holds.
"""

import inspect
import itertools
import unittest

import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Puts adapprox where the suite looks for it and names its static arguments."""
    inject = optax.inject_hyperparams
    monkeypatch.setattr(optax.contrib, "adapprox", adapprox_jax.adapprox, raising=False)
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


def test_every_contract_of_the_suite_is_run():
    """A contract that a newer Optax adds is noticed."""
    assert set(PARAMETERS) == set(CONTRACTS)


@pytest.mark.parametrize(("contract", "parameters"), list(cases()))
def test_contract(contract, parameters):
    """Optax's contract holds for adapprox."""
    run_contract(contract, {}, **parameters)


def quadratic(*shapes):
    """A quadratic with random targets of these shapes, set up in the suite's way."""

    def setup(dtype):
        rng = np.random.default_rng(0)
        final = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]

        def objective(params):
            return optax.tree.norm(optax.tree.sub(params, final), squared=True)

        return optax.tree.zeros_like(final), final, objective

    return setup


def rosenbrock(dtype):
    """Rosenbrock's function summed over pairs of entries from the two halves of a matrix."""
    initial = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (24, 16)), dtype)

    def objective(params):
        x, y = jnp.split(params, 2)
        return jnp.sum((1 - x) ** 2 + 100 * (y - x**2) ** 2)

    return initial, jnp.ones_like(initial), objective


@pytest.mark.parametrize(
    ("settings", "target", "steps"),
    [
        (dict(min_dim_size_to_factor=1), quadratic((24, 16), (48,)), 3_000),
        # A curved valley, which asks more of it.
        (
            dict(min_dim_size_to_factor=1, initial_rank=1, max_rank=6, error_threshold=0.1),
            rosenbrock,
            12_000,
        ),
        pytest.param(
            adapprox_jax.PAPER, quadratic((48, 200), (48,)), 30_000, marks=pytest.mark.slow
        ),
    ],
    ids=["fixed", "adaptive", "paper"],
)
def test_it_converges_where_second_moments_are_factors(settings, target, steps, monkeypatch):
    """The suite's own matrices are 2 x 2. Within some of its 30,000 steps, at a constant rate."""
    params, *_ = target(jnp.float32)
    state = adapprox_jax.adapprox(1e-2, **settings).init(params)
    assert adapprox_jax.rank_report(state, params)
    scan = jax.lax.scan

    def shorter(f, init, xs=None, length=None, **keywords):
        return scan(f, init, xs, steps if length == 30_000 else length, **keywords)

    monkeypatch.setattr(jax.lax, "scan", shorter)
    run_contract("test_optimizers", settings, target=target, dtype="float32")
