"""Functions of a plan and one matrix, for stacks of matrices of many leaves."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from adapprox_jax.sharding.axes import devices_in_use
from adapprox_jax.step.matrix import Matrices, Plan
from adapprox_jax.step.scalars import StepScalars, join_known, split_known

_LARGEST_SLICE = 2**25  # entries of a stack that a device works on at once: 128 MiB in float32


def at_once(shape: tuple[int, ...]) -> int:
    """How many matrices of a stack are worked on at once."""
    batch, rows, columns = shape
    most = _LARGEST_SLICE * devices_in_use()
    return min(batch, max(most // max(rows * columns, 1), 1))


def each(function: Callable[..., Any], plans: Sequence[Plan], *operands: Any) -> list[Any]:
    """A function of a plan and one matrix for all matrices of all leaves.

    Args:
      function: Of a plan and what it needs of one matrix.
      plans: Of the leaves.
      operands: Of each leaf an array or a tree, with the stack's axis in front.

    Returns:
      For each leaf the results with the stack's axis in front.
    """
    return [
        _of_stack(function, plan, None, leaf) for plan, *leaf in zip(plans, *operands, strict=True)
    ]


def sweep(
    function: Callable[..., Any], plans: Sequence[Plan], stacks: Sequence[Matrices], *more: Any
) -> list[Any]:
    """`each`, with as many matrices of a stack at once as there may be targets in memory."""
    results = []
    for plan, stack, *rest in zip(plans, stacks, *more, strict=True):
        count = at_once(stack.grad.shape)
        some = count if count < stack.grad.shape[0] else None
        results.append(_of_stack(function, plan, some, [stack, *rest]))
    return results


def _of_stack(
    function: Callable[..., Any], plan: Plan, some: int | None, operands: Sequence[Any]
) -> Any:
    """A function of a plan and one matrix for all of a stack, or for `some` at once."""
    known, traced = split_known(plan.scalars)
    static = plan._replace(scalars=known)
    return _of_stack_traced_once(traced, list(operands), function, static, some)


# Leaves of one shape share what is traced: tracing all of 117M would take longer than all else.
@partial(jax.jit, static_argnums=(2, 3, 4))
def _of_stack_traced_once(
    traced: StepScalars,
    operands: list[Any],
    function: Callable[..., Any],
    static: Plan,
    some: int | None,
) -> Any:
    plan = static._replace(scalars=join_known(static.scalars, traced))
    if some is None:
        return jax.vmap(partial(function, plan))(*operands)
    return jax.lax.map(lambda x: function(plan, *x), tuple(operands), batch_size=some)
