"""What names say of axes: of heads in attention kernels, and of layers that are stacked.

An attention kernel is one matrix, that of its product: the model's size by the number of heads
times their size. Names and orders of axes are those of Flax, MaxText, Tunix and Gemma.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers, default_axes

_Module: TypeAlias = tuple[str, ...]  # the words of its path

_FROM_MODEL = re.compile(r"^(w?(q|k|v|kv|qkv)(_[ab])?(_proj|_einsum)?|query|key|value)$")
_TO_MODEL = re.compile(r"^(out|o_proj|out_proj|wo|attn_vec_einsum)$")
_ATTENTION = re.compile(r"attn|attention")
_KERNELS = ("kernel", "w", "weight")
_OUTPUTS_FIRST = "weight"  # of PyTorch, Equinox and Levanter; Flax and Haiku say kernel and w
_LONGEST_HEAD = 512  # a longer axis is of heads that are merged already


class KnownAxes(NamedTuple):
    """What is known of a leaf."""

    numbers: MatrixDimensionNumbers | None = None
    layers: int | None = None  # the axis along which layers are stacked


def known_axes(leaves: Leaves) -> list[KnownAxes]:
    """What names say of each leaf.

    A kernel from the model to heads is (model, heads, size), or (heads, model, size) under a name
    that ends in "einsum". One back to the model is (heads, size, model). Layers, or queries, keys
    and values, may be stacked along any axis before the size of heads. Kernels from the model tell
    which axis that is, because the model is larger than what is stacked. Layers are then stacked
    along the same axis in all leaves of the module around them.
    """
    roles = list(map(_role, leaves.words))
    shapes = [leaf.shape for leaf in leaves.arrays]
    known = [KnownAxes()] * len(shapes)
    stacked: dict[_Module, tuple[int, ...] | None] = {}  # of a module with a kernel from the model
    layers: dict[_Module, tuple[int, int]] = {}  # axis and size, of a module and those around it
    for i, (module, role) in enumerate(roles):
        if _FROM_MODEL.search(role):
            numbers, batch = _from_model(role, shapes[i])
            known[i] = KnownAxes(numbers)
            if stacked.get(module) is None:
                stacked[module] = batch
            if batch is not None and len(batch) == 1 and "kv" not in role:
                for length in range(len(module) + 1):
                    layers.setdefault(module[:length], (batch[0], shapes[i][batch[0]]))
    for i, (module, role) in enumerate(roles):
        if _TO_MODEL.search(role):
            batch = stacked.get(module, () if any(map(_ATTENTION.search, module)) else None)
            known[i] = KnownAxes(None if batch is None else _to_model(shapes[i], batch))
        around = (module[:length] for length in range(len(module), 0, -1))
        axis, size = next((layers[outer] for outer in around if outer in layers), (0, -1))
        if shapes[i][axis : axis + 1] == (size,):
            known[i] = KnownAxes(known[i].numbers or _within_layers(shapes[i], axis), axis)
        if leaves.words[i][-1:] == [_OUTPUTS_FIRST]:
            known[i] = known[i]._replace(numbers=_outputs_first(known[i].numbers, shapes[i]))
    return known


def _role(words: Sequence[str]) -> tuple[_Module, str]:
    """The module that a kernel is in, and what it is called there."""
    named = [*words[:-1]] if words and words[-1] in _KERNELS else [*words]
    return tuple(named[:-1]), named[-1] if named else ""


def _from_model(
    role: str, shape: tuple[int, ...]
) -> tuple[MatrixDimensionNumbers | None, tuple[int, ...] | None]:
    """The matrix of a kernel from the model, and what is stacked; None if it has no heads."""
    if len(shape) < 3 or shape[-1] > _LONGEST_HEAD:
        return None, None
    others = list(range(len(shape) - 2))
    model = max(others, key=lambda axis: (shape[axis], axis))
    heads = len(shape) - 2
    if role.endswith("_einsum"):
        model, heads = heads, others[-1]
    elif shape[model] < shape[heads]:
        return None, None
    batch = tuple(axis for axis in others if axis not in (model, heads))
    return MatrixDimensionNumbers(model, (heads, len(shape) - 1)), batch


def _to_model(shape: tuple[int, ...], batch: tuple[int, ...]) -> MatrixDimensionNumbers | None:
    more = max(len(shape) - 3, 0)  # axes than those of heads, size and model
    stacked = batch[:more] if len(batch) >= more else tuple(range(more))
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    if len(axes) != 3 or shape[axes[1]] > _LONGEST_HEAD or shape[axes[2]] < shape[axes[0]]:
        return None
    return MatrixDimensionNumbers(axes[:2], axes[2])


def _outputs_first(
    numbers: MatrixDimensionNumbers | None, shape: tuple[int, ...]
) -> MatrixDimensionNumbers | None:
    """The same matrices of a layer that multiplies from the left; those of heads as they are."""
    if numbers is None and len(shape) > 1:
        numbers = MatrixDimensionNumbers(*default_axes(shape))
    if (
        numbers is None
        or isinstance(numbers.rows, Sequence)
        or isinstance(numbers.columns, Sequence)
    ):
        return numbers
    return MatrixDimensionNumbers(numbers.columns, numbers.rows)


def _within_layers(shape: tuple[int, ...], layers: int) -> MatrixDimensionNumbers | None:
    """The default view of each layer's part of a leaf; of a stack of vectors a dense one."""
    axes = [axis for axis in range(len(shape)) if axis != layers]
    if len(axes) < 2:
        return MatrixDimensionNumbers((), axes) if axes else None
    rows, columns = default_axes([shape[axis] for axis in axes])
    return MatrixDimensionNumbers(axes[rows], axes[columns])
