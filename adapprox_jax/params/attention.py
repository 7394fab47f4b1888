"""Attention kernels with an axis for heads: known by their names, each seen as one matrix.

The matrix is that of the product: the model's size by the number of heads times their size. Names
and orders of axes are those of Flax, MaxText, Tunix and Gemma.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers, matrix_view

_Module: TypeAlias = tuple[str, ...]  # the words of its path

_FROM_MODEL = re.compile(r"^(w?(q|k|v|kv|qkv)(_[ab])?(_proj|_einsum)?|query|key|value)$")
_TO_MODEL = re.compile(r"^(out|o_proj|out_proj|wo|attn_vec_einsum)$")
_ATTENTION = re.compile(r"attn|attention")
_KERNELS = ("kernel", "w", "weight")
_LONGEST_HEAD = 512  # a longer axis is of heads that are merged already


def attention_numbers(leaves: Leaves) -> list[MatrixDimensionNumbers | None]:
    """Which axes of attention kernels form their matrix; None for other leaves.

    A kernel from the model to heads is (model, heads, size), or (heads, model, size) under a name
    that ends in "einsum". One back to the model is (heads, size, model). Axes of layers, or of
    queries, keys and values, may stand anywhere before the size of heads. Kernels from the model
    tell which axes these are, because the model is larger than what is stacked.
    """
    roles = list(map(_role, leaves.words))
    shapes = [leaf.shape for leaf in leaves.arrays]
    numbers: list[MatrixDimensionNumbers | None] = [None] * len(shapes)
    stacked: dict[_Module, tuple[int, ...] | None] = {}  # of a module, if it has an axis of heads
    for i, (module, role) in enumerate(roles):
        if _FROM_MODEL.search(role):
            numbers[i] = _from_model(role, shapes[i])
            if stacked.get(module) is None:
                known = numbers[i]
                stacked[module] = None if known is None else matrix_view(shapes[i], known).batch
    for i, (module, role) in enumerate(roles):
        if _TO_MODEL.search(role):
            leading = () if _is_attention(module) else None
            batch = stacked.get(module, leading)
            numbers[i] = None if batch is None else _to_model(shapes[i], batch)
    return numbers


def is_attention_kernel(words: Sequence[str]) -> bool:
    """Whether the words in a leaf's path name an attention kernel, of whatever shape."""
    module, role = _role(words)
    return bool(_FROM_MODEL.search(role) or (_TO_MODEL.search(role) and _is_attention(module)))


def _is_attention(module: _Module) -> bool:
    return any(map(_ATTENTION.search, module))


def _role(words: Sequence[str]) -> tuple[_Module, str]:
    """The module that a kernel is in, and what it is called there."""
    named = [*words[:-1]] if words and words[-1] in _KERNELS else [*words]
    return tuple(named[:-1]), named[-1] if named else ""


def _from_model(role: str, shape: Sequence[int]) -> MatrixDimensionNumbers | None:
    if len(shape) < 3 or shape[-1] > _LONGEST_HEAD:
        return None
    if role.endswith("_einsum"):
        return MatrixDimensionNumbers(-2, (-3, -1))
    *others, heads, _ = shape
    model = max(range(len(others)), key=lambda axis: (others[axis], axis))
    return MatrixDimensionNumbers(model, (-2, -1)) if others[model] >= heads else None


def _to_model(shape: Sequence[int], batch: tuple[int, ...]) -> MatrixDimensionNumbers | None:
    more = max(len(shape) - 3, 0)  # axes than those of heads, size and model
    stacked = batch[:more] if len(batch) >= more else tuple(range(more))
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    if len(axes) != 3 or shape[axes[1]] > _LONGEST_HEAD or shape[axes[2]] < shape[axes[0]]:
        return None
    return MatrixDimensionNumbers(axes[:2], axes[2])
