"""S-RSI as linear algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adapprox_jax
from adapprox_jax.linalg import orthonormalize
from adapprox_jax.linalg import srsi as low_rank
from adapprox_jax.linalg.products import contract, matmul, outer
from tests import reference

SPECTRA = {
    "geometric": lambda j: 0.9**j,
    "fast": lambda j: 0.5**j,
    "power": lambda j: 1.0 / (1 + j) ** 1.5,
    "dominant": lambda j: np.where(j == 0, 100.0, 0.8**j),
    "steps": lambda j: 10.0 ** -(j // 8),
}


@functools.partial(jax.jit, static_argnums=1, static_argnames=("rotate", "orthogonalization"))
def srsi(matrix, rank, seed, **keywords):
    return adapprox_jax.srsi(matrix, rank, jax.random.key(seed), **keywords)


def with_spectrum(singular_values, shape):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, min(shape))))[0] for n in shape)
    return (left * singular_values) @ right.T


def turned(q, u):
    turn = low_rank.principal_turn(contract(u, u, 0))
    return matmul(q, turn.T), matmul(u, turn.T)


def error(matrix, q, u):
    return np.linalg.norm(matrix - np.asarray(q, np.float64) @ np.asarray(u, np.float64).T)


def orthonormality(q):
    q = np.asarray(q, np.float64)
    return np.max(np.abs(q.T @ q - np.eye(q.shape[1])))


@pytest.mark.parametrize(("orthogonalization", "ranks"), [("qr", (9,)), ("cholesky", (1, 24))])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_error_is_near_the_optimum(spectrum, orthogonalization, ranks):
    """At most 1.02 times the error of the SVD plus 1e-6 of the norm, at l = 5 and p = 5."""
    singular_values = SPECTRA[spectrum](np.arange(48.0))
    matrix = with_spectrum(singular_values, (48, 80))
    for rank in ranks:
        optimum = np.linalg.norm(singular_values[rank:])
        given = matrix.astype(np.float32)
        q, u = srsi(given, rank, rank, orthogonalization=orthogonalization)
        assert error(matrix, q, u) <= 1.02 * optimum + 1e-6 * np.linalg.norm(matrix), rank


@pytest.mark.parametrize(
    ("iterations", "oversampling", "rotate"),
    [(1, 0, False), (1, 3, True), (2, 3, False), (3, 20, True)],
)
def test_the_approximation_is_that_of_the_reference(iterations, oversampling, rotate):
    """Of a spectrum so flat that each iteration, each column and the rotation turn the basis."""
    matrix = with_spectrum(0.95 ** np.arange(12.0), (16, 12))
    start = jax.random.normal(jax.random.key(0), (min(3 + oversampling, 12), 12)).T
    q, u = reference.srsi(matrix, 3, np.asarray(start), iterations, oversampling, rotate)
    options = dict(power_iterations=iterations, oversampling=oversampling, rotate=rotate)
    found = jax.jit(functools.partial(adapprox_jax.srsi, rank=3, key=0, **options))
    assert error(q @ u.T, *found(matrix.astype(np.float32))) <= 1e-5


@pytest.mark.parametrize("width", [2, 16])
@pytest.mark.parametrize("breaks_down", [False, True])
def test_parallel_columns_are_turned_into_one(width, breaks_down, monkeypatch):
    """Of a matrix of rank 1; where Cholesky breaks down the product still stays as it was."""
    if breaks_down:
        broken = functools.partial(jnp.full_like, fill_value=jnp.nan)
        monkeypatch.setattr(jax.lax.linalg, "cholesky", lambda gram, **_: broken(gram))
    direction = np.exp(np.random.default_rng(0).normal(size=(5000, 1)))
    signs = (-1) ** np.arange(width)
    u = (direction * np.geomspace(1e-6, 1, width) * signs).astype(np.float32)
    q = np.eye(24, width, dtype=np.float32)
    turn = jax.jit(turned)  # with the broken Cholesky
    turned_q, turned_u = map(np.asarray, turn(q, u))
    np.testing.assert_allclose(turned_q @ turned_u.T, q @ u.T, atol=1e-5 * np.max(np.abs(u)))
    energies = np.sum(np.square(np.asarray(turned_u, np.float64)), axis=0)
    rounding = width * np.finfo(np.float32).eps
    assert np.all(np.diff(energies) <= rounding**2 * energies[0])
    if not breaks_down:
        np.testing.assert_allclose(energies[0], np.sum(np.square(u)), rtol=1e-4)


# Shape, rank, whether to rotate, and how to orthonormalize: what a program is compiled for.
PROGRAMS = [
    ((1, 1), 1, True, "cholesky"),
    ((1, 7), 1, True, "qr"),
    ((7, 1), 1, False, "cholesky"),
    ((16, 12), 5, True, "qr"),
    ((12, 16), 5, True, "cholesky"),
    ((16, 12), 5, False, "cholesky"),
    ((16, 12), 12, True, "qr"),
    ((16, 12), 12, True, "cholesky"),
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PROGRAMS), st.floats(-20, 10), st.integers(0, 12), st.integers(0, 2**31 - 1))
def test_q_is_orthonormal_and_u_the_projection(program, exponent, deficit, seed):
    """Of scales from 1e-20 to 1e10, of zero and rank-deficient matrices."""
    shape, rank, rotate, method = program
    rng = np.random.default_rng(seed)
    true_rank = max(min(shape) - deficit, 0)
    matrix = rng.normal(size=(shape[0], true_rank)) @ rng.normal(size=(true_rank, shape[1]))
    matrix = (np.abs(matrix) * 10.0**exponent).astype(np.float32)
    q, u = srsi(matrix, rank, seed, rotate=rotate, orthogonalization=method)
    assert orthonormality(q) <= 1e-5
    matrix = matrix.astype(np.float64)
    most = np.linalg.norm(matrix) + 1e-26
    assert np.linalg.norm(u - matrix.T @ np.asarray(q, np.float64)) <= 1e-5 * most
    if rank == min(shape):
        assert error(matrix, q, u) <= 1e-4 * most


def adding_up_to_zero(columns):
    basis = np.linalg.qr(columns)[0]
    return basis - basis.mean(axis=1, keepdims=True)


DEPENDENT = {
    "independent": lambda y: y,
    "graded": lambda y: y * 10.0 ** -np.arange(12),
    "graded and mixed": lambda y: (y * 10.0 ** -np.arange(12)) @ y[:12],
    "of rank one": lambda y: np.outer(y[:, 0], y[:12, 0]),
    "with a zero column and one twice": lambda y: np.c_[y[:, :5], y[:, :6], 0 * y[:, :1]],
    "with two entries": lambda y: np.eye(40, 12)[::-1] * (np.arange(12) > 9),
    "of ones": lambda y: 1 + y * 0,
    "zero": lambda y: y * 0,
    # The entries of their Gram matrix are near those of the identity, and it is singular.
    "3 that add up to zero": lambda y: adding_up_to_zero(y[:, :3]),
    "7 that add up to zero": lambda y: adding_up_to_zero(y[:, :7]),
    "12 that add up to zero": lambda y: adding_up_to_zero(y),
}


def cholesky_basis(matrix, rounds=orthonormalize.ROUNDS):
    given = [matrix[None].astype(np.float32)]
    (basis,) = jax.jit(orthonormalize.orthonormalize_cholesky, static_argnums=1)(given, rounds)
    return np.asarray(basis[0], np.float64)


@pytest.mark.parametrize("case", DEPENDENT)
def test_cholesky_needs_no_fallback(case):
    """Orthonormal to rounding, and the span holds the columns.

    With too few rounds columns are shorter: a second moment may then be underestimated for a step,
    but is never multiplied.
    """
    matrix = DEPENDENT[case](np.random.default_rng(0).normal(size=(40, 12)))
    basis = cholesky_basis(matrix)
    assert orthonormality(basis) <= 2e-6
    left_out = np.linalg.norm(matrix - basis @ (basis.T @ matrix))
    assert left_out <= 1e-5 * np.linalg.norm(matrix)
    for rounds in (1, 2):
        stretches = np.linalg.svd(cholesky_basis(matrix, rounds), compute_uv=False)
        assert stretches[0] <= 1 + 1e-5  # the shift is 6e-6, and rounding


@pytest.mark.parametrize("width", [13, 261])
def test_fixed_rounds_are_enough_for_any_columns_and_few_for_independent_ones(width):
    matrix = np.random.default_rng(0).normal(size=(768, width))
    assert orthonormality(cholesky_basis(matrix, orthonormalize.WARM_ROUNDS)) <= 2e-6
    assert orthonormality(cholesky_basis(matrix * 0.5 ** np.arange(width))) <= 2e-6


def test_many_matrices_are_orthonormalized_as_each_alone():
    """Of other heights, widths and batch sizes, in one factorization."""
    rng = np.random.default_rng(0)
    shapes = (2, 30, 5), (1, 24, 8), (3, 30, 5)
    matrices = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    together = jax.jit(orthonormalize.orthonormalize_cholesky)(matrices)
    for matrix, bases in zip(matrices, together, strict=True):
        for one, basis in zip(matrix, bases, strict=True):
            np.testing.assert_allclose(basis, cholesky_basis(one), atol=2e-5)


@pytest.mark.parametrize(
    ("singular_values", "columns", "width", "iterations"),
    [(np.geomspace(1, 1e-4, 24), 40, 17, 3), (0.5 ** np.arange(96.0), 128, 64, 1)],
    ids=["converged", "first-step"],
)
def test_the_errors_at_every_rank_are_those_of_the_residuals(
    singular_values, columns, width, iterations
):
    """Where the columns of u are far from orthogonal, too, as after one iteration."""
    shape = (len(singular_values), columns)
    matrix = with_spectrum(singular_values, shape).astype(np.float32)

    @jax.jit
    def factor(matrix):
        u = jax.random.normal(jax.random.key(2), (width, columns)).T
        for _ in range(iterations):
            [[q]] = orthonormalize.orthonormalize_qr([matmul(matrix, u)[None]])
            u = contract(matrix, q, 0)
        residual = jnp.sum(jnp.square(matrix - outer(q, u, 0)))
        pairs = (q, u), turned(q, u)
        return residual, [(q, u, jnp.sum(jnp.square(u), axis=0)) for q, u in pairs]

    residual, factors = jax.tree.map(np.asarray, factor(matrix))
    tail_error = jax.jit(low_rank.tail_error)
    ranks = range(1, width + 1)
    for q, u, energies in factors:
        errors = np.array([tail_error(energies, residual, k) for k in ranks])
        true = [error(np.asarray(matrix, np.float64), q[:, :k], u[:, :k]) for k in ranks]
        true = np.array(true) / np.linalg.norm(matrix)
        seen = true > 1e-5
        # And float32's epsilon, which A itself is rounded by.
        np.testing.assert_allclose(errors[seen], true[seen], rtol=1e-3, atol=2.0**-23)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_power_of_two_below(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        limits = jnp.finfo(dtype)
        smallest, largest = float(limits.tiny), float(limits.max)
        for x in (1.0, 1.5, 2.0, 3e-20, 0.75, 5e20):
            assert 1 <= x / low_rank.power_of_two_below(jnp.asarray(x, dtype)) < 2
        assert low_rank.power_of_two_below(jnp.asarray(0, dtype)) == 1
        # At the ends, too, the reciprocal is a normal number.
        assert 1 / low_rank.power_of_two_below(jnp.asarray(largest, dtype)) == smallest
        assert low_rank.power_of_two_below(jnp.asarray(smallest, dtype)) == smallest
