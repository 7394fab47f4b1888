"""The rows of benchmarks: an optimizer by its name, and parameters and gradients for it.

Parameters have GPT-2's shapes, and the second moments of gradients known ranks.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import adapprox_jax
from benchmarks import records
from benchmarks.contenders import CONTENDERS
from examples.gpt2.model import CONFIGS, GPT

# After a contender's name: layers' parameters in one array each; all in bfloat16; `split_weights`.
WORDS = ("stacked", "bfloat16", "split")


def check_rows(argument: str, names: Iterable[str], words: Sequence[str] = WORDS) -> None:
    """Ends the program if a name is not a contender's, with some words behind commas."""
    parts = {name: name.split(", ") for name in names}
    records.check_names(argument, (contender for contender, *_ in parts.values()), CONTENDERS)
    for name, (_, *behind) in parts.items():
        records.check_names(f"{argument}, {name!r},", behind, words)


def row(name: str, shapes: Any) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer of a row, and the shapes of its parameters.

    Args:
      name: A name that `check_rows` lets pass.
      shapes: The parameters of `parameter_shapes`.
    """
    contender, *words = name.split(", ")
    tx = CONTENDERS[contender]()
    shapes = stacked(shapes) if "stacked" in words else shapes
    if {"bfloat16", "split"} & set(words):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    return adapprox_jax.split_weights(tx) if "split" in words else tx, shapes


def parameter_shapes(model: str) -> Any:
    """The parameters of a GPT-2 as a tree of `jax.ShapeDtypeStruct`s."""
    config = CONFIGS[model]
    abstract = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(abstract, nnx.Param))


def stacked(shapes: Any) -> Any:
    """The parameters with those of all layers stacked along a first axis."""

    def stack(*layers: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(layers), *layers[0].shape), layers[0].dtype)

    return {
        name: jax.tree.map(stack, *tree.values()) if name == "blocks" else tree
        for name, tree in shapes.items()
    }


def random_like(shapes: Any, seed: int) -> Any:
    """Small random parameters of the given shapes."""
    return _for_each_leaf(_normal, shapes, seed)


def gradients_like(shapes: Any, seed: int) -> Any:
    """Gradients of random sign whose magnitudes have rank 1, 2, ... 16, 1, 2, ... by leaf.

    A magnitude is a sum of outer products of log-normal vectors. The root of its square, which
    Adapprox factors, has that rank as long as the gradients stay the same.
    """
    return _for_each_leaf(_of_rank, shapes, seed)


def _for_each_leaf(make: Callable[..., jax.Array], shapes: Any, seed: int) -> Any:
    """A tree of what `make` gives for the shape, a key and the number of each leaf."""
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    values = [make(leaf.shape, keys[i], i).astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, values)


@functools.partial(jax.jit, static_argnums=0)
def _normal(shape: tuple[int, ...], key: jax.Array, _: jax.Array) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape)


@functools.partial(jax.jit, static_argnums=0)
def _of_rank(shape: tuple[int, ...], key: jax.Array, number: jax.Array) -> jax.Array:
    rank = number % 16 + 1
    sign, *sides = jax.random.split(key, 3)
    magnitude = jnp.ones(())
    if len(shape) >= 2:
        rows, columns = (
            jnp.exp(2 * jax.random.normal(side, (*shape[:-2], size, 16)))
            for side, size in zip(sides, shape[-2:], strict=True)
        )
        some = jnp.arange(16) < rank  # not a shape, to compile once for all ranks
        magnitude = jnp.where(some, rows, 0) @ columns.mT / rank
    return 1e-3 * magnitude * jax.random.rademacher(sign, shape, jnp.float32)
