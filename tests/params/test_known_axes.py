"""Attention kernels are one matrix: the model by heads times their size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adapprox_jax
from adapprox_jax.params import leaves as leaves_of_trees
from adapprox_jax.params.leaves import Leaves
from adapprox_jax.params.matrix_view import fused_shape
from adapprox_jax.params.views import views_of
from tests.params.test_named_arrays import Axis, NamedArray


def tree_of(leaves):
    """A nested tree of shapes from paths with slashes."""
    tree = {}
    for path, shape in leaves.items():
        *outer, last = path.split("/")
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def views(leaves):
    """Of each path: batch, inputs and outputs."""
    found = Leaves.of(tree_of(leaves))
    results = {}
    for keys, leaf, view in zip(found.keys, found.arrays, views_of(None, found), strict=True):
        batch, rows, columns = fused_shape(leaf.shape, view)
        sides = (rows, columns) if view.inputs_are_rows else (columns, rows)
        results["/".join(key.key for key in keys)] = (batch, *sides)
    return results


@pytest.mark.parametrize(
    ("leaves", "right"),
    [
        (  # Equinox: outputs first
            {"up/weight": (256, 64), "layers/down/weight": (4, 64, 256), "up/bias": (256,)},
            {
                "up/weight": ((), 64, 256),
                "layers/down/weight": ((4,), 256, 64),
                "up/bias": ((256,), 1, 1),
            },
        ),
        (  # Flax
            {"attn/query/kernel": (64, 16, 64), "attn/out/kernel": (16, 64, 64)},
            {"attn/query/kernel": ((), 64, 1024), "attn/out/kernel": ((), 1024, 64)},
        ),
        (  # MaxText, layers along axis 1, as many as heads
            {
                "self_attention/query/kernel": (512, 8, 8, 64),
                "self_attention/out/kernel": (8, 8, 64, 512),
            },
            {
                "self_attention/query/kernel": ((8,), 512, 512),
                "self_attention/out/kernel": ((8,), 512, 512),
            },
        ),
        (  # the same, layers along axis 0
            {"a/query/kernel": (12, 512, 8, 64), "a/out/kernel": (12, 8, 64, 512)},
            {"a/query/kernel": ((12,), 512, 512), "a/out/kernel": ((12,), 512, 512)},
        ),
        (  # queries, keys and values in one kernel, and layers
            {"a/wqkv/kernel": (512, 12, 3, 8, 64), "a/wo/kernel": (8, 12, 64, 512)},
            {"a/wqkv/kernel": ((12, 3), 512, 512), "a/wo/kernel": ((12,), 512, 512)},
        ),
        (  # Gemma: heads first
            {
                "attn/q_einsum/w": (8, 512, 96),
                "attn/kv_einsum/w": (2, 1, 512, 96),
                "attn/attn_vec_einsum/w": (8, 96, 512),
            },
            {
                "attn/q_einsum/w": ((), 512, 768),
                "attn/kv_einsum/w": ((2,), 512, 96),
                "attn/attn_vec_einsum/w": ((), 768, 512),
            },
        ),
        (  # low-rank attention: values have another size than queries
            {
                "attention/wq_b/kernel": (1536, 16, 192),
                "attention/wkv_b/kernel": (512, 16, 256),
                "attention/out/kernel": (16, 128, 2048),
            },
            {
                "attention/wq_b/kernel": ((), 1536, 3072),
                "attention/wkv_b/kernel": ((), 512, 4096),
                "attention/out/kernel": ((), 2048, 2048),
            },
        ),
        (  # layers of kernels in which heads are merged already
            {"attn/q_proj/kernel": (12, 768, 768), "attn/o_proj/kernel": (12, 768, 768)},
            {"attn/q_proj/kernel": ((12,), 768, 768), "attn/o_proj/kernel": ((12,), 768, 768)},
        ),
        (  # the same where the model is as small as a head
            {"attn/q_proj/kernel": (12, 64, 64), "attn/o_proj/kernel": (12, 64, 64)},
            {"attn/q_proj/kernel": ((12,), 64, 64), "attn/o_proj/kernel": ((12,), 64, 64)},
        ),
        (  # a kernel that has its heads merged beside some that have not
            {
                "a/query/kernel": (64, 4, 16),
                "a/value/kernel": (64, 64),
                "a/out/kernel": (4, 16, 64),
            },
            {
                "a/query/kernel": ((), 64, 64),
                "a/value/kernel": ((), 64, 64),
                "a/out/kernel": ((), 64, 64),
            },
        ),
        (  # fused, each matrix by itself; with fewer keys than queries they are not told apart
            {
                "attn/qkv/kernel": (64, 192),
                "a/qkv_proj/kernel": (64, 128),
                "layers/attn/wqkv": (4, 64, 192),
                "torch/attn/c_attn/weight": (192, 64),
                "mlp/gate_up_proj/kernel": (64, 256),
                "experts/gate_up_proj": (8, 64, 256),
                "mlp/gate_up/weight": (256, 64),
            },
            {
                "attn/qkv/kernel": ((3,), 64, 64),
                "a/qkv_proj/kernel": ((), 64, 128),
                "layers/attn/wqkv": ((4, 3), 64, 64),
                "torch/attn/c_attn/weight": ((3,), 64, 64),
                "mlp/gate_up_proj/kernel": ((2,), 64, 128),
                "experts/gate_up_proj": ((8, 2), 64, 128),
                "mlp/gate_up/weight": ((2,), 64, 128),
            },
        ),
        (  # a name alone makes no parts: queries, keys and values of each head are interleaved
            {"attn/qkv/kernel": (64, 4, 48)},
            {"attn/qkv/kernel": ((), 64, 192)},
        ),
        (  # without its siblings, and outside of attention
            {"self_attention/out/kernel": (8, 64, 512), "mlp/wo/kernel": (12, 512, 64)},
            {"self_attention/out/kernel": ((), 512, 512), "mlp/wo/kernel": ((12,), 512, 64)},
        ),
    ],
)
def test_known_kernels(leaves, right):
    assert views(leaves) == right


def test_layers_are_stacked_along_the_axis_of_attention():
    """Vectors of layers are vectors, and a router is a matrix for each layer."""
    stack = {
        "decoder/layers/attention/query/kernel": (512, 32, 8, 64),
        "decoder/layers/norm/scale": (512, 32),
        "decoder/layers/gate/kernel": (512, 32, 16),
        "decoder/norm/scale": (512,),
        "embedder/embedding": (4096, 32),
    }
    found = views(stack)
    assert found["decoder/layers/gate/kernel"] == ((32,), 512, 16)
    assert found["decoder/layers/norm/scale"] == ((32,), 1, 512)
    assert found["embedder/embedding"] == ((), 4096, 32)
    report = adapprox_jax.muon_report(tree_of(stack))
    why = "adapprox: 512 x 16, as long as an embedding or a head"  # as without the stack
    assert report["['decoder']['layers']['gate']['kernel']"] == why


def test_dimension_numbers_come_before_names():
    params = {"query": {"kernel": jnp.ones((64, 4, 16))}}
    by_head = adapprox_jax.MatrixDimensionNumbers(0, 2)
    [what] = adapprox_jax.muon_report(params, None, by_head).values()
    assert what == "orthogonalized: 4 of 64 x 16"
    [what] = adapprox_jax.muon_report(params).values()
    assert what == "orthogonalized: 64 x 64"


def test_one_key_and_value_head_is_no_embedding():
    params = {"attn": {"key": {"kernel": jax.ShapeDtypeStruct((4096, 1, 128), jnp.float32)}}}
    assert adapprox_jax.muon_report(params) == {
        "['attn']['key']['kernel']": "orthogonalized: 4096 x 128"
    }


def test_the_second_moment_and_its_report_see_one_matrix():
    params = {"query": {"kernel": jnp.ones((64, 4, 32))}}
    tx = adapprox_jax.adapprox(1e-3)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), state, params)
    assert updates["query"]["kernel"].shape == (64, 4, 32)
    [info] = adapprox_jax.rank_report(state, params).values()
    assert info.matrices == (64, 128)


def test_heads_are_matrices_where_the_user_says_so():
    params = {
        "q_proj": {"kernel": jnp.ones((64, 128))},
        "k_proj": {"weight": jnp.ones((32, 64))},
        "attn": {"query": {"kernel": jnp.ones((64, 8, 16)), "bias": jnp.ones((8, 16))}},
        "c_attn": {"kernel": jnp.ones((2, 64, 192))},
        "mlp": {"kernel": jnp.ones((64, 256))},
    }
    report = adapprox_jax.muon_report(params, None, adapprox_jax.head_by_head(16))
    assert {path.split("'")[1]: what for path, what in report.items() if "bias" not in path} == {
        "q_proj": "orthogonalized: 8 of 64 x 16",
        "k_proj": "orthogonalized: 2 of 16 x 64, outputs first",
        "attn": "orthogonalized: 8 of 64 x 16",
        "c_attn": "orthogonalized: 24 of 64 x 16",
        "mlp": "orthogonalized: 64 x 256",
    }


@pytest.mark.parametrize("head_size", [None, 24])
def test_heads_without_an_axis_need_a_size_that_divides(head_size):
    params = {"q_proj": {"kernel": jnp.ones((64, 128))}}
    tx = adapprox_jax.adapprox_muon(
        1e-2, weight_dimension_numbers=adapprox_jax.head_by_head(head_size)
    )
    with pytest.raises(ValueError, match=rf"q_proj.*\(64, 128\).*head_size is {head_size}.*128"):
        tx.init(params)


def test_a_model_trains_head_by_head():
    """Under a partition, which shows a function only some of the leaves, and where heads lie."""
    rng = np.random.default_rng(0)
    heads = [rng.normal(size=(64, 16)).astype(np.float32) for _ in range(4)]
    axes = (Axis("embed", 64), Axis("heads", 4), Axis("head_size", 16))
    kernel = jnp.stack(heads, 1)
    params = {
        "query": {"kernel": kernel, "bias": jnp.ones((4, 16))},
        "k_proj": {"kernel": jnp.concatenate(heads, 1)},
        "v_proj": {"weight": NamedArray(kernel, axes)},
        "embedding": jnp.ones((96, 64)),
    }
    tx = adapprox_jax.adapprox_muon(
        1e-2, second_moment=False, weight_dimension_numbers=adapprox_jax.head_by_head(16)
    )
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    alone = {"some": heads}
    plain = adapprox_jax.adapprox_muon(1e-2, second_moment=False)
    expected = jnp.stack(plain.update(alone, plain.init(alone), alone)[0]["some"], 1)
    # The same products in another order: 2^-23 of entries of up to 6, a few times over.
    close = functools.partial(np.testing.assert_allclose, desired=expected, atol=1e-6)
    close(updates["query"]["kernel"])
    close(updates["k_proj"]["kernel"].reshape(64, 4, 16))
    close(updates["v_proj"]["weight"].array)


def test_the_path_of_a_leaf_is_taken_apart_a_few_times_at_most(monkeypatch):
    """And not once for every other leaf: a thousand of them took seconds at every trace."""
    count, real = [], leaves_of_trees._words
    monkeypatch.setattr(leaves_of_trees, "_words", lambda key: count.append(key) or real(key))
    params = {f"w{i}": jax.ShapeDtypeStruct((8, 16), jnp.float32) for i in range(50)}
    adapprox_jax.muon_report(params)
    assert 0 < len(count) <= 10 * len(params)
