"""Which leaves of a model are hidden matrices, for optimizers that treat these alone in a way."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from adapprox_jax.params.boxes import is_box, unbox
from adapprox_jax.params.matrix_view import (
    WeightDimensionNumbers,
    check_dimension_numbers,
    matrix_view,
    resolve_dimension_numbers,
    view_shape,
)
from adapprox_jax.params.tree_checks import check_types

# A tree of booleans that is a prefix of the parameters', or a function from the parameters to it.
Selection: TypeAlias = Any | Callable[[Any], Any] | None

# Of a module or parameter in snake case; the heads of attention are none of these.
_OUTER = re.compile(
    r"embed|(^|_)embs?($|_)|(^|_)(wte|wpe)$|^(tok|tokens?|vocab\w*|pos|positions?)$"
    r"|(?<!multi)(?<!attention)(^|_)head(_\d+)?$|logits|classifier|readout"
)
_NORMS = re.compile(r"(^|_)(ln|\w*norm)(_[a-z0-9])?$")
_VECTORS = re.compile(r"^(b|bias|biases|scale|gamma|beta|offset)$")  # of parameters
_MOST_ELONGATED = 16  # rows to columns: MLPs have 4, fused heads 3, vocabularies 30 and more
_SHORTEST_SIDE = 8  # fewer are stacks of vectors


def hidden_matrices(
    params: optax.Params, weight_dimension_numbers: WeightDimensionNumbers = None
) -> Any:
    """Which leaves are matrices between hidden layers: neither embeddings, heads nor vectors.

    As Muon's users choose: by name ("embed", "wte", "lm_head", "bias", "scale" and their like,
    anywhere in the path) and by shape (a side of fewer than 8, or one more than 16 times the other,
    is no hidden matrix). Stacked layers (L, m, n) count as matrices.

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
    return jax.tree.map(lambda why: why == "", _reasons(params, weight_dimension_numbers))


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
    chosen = resolve_selection(orthogonalized, params, weight_dimension_numbers)
    reasons = _reasons(params, weight_dimension_numbers)
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    report = {}
    leaves = zip(named, jax.tree.leaves(chosen), jax.tree.leaves(reasons), strict=True)
    for (path, _), is_chosen, reason in leaves:
        why = f"adapprox: {reason}" if orthogonalized is None else "adapprox"
        report[jax.tree_util.keystr(path)] = "orthogonalized" if is_chosen else why
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
    try:
        chosen = jax.tree.map(
            lambda flag, subtree: jax.tree.map(lambda _: unbox(flag), subtree, is_leaf=is_box),
            given,
            params,
            is_leaf=is_box,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"orthogonalized is {given!r}; allowed: {allowed}.") from error
    numbers = resolve_dimension_numbers(weight_dimension_numbers, params)
    structure: Any
    named, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)
    flags, of_leaves = structure.flatten_up_to(chosen), structure.flatten_up_to(numbers)
    for (path, leaf), flag, of_leaf in zip(named, flags, of_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if not isinstance(flag, bool):
            raise ValueError(f"orthogonalized has {flag!r} at {name}; allowed: {allowed}.")
        shape = unbox(leaf).shape
        if flag and not matrix_view(shape, of_leaf).is_matrix:
            raise ValueError(
                f"orthogonalized names {name} of shape {shape}; allowed: leaves with rows and"
                " columns."
            )
    return chosen


def _reasons(params: optax.Params, weight_dimension_numbers: WeightDimensionNumbers) -> Any:
    """Why each leaf is no hidden matrix; an empty string where it is one."""
    check_dimension_numbers(weight_dimension_numbers)
    check_types(params, "parameter")
    numbers = resolve_dimension_numbers(weight_dimension_numbers, params)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, of_leaf: _reason(path, unbox(leaf), of_leaf),
        params,
        numbers,
        is_leaf=is_box,
    )


def _reason(path: Any, leaf: Any, numbers: Any) -> str:
    names = [name for key in path for name in _names(key)]
    for name in names:
        if _OUTER.search(name):
            return f"'{name}' names an embedding or a head"
        if _NORMS.search(name):
            return f"'{name}' names vectors"
    if names and _VECTORS.search(names[-1]):
        return f"'{names[-1]}' names vectors"
    view = matrix_view(leaf.shape, numbers)
    if not view.is_matrix:
        return "no matrix"
    _, rows, columns = view_shape(leaf.shape, view)
    short, long = sorted((rows, columns))
    if short < _SHORTEST_SIDE:
        return f"a side of {short}"
    if long > _MOST_ELONGATED * short:
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
