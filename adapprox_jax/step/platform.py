"""All differences between platforms, and the choice of the one that a program is lowered for."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Platform:
    """How a kind of device likes its work. docs/design.md has what was measured."""

    is_cpu: bool
    """The whole step of a leaf is done before that of the next. Its target stays in memory from
    pass to pass, and its quotient is made in the pass that measures the error. Else phases go over
    all leaves: q u^T of few columns is a sum of outer products, which is never written to memory.
    Sums of small leaves are one sum of what was put together, residuals are summed in the blocks of
    `quantize`, so that sums that are alike share a kernel, and few rounds are written out."""
    fuses_products: bool
    """A product of matrices fuses into the one sum that reads it."""
    most_parts: int
    """Parts that one long sum is split into, so that it keeps many cores busy."""
    largest_whole: int | None
    """Entries of a matrix above which passes go over it in tiles; None: never."""
    largest_slice: int | None
    """Entries of a stack of matrices that a pass works on at once; None: any number."""
    target_dtype: Any
    """Type of a target that is written to memory for a product; None for that of the work."""
    makes_averages_twice: bool
    """A maximum over blocks fuses with what it reads. So a new average that is kept in codes is
    made twice, as the update that goes into it: once for the scales of its blocks. It is never
    written to memory in float32."""
    fuses_in_pieces: bool
    """That maximum fuses only with what is made of arrays that are cut into pieces before."""
    directions_at_once: int
    """Entries that a Newton-Schulz iteration works on at once; about four arrays are that large."""
    directions_dtype: Any
    """Type of the operands of a Newton-Schulz iteration; None for that of the matrices."""


CPU = Platform(
    is_cpu=True,
    fuses_products=False,
    most_parts=1,
    largest_whole=2**23,
    largest_slice=2**20,
    target_dtype=None,
    makes_averages_twice=False,
    fuses_in_pieces=False,
    directions_at_once=2**20,
    directions_dtype=None,
)
GPU = Platform(
    is_cpu=False,
    fuses_products=False,
    most_parts=64,
    largest_whole=None,
    largest_slice=None,
    target_dtype=jnp.bfloat16,
    makes_averages_twice=True,
    fuses_in_pieces=False,
    directions_at_once=2**25,
    directions_dtype=jnp.bfloat16,
)
# An elementwise operand fuses into a product, unless that is cut into parts.
TPU = dataclasses.replace(
    GPU,
    fuses_products=True,
    most_parts=1,
    target_dtype=None,
    fuses_in_pieces=True,
    directions_at_once=2**24,
)
# Whose memory is large, and whose bfloat16 is slow.
MESH_OF_CPUS = dataclasses.replace(GPU, target_dtype=None, makes_averages_twice=False)


def on_platform(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls a function of a `Platform` and arrays with the record of the platform in use.

    Traced, the platform is the one that the program is lowered for, which need not be this host's;
    else it is that of the arrays.

    Args:
      function: From a `Platform` and the operands to a tree of arrays, whose shapes and types do
        not depend on the platform.
      *operands: Trees of arrays.

    Returns:
      What the function returns.
    """
    records = {"cpu": CPU, "tpu": TPU, "default": GPU}
    arrays = jax.tree.leaves(operands)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        branches = {name: partial(function, record) for name, record in records.items()}
        return jax.lax.platform_dependent(*operands, **branches)
    platforms = {d.platform for x in arrays if isinstance(x, jax.Array) for d in x.devices()}
    return function(records.get(max(platforms, default="cpu"), GPU), *operands)
