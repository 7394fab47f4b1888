"""Defaults that `--help` shows for options whose value is decided elsewhere, by a preset say."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import tyro

Class = TypeVar("Class", bound=type)


def show_defaults(defaults: Mapping[str, str]) -> Callable[[Class], Class]:
    """Returns a class decorator: `--help` shows these words in place of a field's default.

    Args:
      defaults: Words by name; names that are not those of fields are passed over.

    Returns:
      A decorator, to be applied before `dataclasses.dataclass`.
    """

    def decorate(decorated: Class) -> Class:
        for name in decorated.__annotations__.keys() & defaults.keys():
            hint = tyro.conf.arg(help_behavior_hint=f"(default: {defaults[name]})")
            decorated.__annotations__[name] = Annotated[decorated.__annotations__[name], hint]
        return decorated

    return decorate


def by_case(values: Mapping[str, Any]) -> str:
    """Words for a value that depends on the case: "400 for tiny, 100000 for 117M and 345M"."""
    cases: dict[str, list[str]] = {}
    for case, value in values.items():
        cases.setdefault(str(value), []).append(case)
    if len(cases) == 1:
        return next(iter(cases))
    return ", ".join(f"{value} for {' and '.join(names)}" for value, names in cases.items())
