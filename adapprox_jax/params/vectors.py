"""What names say of vectors, and the stacks of layers that these show."""

import re
from collections.abc import Sequence
from typing import TypeAlias

from adapprox_jax.params.boxes import haliax_names
from adapprox_jax.params.leaves import Leaves

Module: TypeAlias = tuple[str, ...]  # the words of its path

_NORMS = re.compile(r"(^|_)(ln|\w*norm)(_?\d+|_[a-z]|_before|_after)?$")
_VECTORS = re.compile(
    r"^(b|gamma|beta|offset|gain|q?zeros)$|(^|_)q?scales?(_inv)?$|[a-z]{4}_b$"  # query_b
)
_BIASES = re.compile(r"(^|_)bias(es)?($|_)")
_KERNELS = ("kernel", "w", "weight", "weights")


def role_of(words: Sequence[str]) -> tuple[Module, str]:
    """The module that a kernel is in, and what it is called there."""
    named = [*words[:-1]] if words and words[-1] in _KERNELS else [*words]
    return tuple(named[:-1]), re.sub(r"(_\d+|(?<=.{4})_w)$", "", named[-1]) if named else ""


def word_of_vectors(words: Sequence[str]) -> str | None:
    """The word of a leaf's path that names a norm, a bias or a scale; None if there is none."""
    _, role = role_of(words)
    is_kernel = words[-1:] == ["kernel"]  # a projection within a norm, as norm/linear/weight is
    found = [word for word in words[-2:] if _NORMS.search(word) and not is_kernel]
    found += [word for word in words[-1:] if _VECTORS.search(word)]
    return next(iter(found), role if _BIASES.search(role) else None)


def stack_axes(leaves: Leaves) -> list[int | None]:
    """For each leaf the axis along which all of a module around it is stacked, or None.

    Vectors of two axes show it: norms beside kernels of three axes or more. Biases may have one for
    heads.
    """
    paths, arrays = leaves.words, leaves.arrays
    modules: dict[Module, list[int]] = {}
    for i, words in enumerate(paths):
        for length in range(1, len(words)):
            modules.setdefault(tuple(words[:length]), []).append(i)
    axes: list[int | None] = [None] * len(arrays)
    for members in modules.values():  # outer ones first
        shapes = [arrays[i].shape for i in members]
        if min(map(len, shapes)) < 2 or sum(len(shape) > 2 for shape in shapes) < 2:
            continue
        named = {i: word for i in members if (word := word_of_vectors(paths[i]))}
        norms = [i for i, word in named.items() if word != "b" and not _BIASES.search(word)]
        vectors = [arrays[i].shape for i in norms]
        lengths = [{shape[1 - axis] for shape in vectors if len(shape) == 2} for axis in (0, 1)]
        fit = [
            axis
            for axis in (0, 1)
            if len({shape[axis] for shape in shapes}) == 1
            and lengths[axis]
            and 1 not in lengths[axis]
        ]
        is_known = any(axes[i] is not None or haliax_names(leaves.boxed[i]) for i in members)
        if fit and not is_known:
            for i in members:
                axes[i] = min(fit, key=lambda axis: shapes[0][axis])
    return axes
