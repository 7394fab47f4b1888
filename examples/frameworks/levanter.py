"""Levanter: a config that is registered under a name. `python -m examples.frameworks.levanter`."""

import pathlib
from dataclasses import dataclass

import haliax
import jax
import optax
from levanter import tensorstore_serialization as files
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample
from levanter.optim.config import OptimizerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

import adapprox_jax
from examples.frameworks.common import STEPS, Trained, check, tokens

READS = files.TensorStoreReadConfig(replica_mode=files.ReplicaRestoreMode.EVERY_REPLICA)
files.TensorStoreReadConfig = lambda: READS  # On CPUs and GPUs the default does not know int4.
SHAPE = LlamaConfig(max_seq_len=64, hidden_dim=128, intermediate_dim=256, num_layers=2,
                    num_heads=4, num_kv_heads=2)  # fmt: skip


@OptimizerConfig.register_subclass("adapprox")
@dataclass(frozen=True)
class AdapproxConfig(OptimizerConfig):
    """Where it is imported, `optimizer: {type: adapprox}` in YAML, with Levanter's schedules."""

    mu_dtype: str | None = None

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        rate, decay = self.lr_scheduler(num_train_steps), self.weight_decay
        mask = self.build_weight_decay_mask()
        return adapprox_jax.adapprox(rate, mu_dtype=self.mu_dtype, weight_decay=decay, mask=mask)


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    config = TrainerConfig(
        id="tiny", tracker=NoopConfig(), log_dir=folder / "logs", require_accelerator=False,
        checkpointer=CheckpointerConfig(str(folder)), mesh=MeshConfig(axes={"model": 2}),
        train_batch_size=16, num_train_steps=steps, log_jaxprs=False, log_xla_hlo=False,
    )  # fmt: skip
    config.initialize()
    rows = [haliax.named(row, "position") for step in range(STEPS) for row in tokens(step)]
    data = ListAsyncDataset([LmExample.causal(row) for row in rows])
    vocabulary, key = haliax.Axis("vocab", 256), jax.random.PRNGKey(0)
    with Trainer(config, tx, LlamaLMHeadModel.compute_next_token_loss) as trainer:
        state = trainer.initial_state(key, model_init=lambda: SHAPE.build(vocabulary, key=key))
        batches = trainer.data_loader(data).iter_from_step(int(state.step))
        infos = list(trainer.training_steps(state, batches))
        trainer.run_hooks(infos[-1], force=True)  # Saves, as at the end of `trainer.train`.
    return Trained([info.loss for info in infos], infos[-1].model, infos[-1].opt_state)


if __name__ == "__main__":
    check("marin-levanter", train)
