"""`x.data = y` of a parameter or buffer x: a copy of y's values, where nobody can tell.

    k.data = k.data * m + q.data * (1 - m)     ->  k.detach().copy_(k.detach() * m + ...)

In torch x takes y's memory, and leaves its own to what looks at it. A copy is the same, but for who
reads the old memory later, and for who reads y once x was changed, or changes y: these are refused.
So are y of the program's inputs, and one for two tensors: what is done to one later is done to the
other.

Not here: x of another shape or dtype afterwards, which is refused (refusals.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.private_torch import DisableTorchFunction, FakeTensor, pytree


@dataclass(frozen=True, slots=True)
class _Given:
    """``x`` was given the memory of ``y`` when these were their versions."""

    x: torch.Tensor
    y: torch.Tensor
    x_version: int
    y_version: int


@dataclass(slots=True)
class DataAssignments:
    """What one call has given. ``own``: its parameters and buffers; ``inputs``: its arguments."""

    own: Iterable[torch.Tensor]
    inputs: Iterable[torch.Tensor]
    _of: dict[int, _Given] = field(default_factory=dict[int, _Given])  # by x's memory
    _with: dict[int, _Given] = field(default_factory=dict[int, _Given])  # by y's
    _since: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    # by id, what was made of the memory of such an x since, and is not freed for it

    def gives(self, x: torch.Tensor, y: object) -> bool:
        """x has the values of y from now on; False where that would not be as in torch."""
        if not isinstance(y, FakeTensor) or not any(x is own for own in self.own):
            return False
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return False
        taken = {*map(_memory, (*self.own, *self.inputs)), *self._with}
        if _memory(y) in taken or self.end(()) is not None:
            return False
        x.detach().copy_(y.detach())
        for memory in [m for m, given in self._with.items() if given.x is x]:
            del self._with[memory]
        for old in [i for i, other in self._since.items() if _memory(other) == _memory(x)]:
            del self._since[old]
        given = _Given(x, y, x._version, y._version)
        self._of[_memory(x)] = self._with[_memory(y)] = given
        return True

    def stale(self, values: Iterable[object]) -> torch.Tensor | None:
        """A tensor among these that is not in torch what it is here."""
        for tensor in _tensors(values):
            memory = _memory(tensor)
            of, by = self._of.get(memory), self._with.get(memory)
            old = of is not None and tensor is not of.x and id(tensor) not in self._since
            if old or (by is not None and by.x._version != by.x_version):
                return tensor
        return None

    def end(self, values: Iterable[object]) -> torch.Tensor | None:
        """As `stale`, of what the call leaves: its x too, where their y was changed since."""
        changed = (g.x for g in self._with.values() if g.y._version != g.y_version)
        stale = next(changed, None)
        return self.stale(values) if stale is None else stale

    def made(self, result: Any) -> Any:
        """The result of a call, which may look at an x."""
        aliases = (t for t in _tensors(pytree.tree_leaves(result)) if _memory(t) in self._of)
        self._since.update((id(tensor), tensor) for tensor in aliases)
        return result


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, FakeTensor))


def _memory(x: torch.Tensor) -> int:
    with DisableTorchFunction():
        return x.untyped_storage()._cdata
