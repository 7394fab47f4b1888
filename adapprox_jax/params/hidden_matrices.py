"""Selects a model's hidden matrices, by name and by shape."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import optax

from adapprox_jax.params.known_axes import KnownAxes, known_axes
from adapprox_jax.params.leaves import Leaves, spread_booleans
from adapprox_jax.params.matrix_view import MatrixView, fused_shape, view_shape
from adapprox_jax.params.vectors import role_of, word_of_vectors
from adapprox_jax.params.views import WeightDimensionNumbers, views_of

# What `adapprox_muon` does with a leaf; the names of the two parts of its state.
HIDDEN, OTHERS = "orthogonalized", "adapprox"

# A tree of booleans that is a prefix of the parameters', or a function from the parameters to it.
Selection: TypeAlias = Any | Callable[[Any], Any] | None

# Of a module or parameter in snake case; the heads of attention are none of these.
_OUTER = re.compile(
    r"embed|(^|_)embs?($|_)|(^|_)(wte|wpe)$|^(tok|tokens?|vocab(?!_transform)\w*|pos|positions?)$"
    r"|(?<!multi)(?<!attention)(^|_)head(_\d+|_out)?$|(?<!pre_)logits|readout|^final_layer$"
    r"|class(ifier|_predictor)"
)
_CLASSIFIER = re.compile(r"^output_projection$")  # but of attention it is a projection
_LAST = re.compile(  # layers outside of the modules that hold all others
    r"^((fc|final|lm)(_\w+)?|linear|dense|out(put)?|shared|decoder|predictions?|policy)$"
)
_INNER = re.compile(
    r"attn|atten|multiplication|mixer|mamba|ssm|^(q|k|v|o|x|dt|in|out|up|down)_proj|^(query|key|value)$"
)
_TABLES = re.compile(  # of leaves that are no module's kernel
    r"(^|_)((rel|abs|relative|absolute)_pos|(pos(ition(al)?)?|segment)_enc)|(^|_)(tokens?|table)$"
    r"|(latents?|prompts?|codebooks?|codevectors?)$"
)
_LOW_RANK = re.compile(r"(^|_)lora(_|$)")
_CHANNELS = re.compile(  # of state-space models
    r"(^|_)(a_log|dt_bias|depthwise)($|_)|^((log_)?a|lambda)_(real|imag|re|im)$"
    r"|^(time_(faaaa|first|decay)|r_k)$"
)
_MOST_ELONGATED = 16  # rows to columns: MLPs have 4, fused heads 3, vocabularies 30 and more
_SHORTEST_SIDE = 8  # fewer are stacks of vectors


def hidden_matrices(
    params: optax.Params, weight_dimension_numbers: WeightDimensionNumbers = None
) -> Any:
    """Which leaves are matrices between hidden layers: neither embeddings, heads nor vectors.

    As Muon's users choose: by name ("embed", "wte", "lm_head", "bias", "scale", "A_log", "lora_a"
    and their like, in the path) and by shape. Where all other matrices are in modules, one that is
    called "output", "fc", "dense" or the like is a head. A side of fewer than 8 is no side of a
    hidden matrix. Nor is one of more than 16 times the other, but for stacks of other
    things than layers and projections of attention and state spaces. Stacked layers (L, m, n) count
    as matrices. An attention kernel (model, heads, size) counts as one, if its name is known:
    "query", "q_proj", "wq_b", "kv_einsum", "out" and their like.

    Args:
      params: Parameters of any model, or anything with their shapes, boxed or not.
      weight_dimension_numbers: Which axes of a leaf form a matrix, as in `scale_by_adapprox`.

    Returns:
      A tree like the parameters with a boolean for each.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"embedding": jnp.ones((512, 64)), "mlp": {"kernel": jnp.ones((64, 256))}}
      >>> adapprox_jax.hidden_matrices(params)
      {'embedding': False, 'mlp': {'kernel': True}}
    """
    leaves = Leaves.of(params, "parameter")
    reasons = _reasons(leaves, views_of(weight_dimension_numbers, leaves))
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
      A dict from the path of a leaf to "orthogonalized", with the matrices that it is seen as, or
      to "adapprox", with the reason where the default decides.

    Raises:
      ValueError: `orthogonalized` does not fit the parameters.

    Examples:
      >>> import jax.numpy as jnp, adapprox_jax
      >>> params = {"head": jnp.ones((64, 512)), "mlp": jnp.ones((64, 256))}
      >>> for path, what in adapprox_jax.muon_report(params).items():
      ...     print(path, what)
      ['head'] adapprox: 'head' names an embedding or a head
      ['mlp'] orthogonalized: 64 x 256
    """
    chosen = jax.tree.leaves(resolve_selection(orthogonalized, params, weight_dimension_numbers))
    leaves = Leaves.of(params, "parameter")
    views = views_of(weight_dimension_numbers, leaves)
    reasons = _reasons(leaves, views)
    report = {}
    for path, leaf, view, is_chosen, reason in zip(
        leaves.paths, leaves.arrays, views, chosen, reasons, strict=True
    ):
        if is_chosen:
            report[path] = f"{HIDDEN}: {_matrices(leaf.shape, view)}"
        else:
            report[path] = f"{OTHERS}: {reason}" if orthogonalized is None else OTHERS
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
    chosen = spread_booleans("orthogonalized", orthogonalized, params)
    leaves, flags = Leaves.of(params), jax.tree.leaves(chosen)
    views = views_of(weight_dimension_numbers, leaves)
    for name, leaf, flag, view in zip(leaves.names, leaves.arrays, flags, views, strict=True):
        if flag and not view.is_matrix:
            raise ValueError(
                f"orthogonalized names {name} of shape {leaf.shape}; allowed: leaves with rows and"
                " columns."
            )
    return chosen


def _matrices(shape: tuple[int, ...], view: MatrixView) -> str:
    """What a leaf is seen as: '32 of 4096 x 1024' is a stack."""
    first = "" if view.inputs_are_rows else ", outputs first"
    batch, rows, columns = fused_shape(shape, view)
    stacked = f"{math.prod(batch)} of " if batch else ""
    return f"{stacked}{rows} x {columns}{first}"


def _reasons(leaves: Leaves, views: Sequence[MatrixView]) -> list[str]:
    """Why each leaf is no hidden matrix; an empty string where it is one."""
    words = leaves.words
    reasons = list(map(_reason, words, leaves.arrays, views, known_axes(leaves)))
    roles = {i: role_of(words[i]) for i, reason in enumerate(reasons) if not reason}
    depth = min((len(module) for module, _ in roles.values()), default=0)
    outer = {i: role for i, (module, role) in roles.items() if len(module) == depth}
    sides = {i: tuple(sorted(leaves.arrays[i].shape)) for i in outer}
    # At most two, the first and the last; two that undo one another are of an MLP.
    if len(set(sides.values())) == len(outer) <= 2 and len(outer) < len(roles):
        for i, role in outer.items():
            if _LAST.search(role) and len(set(sides[i])) == len(sides[i]) == 2:
                reasons[i] = f"'{role}' outside of the modules of all other matrices is a head"
    return reasons


def _reason(words: Sequence[str], leaf: Any, view: MatrixView, known: KnownAxes) -> str:
    is_inner = any(map(_INNER.search, words))
    is_torch = words[-1:] == ["weight"]
    for place, word in enumerate(words, -len(words)):
        is_near = place >= -3  # else a whole network, as in MAPHead_0/MlpBlock_0/Dense_0/kernel
        if (is_near and _OUTER.search(word)) or (_CLASSIFIER.search(word) and not is_inner):
            return f"'{word}' names an embedding or a head"
        if _LOW_RANK.search(word):
            return f"'{word}' names a low-rank update"
        channels = leaf.shape[1 if is_torch else -2 :][:1] if len(leaf.shape) > 2 else ()
        is_decay = word == "a" == words[-1] and is_inner  # of Mamba
        if is_decay or ("conv" in word and channels == (1,)) or _CHANNELS.search(word):
            return f"'{word}' names what works on each channel by itself"
    if words and _TABLES.search(words[-1]):
        return f"'{words[-1]}' names a table"
    if vectors := word_of_vectors(words):
        return f"'{vectors}' names vectors"
    if not view.is_matrix:
        return "no matrix"
    _, rows, columns = view_shape(leaf.shape, view)
    short, long = sorted((rows, columns))
    if short < _SHORTEST_SIDE:
        return f"a side of {short}"
    # Known projections may be long, and so may be what is stacked, if not as layers.
    is_whole = all(leaf.shape[axis] == 1 or axis == known.layers for axis in view.batch)
    if long > _MOST_ELONGATED * short and is_whole and not is_inner:
        return f"{rows} x {columns}, as long as an embedding or a head"
    return ""
