"""Replace `x.data = y` for a parameter or buffer x by a copy, and refuse uses that would differ.

    k.data = k.data * m + q.data * (1 - m)     ->  k.detach().copy_(k.detach() * m + ...)

In torch, x then shares the memory of y, and old aliases of x keep the old memory. A copy gives the
same results unless an old alias is read, y is read after x changed, or y is changed. It is also
refused if y is an input of the program, is assigned to two tensors, or has another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.private_torch import DisableTorchFunction, FakeTensor, pytree


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The assignment ``x.data = y``, with the version counters of both tensors at that time."""

    x: torch.Tensor
    y: torch.Tensor
    x_version: int
    y_version: int


@dataclass(slots=True)
class DataAssignments:
    """The assignments `x.data = y` of one call. ``parameters`` includes the buffers."""

    parameters: Iterable[torch.Tensor]
    inputs: Iterable[torch.Tensor]
    _by_target: dict[int, _Assignment] = field(default_factory=dict[int, _Assignment])
    _by_source: dict[int, _Assignment] = field(default_factory=dict[int, _Assignment])
    _aliases: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    # By memory of x; by memory of y; and by id, results of later calls that share memory with an x.
    # The dict keeps these tensors alive, so that no id is reused.

    def assign(self, x: torch.Tensor, y: object) -> bool:
        """Copy the values of y to x; return False, and copy nothing, if torch would differ."""
        if not isinstance(y, FakeTensor) or not any(x is p for p in self.parameters):
            return False
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        unavailable = {*map(_memory, (*self.parameters, *self.inputs)), *self._by_source}
        if _memory(y) in unavailable or self.stale_at_end(()) is not None:
            return False
        x.detach().copy_(y.detach())
        for memory in [m for m, assignment in self._by_source.items() if assignment.x is x]:
            del self._by_source[memory]
        for alias in [i for i, tensor in self._aliases.items() if _memory(tensor) == _memory(x)]:
            del self._aliases[alias]
        assignment = _Assignment(x, y, x._version, y._version)
        self._by_target[_memory(x)] = self._by_source[_memory(y)] = assignment
        return True

    def stale(self, values: Iterable[object]) -> torch.Tensor | None:
        """Return a tensor among ``values`` that has other values in torch than here, or None."""
        for tensor in _tensors(values):
            memory = _memory(tensor)
            target, source = self._by_target.get(memory), self._by_source.get(memory)
            old = target is not None and tensor is not target.x and id(tensor) not in self._aliases
            if old or (source is not None and source.x._version != source.x_version):
                return tensor
        return None

    def stale_at_end(self, values: Iterable[object]) -> torch.Tensor | None:
        """Like `stale`, for the results of the call; also return an x whose y has changed."""
        changed_targets = (g.x for g in self._by_source.values() if g.y._version != g.y_version)
        stale = next(changed_targets, None)
        return self.stale(values) if stale is None else stale

    def record_result(self, result: Any) -> Any:
        """Return the result of a torch call; record tensors in it that are views of an x."""
        aliases = (t for t in _tensors(pytree.tree_leaves(result)) if _memory(t) in self._by_target)
        self._aliases.update((id(tensor), tensor) for tensor in aliases)
        return result


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, FakeTensor))


def _memory(x: torch.Tensor) -> int:
    with DisableTorchFunction():
        return x.untyped_storage()._cdata
