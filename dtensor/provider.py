"""`Provider`: a function of a higher level, for a module that must not import that level.

    SAVE_PLAN = Provider[Writer]("save_plan")       # sharding/plan/plan.py, a low level
    SAVE_PLAN.get()(plan, "plan.html")              # imports the explorer now

`dtensor/__init__.py` states where each function is, so that no module names a higher level.
"""

from __future__ import annotations

import pkgutil
from typing import Generic, TypeVar, cast

T = TypeVar("T")

_FUNCTIONS: dict[str, str] = {}


def provide(**functions: str) -> None:
    """Record the place, ``"module:function"``, of the functions of providers by their names."""
    _FUNCTIONS.update(functions)


class Provider(Generic[T]):
    def __init__(self, name: str) -> None:
        self._name = name

    def get(self) -> T:
        """Return the function, importing its module. Raises KeyError if no place is recorded."""
        return cast(T, pkgutil.resolve_name(_FUNCTIONS[self._name]))
