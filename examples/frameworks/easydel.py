"""EasyDeL: its trainer makes the optimizer in `TrainingArguments.get_optimizer_and_scheduler`, from
a name. A subclass returns ours there, for the first start and as the template for a restart.

    python -m examples.frameworks.easydel
"""

import pathlib
import sys
from typing import Any

import datasets
import easydel as ed
import numpy as np
import optax
from flax import nnx
from jax.numpy import float32 as f32

from examples.frameworks.common import RATE, STEPS, Trained, check, tokens

# EasyDeL patches these models of transformers at its import, which fails without PyTorch.
for name in ("dbrx", "glm4v_moe", "llama4", "phimoe", "qwen3_5_moe", "qwen3_next"):
    sys.modules[f"transformers.models.{name}"] = None  # type: ignore[assignment]
# `attn_dtype` stays bfloat16: checkpoints lose another, and AdamW then resumes with other bits.
SHAPE = ed.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    sharding_axis_dims=(1, 4, 1, 2, 1), attn_mechanism="sdpa",
)  # fmt: skip
ROWS = np.concatenate([tokens(step) for step in range(STEPS)])
DATA = datasets.Dataset.from_dict({"input_ids": ROWS, "attention_mask": np.ones_like(ROWS)})


class Trainer(ed.Trainer):
    losses: list[float]

    def on_step_end(self, state: Any, metrics: Any, step: int) -> tuple[Any, Any]:
        self.losses.append(float(metrics.loss))
        return state, metrics


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    class Arguments(ed.TrainingArguments):
        def get_optimizer_and_scheduler(self, steps: int | None = None) -> tuple[Any, Any]:
            return tx, optax.constant_schedule(RATE)

    arguments = Arguments(
        save_directory=str(folder), resume_if_possible=True, max_training_steps=steps,
        num_train_epochs=1, total_batch_size=16, max_length=64, shuffle_train_dataset=False,
        do_last_save=True, use_wandb=False, progress_bar_type="json",
        save_tpu_preemption_checkpoints=False,
    )  # fmt: skip
    model = ed.LlamaForCausalLM(config=SHAPE, dtype=f32, param_dtype=f32, rngs=nnx.Rngs(0))
    trainer = Trainer(arguments=arguments, model=model.shard_model(), dataset_train=DATA)
    trainer.losses = []
    state = trainer.train().state
    return Trained(trainer.losses, state.graphstate, state.opt_state)


if __name__ == "__main__":
    check("easydel", train)
