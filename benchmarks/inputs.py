"""Parameters of GPT-2's shapes, and gradients whose second moments have known ranks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.gpt2.model import CONFIGS, GPT


def parameter_shapes(model: str) -> Any:
    """The parameters of a GPT-2 as a tree of `jax.ShapeDtypeStruct`s."""
    config = CONFIGS[model]
    abstract = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(abstract, nnx.Param))


def random_like(shapes: Any, seed: int) -> Any:
    """Small random parameters of the given shapes."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape), static_argnums=1)
    values = [make(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, values)


def gradients_like(shapes: Any, seed: int, largest_rank: int = 16) -> Any:
    """Gradients of random sign whose magnitudes have rank 1, 2, ... `largest_rank`, 1, ... by leaf.

    A magnitude is a sum of outer products of log-normal vectors. The root of its square, which
    Adapprox factors, has that rank as long as the gradients stay the same.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def make(key: jax.Array, shape: tuple[int, ...], rank: int) -> jax.Array:
        sign, *sides = jax.random.split(key, 1 + max(len(shape), 1))
        magnitude = jnp.ones(())
        if len(shape) == 2:
            rows, columns = (
                jnp.exp(2 * jax.random.normal(side, (size, rank)))
                for side, size in zip(sides, shape, strict=True)
            )
            magnitude = rows @ columns.T / rank
        return 1e-3 * magnitude * jax.random.rademacher(sign, shape, jnp.float32)

    compiled = jax.jit(make, static_argnums=(1, 2))
    values = [
        compiled(key, leaf.shape, i % largest_rank + 1)
        for i, (key, leaf) in enumerate(zip(keys, leaves, strict=True))
    ]
    return jax.tree.unflatten(treedef, values)
