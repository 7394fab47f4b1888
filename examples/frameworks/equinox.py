"""Equinox: `update` takes the model. Run `python -m examples.frameworks.equinox`."""

import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import adapprox_jax
from examples.frameworks.common import Trained, check, tokens

MESH = jax.sharding.Mesh(jax.devices(), ("fsdp",))


def sharded(x: Any) -> Any:
    spec = jax.P(None, "fsdp") if eqx.is_array(x) and x.ndim == 2 else jax.P()  # (outputs, inputs)
    return eqx.filter_shard(x, jax.NamedSharding(MESH, spec))


def load(file: Any, like: Any) -> Any:
    """NumPy's files, which Equinox writes, keep the bytes of int4 and not its name."""
    x = eqx.default_deserialise_filter_spec(file, like)
    return jnp.asarray(x.view(jnp.int4)) if eqx.is_array(like) and like.dtype == jnp.int4 else x


@eqx.filter_value_and_grad
def loss_of_next_token(model: eqx.nn.MLP, text: jax.Array) -> jax.Array:
    windows, labels = jnp.stack([text[:, i : i - 8] for i in range(8)], -1), text[:, 8:].reshape(-1)
    logits = jax.vmap(model)(jax.nn.one_hot(windows, 256).reshape(-1, 8 * 256))
    return jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 256)))


def train(tx: optax.GradientTransformation, steps: int, folder: pathlib.Path) -> Trained:
    model = jax.tree.map(sharded, eqx.nn.MLP(8 * 256, 256, 256, depth=2, key=jax.random.key(0)))
    params = eqx.filter(model, eqx.is_inexact_array)
    shardings = adapprox_jax.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    done, file, losses = 0, folder / "checkpoint.eqx", []
    if file.exists():
        done, model, state = eqx.tree_deserialise_leaves(file, (0, model, state), load)
        model, state = jax.tree.map(sharded, model), jax.device_put(state, shardings)

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, state: Any, text: jax.Array) -> Any:
        loss, grads = loss_of_next_token(model, text)
        updates, state = tx.update(grads, state, model)
        model = jax.tree.map(sharded, eqx.apply_updates(model, updates))  # else XLA chooses
        return model, eqx.filter_shard(state, shardings), loss

    for i in range(done, steps):
        model, state, loss = step(model, state, jnp.asarray(tokens(i)))
        losses.append(float(loss))
    eqx.tree_serialise_leaves(file, (steps, model, state))
    return Trained(losses, eqx.filter(model, eqx.is_inexact_array), state)


if __name__ == "__main__":
    check("equinox", train)
