"""Equinox: `update` takes the model. Run `python -m examples.frameworks.equinox`."""

import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import adapprox_jax
from examples.frameworks.common import Trained, check, tokens

MESH = jax.sharding.Mesh(jax.devices(), ("fsdp",))


def sharded(x: Any) -> Any:
    """Weights are (outputs, inputs): the last axis over the mesh."""
    spec = PartitionSpec(None, "fsdp") if eqx.is_array(x) and x.ndim == 2 else PartitionSpec()
    return eqx.filter_shard(x, NamedSharding(MESH, spec))


@eqx.filter_value_and_grad
def loss_and_grads(model: eqx.nn.MLP, text: jax.Array) -> jax.Array:
    """Of the next token after each eight."""
    windows = jnp.stack([text[:, i : i - 8] for i in range(8)], axis=-1).reshape(-1, 8)
    logits = jax.vmap(model)(jax.nn.one_hot(windows, 256).reshape(-1, 8 * 256))
    labels = text[:, 8:].reshape(-1)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    model = jax.tree.map(sharded, eqx.nn.MLP(8 * 256, 256, 256, depth=2, key=jax.random.key(0)))
    params = eqx.filter(model, eqx.is_inexact_array)
    shardings = adapprox_jax.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    done, file, losses = 0, folder / "checkpoint.eqx", []
    if file.exists():
        done, model, state = eqx.tree_deserialise_leaves(file, (0, model, state))
        model, state = jax.tree.map(sharded, model), jax.device_put(state, shardings)

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, state: Any, text: jax.Array) -> tuple[eqx.nn.MLP, Any, jax.Array]:
        loss, grads = loss_and_grads(model, text)
        updates, state = tx.update(grads, state, model)
        model = jax.tree.map(sharded, eqx.apply_updates(model, updates))  # else XLA chooses
        return model, eqx.filter_shard(state, shardings), loss

    for i in range(done, steps):
        model, state, loss = step(model, state, jnp.asarray(tokens(i)))
        losses.append(float(loss))
    folder.mkdir(exist_ok=True)
    eqx.tree_serialise_leaves(file, (steps, model, state))
    return Trained(losses, eqx.filter(model, eqx.is_inexact_array), state)


if __name__ == "__main__":
    check("equinox", train)
