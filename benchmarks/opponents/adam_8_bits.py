"""Adam with both moments in 8 bits, block by block.

After Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization" (2110.02861): dynamic
tree codes, blocks of 256 numbers, and leaves below 4096 numbers in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
SMALLEST = 4096  # numbers of a leaf that is kept in codes


class Codes(NamedTuple):
    """An array in codes."""

    code: jax.Array  # uint8 (blocks, BLOCK), padded
    largest: jax.Array  # float32 (blocks, 1), the largest magnitude of each block


class ScaleByAdam8BitsState(NamedTuple):
    """State of `scale_by_adam_8_bits`: moments in `Codes`, those of small leaves as arrays."""

    count: jax.Array
    mu: Any
    nu: Any


def dynamic_values(signed: bool) -> np.ndarray:
    """The values of the 256 codes, ascending; the largest is 1.

    A code with e leading zeros has the exponent 10^-e. A one ends the zeros, and the remaining bits
    divide [0.1, 1].

    Args:
      signed: Whether one of the 8 bits is a sign.

    Returns:
      An array (256,) float32.
    """
    bits = 7 if signed else 8
    sizes = [0.0]
    for exponent in range(bits):
        edges = np.linspace(0.1, 1, 2 ** (bits - 1 - exponent) + 1)
        sizes += list(10.0**-exponent * (edges[:-1] + edges[1:]) / 2)
    if signed:
        sizes += [1.0, *(-x for x in sizes[1:])]
    else:
        sizes[sizes.index(max(sizes))] = 1.0
    return np.sort(np.asarray(sizes, np.float32))


SIGNED, UNSIGNED = dynamic_values(True), dynamic_values(False)


def encode(x: jax.Array, values: np.ndarray) -> Codes:
    """The nearest code of each number, relative to the largest magnitude of its block."""
    flat = x.astype(jnp.float32).reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    between = (values[:-1] + values[1:]) / 2
    relative = blocks / jnp.where(largest == 0, 1, largest)
    return Codes(jnp.searchsorted(jnp.asarray(between), relative).astype(jnp.uint8), largest)


def decode(codes: Codes, values: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """The array of a shape that codes stand for."""
    flat = (jnp.asarray(values)[codes.code] * codes.largest).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape)


def scale_by_adam_8_bits(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with its state in 8 bits."""

    def kept(tree: Any, values: np.ndarray) -> Any:
        return jax.tree.map(lambda x: encode(x, values) if x.size >= SMALLEST else x, tree)

    def read(held: Any, values: np.ndarray, like: jax.Array) -> jax.Array:
        return decode(held, values, like.shape) if isinstance(held, Codes) else held

    def init(params: optax.Params) -> ScaleByAdam8BitsState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return ScaleByAdam8BitsState(
            jnp.zeros([], jnp.int32), kept(zeros, SIGNED), kept(zeros, UNSIGNED)
        )

    def update(
        grads: optax.Updates, state: ScaleByAdam8BitsState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdam8BitsState]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: b1 * read(m, SIGNED, g) + (1 - b1) * g, grads, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * read(v, UNSIGNED, g) + (1 - b2) * g**2, grads, state.nu)
        updates = jax.tree.map(
            lambda m, v: m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps), mu, nu
        )
        return updates, ScaleByAdam8BitsState(count, kept(mu, SIGNED), kept(nu, UNSIGNED))

    return optax.GradientTransformation(init, update)
