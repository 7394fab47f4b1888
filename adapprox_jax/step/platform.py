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

    leaf_after_leaf: bool
    """The whole step of a leaf is done before that of the next; else phases go over all leaves."""
    fuses_outer_products: bool
    """q u^T of few columns is a sum of outer products, which is never written to memory."""
    fuses_products: bool
    """A product of matrices fuses into the one sum that reads it."""
    lanes: int
    """A matrix lies in rows if this divides their length; else the compiler may have columns."""
    most_parts: int
    """Parts that one long sum is split into, so that it keeps many cores busy."""
    largest_whole: int | None
    """Entries of a matrix above which passes go over it in tiles; None: never."""
    largest_slice: int | None
    """Entries of a stack of matrices that a pass works on at once; None: any number."""
    keeps_targets: bool
    """The target of a matrix stays in memory from pass to pass; else at most the largest one."""
    quotient_with_error: bool
    """The quotient is made in the pass that measures the error; else last, to be used soon."""
    most_kept: int
    """Entries of targets on a device up to which the largest stays beside another one."""
    unrolls_rounds: bool
    """The few rounds of Cholesky QR and Newton-Schulz are written out instead of looped over."""
    sums_in_blocks: bool
    """A residual is summed in the blocks of `quantize`: sums that are alike share a kernel."""
    sums_together: bool
    """Sums of small leaves are one sum of what was put together."""
    directions_at_once: int
    """Entries that a Newton-Schulz iteration works on at once; about four arrays are that large."""
    directions_dtype: Any
    """Type of the operands of a Newton-Schulz iteration; None for that of the matrices."""


CPU = Platform(
    leaf_after_leaf=True,
    fuses_outer_products=False,
    fuses_products=False,
    lanes=1,
    most_parts=1,
    largest_whole=2**23,
    largest_slice=2**20,
    keeps_targets=True,
    most_kept=0,
    quotient_with_error=True,
    unrolls_rounds=False,
    sums_in_blocks=False,
    sums_together=False,
    directions_at_once=2**20,
    directions_dtype=None,
)
GPU = Platform(
    leaf_after_leaf=False,
    fuses_outer_products=True,
    fuses_products=False,
    lanes=1,
    most_parts=64,
    largest_whole=None,
    largest_slice=2**25,
    keeps_targets=False,
    quotient_with_error=False,
    most_kept=40 * 2**20,  # 160 MiB in float32
    unrolls_rounds=True,
    sums_in_blocks=True,
    sums_together=True,
    directions_at_once=2**25,
    directions_dtype=jnp.bfloat16,
)
# An elementwise operand fuses into a product, unless that is cut into parts.
TPU = dataclasses.replace(
    GPU,
    fuses_products=True,
    lanes=128,
    most_parts=1,
    largest_slice=None,
    most_kept=0,
    directions_at_once=2**24,
)


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
