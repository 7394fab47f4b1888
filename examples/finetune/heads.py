"""A GPT-2 with a head for a task: a class of a text, or the ends of an answer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.gpt2.model import GPT

Batch = dict[str, Any]  # arrays with the batch's axis first; "tokens" is (B, L)


class WithHead(nnx.Module):
    """A model whose residual stream, or a place of it, goes through a linear layer.

    Shapes as in `model`, with O outputs of the head.
    """

    def __init__(self, gpt: GPT, outputs: int, *, rngs: nnx.Rngs):
        self.gpt = gpt
        init = nnx.initializers.normal(0.02)
        self.head = nnx.Linear(gpt.config.width, outputs, kernel_init=init, rngs=rngs)

    def classes(self, batch: Batch) -> jax.Array:
        """Logits (B, O) from the state of each text's last token, `batch["last"]` (B,)."""
        stream_BxLxD = self.gpt.stream(batch["tokens"])
        last_Bx1x1 = batch["last"][:, None, None]
        stream_BxD = jnp.take_along_axis(stream_BxLxD, last_Bx1x1, axis=1)[:, 0]
        return self.head(stream_BxD.astype(jnp.float32))

    def ends(self, batch: Batch) -> jax.Array:
        """Logits (B, 2, L) of the first and the last token of an answer.

        Minus infinity but from the end of text before the context, `batch["first"]` (B,), which
        stands for no answer, to the last token of the context, `batch["last"]` (B,).
        """
        tokens_BxL = batch["tokens"]
        logits_BxLx2 = self.head(self.gpt.stream(tokens_BxL).astype(jnp.float32))
        at_L = jnp.arange(tokens_BxL.shape[1])
        within_BxL = (at_L >= batch["first"][:, None]) & (at_L <= batch["last"][:, None])
        return jnp.where(within_BxL[:, None], jnp.moveaxis(logits_BxLx2, 2, 1), -jnp.inf)


def class_loss(model: WithHead, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the classes `batch["label"]` (B,)."""
    logits_BxO = model.classes(batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxO, batch["label"]).mean()


def span_loss(model: WithHead, batch: Batch) -> jax.Array:
    """Mean cross-entropy of first and last tokens of answers, `batch["target"]` (B, 2)."""
    logits_Bx2xL = model.ends(batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits_Bx2xL, batch["target"]).mean()


def padded(rows: list[list[int]], length: int, filler: int) -> np.ndarray:
    """Rows of tokens as an array (rows, length); what a row lacks comes after it."""
    array = np.full((len(rows), length), filler, np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array
