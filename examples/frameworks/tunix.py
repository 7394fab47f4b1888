"""Tunix: its trainers take any Optax transformation. Run `python -m examples.frameworks.tunix`.

Its command line knows names of Optax: `optax.adapprox = adapprox_jax.adapprox` adds one.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from examples.frameworks.common import Trained, check, tokens

SHAPE = ModelConfig(
    num_layers=2, vocab_size=256, embed_dim=128, hidden_dim=256, num_heads=4, head_dim=32,
    num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip
MESH = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("fsdp", "tp"))


@nnx.jit
def sharded_model() -> Llama3:
    model = Llama3(SHAPE, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def batches(steps: int) -> Iterator[TrainingInput]:
    for step in range(steps):
        yield TrainingInput(tokens(step), np.ones_like(tokens(step)))


def model_input(batch: TrainingInput) -> dict[str, Any]:
    rows, length = batch.input_tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = positions[:, :, None] >= positions[:, None, :]
    own = {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
    return {**own, "positions": positions, "attention_mask": causal}


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    with MESH:
        config = TrainingConfig(
            eval_every_n_steps=1000, max_steps=steps, checkpoint_root_directory=str(folder)
        )
        trainer = PeftTrainer(sharded_model(), tx, config).with_gen_model_input_fn(model_input)
        trainer.train(batches(steps))
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    return Trained(losses, nnx.state(trainer.model), nnx.state(trainer.optimizer))


if __name__ == "__main__":
    check("google-tunix", train)
