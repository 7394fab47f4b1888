"""Kauldron: `cfg.optimizer = adapprox(...)`. Run `python -m examples.frameworks.kauldron`."""

import dataclasses
import pathlib
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd
from kauldron.train.metric_writer import NoopWriter

from examples.frameworks.common import STEPS, Trained, check, tokens

SHARDED = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
LOSS = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.labels")


def rows() -> list[dict[str, np.ndarray]]:
    """Examples; Kauldron makes a step more than it is asked for, after the last checkpoint."""
    texts = [row for step in range(STEPS + 1) for row in tokens(step, length=65)]
    return [{"tokens": text[:-1], "labels": text[1:, None]} for text in texts]


class Transformer(nn.Module):
    tokens: kd.kontext.Key = "batch.tokens"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> dict[str, jax.Array]:
        x, mask = nn.Embed(256, 128)(tokens), nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(2):
            x = kd.nn.PreNormBlock.from_spec(num_heads=4)(x, mask)
        return {"logits": nn.Dense(256)(nn.LayerNorm()(x))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses(NoopWriter):
    """Keeps the losses."""

    values: list[float] = dataclasses.field(default_factory=list)

    def write_step_metrics(self, *, aux: kd.train.AuxiliariesState, **_: Any) -> None:
        self.values.append(float(aux.compute().loss_values["losses/text"]))


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    trainer = kd.train.Trainer(
        workdir=folder, model=Transformer(), optimizer=tx, train_losses={"text": LOSS},
        train_ds=kd.data.py.DataSource(rows(), batch_size=16, shuffle=False, num_workers=0),
        sharding=kd.sharding.ShardingStrategy(params=SHARDED, opt_state=SHARDED),
        num_train_steps=steps, checkpointer=kd.ckpts.Checkpointer(save_interval_steps=steps),
        writer=Losses(), log_metrics_every=1, profiler=None,
    )  # fmt: skip
    state, _ = trainer.train()
    return Trained(trainer.writer.values, state.params, state.opt_state)


if __name__ == "__main__":
    check("kauldron", train)
