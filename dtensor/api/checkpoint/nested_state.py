"""A state of nested dicts that says where a key is which somebody looks up one level too high.

    state = gather_state_dict(model)
    state["up.weight"]        # KeyError: ... fix: state["model"]["up.weight"]

It is a dict, and a plain one wherever it is copied or pickled, so torch alone reads what is saved.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn


class NestedState(dict[str, Any]):
    """What `gather_state_dict` returns."""

    def __missing__(self, key: object) -> NoReturn:
        inside = [name for name, value in self.items() if isinstance(value, dict) and key in value]
        fix = f"state[{inside[0]!r}][{key!r}]" if inside else f"one of {', '.join(self)}"
        raise KeyError(f"{key!r} is no entry of the state. fix: {fix}".replace("'", '"'))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """As a dict that torch loads with weights_only, for which it knows one class of dicts."""
        items: Iterator[tuple[str, Any]] = iter(self.items())
        return OrderedDict, (), None, None, items
