"""What a level offers and one above it does: `plan.save` is planning's, the page the explorer's.

    PAGES = Provider[Writer]("dtensor.api.launch.plan_page:save_plan")
    PAGES.get()(plan, "plan.html")                  # imported now

Invariant: no level imports what is above it before that does something for it.
"""

from __future__ import annotations

import pkgutil
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Provider(Generic[T]):
    def __init__(self, name: str) -> None:
        """``name``: ``"module:function"``, what does it."""
        self._name = name

    def get(self) -> T:
        return cast(T, pkgutil.resolve_name(self._name))
