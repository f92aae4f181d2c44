"""The labels of a module's parameters and buffers: each belongs to an object, not to its name.

    labels = Labels(net)
    seen = labels.see()
    seen.labels["down.weight"]            # "down.weight": an object's first name, which it keeps
    net.down = nn.Linear(64, 16)
    seen.stands()                         # False: the module has other objects, or other names
    labels.see().labels["down.weight"]    # "down.weight#2": no label is used twice

The facts of a parameter are stored by its label: its shards on the ranks, its placement, its
optimizer's state. Its name is its present place in the module: programs, plans and files use that.
So a parameter that moves in the module keeps them, another in its place begins with none, and a
removed one has them again if it returns.

Not here: the effect of a module's change on placements and stages (parallel.py), and on values on
ranks (home.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dtensor.frontend.graph import named_tensors

_MOST_SEEN = 64
"""Number of different `SeenModule`s whose numbers are kept: a module may change back and forth."""

_held = attrgetter("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, eq=False)
class SeenModule:
    """The contents of a module. ``labels``: by each name; ``names``: by label, the first name;
    ``tensors``: by label; ``number``: the same for the same objects under the same names."""

    labels: Mapping[str, str]
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    number: int
    held: _Held = field(repr=False)

    def stands(self) -> bool:
        """Whether the module is unchanged."""
        return self.held.stands()

    def name(self, label: str) -> str:
        """Its name in the module, or its first name."""
        return self.names.get(label, label)


class Labels:
    """The labels of a module's tensors, of all that were ever in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._labels: Any = WeakIdKeyDictionary()  # tensor -> label
        self._given: dict[str, int] = {}  # name -> number of labels made from it
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._last = 0

    def of(self, tensor: Tensor) -> str | None:
        """The label of a tensor that is in the module, or was."""
        return self._labels.get(tensor)

    @property
    def known(self) -> frozenset[str]:
        """The labels of objects that still exist, in the module or not."""
        return frozenset(self._labels.values())

    def see(self) -> SeenModule:
        """The module's present contents; new objects get labels."""
        held = _Held(self.module)
        tensors = named_tensors(self.module)
        labels = {name: self._label(name, tensor) for name, tensor in tensors.items()}
        names: dict[str, str] = {}
        for name, label in labels.items():
            names.setdefault(label, name)
        return SeenModule(
            labels=labels,
            names=names,
            tensors={label: tensors[name] for label, name in names.items()},
            number=self._number(tuple(labels.items())),
            held=held,
        )

    def _label(self, name: str, tensor: Tensor) -> str:
        label = self._labels.get(tensor)
        if label is None:
            number = self._given[name] = self._given.get(name, 0) + 1
            label = self._labels[tensor] = name if number == 1 else f"{name}#{number}"
        return label

    def _number(self, placed: tuple[tuple[str, str], ...]) -> int:
        number = self._numbers.pop(placed, None)
        if number is None:
            self._last += 1
            number = self._last
        self._numbers[placed] = number  # the last used last
        while len(self._numbers) > _MOST_SEEN:
            del self._numbers[next(iter(self._numbers))]
        return number


class _Held:
    """The contents of each module of one, compared at every step: by identity, in C."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = tuple(module.modules())
        self.all: list[dict[str, Any]] = list(chain.from_iterable(map(_held, self.modules)))
        self.full = [own for own in self.all if own]
        self.empty = [own for own in self.all if not own]
        self.keys = list(chain.from_iterable(self.full))
        self.values = list(chain.from_iterable(map(dict.values, self.full)))

    def stands(self) -> bool:
        return not (
            any(map(is_not, chain.from_iterable(map(_held, self.modules)), self.all))
            or any(self.empty)
            or list(chain.from_iterable(self.full)) != self.keys
            or any(map(is_not, chain.from_iterable(map(dict.values, self.full)), self.values))
        )
