"""The way that suits the platform that a function is lowered for."""

from collections.abc import Callable
from typing import Any

import jax


def by_platform(*operands: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """Calls one of two functions: that for CPUs, or that for all else.

    Traced, `jax.lax.platform_dependent` leaves the choice to the platform that it is lowered for,
    which need not be that of this host; else arrays lie where they are worked on.

    Args:
      *operands: Trees of arrays.
      cpu: Of the operands.
      default: Likewise, with results of the same shapes and types.
    """
    arrays = jax.tree.leaves(operands)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)
    platforms = {d.platform for x in arrays if isinstance(x, jax.Array) for d in x.devices()}
    return (cpu if platforms <= {"cpu"} else default)(*operands)
