"""Which leaves of published models are hidden matrices, and the matrices that they are seen as."""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import adapprox_jax
from adapprox_jax.params import leaves as leaves_of_trees
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import fused_shape
from adapprox_jax.params.views import views_of
from tests.params.test_named_arrays import Axis, NamedArray

MODELS = sorted((pathlib.Path(__file__).parents[1] / "data" / "models").glob("*.json"))


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree_of(leaves):
    """A nested tree from paths with slashes."""
    tree = {}
    for path, leaf in leaves.items():
        *outer, last = path.split("/")
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


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
        "CausalAttn_0/attn_out_proj/kernel": ((8, 64, 512), "512 x 512"),
        "trans_atten/post/kernel": ((8, 128, 1024), "1024 x 1024"),
        "self_attention/q_projection/kernel": ((64, 4, 16), "64 x 64"),
        "self_attention/query_dense/kernel": ((1024, 16, 64), "1024 x 1024"),
        "attention/qkv_fused/kernel": ((768, 2304), "3 of 768 x 768"),
        "triangle_multiplication_incoming/output_projection/weights": (
            (48, 128, 128),
            "48 of 128 x 128",
        ),
    },
    "KerasHub: heads before the model": {
        "decoder_block_0/attention/query/kernel": ((8, 2048, 256), "2048 x 2048, outputs first"),
        "decoder_block_0/attention/key/kernel": ((1, 2048, 256), "256 x 2048, outputs first"),
        "decoder_block_0/attention/attention_output/kernel": ((8, 256, 2048), "2048 x 2048"),
    },
    "stacked layers with merged heads are no heads": {
        "transformer/attn/query/kernel": ((12, 384, 384), "12 of 384 x 384"),
        "transformer/attn/key/kernel": ((12, 384, 128), "12 of 384 x 128"),
        "transformer/ln_f/scale": ((384,), "names vectors"),
    },
    "convolutions as queries, keys and values": {
        "mixer/qkv/weight": ((384, 128, 1, 1), "3 of 128 x 128, outputs first"),
        "mlp/up/weight": ((512, 128), "512 x 128, outputs first"),
    },
    "windows": {
        "stem/kernel": ((16, 16, 3, 768), "a side of 3"),
        "tokenizer/proj/kernel": ((2, 16, 16, 3, 768), "a side of 3"),
        "small/weight": ((64, 32, 9, 9), "81 of 64 x 32, outputs first"),
        "square/weight": ((32, 32, 3, 3), "9 of 32 x 32, outputs first"),
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
        "seq/Lambda_re": ((64, 128), "works on each channel"),
        "att/time_decay": ((64, 64), "works on each channel"),
        "mlp/a": ((64, 16), "64 x 16"),
        "time_mix/time_faaaa": ((12, 64), "works on each channel"),
        "blocks/norm/linear/kernel": ((64, 192), "64 x 192"),
        "blocks/norm1/linear/weight": ((192, 64), "192 x 64, outputs first"),
        "mask/segment_encoding": ((256, 64), "names a table"),
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
        "evoformer/norm/query/weights": ((48, 256, 64, 32), "48 of 256 x 2048"),
    },
    "networks named after heads and embeddings": {
        "MAPHead_0/MlpBlock_0/Dense_0/kernel": ((64, 256), "64 x 256"),
        "MAPHead_0/Attention_0/query/kernel": ((64, 4, 16), "64 x 64"),
        "text_embedder/layers_0/mlp/kernel": ((64, 256), "64 x 256"),
        "embeddings/patch_embeddings/projection/kernel": ((192, 64), "names an embedding"),
        "decoder/head_out/kernel": ((64, 256), "'head_out' names an embedding or a head"),
        "ObjectClassPredictor/kernel": ((256, 92), "names an embedding or a head"),
        "vocab_transform/kernel": ((768, 768), "768 x 768"),
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
    "layers without modules": {
        "Dense_0/kernel": ((64, 256), "64 x 256"),
        "Dense_1/kernel": ((256, 100), "256 x 100"),
    },
    "queries, keys and values in one kernel, and layers": {
        "attention/wqkv/kernel": ((512, 12, 3, 8, 64), "36 of 512 x 512"),
        "attention/wo/kernel": ((8, 12, 64, 512), "12 of 512 x 512"),
    },
    "fused, each matrix by itself": {
        "attn/qkv/kernel": ((64, 192), "3 of 64 x 64"),
        "few_keys/qkv_proj/kernel": ((64, 128), "64 x 128"),  # they are not told apart
        "interleaved/qkv/kernel": ((64, 4, 48), "64 x 192"),  # those of each head
        "layers/attn/wqkv": ((4, 64, 192), "12 of 64 x 64"),
        "torch/attn/c_attn/weight": ((192, 64), "3 of 64 x 64, outputs first"),
        "mlp/gate_up_proj/kernel": ((64, 256), "2 of 64 x 128"),
        "experts/gate_up_proj": ((8, 64, 256), "16 of 64 x 128"),
        "mlp/gate_up/weight": ((256, 64), "2 of 128 x 64, outputs first"),
    },
    "as many key heads as layers, along axis 1": {
        "self_attention/key/kernel": ((4096, 8, 8, 128), "8 of 4096 x 1024"),
        "MultiHeadDotProductAttention_0/value/kernel": ((2048, 32, 64), "2048 x 2048"),
    },
    "one head of keys and values": {"attn/key/kernel": ((4096, 1, 128), "4096 x 128")},
    "sides": {
        "mlp/longest/kernel": ((8, 128), "8 x 128"),
        "mlp/longer/kernel": ((8, 129), "8 x 129, as long as an embedding"),
        "mlp/short/kernel": ((7, 100), "a side of 7"),
    },
    "channels": {
        "mixer/A_log": ((32, 12), "works on each channel"),
        "attention/conv1d/kernel": ((4, 12, 1, 128), "works on each channel"),
        "block/depthwise_conv/kernel": ((3, 3, 64, 64), "works on each channel"),
    },
}


@pytest.mark.parametrize("name", TREES)
def test_parts_of_models(name):
    report = adapprox_jax.muon_report(
        tree_of({k: of(*shape) for k, (shape, _) in TREES[name].items()})
    )
    for path, (_, expected) in TREES[name].items():
        said = report["".join(f"['{word}']" for word in path.split("/"))]
        is_hidden = re.fullmatch(r"(\d+ of )?\d+ x \d+(, outputs first)?", expected)
        right = f"orthogonalized: {expected}$" if is_hidden else f"adapprox: .*{expected}"
        assert re.match(right, said), (path, said)


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_whole_models(path):
    """Roles, and the matrices that leaves are seen as: how many, inputs, outputs."""
    right = json.loads(path.read_text())["leaves"]
    arrays = {name: of(*leaf["shape"]) for name, leaf in right.items()}
    for name, leaf in right.items():
        if "axes" in leaf:  # of haliax
            axes = tuple(map(Axis, leaf["axes"], leaf["shape"]))
            arrays[name] = NamedArray(arrays[name], axes)
    tree = tree_of(arrays)
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


def test_a_router_of_stacked_layers_is_judged_as_one_layer():
    """By the names of its axes, or by the axis of the layers around it; norms are vectors."""
    axes = (Axis("layers", 32), Axis("experts", 8), Axis("embed", 4096))
    params = {"layers": {"gate": {"weight": NamedArray(of(32, 8, 4096), axes)}}}
    [report] = adapprox_jax.muon_report(params).values()
    assert report == "adapprox: 8 x 4096, as long as an embedding or a head"
    tree = tree_of(
        {
            "layers/attention/query/kernel": of(512, 32, 8, 64),
            "layers/gate/kernel": of(512, 32, 16),
            "layers/norm/scale": of(512, 32),
        }
    )
    report = adapprox_jax.muon_report(tree)
    assert report["['layers']['gate']['kernel']"].startswith("adapprox: 512 x 16, as long")
    norm = views_of(None, Leaves.of(tree))[-1]
    assert (norm.batch, norm.is_matrix) == ((1,), False)


def test_the_path_of_a_leaf_is_taken_apart_a_few_times_at_most(monkeypatch):
    """And not once for every other leaf: a thousand of them took seconds at every trace."""
    count, real = [], leaves_of_trees._words
    monkeypatch.setattr(leaves_of_trees, "_words", lambda key: count.append(key) or real(key))
    params = {f"w{i}": of(8, 16) for i in range(50)}
    adapprox_jax.muon_report(params)
    assert 0 < len(count) <= 10 * len(params)
