"""One-line errors for arguments out of range."""

import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# What numbers are allowed, as the last two arguments of `require`.
Range: TypeAlias = tuple[Callable[[Any], bool], str]
DECAY: Range = (lambda x: 0 <= x < 1, "a number in [0, 1)")
NOT_NEGATIVE: Range = (lambda x: 0 <= x < math.inf, "a finite number of at least 0")
FINITE: Range = (lambda x: abs(x) < math.inf, "a finite number")
POSITIVE: Range = (lambda x: x > 0, "a number above 0")


def require(name: str, value: Any, holds: Callable[[Any], bool], allowed: str) -> None:
    """Raises ValueError naming the argument, its value and what is allowed.

    Traced values pass (under `optax.inject_hyperparams`, say): there is nothing to compare.

    Args:
      name: The argument's name.
      value: Its value, a real number or an array of no axes.
      holds: Whether a concrete value is allowed. NaN must not be.
      allowed: What is allowed, in words.
    """
    if isinstance(value, jax.core.Tracer):
        return
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array and not getattr(value, "is_fully_addressable", True):
        return
    number = np.asarray(value)[()] if is_array and value.ndim == 0 else value
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool | np.bool_)
    if not (is_number or _is_low_precision(number)) or not holds(number):
        given = f"{value.dtype}{list(value.shape)}" if is_array and value.ndim else repr(value)
        raise ValueError(f"{name} is {given}; allowed: {allowed}.")


def require_precise(name: str, value: Any) -> None:
    """Raises ValueError for an array of fewer than 32 bits that is 1, or may be: so is 0.999 there.

    Under `optax.inject_hyperparams` hyperparameters have the type of the parameters unless said
    otherwise.
    """
    if not isinstance(value, jax.Array) or value.ndim:
        return
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    if is_narrow and (isinstance(value, jax.core.Tracer) or value == 1):
        raise ValueError(
            f"{name} is an array of type {value.dtype.name}; allowed: a number, or an array of 32"
            " bits or more. Under optax.inject_hyperparams give hyperparam_dtype=jnp.float32."
        )


def require_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises ValueError unless `value` is a concrete integer from `least` to `most`."""
    if isinstance(value, jax.Array):
        what = "traced" if isinstance(value, jax.core.Tracer) else "an array of JAX"
        raise ValueError(
            f"{name} is {what}; allowed: a Python number, as int() makes one. Under"
            " optax.inject_hyperparams give static_args=adapprox_jax.STATIC_ARGS, or"
            " MUON_STATIC_ARGS for adapprox_muon."
        )
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and value >= least and (most is None or value <= most)):
        upper = "of at least" if most is None else "from"
        bounds = f"{upper} {least}" + ("" if most is None else f" to {most}")
        raise ValueError(f"{name} is {value!r}; allowed: an integer {bounds}.")


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array or value not in choices:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, choices))}.")


def dtype_name(value: Any) -> str:
    """The name of a type, or of "int5"; what is no type is shown as it is."""
    if isinstance(value, jax.Array | np.ndarray):  # `jnp.dtype` would take it for its type
        return "an array"
    try:
        return str(value) if value is None or value == "int5" else jnp.dtype(value).name
    except TypeError:
        return repr(value)


def require_dtype(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is a type with one of these names."""
    if dtype_name(value) not in choices:
        raise ValueError(f"{name} is {dtype_name(value)}; allowed: {', '.join(choices)}.")


def require_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}; allowed: True or False.")


def require_function(name: str, value: Any, allowed: str) -> None:
    """Raises ValueError unless `value` can be called with one argument."""
    if not (callable(value) and takes_one_argument(value)):
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


def takes_one_argument(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument, as far as it tells."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # it does not tell its arguments
        pass
    return True


def require_or_schedule(name: str, value: Any, holds: Callable[[Any], bool], allowed: str) -> None:
    """`require` of a number, or `require_function` of what can be called."""
    allowed = f"{allowed}, or a function from the step to one"
    if callable(value):
        require_function(name, value, allowed)
    else:
        require(name, value, holds, allowed)


def at_step(
    name: str, value: Any, step: jax.Array, holds: Callable[[Any], bool], allowed: str
) -> Any:
    """A hyperparameter at a step: what the function gives, if it is one.

    Raises:
      ValueError: It gives something else than one real number, or one that is not allowed.
    """
    result = value(step) if callable(value) else value
    require_scalar(name, result)
    if callable(value):
        require(name, result, holds, f"{allowed} at every step")
    return result


def require_transformation(name: str, value: Any) -> None:
    """Raises ValueError unless `value` has Optax's `init` and `update`."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        kind = type(value).__name__
        raise ValueError(f"{name} is a {kind}; allowed: an optax.GradientTransformation.")


def require_scalar(name: str, result: Any) -> None:
    """Raises ValueError unless what the function `name` gave is one real number, traced or not."""
    try:
        if result is None:
            raise TypeError
        dtype, shape = jnp.result_type(result), np.shape(result)
    except TypeError:
        raise ValueError(f"{name} gave {result!r}; allowed: one real number.") from None
    if shape != () or jnp.issubdtype(dtype, np.complexfloating):
        raise ValueError(f"{name} gave {dtype.name}{list(shape)}; allowed: one real number.")


def require_same(what: str, given: Any, expected: Any) -> None:
    """Raises ValueError where two things differ that belong together, such as shapes of a leaf."""
    if given != expected:
        raise ValueError(
            f"{what} {given}; expected {expected}. Was the state made for"
            " other parameters, or with other settings?"
        )


def check_concrete(function: str, tree: Any) -> None:
    """Raises ValueError where a function that works on the host is given traced arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer):
            name = jax.tree_util.keystr(path) or "the only leaf"
            raise ValueError(
                f"{function} got a traced array at {name}; allowed: concrete arrays."
                f" Call {function} between two steps, outside of jax.jit and the like."
            )


def check_state(state: Any, expected: type, transformation: str) -> None:
    """Raises ValueError where a transformation is given the state of another one."""
    if not isinstance(state, expected):
        raise ValueError(
            f"{transformation} got a state of type {type(state).__name__}; expected"
            f" {expected.__name__}. Was it made by another optimizer or with other settings?"
        )


def is_zero(value: Any) -> bool:
    """Whether a hyperparameter is known to be zero: a concrete number, not an array."""
    return isinstance(value, numbers.Real) and value == 0


def _is_low_precision(number: Any) -> bool:
    """Whether a NumPy scalar is of a type such as bfloat16, which is no `numbers.Real`."""
    return isinstance(number, np.generic) and jnp.issubdtype(number.dtype, np.floating)
