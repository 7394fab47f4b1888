"""Which leaves of published models are hidden matrices."""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import adapprox_jax
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import fused_shape
from adapprox_jax.params.views import views_of
from tests.params.test_known_axes import tree_of
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


# Of each tree: the shapes of leaves, and what the report says of them.
TREES = {
    "T5 with merged heads, layers along axis 1": {
        "layers/self_attention/query/kernel": ((512, 8, 384), "8 of 512 x 384"),
        "layers/self_attention/out/kernel": ((384, 8, 512), "8 of 384 x 512"),
        "layers/layer_norm/scale": ((512, 8), "names vectors"),
        "embedder/embedding": ((32128, 512), "names an embedding"),
    },
    "low-rank attention, layers along axis 1": {
        "layers/attention/wkv_a/kernel": ((2560, 62, 288), "62 of 2560 x 288"),
        "layers/attention/wq_b/kernel": ((768, 62, 40, 96), "62 of 768 x 3840"),
        "layers/attention/out/kernel": ((40, 62, 64, 2560), "62 of 2560 x 2560"),
    },
    "layers of PyTorch along axis 0, and state spaces": {
        "layers/attn/q_proj/weight": ((32, 512, 512), "32 of 512 x 512, outputs first"),
        "layers/mlp/up/weight": ((32, 2048, 512), "32 of 2048 x 512, outputs first"),
        "layers/ln1/weight": ((32, 512), "names vectors"),
        "layers/layernorm_before/weight": ((32, 512), "names vectors"),
        "layers/attn/sinks": ((32, 64), "no matrix"),
        "layers/attn/norm/weight": ((32, 512), "names vectors"),
    },
    "biases of as many heads as their size": {
        "attn/query/kernel": ((512, 64, 64), "512 x 4096"),
        "attn/query/bias": ((64, 64), "names vectors"),
        "attn/key/kernel": ((512, 64, 64), "512 x 4096"),
        "attn/out/kernel": ((64, 64, 512), "4096 x 512"),
    },
    "openpi's second expert": {
        "attn/q_einsum_1/w": ((8, 1024, 256), "2048 x 1024, outputs first"),
        "attn/attn_vec_einsum_1/w": ((8, 256, 1024), "2048 x 1024"),
    },
    "praxis and axlearn: the model first": {
        "self_attention/query/w": ((1024, 16, 64), "1024 x 1024"),
        "self_attention/post/w": ((1024, 16, 64), "1024 x 1024, outputs first"),
        "attention/o_proj/weight": ((4096, 32, 128), "4096 x 4096, outputs first"),
    },
    "other names of attention": {
        "attn1/to_q/kernel": ((320, 8, 40), "320 x 320"),
        "attn1/to_out/kernel": ((8, 40, 320), "320 x 320"),
        "attention/queries/kernel": ((64, 4, 16), "64 x 64"),
        "attention/attention_output/kernel": ((4, 16, 64), "64 x 64"),
        "block/attn/img_qkv/kernel": ((64, 192), "3 of 64 x 64"),
    },
    "windows": {
        "stem/kernel": ((16, 16, 3, 768), "a side of 3"),
        "tokenizer/proj/kernel": ((2, 16, 16, 3, 768), "a side of 3"),
        "small/weight": ((64, 32, 9, 9), "81 of 64 x 32, outputs first"),
        "conv1/weight": ((64, 256, 1, 1), "1 of 64 x 256, outputs first"),
        "conv2/weight": ((96, 1, 7, 7), "works on each channel"),
        "dw/weight": ((96, 1, 31, 31), "a side of 1"),
    },
    "vectors and tables": {
        "experts/down_proj_bias": ((32, 2880), "names vectors"),
        "rel_attn/r_w_bias": ((16, 64), "names vectors"),
        "mlp/up/weight_scale_inv": ((16, 56), "names vectors"),
        "attention/relative_position_bias_table": ((169, 16), "names a table"),
        "attention/relative_attention_bias/weight": ((32, 12), "names vectors"),
        "attn/rel_pos_h": ((127, 80), "names a table"),
        "register_tokens": ((1, 16, 768), "names a table"),
        "perceiver/latents": ((256, 512), "names a table"),
        "map_tokens/kernel": ((256, 512), "256 x 512"),
        "attention/query/kernel_lora_b": ((16, 32, 128), "names a low-rank update"),
        "s4/log_A_real": ((256, 32), "works on each channel"),
        "mixer/A": ((64, 16), "works on each channel"),
        "mlp/a": ((64, 16), "64 x 16"),
        "time_mix/time_faaaa": ((12, 64), "works on each channel"),
        "blocks/norm/linear/kernel": ((64, 192), "64 x 192"),
        "final_layer/linear/kernel": ((384, 32), "names an embedding or a head"),
    },
    "axlearn: weights by heads, so those of the MLP have inputs first, too": {
        "layer0/self_attention/q_proj/weight": ((512, 8, 64), "512 x 512"),
        "layer0/feed_forward/linear1_0/weight": ((512, 1376), "512 x 1376"),
    },
    "AlphaFold": {
        "evoformer/attention/query_w": ((48, 256, 8, 32), "48 of 256 x 256"),
        "evoformer/attention/gating_w": ((48, 256, 8, 32), "48 of 256 x 256"),
        "evoformer/attention/output_w": ((48, 8, 32, 256), "48 of 256 x 256"),
        "evoformer/attention/gating_b": ((48, 8, 32), "names vectors"),
        "evoformer/transition/transition1/weights": ((48, 256, 1024), "48 of 256 x 1024"),
    },
    "networks named after heads and embeddings": {
        "MAPHead_0/MlpBlock_0/Dense_0/kernel": ((64, 256), "64 x 256"),
        "MAPHead_0/Attention_0/query/kernel": ((64, 4, 16), "64 x 64"),
        "text_embedder/layers_0/mlp/kernel": ((64, 256), "64 x 256"),
        "embeddings/patch_embeddings/projection/kernel": ((192, 64), "names an embedding"),
    },
    "Llama's own names": {
        "tok_embeddings/weight": ((512, 64), "names an embedding"),
        "layers/0/attention/wq/weight": ((64, 64), "64 x 64, outputs first"),
        "layers/0/feed_forward/w1/weight": ((256, 64), "256 x 64, outputs first"),
        "output/weight": ((512, 64), "'output' outside of the modules"),
    },
    "a ResNet": {
        "conv_init/kernel": ((7, 7, 3, 64), "a side of 3"),
        "ResNetBlock_0/Conv_0/kernel": ((3, 3, 64, 64), "9 of 64 x 64"),
        "Dense_0/kernel": ((64, 100), "'dense' outside of the modules"),
    },
    "an MLP beside attention": {
        "attention/query/kernel": ((64, 4, 16), "64 x 64"),
        "Dense_0/kernel": ((64, 256), "64 x 256"),
        "Dense_1/kernel": ((256, 64), "256 x 64"),
    },
    "layers without modules": {
        "Dense_0/kernel": ((64, 256), "64 x 256"),
        "Dense_1/kernel": ((256, 100), "256 x 100"),
    },
    "gate and up interleaved": {
        "experts/gate_up_proj": ((4, 64, 256), "4 of 64 x 256"),
        "experts/gate_up_proj_bias": ((4, 256), "names vectors"),
    },
}


@pytest.mark.parametrize("name", TREES)
def test_parts_of_models(name):
    tree = tree_of({path: shape for path, (shape, _) in TREES[name].items()})
    report = adapprox_jax.muon_report(tree)
    for path, (_, expected) in TREES[name].items():
        key = "".join(f"['{word}']" for word in path.split("/"))
        said = report[key]
        if expected[0].isdigit():
            assert said == f"orthogonalized: {expected}", path
        else:
            assert re.match(f"adapprox: .*{expected}", said), (path, said)


def test_a_router_of_stacked_layers_with_named_axes():
    axes = (Axis("layers", 32), Axis("experts", 8), Axis("embed", 4096))
    params = {"layers": {"gate": {"weight": NamedArray(of(32, 8, 4096), axes)}}}
    [report] = adapprox_jax.muon_report(params).values()
    assert report == "adapprox: 8 x 4096, as long as an embedding or a head"  # as of one layer


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
