"""Who wrote what a capture finds changed: its program, or another thread meanwhile.

    wrote = Wrote(recorder)               # what ran in this thread, and calls of C that it made
    wrote.may(change)                     # False: no code that ran can make such a change
    wrote.drew("rng", generator)

A change is the program's only if code that ran in its thread can make it: an instruction that
stores under such a name, or under such a key, or a method that changes what it is called on. A
container that a function has made itself was not there before, so what is stored there counts not.

Invariants: in a process of one thread every change is the program's. What may be another thread's
is never taken for the program's where nothing that ran stores anything of its kind; what the
program wrote is never taken for another's. Not here: what has changed (effects.py).
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import CellType, CodeType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from dtensor.frontend.alone import has_started
from dtensor.frontend.reads.ran import CodeRecorder
from dtensor.frontend.source import OURS, owner_of_file

_ANY: Any = object()  # a key that is known when it runs
_NAMED = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"}
_CELLS = {"STORE_DEREF", "DELETE_DEREF"}
_MUTATING = {"add", "append", "appendleft", "clear", "difference_update", "discard", "extend"}
_MUTATING |= {"extendleft", "insert", "intersection_update", "pop", "popitem", "popleft", "remove"}
_MUTATING |= {"reverse", "rotate", "setdefault", "sort", "symmetric_difference_update", "update"}
_MUTATING |= {"__setitem__", "__delitem__", "__ior__", "__iadd__"}
_ANY_NAME = {"setattr", "delattr", "__dict__", "__setattr__", "__delattr__", "vars", "globals"}
_SETTERS = {f"<built-in method builtins.{name}>" for name in ("setattr", "delattr")}
_OF_MODULES = {"add_module", "register_module", "append", "extend", "insert", "pop", "update"}
_OF_MODULES |= {"__setitem__", "__delitem__"}  # of nn.ModuleList and nn.ModuleDict
_FRESH = {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SET", "LIST_EXTEND"}
_FRESH |= {"DICT_MERGE", "DICT_UPDATE", "SET_UPDATE"}
_LOADS = {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}
_INPLACE = 13  # the first of the numbers of BINARY_OP that write in place


@dataclass(frozen=True, slots=True)
class _Stores:
    """What a code stores: under names, in cells, under keys, and whether it may in place."""

    names: frozenset[str]
    cells: frozenset[str]
    keys: tuple[Any, ...]
    in_place: bool


class Wrote:
    """``recorder``: of what ran; ``alone``: whether no other thread was there."""

    def __init__(self, recorder: CodeRecorder, *, alone: bool) -> None:
        seen = None if alone or has_started() else recorder.everything()
        self._codes = None if seen is None else [c for c in seen[0] if not _is_ours(c)]
        self._called: set[str] = set() if seen is None else seen[1]

    def may(self, change: Any) -> bool:
        """Whether the program may have made a change of `effects`."""
        if self._codes is None or _holds_fakes(change.after, 4):
            return True
        stores = [_stores(code) for code in self._codes]
        if isinstance(change.holder, CellType):
            name = change.path.partition(" (closure")[0]
            return any(name in s.cells for s in stores) or self._names("cell_contents")
        if change.key is None:  # a list, a set
            return any(s.keys or s.in_place for s in stores)
        if hasattr(type(change.holder), "__missing__"):  # reading is enough
            return True
        if change.path.endswith("]"):
            return any(s.in_place or any(_fits(k, change.key) for k in s.keys) for s in stores)
        return (
            any(change.key in s.names for s in stores)
            or self._names(*_ANY_NAME)
            or not self._called.isdisjoint(_SETTERS)
            or any(c.co_name in _OF_MODULES and "modules" in c.co_filename for c in self._codes)
        )

    def drew(self, path: str, generator: Any) -> bool:
        """Whether the program may have taken from a generator of random numbers, or an iterator."""
        if self._codes is None:
            return True
        name = path.partition(" (")[0].rpartition(".")[2].partition("[")[0]
        match generator:
            case torch.Generator():
                return any("torch._C.Generator" in text for text in self._called)
            case GeneratorType():
                return any(code is generator.gi_code for code in self._codes)
            case _ if generator is np.random:
                return self._names("random", "RandomState") or self._calls(np.random.mtrand._rand)
            case np.random.Generator() | np.random.RandomState():
                return self._names(name)
            case _ if generator is random or isinstance(generator, random.Random):
                drawn = any("_random.Random" in text or "Random." in text for text in self._called)
                if generator is random:
                    return drawn and (self._names("random") or self._calls(random._inst))  # type: ignore[attr-defined]
                return drawn and self._names(name)
            case _:
                return True

    def ran(self, code: CodeType | None) -> bool:
        return self._codes is None or any(code is one for one in self._codes)

    def _names(self, *names: str) -> bool:
        """Whether code of the user's or a library's says one of them."""
        assert self._codes is not None
        wanted = set(names)
        return any(
            not wanted.isdisjoint((*c.co_names, *c.co_freevars, *c.co_varnames))
            for c in self._codes
            if c.co_filename.startswith("<") or owner_of_file(c.co_filename) is not None
        )

    def _calls(self, instance: Any) -> bool:
        """Whether one of these codes has a bound method of it among its globals, by the name."""
        assert self._codes is not None
        files = {code.co_filename: code for code in self._codes}
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", {})
            if space.get("__file__") in files or space.get("__name__") == "__main__":
                names = {n for c in self._codes for n in c.co_names}
                if any(getattr(space.get(n), "__self__", None) is instance for n in names):
                    return True
        return False


def is_alone() -> bool:
    """Whether no other thread runs Python."""
    return len(sys._current_frames()) == 1


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _fits(known: Any, key: Any) -> bool:
    return known is _ANY or (type(known) is type(key) and known == key)


@lru_cache(maxsize=4096)
def _stores(code: CodeType) -> _Stores:
    instructions = list(dis.get_instructions(code))
    fresh = _made_here(code, instructions)
    names, cells, keys, in_place = set[str](), set[str](), list[Any](), False
    for at, one in enumerate(instructions):
        match one.opname:
            case name if name in _NAMED:
                names.add(one.argval)
            case name if name in _CELLS:
                cells.add(one.argval)
            case "STORE_SUBSCR" | "DELETE_SUBSCR":
                container, key = _operands(instructions, at)
                if not _is_fresh(container, fresh):
                    keys.append(key)
            case "BINARY_OP" if one.arg is not None and one.arg >= _INPLACE:
                in_place |= _follows_load(instructions, at)
            case "LOAD_METHOD" | "LOAD_ATTR" if one.argval in _MUTATING:
                in_place |= not _is_fresh(instructions[at - 1], fresh)
            case _:
                pass
    return _Stores(frozenset(names), frozenset(cells), tuple(keys), in_place)


Instructions = list[dis.Instruction]


def _operands(found: Instructions, at: int) -> tuple[dis.Instruction | None, Any]:
    """What loads the container that is stored to, and the key where it is a constant."""
    key = at - 1
    if found[key].opname == "SWAP":  # d[k] += 1
        while key > 0 and not (found[key].opname == found[key - 1].opname == "COPY"):
            key -= 1
        key -= 2
    if key < 1 or found[key].opname not in _LOADS:
        return None, _ANY
    constant = found[key].opname == "LOAD_CONST"
    return found[key - 1], found[key].argval if constant else _ANY


def _follows_load(found: Instructions, at: int) -> bool:
    """Whether what is written in place may be a container: not where a number follows."""
    return not (
        found[at - 1].opname == "LOAD_CONST" and isinstance(found[at - 1].argval, int | float)
    )


def _is_fresh(one: dis.Instruction | None, fresh: set[str]) -> bool:
    return one is not None and one.opname == "LOAD_FAST" and one.argval in fresh


def _made_here(code: CodeType, found: Instructions) -> set[str]:
    """The variables that only ever are containers which this code makes; *args and **kwargs."""
    num = code.co_argcount + code.co_kwonlyargcount
    flags = code.co_flags
    extra = bool(flags & 0x04) + bool(flags & 0x08)
    given, own = set(code.co_varnames[:num]), set(code.co_varnames[num : num + extra])
    made, other = set[str](), set[str]()
    for before, one in pairwise(found):
        if one.opname == "STORE_FAST":
            (made if before.opname in _FRESH else other).add(one.argval)
    return (made | own) - other - given


def _holds_fakes(value: Any, depth: int) -> bool:
    """Which only a capture makes."""
    return any(isinstance(x, FakeTensor) for x in _tensors(value, depth))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case torch.nn.Module() | type():
            pass
        case dict() if depth:
            for one in list(value.values()):
                yield from _tensors(one, depth - 1)
        case list() | tuple() | set() if depth:
            for one in list(value):
                yield from _tensors(one, depth - 1)
        case _ if depth:
            for one in list(getattr(value, "__dict__", {}).values()):
                yield from _tensors(one, depth - 1)
        case _:
            pass
