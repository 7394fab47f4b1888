"""Which leaves of published models are hidden matrices."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

import adapprox_jax
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import fused_shape
from adapprox_jax.params.views import views_of
from tests.params.test_named_arrays import Axis, NamedArray

MODELS = sorted((pathlib.Path(__file__).parents[1] / "data" / "models").glob("*.json"))


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("path", "shape", "is_hidden"),
    [
        (("self_attention", "query", "kernel"), (4096, 32, 128), True),  # Llama 8B in MaxText
        (("self_attention", "key", "kernel"), (4096, 32, 8, 128), True),  # layers along axis 1
        (("self_attention", "out", "kernel"), (32, 128, 4096), True),
        (("MultiHeadDotProductAttention_0", "value", "kernel"), (2048, 32, 64), True),
        (("mlp", "wi", "kernel"), (8, 128), True),  # 16 : 1, and a side of 8
        (("mlp", "wi", "kernel"), (8, 129), False),
        (("mlp", "wi", "kernel"), (7, 100), False),
        (("mixer", "A_log"), (32, 12), False),  # of state-space models, layers stacked
        (("attention", "conv1d", "kernel"), (4, 12, 1, 128), False),
        (("conv1d", "kernel"), (5, 64, 128), True),  # over all channels
        (("conv_1", "kernel"), (3, 3, 64, 128), True),
        (("block", "depthwise_conv", "kernel"), (3, 3, 64, 64), False),
        (("lm_head", "kernel"), (1024, 4096), False),
    ],
)
def test_leaves_of_published_models(path, shape, is_hidden):
    tree = of(*shape)
    for name in reversed(path):
        tree = {name: tree}
    assert jax.tree.leaves(adapprox_jax.hidden_matrices(tree)) == [is_hidden]
    [what] = adapprox_jax.muon_report(tree).values()
    assert what.startswith("orthogonalized" if is_hidden else "adapprox: ")


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_whole_models(path):
    """Roles, and the matrices that leaves are seen as: how many, inputs, outputs."""
    right = json.loads(path.read_text())["leaves"]
    tree = {}
    for name, leaf in right.items():
        *outer, last = name.split("/")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = of(*leaf["shape"])
        if "axes" in leaf:  # of haliax
            node[last] = NamedArray(node[last], tuple(map(Axis, leaf["axes"], leaf["shape"])))
    leaves = Leaves.of(tree)
    reports = adapprox_jax.muon_report(tree).values()
    for keys, leaf, view, report in zip(
        leaves.keys, leaves.arrays, views_of(None, leaves), reports, strict=True
    ):
        expected = right["/".join(key.key for key in keys)]
        assert report.startswith(expected["role"]), keys
        if expected["role"] == "orthogonalized":
            batch, rows, columns = fused_shape(leaf.shape, view)
            sides = [rows, columns] if view.inputs_are_rows else [columns, rows]
            count = [math.prod(batch)] if math.prod(batch) > 1 else []
            assert [*count, *sides] == expected["matrices"], keys
