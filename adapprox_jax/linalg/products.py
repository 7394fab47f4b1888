"""Products of a matrix with thin factors, in full precision.

Shapes: A is the matrix (m, n), q is (m, width) with orthonormal columns and u = A^T q is
(n, width), so that A is approximated by q @ u.T. Where an `axis` is named, q stands along that axis
of the matrix: with axis 1 the array holds A^T, (n, m), and nothing is ever transposed for that.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

# On GPUs and TPUs the default precision of a float32 product keeps 8 to 10 bits, which is more
# than the small entries of a second moment can lose.
_PRECISION = jax.lax.Precision.HIGHEST
_MOST_OUTER_PRODUCTS = 16
_SHORTEST_PART = 128  # entries of a long sum


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two matrices in their full precision on every backend."""
    return jnp.matmul(a, b, precision=_PRECISION)


def contract(matrix: jax.Array, factor: jax.Array, axis: int) -> jax.Array:
    """Product of a matrix and a factor along one axis of the matrix.

    Args:
      matrix: (m, n).
      factor: (m, width) for axis 0, (n, width) for axis 1.
      axis: Of the matrix, summed over.

    Returns:
      matrix.T @ factor, (n, width), for axis 0; matrix @ factor, (m, width), for axis 1.
    """
    if axis == 1:
        return matmul(matrix, factor)
    # XLA's product with a transposed first operand takes ten times as long on CPUs, and without
    # the barrier it would turn this form into that one.
    return jax.lax.optimization_barrier(matmul(factor.T, matrix)).T


def contract_in_parts(matrix: jax.Array, factor: jax.Array, axis: int, most: int) -> jax.Array:
    """`contract` of a long axis, as the products of its parts, which are still to be added.

    On accelerators one sum of few results keeps few cores busy, so that XLA parts it, and pads a
    copy of the matrix where it likes another length. The number of parts is a power of two, which
    suits a mesh.

    Args:
      matrix: (m, n).
      factor: (m, width) for axis 0, (n, width) for axis 1.
      axis: Of the matrix, summed over.
      most: How many parts there may be.

    Returns:
      (parts, n, width) for axis 0; (parts, m, width) for axis 1.
    """
    length = matrix.shape[axis]
    parts = 1
    while 2 * parts <= most and length % (8 * parts) == 0 and length >= 2 * parts * _SHORTEST_PART:
        parts *= 2
    if parts == 1:
        return contract(matrix, factor, axis)[None]
    in_parts = (*matrix.shape[:axis], parts, length // parts, *matrix.shape[axis + 1 :])
    return jnp.einsum(
        "pmn,pmk->pnk" if axis == 0 else "mpn,pnk->pmk",
        matrix.reshape(in_parts),
        factor.reshape(parts, length // parts, factor.shape[1]),
        precision=_PRECISION,
    )


def outer(q: jax.Array, u: jax.Array, axis: int) -> jax.Array:
    """The product q @ u.T, turned so that q stands along `axis`."""
    return matmul(q, u.T) if axis == 0 else matmul(u, q.T)


def outer_by_rows(q: jax.Array, u: jax.Array, axis: int) -> jax.Array:
    """`outer`, laid out in memory row after row, as matrices are.

    Of a product that fuses into a pass a TPU's compiler may want columns. Then it would turn all
    that the pass reads and writes, in copies.
    """
    return with_layout_constraint(outer(q, u, axis), Layout(major_to_minor=(0, 1)))


def fused_outer(
    q: jax.Array, u: jax.Array, axis: int, *, laid_out: bool = True, in_order: bool = True
) -> jax.Array:
    """`outer` of few columns as a sum of outer products, which fuses with what follows.

    On accelerators: as a product of matrices it would be written to memory and read again.

    Args:
      q: (m, width).
      u: (n, width).
      axis: Along which q stands.
      laid_out: Whether all columns are laid out first, for GPUs. There each column of a stack would
        be cut out by its own kernel.
      in_order: Whether columns are then laid out as they are read. Factors that are divided over a
        mesh would be gathered for it.

    Returns:
      (m, n) for axis 0, (n, m) for axis 1.
    """
    if q.shape[1] > _MOST_OUTER_PRODUCTS:
        return outer(q, u, axis)
    left, right = (q, u) if axis == 0 else (u, q)
    pairs = [(left[:, i], right[:, i]) for i in range(q.shape[1])]
    if laid_out:
        # Flat, because only then are the entries of a column next to each other. Neighbouring
        # threads of a GPU read those of `across`, and all of them the same one of `down`.
        down, across = left.T, right.T
        laid = across.ravel() if in_order else across
        down, laid = jax.lax.optimization_barrier((down, laid))
        pairs = list(zip(down, laid.reshape(across.shape), strict=True))
    terms = (x[:, None] * y[None, :] for x, y in pairs)
    return sum(terms, start=jnp.zeros((), q.dtype))
