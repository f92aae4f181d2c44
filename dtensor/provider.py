"""What a level offers and one above it does: `plan.save` is planning's, the page the explorer's.

    PAGES = Provider[Writer]("writes plans as pages")      # where it is offered
    PAGES.use(save_plan)                                   # dtensor/__init__.py, which knows both
    PAGES.get()(plan, "plan.html")

Invariant: there is one of each; so no level imports what is above it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Provider(Generic[T]):
    def __init__(self, what: str) -> None:
        """``what`` it does, for the error."""
        self._what = what
        self._given: T | None = None

    def use(self, given: T) -> None:
        """From now on this does it."""
        self._given = given

    def get(self) -> T:
        """RuntimeError where nothing does it: `import dtensor` says what does."""
        if self._given is None:
            raise RuntimeError(f"nothing here {self._what}.\nfix: import dtensor")
        return self._given
