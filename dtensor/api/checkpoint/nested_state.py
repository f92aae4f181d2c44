"""A dict of dicts whose KeyError names the inner dict that has the missing key.

    state = gather_state_dict(model)
    state["up.weight"]        # KeyError: ... fix: state["model"]["up.weight"]

Its copies and pickles are plain dicts, so torch can load them without dtensor.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn


class NestedState(dict[str, Any]):
    """The result of `gather_state_dict`."""

    def __missing__(self, key: object) -> NoReturn:
        inside = [name for name, value in self.items() if isinstance(value, dict) and key in value]
        fix = f"state[{inside[0]!r}][{key!r}]" if inside else f"one of {', '.join(self)}"
        raise KeyError(f"{key!r} is no entry of the state. fix: {fix}".replace("'", '"'))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle as an OrderedDict, which torch.load accepts with weights_only=True."""
        items: Iterator[tuple[str, Any]] = iter(self.items())
        return OrderedDict, (), None, None, items
