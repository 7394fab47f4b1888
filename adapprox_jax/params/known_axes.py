"""What names say of axes: heads in attention kernels, stacked layers, and fused matrices.

An attention kernel is one matrix, that of its product: the model's size by the number of heads
times their size. Names and orders of axes are those of Flax, MaxText, Tunix and Gemma.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adapprox_jax.params.boxes import haliax_names
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import MatrixDimensionNumbers, default_axes
from adapprox_jax.params.vectors import Module, role_of, stack_axes

_FROM_MODEL = re.compile(
    r"^((w_?|to_|combined_)?(q|k|v|kv|qkv)(_b)?(_proj|_einsum|_projection)?"
    r"|(query|key|value)(_proj|_projection|_dense)?|queries|keys|values)$"
)
_TO_MODEL = re.compile(
    r"^((attn_|attention_)?(o|out|output)(_proj)?|to_out|w_?o|post|attn_vec_einsum)$"
)
_ATTENTION = re.compile(r"attn|atten")
# With 3 of one size, one after the other.
_QKV = re.compile(r"^((w|\w+_)?qkv|(w|to_|c_)?attn)(_proj|_fused)?$")
_GATE_AND_UP = re.compile(r"^(gate_up|up_gate)(_proj)?$")  # 2 of them

_OUTPUTS_FIRST = "weight"  # of PyTorch and Equinox; Flax and Haiku say kernel and w
_TO_EMBED = re.compile(r"^((down|c)_proj|w2)$")  # beside _TO_MODEL, in Levanter
_STACKED = re.compile(r"^(layers?|blocks?|experts?|qkv)$")  # names of haliax' axes
_CONV1D = re.compile(r"^c_(attn|fc|proj)$")  # of transformers' GPT-2: outputs first


_LONGEST_HEAD = 512  # a longer axis is of heads that are merged already
_SHORTEST_HEAD = 8  # a shorter one is the window of a convolution


class KnownAxes(NamedTuple):
    """What is known of a leaf."""

    numbers: MatrixDimensionNumbers | None = None
    layers: int | None = None  # the axis along which layers are stacked


def known_axes(leaves: Leaves) -> list[KnownAxes]:
    """What names say of each leaf.

    A kernel from the model to heads is (model, heads, size), or (heads, model, size) under a name
    that ends in "einsum", or where queries have more heads than keys in that order. One back to
    the model is (heads, size, model). Layers, or queries, keys and values, may be stacked along
    any axis before the size of heads. Kernels from the model tell which axis that is, because the
    model is larger than what is stacked. Layers are then stacked along the same axis in all leaves
    of the module around them. So they are where norms have two axes. The axes of haliax' arrays
    have names of their own, which come first.
    """
    axes = stack_axes(leaves)
    if any(axis is not None for axis in axes):
        return _of_stacks(leaves, axes)
    paths = leaves.words
    roles = list(map(role_of, paths))
    shapes = [leaf.shape for leaf in leaves.arrays]
    known = [KnownAxes()] * len(shapes)
    stacked: dict[Module, tuple[int, ...] | None] = {}  # of a module with a kernel from the model
    alike: dict[tuple[Module, tuple[int, ...]], MatrixDimensionNumbers] = {}  # other such kernels
    layers: dict[Module, tuple[int, int]] = {}  # axis and size, of a module and those around it
    is_conv1d = any(
        role == "c_attn" and shape[-2:] == (3 * shape[-1], shape[-1])
        for (_, role), shape in zip(roles, shapes, strict=True)
    )
    first_sizes: dict[Module, set[int]] = {}  # of kernels from the model
    for (module, role), shape in zip(roles, shapes, strict=True):
        if _FROM_MODEL.search(role) and len(shape) == 3:
            first_sizes.setdefault(module, set()).add(shape[0])
    for i, (module, role) in enumerate(roles):
        if _FROM_MODEL.search(role):
            numbers, batch = _from_model(role, shapes[i], len(first_sizes.get(module, ())) > 1)
            known[i] = KnownAxes(numbers)
            if numbers is not None:
                alike[module, shapes[i]] = numbers
            if stacked.get(module) is None:
                stacked[module] = batch
            if batch is not None and len(batch) == 1 and "kv" not in role:
                for length in range(len(module) + 1):
                    layers.setdefault(module[:length], (batch[0], shapes[i][batch[0]]))
    # PyTorch's kernels have no axis for heads.
    is_torch = not any(
        of_leaf.numbers and words[-1:] == [_OUTPUTS_FIRST]
        for of_leaf, words in zip(known, paths, strict=True)
    )
    for i, (module, role) in enumerate(roles):
        if _TO_MODEL.search(role):
            batch = stacked.get(module, () if any(map(_ATTENTION.search, module)) else None)
            known[i] = KnownAxes(None if batch is None else _to_model(shapes[i], batch))
        elif (module, shapes[i]) in alike:  # gates, and keys of positions
            known[i] = KnownAxes(alike[module, shapes[i]])
        around = (module[:length] for length in range(len(module), 0, -1))
        axis, size = next((layers[outer] for outer in around if outer in layers), (0, -1))
        if shapes[i][axis : axis + 1] == (size,):
            known[i] = KnownAxes(known[i].numbers or _of_stack(None, shapes[i], axis), axis)
        plain = _plain(known[i].numbers, shapes[i])
        is_outputs_first = paths[i][-1:] == [_OUTPUTS_FIRST] and is_torch
        if plain and (is_outputs_first or (is_conv1d and _CONV1D.search(role))):
            known[i] = known[i]._replace(numbers=MatrixDimensionNumbers(*reversed(plain)))
        if (module, f"{role}_bias") not in roles:  # of GPT-OSS: gate and up are interleaved
            known[i] = known[i]._replace(numbers=_in_parts(role, known[i].numbers, shapes[i]))
        known[i] = _of_named_axes(role, haliax_names(leaves.boxed[i])) or known[i]
    return known


def _of_stacks(leaves: Leaves, axes: Sequence[int | None]) -> list[KnownAxes]:
    """What is known of leaves some of which are stacked along axes, from one layer of these."""
    shapes = [leaf.shape for leaf in leaves.arrays]
    layer = [
        () if axis is None else (*shape[:axis], *shape[axis + 1 :])
        for shape, axis in zip(shapes, axes, strict=True)
    ]
    boxed = [
        leaf if axis is None else jax.ShapeDtypeStruct(shape, jnp.float32)
        for leaf, shape, axis in zip(leaves.boxed, layer, axes, strict=True)
    ]
    return [
        known if axis is None else KnownAxes(_of_stack(known.numbers, shape, axis), axis)
        for known, shape, axis in zip(
            known_axes(dataclasses.replace(leaves, boxed=boxed)), shapes, axes, strict=True
        )
    ]


def _of_stack(
    of_layer: MatrixDimensionNumbers | None, shape: tuple[int, ...], axis: int
) -> MatrixDimensionNumbers | None:
    """What is known of a stack along an axis: of a stack of vectors that it is a dense one."""
    axes = [i for i in range(len(shape)) if i != axis]
    if of_layer is None and len(axes) < 2:
        return MatrixDimensionNumbers((), axes) if axes else None
    numbers = of_layer or MatrixDimensionNumbers(*default_axes([shape[i] for i in axes]))
    rows, columns = (
        axes[side] if isinstance(side, int) else [axes[i] for i in side] for side in numbers[:2]
    )
    return MatrixDimensionNumbers(rows, columns, numbers.parts)


def is_from_model(words: Sequence[str]) -> bool:
    """Whether a leaf's path names queries, keys or values, alone or fused."""
    _, role = role_of(words)
    return bool(_FROM_MODEL.search(role) or _QKV.search(role))


def _from_model(
    role: str, shape: tuple[int, ...], differs: bool
) -> tuple[MatrixDimensionNumbers | None, tuple[int, ...] | None]:
    """The matrix of a kernel from the model, and what is stacked; None if it has no heads."""
    if len(shape) < 3 or not _SHORTEST_HEAD <= shape[-1] <= _LONGEST_HEAD:
        return None, None
    others = list(range(len(shape) - 2))
    model = max(others, key=lambda axis: (shape[axis], axis))
    heads = len(shape) - 2
    # Layers would be as many in each kernel of a module, where heads need not be.
    heads_first = differs and len(shape) == 3 and shape[0] < shape[1] >= shape[2]
    if role.endswith("_einsum") or heads_first:
        model, heads = heads, others[-1]
    elif shape[model] < shape[heads]:
        return None, None
    batch = tuple(axis for axis in others if axis not in (model, heads))
    return MatrixDimensionNumbers(model, (heads, len(shape) - 1)), batch


def _to_model(shape: tuple[int, ...], batch: tuple[int, ...]) -> MatrixDimensionNumbers | None:
    more = max(len(shape) - 3, 0)  # axes than those of heads, size and model
    stacked = batch[:more] if len(batch) >= more else tuple(range(more))
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    if len(axes) != 3:
        return None
    is_last = shape[axes[0]] <= shape[axes[2]]  # else the model comes first, as in praxis
    (heads, size), model = (axes[:2], axes[2]) if is_last else (axes[1:], axes[0])
    return None if shape[size] > _LONGEST_HEAD else MatrixDimensionNumbers((heads, size), model)


def _plain(
    numbers: MatrixDimensionNumbers | None, shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """The axes of rows and of columns of a leaf's matrices; None where axes are merged."""
    if len(shape) < 2:
        return None
    rows, columns = (numbers or default_axes(shape))[:2]
    return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None


def _in_parts(
    role: str, numbers: MatrixDimensionNumbers | None, shape: tuple[int, ...]
) -> MatrixDimensionNumbers | None:
    """The same matrices, with parts along the outputs where a name says that they are fused."""
    parts = 3 if _QKV.search(role) else 2 if _GATE_AND_UP.search(role) else 1
    plain = _plain(numbers, shape)
    if parts == 1 or plain is None:
        return numbers
    inputs, outputs = (shape[axis] for axis in plain)
    # Fewer keys than queries are not told from the shape.
    is_whole = outputs == 3 * inputs if parts == 3 else outputs % 2 == 0
    return MatrixDimensionNumbers(*plain, parts) if is_whole else numbers


def _of_named_axes(role: str, names: Sequence[str]) -> KnownAxes | None:
    """What the names that Levanter gives to axes say of a kernel; None if it has none of these."""
    stacked = [axis for axis, name in enumerate(names) if _STACKED.search(name)]
    model = [axis for axis, name in enumerate(names) if name == "embed"]
    others = [axis for axis in range(len(names)) if axis not in stacked + model]
    layers = next((axis for axis in stacked if names[axis].startswith(("layer", "block"))), None)
    others = others or [axis for axis in stacked if axis != layers]  # a router's experts
    if len(model) != 1 or not others:
        return None
    ends_in_model = _TO_MODEL.search(role) or _TO_EMBED.search(role)
    sides = (others, model) if ends_in_model else (model, others)
    return KnownAxes(MatrixDimensionNumbers(*sides), layers)
