"""The contracts of Optax's suite where second moments are factors: its own matrices are 2 x 2.

These are the contracts whose problem can be set. Tests of wrappers have matrices for the others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import _common_test as suite

import adapprox_jax
from tests.hardware import marks_of
from tests.optax_suite.test_contracts import PARAMETERS, register, run_contract

SHORT, LONG, VECTOR = (64, 48), (48, 200), (48,)
SETTINGS = {
    "fixed": dict(min_dim_size_to_factor=1),
    "adaptive": dict(min_dim_size_to_factor=1, initial_rank=1, max_rank=6, error_threshold=0.1),
    "paper": adapprox_jax.PAPER,
}
ON_A_SETUP = [
    "test_optimizers_accept_extra_args",
    "test_state_shape_dtype_shard_stability",
    "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such",
]
# It compares entries of updates at a relative 1e-6. Nesterov's momentum is a sum in which some
# entries cancel, and two programs round its terms in their own ways.
OF_TWO_PROGRAMS = ON_A_SETUP[-1]


def quadratic(*shapes):
    """A quadratic with random targets of these shapes, set up in the suite's way."""

    def setup(dtype):
        rng = np.random.default_rng(0)
        final = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
        initial = [jnp.zeros(shape, dtype) for shape in shapes]
        return initial, final, lambda params: sum_of_squares(optax.tree.sub(params, final))

    return setup


def rosenbrock(*shape):
    """Rosenbrock's function summed over pairs of entries from the two halves of a matrix."""

    def setup(dtype):
        rng = np.random.default_rng(0)
        initial = jnp.asarray(rng.uniform(-1, 1, shape), dtype)

        def objective(params):
            x, y = jnp.split(params[0], 2)
            return jnp.sum((1 - x) ** 2 + 100 * (y - x**2) ** 2)

        return [initial], [jnp.ones(shape, dtype)], objective

    return setup


def sum_of_squares(params):
    return sum(jnp.sum(p**2) for p in params)


@pytest.fixture
def adapprox(monkeypatch):
    """Registers adapprox; in every state made by it matrices, and only they, are factored."""
    ndims = set()

    @functools.wraps(adapprox_jax.adapprox)
    def factory(*args, **keywords):
        tx = adapprox_jax.adapprox(*args, **keywords)

        def init(params):
            state = tx.init(params)
            dense = {leaf.shape for leaf in jax.tree.leaves(state[0].nu)}
            ndims.update((leaf.ndim, leaf.shape in dense) for leaf in jax.tree.leaves(params))
            return state

        # Compiled, because step by step the loops in it would be compiled anew at each.
        return tx._replace(init=init, update=jax.jit(tx.update))

    register(monkeypatch, factory)
    yield factory
    assert (2, False) in ndims
    assert ndims <= {(2, False), (1, True)}


def cases():
    """The contracts whose problem can be set, with the types asked for.

    Of the adaptive rank tests of wrappers prove the others on smaller programs.
    """
    of_fixed = [
        (contract, "fixed", dtype)
        for contract in ON_A_SETUP
        for dtype in PARAMETERS[contract].get("dtype", [None])
    ]
    for contract, name, dtype in (*of_fixed, (ON_A_SETUP[1], "adaptive", jnp.float32)):
        parameters = {key: values[0] for key, values in PARAMETERS[contract].items()}
        parameters |= {"dtype": dtype} if dtype else {}
        settings = {**SETTINGS[name], "nesterov": contract != OF_TWO_PROGRAMS}
        label = "-".join([contract, *([dtype.__name__] if dtype else []), name])
        yield pytest.param(contract, parameters, settings, id=label, marks=marks_of(dtype))


@pytest.mark.parametrize(("contract", "parameters", "settings"), list(cases()))
def test_contract(contract, parameters, settings, adapprox, monkeypatch):
    """Optax's contract holds where its problem is one of matrices."""
    monkeypatch.setattr(suite, "_setup_parabola", quadratic(LONG, VECTOR))
    monkeypatch.setattr(suite, "_setup_rosenbrock", rosenbrock(*SHORT))
    run_contract(contract, settings, **parameters)


@pytest.mark.parametrize(
    ("name", "target", "steps"),
    [
        ("fixed", quadratic((24, 16), VECTOR), 3_000),
        ("adaptive", rosenbrock(24, 16), 12_000),  # a curved valley, which asks more of it
        pytest.param("paper", quadratic(LONG, VECTOR), 30_000, marks=pytest.mark.slow),
    ],
    ids=["fixed", "adaptive", "paper"],
)
def test_converges(name, target, steps, adapprox, monkeypatch):
    """To the optimum, within some of the suite's 30,000 steps, at a constant rate."""
    scan = jax.lax.scan

    def shorter(f, init, xs=None, length=None, **keywords):
        return scan(f, init, xs, steps if length == 30_000 else length, **keywords)

    monkeypatch.setattr(jax.lax, "scan", shorter)
    run_contract("test_optimizers", SETTINGS[name], target=target, dtype="float32")
