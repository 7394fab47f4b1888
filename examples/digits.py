"""Flax Linen on scikit-learn's digits: `python -m examples.digits` prints 99.3 % test accuracy."""

from typing import Literal

import jax
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import adapprox_jax


class Network(nn.Module):
    """Two convolutions and two dense layers; the kernels of the inner two are factored."""

    @nn.compact
    def __call__(self, images_Bx8x8x1: jax.Array) -> jax.Array:
        """Returns logits (batch, 10)."""
        x = nn.relu(nn.Conv(64, (3, 3))(images_Bx8x8x1))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))  # (batch, 4, 4, 64)
        x = nn.relu(nn.Conv(64, (3, 3))(x))  # kernel (3, 3, 64, 64): nine matrices
        x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))  # kernel (1024, 256)
        return nn.Dense(10)(x)


@jax.jit
def train_step(state: TrainState, images_Bx8x8x1: jax.Array, labels_B: jax.Array):
    """Returns the next state and the loss."""

    def loss_fn(params):
        logits_Bx10 = state.apply_fn({"params": params}, images_Bx8x8x1)
        return optax.softmax_cross_entropy_with_integer_labels(logits_Bx10, labels_B).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(
    optimizer: Literal["adapprox", "adamw"] = "adapprox",
    learning_rate: float = 4e-3,
    epochs: int = 10,
    batch_size: int = 64,
    seed: int = 0,
) -> float:
    """Trains, prints what came out, and returns the accuracy on the held-out test images."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)
    n = len(train_x)  # 1347; the other 450 are for the test, the same ones for every seed
    if not (0 < learning_rate < 1 and epochs > 0 and 0 < batch_size <= n and 0 <= seed < 2**31):
        raise SystemExit(f"error: need 0 < rate < 1, epochs > 0, batch 1 to {n}, 0 <= seed < 2**31")
    steps = n // batch_size  # of an epoch; the few images left over are skipped
    schedule = optax.cosine_decay_schedule(learning_rate, epochs * steps)
    tx = {"adapprox": adapprox_jax.adapprox, "adamw": optax.adamw}[optimizer](schedule)
    network = Network()
    params = network.init(jax.random.key(seed), test_x[:1])["params"]
    state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    rng = np.random.default_rng(seed)
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in rng.permutation(n)[: steps * batch_size].reshape(steps, batch_size):
            state, loss = train_step(state, train_x[batch], train_y[batch])
            losses.append(loss)
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
    logits_Bx10 = network.apply({"params": state.params}, test_x)
    accuracy = float((logits_Bx10.argmax(axis=-1) == test_y).mean())
    size, adamw_size = (adapprox_jax.state_nbytes(t, params) for t in (tx, optax.adamw(schedule)))
    factored = adapprox_jax.rank_report(state.opt_state, state.params)
    print(f"test accuracy {accuracy:.1%}, {len(factored)} factored leaves")
    print(f"optimizer state {size:,} bytes, AdamW's {adamw_size:,} bytes")
    return accuracy


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.digits")
