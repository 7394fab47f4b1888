"""GPT-2 in Flax NNX: pre-norm, learned positions, tied embeddings.

Shapes are in the names: B batch, L sequence length, D width, H heads, K size of a head,
V vocabulary. Logits and losses are float32; `GPTConfig.dtype` is what the layers before compute in.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2 and the type in which it computes."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    dtype: str = "float32"
    inner: int | None = None  # width of the feed-forward layers; None for four times the width
    epsilon: float = 1e-5  # of the layer norms


BATCH_AXES = ("data", "fsdp")  # of a mesh, along which batches are divided

# The two larger rows are the paper's Table 1; GPT-2's 50257 tokens are padded to a multiple of 128.
CONFIGS = {
    "tiny": GPTConfig(layers=4, width=128, heads=4, context=128, vocabulary=512),
    "117M": GPTConfig(layers=12, width=768, heads=12, context=1024, vocabulary=50304),
    "345M": GPTConfig(layers=24, width=1024, heads=16, context=1024, vocabulary=50304),
}


class Linear(nnx.Linear):
    """`nnx.Linear` over all positions as the rows of one matrix.

    With a batch and a length apart, XLA turns the output's gradient on a CPU before it multiplies:
    the gradients of a layer then take three times as long.
    """

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Returns x W + b, of shape B x L x n_out."""
        B, L, D = x_BxLxD.shape
        return super().__call__(x_BxLxD.reshape(B * L, D)).reshape(B, L, -1)


def _linear(n_in: int, n_out: int, config: GPTConfig, rngs: nnx.Rngs, scale: float = 1.0) -> Linear:
    init = nnx.initializers.normal(0.02 * scale)
    return Linear(n_in, n_out, dtype=config.dtype, kernel_init=init, rngs=rngs)


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)


class Block(nnx.Module):
    """Causal self-attention, then the feed-forward layer: each sees the stream normalised."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        d, inner = config.width, config.inner or 4 * config.width
        residual_scale = (2 * config.layers) ** -0.5  # 2 residual sums a layer keep unit variance
        self.heads = config.heads
        self.norm_1 = _norm(config, rngs)
        self.qkv = _linear(d, 3 * d, config, rngs)
        self.projection = _linear(d, d, config, rngs, residual_scale)
        self.norm_2 = _norm(config, rngs)
        self.expand = _linear(d, inner, config, rngs)
        self.contract = _linear(inner, d, config, rngs, residual_scale)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Returns the block's output, of its input's shape."""
        x_BxLxD = x_BxLxD + self.attention(self.norm_1(x_BxLxD))
        return x_BxLxD + self.contract(jax.nn.gelu(self.expand(self.norm_2(x_BxLxD))))

    def attention(self, x_BxLxD: jax.Array) -> jax.Array:
        """Each position's mix of the values at and before it."""
        B, L, D = x_BxLxD.shape
        qkv_BxLx3xHxK = self.qkv(x_BxLxD).reshape(B, L, 3, self.heads, D // self.heads)
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = jnp.moveaxis(qkv_BxLx3xHxK, 2, 0)
        x_BxLxHxK = jax.nn.dot_product_attention(q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True)
        return self.projection(x_BxLxHxK.reshape(B, L, D))


class GPT(nnx.Module):
    """GPT-2: tokens to logits for the token after each of them."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns float32 logits of shape B x L x V."""
        x_BxLxD = self.stream(tokens_BxL)
        head_VxD = self.tokens.embedding[...].astype(x_BxLxD.dtype)
        return jnp.einsum("BLD,VD->BLV", x_BxLxD, head_VxD, preferred_element_type=jnp.float32)

    def stream(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns the normalised residual stream after the last block, B x L x D."""
        tokens_VxD = _divided(self.tokens.embedding[...], "tensor")  # whole rows are looked up
        positions_LxD = self.positions.embedding[: tokens_BxL.shape[1]]
        x_BxLxD = jnp.take(tokens_VxD, tokens_BxL, axis=0) + positions_LxD
        x_BxLxD = _divided(x_BxLxD.astype(self.config.dtype), BATCH_AXES)
        for block in self.blocks:
            x_BxLxD = _divided(block(x_BxLxD), BATCH_AXES)
        return self.norm(x_BxLxD)


def _divided(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """An array, divided along its first axis if the mesh in use has these and they divide it.

    Left to itself the compiler may divide the stream as the parameters that it comes from.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = axes if isinstance(axes, tuple) else (axes,)
    if not set(names) <= set(mesh.axis_names):
        return x
    if x.shape[0] % math.prod(mesh.shape[name] for name in names):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def loss(model: GPT, tokens_BxL: jax.Array) -> jax.Array:
    """Mean cross-entropy (nats per token) of each token given those before it."""
    logits_BxLxV = model(tokens_BxL[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, tokens_BxL[:, 1:].astype(jnp.int32)
    ).mean()
