"""A chain that tells by its name where it is given the state of another optimizer."""

from typing import Any

import optax


def named_chain(name: str, *parts: optax.GradientTransformation) -> Any:
    """`optax.chain` whose update raises ValueError where the state is of another optimizer.

    A list is taken too, as some checkpoints give a state back.
    """
    chain = optax.chain(*parts)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        if not isinstance(state, tuple | list) or len(state) != len(parts):
            raise ValueError(
                f"{name} got the state of another optimizer; allowed: one from {name}(...).init, or"
                " from_adam(tx, adam_state, params)."
            )
        return chain.update(updates, state, params, **more)

    return optax.GradientTransformationExtraArgs(chain.init, update)
