"""head_by_head: dimension numbers with which each attention head is a matrix by itself."""

from collections.abc import Callable, Sequence
from typing import Any

from adapprox_jax.argument_checks import require_integer
from adapprox_jax.params.known_axes import is_from_model, known_axes
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers, default_axes


def head_by_head(head_size: int | None = None) -> Callable[[Any], Any]:
    """Dimension numbers that make queries, keys and values orthogonal head by head.

    For `weight_dimension_numbers`. Kernels are known by their names: "query", "q_proj", "qkv",
    "kv_einsum" and their like. All other leaves are seen as they are without it.

    Args:
      head_size: Outputs of one head. Kernels that have no axis for heads are cut into parts of as
        many outputs. None where all have one.

    Returns:
      A function from the parameters to a tree of `MatrixDimensionNumbers` and None.

    Raises:
      ValueError: head_size is no integer above 0; or, from the function, a kernel has no axis for
        heads and its outputs are no multiple of `head_size`.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"query": jnp.ones((64, 4, 16)), "qkv": jnp.ones((64, 192))}
      >>> by_head = adapprox_jax.head_by_head(head_size=16)
      >>> list(adapprox_jax.muon_report(params, None, by_head).values())
      ['orthogonalized: 12 of 64 x 16', 'orthogonalized: 4 of 64 x 16']

    Source: Muon Split of GLM-5 (2602.15763); docs/orthogonal.md has what it did to losses.
    """
    if head_size is not None:
        require_integer("head_size", head_size, 1)

    def numbers_of(params: Any) -> Any:
        leaves = Leaves.of(params)
        names, words, arrays = leaves.names, leaves.words, leaves.arrays
        numbers: list[MatrixDimensionNumbers | None] = [None] * len(arrays)
        for i, known in enumerate(known_axes(leaves)):
            shape = arrays[i].shape
            if is_from_model(words[i]) and len(shape) > 1:
                whole = known.numbers or MatrixDimensionNumbers(*default_axes(shape))
                numbers[i] = _by_head(names[i], whole, shape, head_size)
        return leaves.structure.unflatten(numbers)

    return numbers_of


def _by_head(
    name: str, whole: MatrixDimensionNumbers, shape: tuple[int, ...], head_size: int | None
) -> MatrixDimensionNumbers:
    columns = whole.columns if isinstance(whole.columns, Sequence) else (whole.columns,)
    if len(columns) > 1:
        return MatrixDimensionNumbers(whole.rows, columns[-1])
    outputs = shape[columns[0]]
    if head_size is None or outputs % head_size:
        raise ValueError(
            f"{name} of shape {shape} has no axis for heads, and head_size is {head_size}; allowed:"
            f" a divisor of its {outputs} outputs."
        )
    return whole._replace(parts=outputs // head_size)
