"""The Python state that a walk reached: what guards compare, by value and by identity.

    state.fingerprint.paths[0], state.fingerprint.descriptions[0]    # "BETA (...)", (float, "0.1")
    state.entries["BETA"].holders          # [the globals of train]: where to read BETA again

Two fingerprints are equal if and only if the state is the same to a program: numbers and strings by
type and value (1, True and 1.0 differ), tensors by shape, dtype and requires_grad, containers,
objects, functions and modules by their parts, an object that was visited before by the number of
that visit, any other object by identity. The values in a tensor are not part of it.

A fingerprint takes a walk. Comparing identities takes microseconds (guards.py): the other fields
list the places to read and the objects to compare.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from dtensor.frontend.guards.known_functions import Getter
from dtensor.kernel_flags import kernel_flags

Roots = tuple[tuple[str, Any], ...]
"""Objects at which a walk starts, each with its name for messages."""

METHOD_OWNER = " (of a bound method)"
"""Suffix of the path of an object whose method in C is stored: `pop = items.pop` reaches items."""
REMOTE_VALUE = "_remote_value"
"""Attribute of a parameter whose value is on ranks (api/values/lazy_parameters.py)."""

T = TypeVar("T")
WithPaths = list[tuple[str, T]]
"""Objects, each with the path at which it was found. Two objects may have the same path."""


@dataclass(slots=True)
class Entries:
    """All places with one key: ``holders[i][key]`` was ``values[i]`` and was found at ``paths[i]``.

    The places are grouped by key so that guards can read each group in one comprehension.
    """

    holders: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Fingerprint:
    """The reached state by value: the description and the path of each visited object, in order.

    ``keep_alive``: the objects whose id is in a description; no other object can take their id.
    """

    descriptions: list[tuple[object, ...]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keep_alive: list[object] = field(default_factory=list, compare=False)

    def add(self, path: str, *description: object) -> None:
        self.descriptions.append(description)
        self.paths.append(path)

    def add_by_identity(self, path: str, value: object) -> None:
        self.keep_alive.append(value)
        self.add(path, "is", id(value))

    def truncate(self, length: int) -> None:
        del self.descriptions[length:], self.paths[length:]

    def first_difference(self, now: Fingerprint) -> str | None:
        """Return the first difference in words ("BETA (global of train): 0.1 -> 0.5"), or None."""
        for i, path in enumerate(self.paths):
            if i >= len(now.paths) or now.paths[i] != path:
                other = now.paths[i] if i < len(now.paths) else "it is gone"
                return path if path not in now.paths else other
            if self.descriptions[i] != now.descriptions[i]:
                return f"{path}: {_text(self.descriptions[i])} -> {_text(now.descriptions[i])}"
        return now.paths[len(self.paths)] if len(now.paths) > len(self.paths) else None


def _text(description: tuple[object, ...]) -> str:
    """Return a description as part of a message: (float, "0.1") is "0.1"."""
    kind, *values = description
    if isinstance(kind, type) and len(values) == 1:
        return repr(values[0]) if kind is str else str(values[0])
    if kind == "gives":
        return str(values[0])
    return "another object" if kind == "is" else " ".join(map(str, description))


@dataclass(slots=True)
class ReachedState:
    """The result of a walk."""

    fingerprint: Fingerprint = field(default_factory=Fingerprint)  # compared by value

    # Places to read: guards compare the identity of the object there.
    entries: dict[Any, Entries] = field(default_factory=dict)  # by key
    attributes: list[tuple[str, Any, str]] = field(default_factory=list)  # (path, object, slot)
    cells: WithPaths[CellType] = field(default_factory=list)
    context_variables: WithPaths[contextvars.ContextVar[Any]] = field(default_factory=list)

    # Objects to inspect. The comment is the property that guards compare.
    objects: list[Any] = field(default_factory=list)  # class, which may be assigned
    modules: list[nn.Module] = field(default_factory=list)  # number of hooks
    functions: WithPaths[FunctionType] = field(default_factory=list)  # code, defaults
    sized: WithPaths[Any] = field(default_factory=list)  # length
    tensor_attributes: WithPaths[dict[str, Any]] = field(default_factory=list)  # length
    ordered: list[Mapping[Any, Any]] = field(default_factory=list)  # order of the keys
    containers: list[Any] = field(default_factory=list)  # contents, by `raw_items`
    parameters: WithPaths[torch.Tensor] = field(default_factory=list)  # dtype; buffers, too
    tensors: WithPaths[torch.Tensor] = field(default_factory=list)  # others: `tensor_metadata`
    arrays: WithPaths[Any] = field(default_factory=list)  # `array_contents`
    getters: WithPaths[Getter] = field(default_factory=list)  # result

    # Not compared: side_effects.py and unguarded.py look at these once.
    generators: WithPaths[Any] = field(default_factory=list)  # of random numbers; iterators
    caches: WithPaths[Any] = field(default_factory=list)  # functools.lru_cache
    unguarded: WithPaths[Any] = field(default_factory=list)  # objects that cannot be compared

    extra_roots: Roots = ()  # functions that ran and are not reached from the roots
    reads_environment: bool = False
    reads_strides: bool = False

    def add_entry(self, holder: Any, key: Any, value: Any, path: str) -> None:
        """Add a place to read: ``holder[key]``, which is ``value`` now."""
        if (entries := self.entries.get(key)) is None:
            entries = self.entries[key] = Entries()
        entries.holders.append(holder)
        entries.values.append(value)
        entries.paths.append(path)

    def add_getter(self, path: str, getter: Getter) -> None:
        """Add a function whose result is compared, unless it was added under another path."""
        if any(getter is known for _, known in self.getters):
            return
        self.getters.append((path, getter))
        if getter is kernel_flags:  # an entry for each, so that a message names the flag
            for name, value in kernel_flags():
                self.fingerprint.add(f"a setting of torch, {name}", "gives", repr(value))
        else:
            self.fingerprint.add(path, "gives", repr(getter()))
