"""Labels of a module's parameters and buffers. A label belongs to a tensor object, not to its name.

    labels = Labels(net)
    seen = labels.see()
    seen.labels["down.weight"]            # "down.weight": an object's first name, which it keeps
    net.down = nn.Linear(64, 16)
    seen.stands()                         # False: the module has other objects, or other names
    labels.see().labels["down.weight"]    # "down.weight#2": no label is used twice

A parameter's shards, placement and optimizer state are stored by its label. Programs, plans and
files use its name, its present place in the module. So a parameter that moves in the module, or is
removed and returns, keeps its state; another parameter in its place has none.
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

_MAX_NUMBERS = 64
"""How many different contents keep their numbers, because a module may change back and forth."""

_dicts_of = attrgetter("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSnapshot:
    """The contents of a module when a snapshot was made.

    labels: name -> label. names: label -> first name. tensors: label -> tensor. number: equal for
    snapshots with the same tensors under the same names.
    """

    labels: Mapping[str, str]
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    number: int
    contents: _Contents = field(repr=False)

    def is_current(self) -> bool:
        """Return whether the module still has these contents."""
        return self.contents.is_current()

    def name(self, label: str) -> str:
        """Return the name of a tensor; the label itself if the tensor is not in the module."""
        return self.names.get(label, label)


class Labels:
    """The labels of all tensors that a module has or had."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._labels: Any = WeakIdKeyDictionary()  # tensor -> label
        self._num_labels: dict[str, int] = {}  # name -> number of labels made from it
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}  # of contents; last used last
        self._last_number = 0

    def of(self, tensor: Tensor) -> str | None:
        """Return the label of a tensor that is or was in the module, else None."""
        return self._labels.get(tensor)

    @property
    def known(self) -> frozenset[str]:
        """The labels of objects that still exist, in the module or not."""
        return frozenset(self._labels.values())

    def snapshot(self) -> ModuleSnapshot:
        """Return the module's present contents. New tensors get labels."""
        contents = _Contents(self.module)
        tensors = named_tensors(self.module)
        labels = {name: self._label(name, tensor) for name, tensor in tensors.items()}
        names: dict[str, str] = {}
        for name, label in labels.items():
            names.setdefault(label, name)
        return ModuleSnapshot(
            labels=labels,
            names=names,
            tensors={label: tensors[name] for label, name in names.items()},
            number=self._number(tuple(labels.items())),
            contents=contents,
        )

    def _label(self, name: str, tensor: Tensor) -> str:
        """Return the tensor's label: its first name, with a number if a label has that name."""
        label = self._labels.get(tensor)
        if label is None:
            number = self._num_labels[name] = self._num_labels.get(name, 0) + 1
            label = self._labels[tensor] = name if number == 1 else f"{name}#{number}"
        return label

    def _number(self, named_labels: tuple[tuple[str, str], ...]) -> int:
        """Return the number of these contents, a new one if they have none among the last."""
        number = self._numbers.pop(named_labels, None)
        if number is None:
            self._last_number += 1
            number = self._last_number
        self._numbers[named_labels] = number
        while len(self._numbers) > _MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return number


class _Contents:
    """The dicts of parameters, buffers and submodules of a module and of all its submodules, with
    their keys and values. Every step compares them: by identity, in C."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = tuple(module.modules())
        self.dicts: list[dict[str, Any]] = list(chain.from_iterable(map(_dicts_of, self.modules)))
        self.full = [items for items in self.dicts if items]
        self.empty = [items for items in self.dicts if not items]
        self.keys = list(chain.from_iterable(self.full))
        self.values = list(chain.from_iterable(map(dict.values, self.full)))

    def is_current(self) -> bool:
        """Return whether the module has the same dicts, keys and values."""
        return not (
            any(map(is_not, chain.from_iterable(map(_dicts_of, self.modules)), self.dicts))
            or any(self.empty)
            or list(chain.from_iterable(self.full)) != self.keys
            or any(map(is_not, chain.from_iterable(map(dict.values, self.full)), self.values))
        )
