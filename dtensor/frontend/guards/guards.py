"""Guards compare the state that a captured program read with the present state.

    guards = Guards(roots, executed, constants)
    guards.same()          # before each call: True; takes tens of microseconds
    guards.difference()    # "temperature: 1.0 -> 0.5"; None if all is the same by value

`same` compares the identities of all objects that the walk found. It also returns False if an
object was replaced by an equal object; so `difference` walks again and compares by value.

Tensors that the program captured as constants are not compared: the next call computes with their
current elements. `refresh` notices changes of them; above 1 MB it misses writes through numpy and
`.data`, because it compares only `_version` and `data_ptr`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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

MAX_COMPARED_BYTES = 2**20
"""Size up to which the elements of a captured tensor are compared."""
_MIN_GROUP = 4


@dataclass(slots=True)
class CapturedTensor:
    """A tensor that a program reads but does not take as an argument.

    Args:
        name: the name of the input by which the program takes it.
        place: an index into the tensors that the walk found; None if the walk did not find it.
        copy, stamp: the elements, and the version and address, at the last `refresh`.
        number: counts the refreshes at which the elements had changed.
    """

    name: str
    place: int | None
    tensor: torch.Tensor
    copy: torch.Tensor
    stamp: tuple[int, int]
    number: int = 0

    def refresh(self) -> None:
        """Copy the elements, and count a change, if the tensor was written since the last time."""
        tensor = self.tensor.detach()
        stamp = (tensor._version, tensor.data_ptr())
        is_large = tensor.nbytes > MAX_COMPARED_BYTES
        if stamp == self.stamp and (is_large or _is_equal(tensor, self.copy)):
            return
        self.stamp = stamp
        self.copy = tensor.clone()
        self.number += 1


Definition: TypeAlias = tuple[object, ...]
NO_OPS: Mapping[str, Definition] = {}


def definition_of(name: str) -> Definition:
    """Return the functions that now define a custom op ("mylib::scale"): kernels, gradient, shapes.
    A module that is reloaded defines its ops again, under the same names. () for other ops."""
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
    """Return the definitions of a graph's `torch.library.custom_op` ops by name."""
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    names = sorted({target.name().partition(".")[0] for target in targets})
    return {name: definition for name in names if (definition := definition_of(name))}


class Guards:
    """The state that one program read.

    ``caught``: the captured tensors that the user still holds. ``ops``: the program's custom ops
    (`custom_ops`). ``values``: each tensor whose elements the program's Python read, with a copy.
    """

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
        self._searched = searched  # whether all objects of the process were searched (`walk`)
        reached = self._walk()
        tensors = _tensors(reached)
        places = {_memory(tensor): place for place, tensor in enumerate(tensors)}
        for name, value in constants:
            place = places.get(_memory(value))
            tensor = value if place is None else tensors[place]
            stamp = (value._version, value.data_ptr())
            self.caught.append(CapturedTensor(name, place, tensor, value.clone(), stamp))
        self.values = values
        self._value_places = [places.get(_memory(tensor)) for tensor, _ in values]
        self._compare_with(reached)

    def of(self, constants: Sequence[Any], ops: Mapping[str, Definition]) -> Guards:
        """Return the guards of another graph that was captured from the same program just now."""
        return Guards(self.roots, self.ran, constants, ops, values=self.values, searched=True)

    def _walk(self) -> ReachedState:
        reached = walk(self.roots, self.ran, search=not self._searched)
        self._searched = True
        self.roots += reached.extra_roots
        return reached

    def _compare_with(self, reached: ReachedState) -> None:
        """Let `same` compare the present state with ``reached``, the result of a walk just now."""
        self.reached = reached
        groups = [(key, e.holders, e.values) for key, e in reached.entries.items()]
        self._groups = [group for group in groups if len(group[1]) >= _MIN_GROUP]
        small = [group for group in groups if len(group[1]) < _MIN_GROUP]
        self._entries = [(holder, key) for key, holders, _ in small for holder in holders]
        self._values = [value for _, _, values in small for value in values]
        self._cells = [cell for _, cell in reached.cells]
        self._contents = [cell.cell_contents for cell in self._cells]
        self._functions = [function for _, function in reached.functions]
        self._defaults = [f.__defaults__ for f in self._functions]
        self._codes = [f.__code__ for f in self._functions]
        self._sized = [holder for _, holder in reached.sized]
        self._lengths = list(map(len, self._sized))
        self._attribute_counts = self._current_attribute_counts()
        ordered = (d for d in reached.ordered if len(d) > 1)
        self._ordered = [d for d in ordered if type(d) in (dict, OrderedDict)]
        self._keys = list(chain.from_iterable(self._ordered))
        self._sets = [(s, frozenset(s)) for s in self._sized if isinstance(s, (set, frozenset))]
        self._objects = reached.objects
        self._types = list(map(type, reached.objects))
        self._attributes = [(o, n, _attribute(o, n)) for _, o, n in reached.attributes]
        self._containers = [(c, raw_items(c) or []) for c in reached.containers]
        self._variables = [(v, v.get(None)) for _, v in reached.context_variables]
        self._arrays = [(a, array_contents(a)) for _, a in reached.arrays]
        self._getters = [(getter, getter()) for _, getter in reached.getters]
        self._tensors = [x for _, x in reached.tensors]
        self._metadata = self._current_metadata()
        self._parameters = [x for _, x in reached.parameters]
        self._parameter_flags = self._current_parameter_flags()
        self._next_hook_id = RemovableHandle.next_id
        self._hook_counts = self._current_hook_counts()
        self._torch_state = _torch_state(reached)
        tensors = _tensors(reached)
        for caught in self.caught:
            if caught.place is not None:
                caught.tensor = tensors[caught.place]
        self._read_values = [
            (tensor if place is None else tensors[place], copy)
            for place, (tensor, copy) in zip(self._value_places, self.values, strict=True)
        ]
        paths = [path for path, _ in (*reached.parameters, *reached.tensors)]
        self._value_paths = ["a tensor" if p is None else paths[p] for p in self._value_places]

    def _current_parameter_flags(self) -> list[Any]:
        with DisableTorchFunctionSubclass():
            flags = [x.requires_grad for x in self._parameters]
            flags += [x.dtype for x in self._parameters]
        return flags

    def _current_attribute_counts(self) -> list[int]:
        spaces = self.reached.tensor_attributes
        return [len(space) - (REMOTE_VALUE in space) for _, space in spaces]

    def _current_metadata(self) -> list[Any]:
        return [tensor_metadata(x, strides=self.reached.reads_strides) for x in self._tensors]

    def same(self) -> bool:
        """Return whether no object was replaced. False may be a false alarm (`difference`)."""
        try:
            for key, holders, values in self._groups:
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
            and self._current_attribute_counts() == self._attribute_counts
            and list(chain.from_iterable(self._ordered)) == self._keys
            and all(map(is_, map(type, self._objects), self._types))
            and (self._next_hook_id == RemovableHandle.next_id or self._has_same_hooks())
            and self._current_parameter_flags() == self._parameter_flags
            and all(map(is_, [f.__defaults__ for f in self._functions], self._defaults))
            and all(map(is_, [f.__code__ for f in self._functions], self._codes))
            and all(_attribute(o, name) is value for o, name, value in self._attributes)
            and all(variable.get(None) is value for variable, value in self._variables)
            and all(current == copy for current, copy in self._sets)
            and all(
                len(current := raw_items(c) or []) == len(items) and all(map(is_, current, items))
                for c, items in self._containers
            )
            and self._current_metadata() == self._metadata
            and all(array_contents(array) == contents for array, contents in self._arrays)
            and all(getter() == value for getter, value in self._getters)
            and all(_is_equal(tensor, copy) for tensor, copy in self._read_values)
            and self._torch_state == _torch_state(self.reached)
            and all(definition_of(name) == before for name, before in self.ops.items())
        )

    def _has_same_hooks(self) -> bool:
        """Return whether all hooks that were registered since are on other modules and tensors."""
        if self._current_hook_counts() != self._hook_counts:
            return False
        self._next_hook_id = RemovableHandle.next_id
        return True

    def _current_hook_counts(self) -> list[int]:
        """Return the number of hooks of each module and kind, then whether each parameter has
        hooks."""
        spaces = [vars(module) for module in self.reached.modules]
        kinds = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
        return [len(space.get(kind, ())) for space in spaces for kind in kinds] + [
            has_hooks(x) for x in self._parameters
        ]

    def difference(self) -> str | None:
        """Return the first difference by value, in words, or None. After None the present objects
        are the reference of `same`."""
        for name, before in self.ops.items():
            if definition_of(name) != before:
                return f"the op {name}, which was defined again"
        reached = self._walk()
        if reached.fingerprint != self.reached.fingerprint:
            return self.reached.fingerprint.first_difference(reached.fingerprint)
        arrays = [array_contents(array) for _, array in reached.arrays]
        if arrays != [contents for _, contents in self._arrays]:
            return f"the contents of {reached.arrays[0][0]}"
        if self._torch_state != _torch_state(reached):
            return "torch's default dtype, its global hooks, or the environment"
        self._compare_with(reached)
        for path, (tensor, copy) in zip(self._value_paths, self._read_values, strict=True):
            if not _is_equal(tensor, copy):
                return f"{path}: {_elements_text(copy)} -> {_elements_text(tensor)}"
        return None

    def hold(self, constants: Sequence[Any]) -> None:
        """Replace the captured tensors by the constants of another capture, in the same order."""
        for caught, (_, value) in zip(self.caught, constants, strict=True):
            caught.tensor = value

    def refresh(self) -> None:
        for caught in self.caught:
            caught.refresh()


def _attribute(value: Any, name: str) -> Any:
    try:
        return raw_attribute(value, name)
    except AttributeError:
        return None


def _torch_state(reached: ReachedState) -> tuple[Any, ...]:
    """Return the global state that torch itself reads, and the environment if the code reads it."""
    environment = dict(os.environ) if reached.reads_environment else None
    forward_hooks = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)
    hooks = (
        tuple(id(hook) for space in forward_hooks for hook in space.values())
        if any(forward_hooks)
        else ()
    )
    return (torch.get_default_dtype(), hooks, environment)


def _tensors(reached: ReachedState) -> list[torch.Tensor]:
    """Return all tensors and parameters; a program may capture both."""
    return [x for _, x in (*reached.parameters, *reached.tensors)]


def _memory(x: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    with DisableTorchFunctionSubclass():
        return (x.data_ptr(), x.shape, x.stride())


def _is_equal(x: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether the dtypes, the shapes and all bits of two tensors are equal."""
    with DisableTorchFunctionSubclass():
        same = x.dtype == copy.dtype and x.shape == copy.shape
        return same and torch.equal(_bits(x.detach()), _bits(copy))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in which 0.0 differs from -0.0 and a NaN equals itself."""
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _elements_text(x: torch.Tensor) -> str:
    text = str(x.tolist())
    return text if len(text) <= 60 else f"{text[:57]}..."
