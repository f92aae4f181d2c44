"""Which parameters and buffers a module has now: each is told by its object, not by its name.

    labels = Labels(net)
    seen = labels.see()
    seen.labels["down.weight"]            # "down.weight": an object's first name, which it keeps
    net.down = nn.Linear(64, 16)
    seen.stands()                         # False: other objects stand in the module, or elsewhere
    labels.see().labels["down.weight"]    # "down.weight#2": no label is given twice

What belongs to a parameter goes by its label: its shards on the ranks, its placement, its
optimizer's state. Its name is where the module has it now: programs, plans and files use that. So a
parameter that is moved takes all of it along, another in its place begins with nothing, and one
that is gone has all of it if it returns.

Not here: what a module's change means for placements and stages (parallel.py), and for values that
are on ranks (home.py).
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
"""How many different sights have their numbers known: a module may go back and forth."""

_held = attrgetter("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, eq=False)
class SeenModule:
    """What stands in a module. ``labels``: by each name; ``names``: by label, the first name;
    ``tensors``: by label; ``number``: the same for the same objects under the same names."""

    labels: Mapping[str, str]
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    number: int
    held: _Held = field(repr=False)

    def stands(self) -> bool:
        """Whether the module is as it was seen."""
        return self.held.stands()

    def name(self, label: str) -> str:
        """Where the module has it, or had it first."""
        return self.names.get(label, label)


class Labels:
    """The labels of a module's tensors, of all that ever stood in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._labels: Any = WeakIdKeyDictionary()  # tensor -> label
        self._given: dict[str, int] = {}  # name -> how many labels were made of it
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._last = 0

    def of(self, tensor: Tensor) -> str | None:
        """That of a tensor that stands in the module, or did."""
        return self._labels.get(tensor)

    @property
    def known(self) -> frozenset[str]:
        """Those of objects that are there still, in the module or not."""
        return frozenset(self._labels.values())

    def see(self) -> SeenModule:
        """What stands in the module now; objects that are new are given labels."""
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
        found = self._numbers.pop(placed, None)
        if found is None:
            self._last += 1
            found = self._last
        self._numbers[placed] = found  # the last used last
        while len(self._numbers) > _MOST_SEEN:
            del self._numbers[next(iter(self._numbers))]
        return found


class _Held:
    """What each module of one holds, compared at every step: by identity, in C."""

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
