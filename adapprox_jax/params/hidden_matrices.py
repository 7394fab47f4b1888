"""Selects a model's hidden matrices, by name and by shape."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from adapprox_jax.params.boxes import is_box, unbox
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import (
    WeightDimensionNumbers,
    check_dimension_numbers,
    dimension_numbers_of,
    matrix_view,
    view_shape,
)

# What `adapprox_muon` does with a leaf; the names of the two parts of its state.
HIDDEN, OTHERS = "orthogonalized", "adapprox"

# A tree of booleans that is a prefix of the parameters', or a function from the parameters to it.
Selection: TypeAlias = Any | Callable[[Any], Any] | None

# Of a module or parameter in snake case; the heads of attention are none of these.
_OUTER = re.compile(
    r"embed|(^|_)embs?($|_)|(^|_)(wte|wpe)$|^(tok|tokens?|vocab\w*|pos|positions?)$"
    r"|(?<!multi)(?<!attention)(^|_)head(_\d+)?$|logits|classifier|readout"
)
_NORMS = re.compile(r"(^|_)(ln|\w*norm)(_[a-z0-9])?$")
_CHANNELS = re.compile(r"(^|_)(a_log|dt_bias|depthwise)($|_)")  # of state-space models
_VECTORS = re.compile(r"^(b|bias|biases|scale|gamma|beta|offset)$")  # of parameters
_MOST_ELONGATED = 16  # rows to columns: MLPs have 4, fused heads 3, vocabularies 30 and more
_SHORTEST_SIDE = 8  # fewer are stacks of vectors


def hidden_matrices(
    params: optax.Params, weight_dimension_numbers: WeightDimensionNumbers = None
) -> Any:
    """Which leaves are matrices between hidden layers: neither embeddings, heads nor vectors.

    As Muon's users choose: by name ("embed", "wte", "lm_head", "bias", "scale", "A_log" and
    their like, anywhere in the path) and by shape (a side of fewer than 8, or in a leaf of one
    matrix a side of more than 16 times the other, is no hidden matrix). Stacked layers (L, m, n)
    and attention kernels (model, heads, size) count as matrices.

    Args:
      params: Parameters of any model, or anything with their shapes, boxed or not.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      A tree like the parameters with a boolean for each.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"embedding": jnp.ones((512, 64)), "mlp": {"kernel": jnp.ones((64, 256))}}
      >>> adapprox_jax.hidden_matrices(params)
      {'embedding': False, 'mlp': {'kernel': True}}
    """
    leaves = Leaves.of(params, "parameter")
    reasons = _reasons(leaves, weight_dimension_numbers)
    return leaves.structure.unflatten([reason == "" for reason in reasons])


def muon_report(
    params: optax.Params,
    orthogonalized: Selection = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> dict[str, str]:
    """What `adapprox_muon` does with every leaf, and why.

    Args:
      params: The parameters.
      orthogonalized: As for `adapprox_muon`.
      weight_dimension_numbers: Likewise.

    Returns:
      A dict from the path of a leaf to "orthogonalized" or "adapprox", with the reason for the
      latter where the default decides.

    Raises:
      ValueError: `orthogonalized` does not fit the parameters.

    Example:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"head": jnp.ones((64, 512)), "mlp": jnp.ones((64, 256))}
      >>> for path, what in adapprox_jax.muon_report(params).items():
      ...     print(path, what)
      ['head'] adapprox: 'head' names an embedding or a head
      ['mlp'] orthogonalized
    """
    chosen = jax.tree.leaves(resolve_selection(orthogonalized, params, weight_dimension_numbers))
    leaves = Leaves.of(params, "parameter")
    reasons = _reasons(leaves, weight_dimension_numbers)
    report = {}
    for path, is_chosen, reason in zip(leaves.paths, chosen, reasons, strict=True):
        why = f"{OTHERS}: {reason}" if orthogonalized is None else OTHERS
        report[path] = HIDDEN if is_chosen else why
    return report


def resolve_selection(
    orthogonalized: Selection,
    params: optax.Params,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> Any:
    """A tree like the parameters with a boolean at each leaf.

    Raises:
      ValueError: the selection is no tree of booleans that fits, or names a leaf without matrices.
    """
    if orthogonalized is None:
        return hidden_matrices(params, weight_dimension_numbers)
    given = orthogonalized(params) if callable(orthogonalized) else orthogonalized
    allowed = (
        "None, a tree of booleans that is a prefix of the parameters, or a function of the"
        " parameters to one"
    )
    leaves = Leaves.of(params)
    try:
        flags = [unbox(flag) for flag in leaves.spread(given, is_box)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"orthogonalized is {given!r}; allowed: {allowed}.") from error
    numbers = dimension_numbers_of(weight_dimension_numbers, leaves)
    for name, leaf, flag, of_leaf in zip(leaves.names, leaves.arrays, flags, numbers, strict=True):
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"orthogonalized has {flag!r} at {name}; allowed: {allowed}.")
        if flag and not matrix_view(leaf.shape, of_leaf).is_matrix:
            raise ValueError(
                f"orthogonalized names {name} of shape {leaf.shape}; allowed: leaves with rows and"
                " columns."
            )
    return leaves.structure.unflatten(flags)


def _reasons(leaves: Leaves, weight_dimension_numbers: WeightDimensionNumbers) -> list[str]:
    """Why each leaf is no hidden matrix; an empty string where it is one."""
    check_dimension_numbers(weight_dimension_numbers)
    numbers = dimension_numbers_of(weight_dimension_numbers, leaves)
    return list(map(_reason, leaves.keys, leaves.arrays, numbers))


def _reason(path: Any, leaf: Any, numbers: Any) -> str:
    names = [name for key in path for name in _names(key)]
    for name in names:
        if _OUTER.search(name):
            return f"'{name}' names an embedding or a head"
        if _NORMS.search(name):
            return f"'{name}' names vectors"
        is_depthwise = "conv" in name and len(leaf.shape) > 2 and leaf.shape[-2] == 1
        if is_depthwise or _CHANNELS.search(name):
            return f"'{name}' names what works on each channel by itself"
    if names and _VECTORS.search(names[-1]):
        return f"'{names[-1]}' names vectors"
    view = matrix_view(leaf.shape, numbers)
    if not view.is_matrix:
        return "no matrix"
    batch, rows, columns = view_shape(leaf.shape, view)
    short, long = sorted((rows, columns))
    if short < _SHORTEST_SIDE:
        return f"a side of {short}"
    # The heads of attention and layers in stacks may be long: model size to head size.
    if long > _MOST_ELONGATED * short and not batch:
        return f"{rows} x {columns}, as long as an embedding or a head"
    return ""


def _names(key: Any) -> list[str]:
    """The names in one key of a path, in snake case: 'mlp/~/LayerNorm_0' has two."""
    text = getattr(key, "key", getattr(key, "name", ""))
    parts = re.split(r"[/.~]+", text) if isinstance(text, str) else []
    return [
        re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", part).lower()
        for part in parts
        if part
    ]
