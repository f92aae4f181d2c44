"""What a captured program read besides its arguments, and whether it is still the same.

    reads = Guards(roots, ran, graph's constants)
    reads.same()          # before each call: True, and some tens of microseconds
    reads.difference()    # "temperature: 1.0 -> 0.5", or None: the same by value

`same` compares identities, of all that the walk found, and so may err on one side alone: an object
that was replaced by its equal. `difference` then walks again and compares by value (walk.py), and
takes over what it found where that is the same.

A tensor that the program caught is no part of that comparison: what it holds now is what the next
call computes with. `refreshed` names those that changed: up to 1 MB by comparing what they hold,
above that by `_version` and `data_ptr`, which miss writes through numpy and `.data`.

Not here: what is done about a difference (api/step/plan_call.py).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from dtensor.frontend.guards.executed_code import ExecutedCode
from dtensor.frontend.guards.raw_access import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    array_contents,
    has_hooks,
    raw_attribute,
    raw_items,
    tensor_metadata,
)
from dtensor.frontend.guards.reached_state import REMOTE_VALUE, ReachedState, Roots
from dtensor.frontend.guards.walk import walk
from dtensor.private_torch import OPDEFS, DisableTorchFunctionSubclass, OpOverload

MOST_COMPARED = 2**20
"""Bytes up to which a caught tensor is compared by what it holds."""
_WORTH_A_COLUMN = 4


@dataclass(slots=True)
class CapturedTensor:
    """A tensor that a program uses and was not given, as its input ``name``; ``kept``: what it held
    when it was last looked at; ``number``: how often that changed; ``place``: which of the tensors
    that the walk finds."""

    name: str
    place: int | None
    tensor: torch.Tensor
    kept: torch.Tensor
    stamp: tuple[int, int]
    number: int = 0

    def refresh(self) -> None:
        now = self.tensor.detach()
        stamp = (now._version, now.data_ptr())
        unseen = now.nbytes > MOST_COMPARED
        if stamp == self.stamp and (unseen or _holds(now, self.kept)):
            return
        self.stamp = stamp
        self.kept = now.clone()
        self.number += 1


Definition: TypeAlias = tuple[object, ...]
NO_OPS: Mapping[str, Definition] = {}


def definition_of(name: str) -> Definition:
    """What makes up a custom op, "mylib::scale", now: its kernels, its gradient, its shapes. A
    module that is reloaded defines its ops anew, under the same names."""
    definition: Any = OPDEFS.get(name)
    if definition is None:
        return ()
    kernels = definition._backend_fns.values()
    return (
        definition,
        *kernels,
        definition._backward_fn,
        definition._setup_context_fn,
        definition._abstract_fn,
    )


def custom_ops(graph: fx.Graph) -> dict[str, Definition]:
    """The ops of a graph that `torch.library.custom_op` defined, by name."""
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    names = sorted({target.name().partition(".")[0] for target in targets})
    return {name: made for name in names if (made := definition_of(name))}


class Guards:
    """What one program read. ``caught``: the constants of the program that the user holds.
    ``ops``: its custom ops, as `custom_ops` has them. ``values``: tensors whose values its Python
    read, each with a copy of them."""

    def __init__(
        self,
        roots: Roots,
        ran: ExecutedCode | None,
        constants: Sequence[Any] = (),
        ops: Mapping[str, Definition] = NO_OPS,
        *,
        values: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        searched: bool = False,
    ) -> None:
        self.roots: Roots = roots
        self.ran = ran
        self.ops = ops
        self.caught: list[CapturedTensor] = []
        self._searched = searched  # through all that there is, which takes a while
        reached = self._walk()
        tensors = _tensors(reached)
        places = {_storage(tensor): place for place, tensor in enumerate(tensors)}
        for name, value in constants:
            place = places.get(_storage(value))
            tensor = value if place is None else tensors[place]
            stamp = (value._version, value.data_ptr())
            self.caught.append(CapturedTensor(name, place, tensor, value.clone(), stamp))
        self.values = values
        self._places = [places.get(_storage(tensor)) for tensor, _ in values]
        self._take(reached)

    def of(self, constants: Sequence[Any], ops: Mapping[str, Definition]) -> Guards:
        """Of another graph of the same program, at the same time."""
        return Guards(self.roots, self.ran, constants, ops, values=self.values, searched=True)

    def _walk(self) -> ReachedState:
        reached = walk(self.roots, self.ran, search=not self._searched)
        self._searched = True
        self.roots += reached.extra_roots
        return reached

    def _take(self, reached: ReachedState) -> None:
        self.reached = reached
        columns = [(key, e.holders, e.values) for key, e in reached.entries.items()]
        self._columns = [column for column in columns if len(column[1]) >= _WORTH_A_COLUMN]
        few = [column for column in columns if len(column[1]) < _WORTH_A_COLUMN]
        self._entries = [(holder, key) for key, holders, _ in few for holder in holders]
        self._values = [value for _, _, values in few for value in values]
        self._cells = [cell for _, cell in reached.cells]
        self._contents = [cell.cell_contents for cell in self._cells]
        self._functions = [function for _, function in reached.functions]
        self._defaults = [f.__defaults__ for f in self._functions]
        self._codes = [f.__code__ for f in self._functions]
        self._sized = [holder for _, holder in reached.sized]
        self._lengths = list(map(len, self._sized))
        self._spaces = [space for _, space in reached.tensor_attributes]
        self._numbers_of_attributes = self._now_attributes()
        several = (d for d in reached.ordered if len(d) > 1)
        self._ordered = [d for d in several if type(d) in (dict, OrderedDict)]
        self._keys = list(chain.from_iterable(self._ordered))
        self._sets = [(s, frozenset(s)) for s in self._sized if isinstance(s, (set, frozenset))]
        self._objects = reached.objects
        self._types = list(map(type, reached.objects))
        self._attributes = [(o, n, _attribute(o, n)) for _, o, n in reached.attributes]
        self._containers = [(c, raw_items(c) or []) for c in reached.containers]
        self._variables = [(v, v.get(None)) for _, v in reached.context_variables]
        self._arrays = [(a, array_contents(a)) for _, a in reached.arrays]
        self._asked = [(asked, asked()) for _, asked in reached.getters]
        self._tensors = [x for _, x in reached.tensors]
        self._metadata = self._now_metadata()
        self._weights = [x for _, x in reached.parameters]
        self._flags = self._now_flags()
        self._hooks = RemovableHandle.next_id
        self._numbers_of_hooks = self._hooks_here()
        self._around = _around(reached)
        tensors = _tensors(reached)
        for caught in self.caught:
            if caught.place is not None:
                caught.tensor = tensors[caught.place]
        self._read = [
            (tensor if place is None else tensors[place], value)
            for place, (tensor, value) in zip(self._places, self.values, strict=True)
        ]
        paths = [path for path, _ in (*reached.parameters, *reached.tensors)]
        self._read_paths = ["a tensor" if p is None else paths[p] for p in self._places]

    def _now_flags(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            wanted = [x.requires_grad for x in self._weights]
            wanted += [x.dtype for x in self._weights]
        return wanted

    def _now_attributes(self) -> list[int]:
        return [len(space) - (REMOTE_VALUE in space) for space in self._spaces]

    def _now_metadata(self) -> list[Any]:
        return [tensor_metadata(x, strides=self.reached.reads_strides) for x in self._tensors]

    def same(self) -> bool:
        """Whether nothing was replaced; False may be a false alarm."""
        try:
            for key, holders, values in self._columns:
                if not all(map(is_, [holder[key] for holder in holders], values)):
                    return False
            if not all(map(is_, [holder[key] for holder, key in self._entries], self._values)):
                return False
            for cell, content in zip(self._cells, self._contents):
                if cell.cell_contents is not content:
                    return False
        except (KeyError, IndexError, ValueError):
            return False
        return (
            list(map(len, self._sized)) == self._lengths
            and self._now_attributes() == self._numbers_of_attributes
            and list(chain.from_iterable(self._ordered)) == self._keys
            and all(map(is_, map(type, self._objects), self._types))
            and (self._hooks == RemovableHandle.next_id or self._same_hooks())
            and self._now_flags() == self._flags
            and all(map(is_, [f.__defaults__ for f in self._functions], self._defaults))
            and all(map(is_, [f.__code__ for f in self._functions], self._codes))
            and all(_attribute(o, name) is value for o, name, value in self._attributes)
            and all(variable.get(None) is value for variable, value in self._variables)
            and all(held == kept for held, kept in self._sets)
            and all(
                len(now := raw_items(c) or []) == len(kept) and all(map(is_, now, kept))
                for c, kept in self._containers
            )
            and self._now_metadata() == self._metadata
            and all(array_contents(array) == kept for array, kept in self._arrays)
            and all(asked() == given for asked, given in self._asked)
            and all(_holds(tensor, value) for tensor, value in self._read)
            and self._around == _around(self.reached)
            and all(definition_of(name) == before for name, before in self.ops.items())
        )

    def _same_hooks(self) -> bool:
        """Whether the hooks that were made since are others'."""
        if self._hooks_here() != self._numbers_of_hooks:
            return False
        self._hooks = RemovableHandle.next_id
        return True

    def _hooks_here(self) -> list[int]:
        spaces = [vars(module) for module in self.reached.modules]
        kinds = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
        return [len(space.get(kind, ())) for space in spaces for kind in kinds] + [
            has_hooks(x) for x in self._weights
        ]

    def difference(self) -> str | None:
        """What is no longer as it was read, in words; None where all is the same by value."""
        for name, before in self.ops.items():
            if definition_of(name) != before:
                return f"the op {name}, which was defined anew"
        reached = self._walk()
        before, now = self.reached, reached
        if before.fingerprint == now.fingerprint and before.paths == now.paths:
            arrays = [array_contents(a) for _, a in now.arrays]
            if arrays != [kept for _, kept in self._arrays]:
                return f"what {now.arrays[0][0]} holds"
            if self._around != _around(reached):
                return "torch's default dtype, its global hooks, or the environment"
            self._take(reached)
            for path, (tensor, value) in zip(self._read_paths, self._read, strict=True):
                if not _holds(tensor, value):
                    return f"{path}: {_numbers(value)} -> {_numbers(tensor)}"
            return None
        for index, path in enumerate(before.paths):
            if index >= len(now.paths) or now.paths[index] != path:
                other = now.paths[index] if index < len(now.paths) else "it is gone"
                return path if path not in now.paths else other
            if before.fingerprint[index] != now.fingerprint[index]:
                was, is_now = before.fingerprint[index], now.fingerprint[index]
                return f"{path}: {_words(was)} -> {_words(is_now)}"
        return now.paths[len(before.paths)]

    def hold(self, constants: Sequence[Any]) -> None:
        """Other tensors in the place of those that were caught, in their order."""
        for caught, (_, value) in zip(self.caught, constants, strict=True):
            caught.tensor = value

    def refresh(self) -> None:
        """Looks at what the caught tensors hold now."""
        for caught in self.caught:
            caught.refresh()


def _attribute(value: Any, name: str) -> Any:
    """As `getattr`, without asking the object's own methods; None where it is not there."""
    try:
        return raw_attribute(value, name)
    except AttributeError:
        return None


def _around(reached: ReachedState) -> tuple[Any, ...]:
    """What of the process torch reads by itself."""
    environment = dict(os.environ) if reached.reads_environment else None
    forward_hooks = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)
    hooks = (
        tuple(id(hook) for held in forward_hooks for hook in held.values())
        if any(forward_hooks)
        else ()
    )
    return (torch.get_default_dtype(), hooks, environment)


def _tensors(reached: ReachedState) -> list[torch.Tensor]:
    """Those of modules that were not given are caught as well."""
    return [x for _, x in (*reached.parameters, *reached.tensors)]


def _storage(x: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    with DisableTorchFunctionSubclass():  # where it is, not what it holds
        return (x.data_ptr(), x.shape, x.stride())


def _bits(x: torch.Tensor) -> torch.Tensor:
    """What tells 0.0 from -0.0, and a nan from a number."""
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _holds(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor has the dtype, shape and bits of a value."""
    with DisableTorchFunctionSubclass():
        same = x.dtype == value.dtype and x.shape == value.shape
        return same and torch.equal(_bits(x.detach()), _bits(value))


def _numbers(x: torch.Tensor) -> str:
    text = str(x.tolist())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(entry: Any) -> str:
    """An entry of a fingerprint in words."""
    words: Iterable[Any] = entry if isinstance(entry, tuple) else (entry,)
    kind, *rest = words
    if isinstance(kind, type) and len(rest) == 1:
        return repr(rest[0]) if kind is str else str(rest[0])
    if kind == "gives":
        return str(rest[0])
    return {"is": "another object"}.get(str(kind), " ".join(map(str, (kind, *rest))))
