"""MaxText: its trainer makes the optimizer in `get_optimizer` from a name, `opt_type`. In a fork
one adds a branch there, in src/maxtext/optimizers/optimizers.py,

      elif config.opt_type == "adapprox":
        base_opt = adapprox_jax.adapprox(learning_rate_schedule)

and the name to `OptimizerType` in src/maxtext/configs/types.py. Here the function is replaced.

    python -m examples.frameworks.maxtext
"""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import optax
from flax import nnx
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train.train import initialize, train_loop

from examples.frameworks.common import Trained, check, tokens

FLAGS = [
    "base_emb_dim=128", "base_mlp_dim=256", "base_num_decoder_layers=2", "base_num_query_heads=4",
    "base_num_kv_heads=2", "head_dim=32", "vocab_size=256", "max_target_length=64",
    "per_device_batch_size=2", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2",
    "attention=dot_product", "hardware=cpu", "skip_jax_distributed_system=true", "run_name=tiny",
    "dataset_type=synthetic", "enable_goodput_recording=false",
]  # fmt: skip


def batches(step: int) -> Iterator[dict[str, np.ndarray]]:
    ones = np.ones((16, 64), np.int32)
    while True:
        text = tokens(step, length=65)
        batch: dict[str, np.ndarray] = {}
        for name, part in {"inputs": text[:, :-1], "targets": text[:, 1:]}.items():
            batch |= {name: part, f"{name}_segmentation": ones}
            batch[f"{name}_position"] = np.cumsum(ones, 1, dtype=np.int32) - 1
        yield batch
        step += 1


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    saved = [int(x.name) for x in folder.glob("tiny/checkpoints/*") if x.name.isdigit()]
    metrics = folder / f"until-{steps}.jsonl"
    places = [f"base_output_directory={folder}", f"metrics_file={metrics}", f"steps={steps}"]
    optimizers.get_optimizer = lambda *_, **__: tx
    data = batches(max(saved, default=-1) + 1)
    input_pipeline_interface.create_data_iterator = lambda *_: (data, None)
    state = train_loop(*initialize(["", *FLAGS, *places]))
    losses = [json.loads(x)["learning/loss"] for x in metrics.read_text().splitlines()]
    return Trained(losses, nnx.state(state.model, nnx.Param), state.optimizer)


if __name__ == "__main__":
    check("maxtext", train)
