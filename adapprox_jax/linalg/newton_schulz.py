"""Newton-Schulz iteration: matrices made nearly orthogonal by products alone."""

from functools import partial

import jax
import jax.numpy as jnp

from adapprox_jax.linalg.rounding import wide_dtype

# Of x -> a x + b x^3 + c x^5 on the singular values: steep at zero, and after five steps between
# 0.7 and 1.2 (Jordan et al., 2024, "Muon").
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@partial(jax.jit, static_argnames=("steps", "product_dtype", "unroll"))
def newton_schulz(
    matrices: jax.Array,
    steps: int = 5,
    product_dtype: jax.typing.DTypeLike | None = None,
    unroll: bool = False,
) -> jax.Array:
    """Turns U S V^T into about U V^T, for each of many matrices.

    X <- (a I + b X X^T + c (X X^T)^2) X with `COEFFICIENTS`, from X = A / ||A||; with X^T X on the
    other side where that is smaller.

    Args:
      matrices: (batch, m, n), of any scale, of 16 bits or more.
      steps: How often.
      product_dtype: Of products and their operands, which add up in float32: None for that of the
        matrices, in full precision.
      unroll: Whether steps are written out instead of looped over: a loop's result is copied to
        where it began, at every step.

    Returns:
      Of the shape of the matrices and the type of the products; a zero matrix stays zero.

    Source: Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    a, b, c = COEFFICIENTS
    precision = jax.lax.Precision.HIGHEST if product_dtype is None else None
    dtype = product_dtype or matrices.dtype
    sum_dtype = wide_dtype(matrices.dtype)
    _, m, n = matrices.shape
    gram, product = ("bmn,bkn->bmk", "bmk,bkn->bmn") if m <= n else ("bmn,bmk->bnk", "bmk,bkn->bmn")

    def times(x: jax.Array, y: jax.Array, of: str) -> jax.Array:
        return jnp.einsum(of, x, y, precision=precision, preferred_element_type=dtype)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        squares = times(x, x, gram)
        fourths = times(squares, squares, product).astype(sum_dtype)
        # With a I in the polynomial no pass over x has to add a x.
        identity = jnp.eye(min(m, n), dtype=sum_dtype)[None]
        polynomial = (a * identity + b * squares.astype(sum_dtype) + c * fourths).astype(dtype)
        return times(polynomial, x, product) if m <= n else times(x, polynomial, product)

    unit = of_norm_one(matrices.astype(sum_dtype), (1, 2)).astype(dtype)
    return jax.lax.fori_loop(0, steps, step, unit, unroll=unroll)


def of_norm_one(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An array divided by its norms over some axes; what is zero stays zero."""
    # Largest entry first: squares of small numbers vanish, of large ones they overflow.
    x = x / _nonzero(jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0))
    return x / _nonzero(jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True)))


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)
