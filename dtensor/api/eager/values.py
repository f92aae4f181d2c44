"""The data structures of DTensors: immutable values, cells that hold them, and views of cells.

    w = (x @ y)            a Cell that holds a Value: shards under one name on the ranks
    v = w[1:].t()          the same Cell, seen through the views slice and t
    v.mul_(2)              a new Value is computed and stored in the Cell; w and v both see it

Tensors that share storage in PyTorch share a cell here. A Value that nothing refers to is dropped
on the ranks. Invariants: a Value's shards are never written, so cells may share a Value, and a
clone costs nothing; except that a compiled function may write the shards of a Value that only one
cell has ever held. Equal views are one object, compared by identity.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.api.store.handle import Layout, TensorHandle, layout_of
from dtensor.api.store.session import MeshSession, Returned
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.stored import StoredTensor

_names = itertools.count()


def fresh_name() -> str:
    return f"tensor {next(_names)}"


class Value:
    """A value on the ranks of a session. Its shards are dropped when this object is collected.

    ``returned``: the output of the run that makes the value, if the run also returns its shards.
    """

    __slots__ = ("cells", "owns_shards", "returned", "run", "session", "stored")

    def __init__(
        self, session: MeshSession, stored: StoredTensor, returned: Returned | None = None
    ) -> None:
        self.session: MeshSession = session
        self.stored: StoredTensor = stored
        self.owns_shards: bool = True  # False once another Value has the shards
        self.returned: Returned | None = returned
        self.cells: int = 0  # the number of cells that have held this value
        self.run: Any = None  # the future of the run that writes the shards in place

    def after_write(self, run: Any) -> Value:
        """Return a new Value of the same shards, which a run writes in place. This Value is no
        longer valid."""
        new = Value(self.session, self.stored)
        new.run = run
        self.owns_shards = False
        return new

    def __del__(self) -> None:
        if self.owns_shards:
            self.session.forget(self.stored)


@dataclass(frozen=True, slots=True, eq=False)
class ViewStep:
    """A view op on a cell (``parent`` is None) or on another view, and the layout of its result.
    ``args``: the op's arguments after the tensor."""

    parent: ViewStep | None
    target: Any
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def steps(self) -> tuple[ViewStep, ...]:
        """Return the views from the cell to this view, in order."""
        return (*(self.parent.steps() if self.parent is not None else ()), self)


class Cell:
    """The storage that a tensor and its views share. Its shape, dtype and strides are fixed.

    ``value``: None until the first write (`torch.empty_like`); ``layout``: the value's layout;
    ``reduced``: the same value without its pending sum, which an earlier op had to reduce.
    """

    __slots__ = ("layout", "reduced", "session", "value")

    def __init__(self, session: MeshSession, layout: Layout, value: Value | None) -> None:
        self.session: MeshSession = session
        self.layout: Layout = layout
        self.value = value
        self.reduced: Value | None = None
        if value is not None:
            value.cells += 1

    def set(self, value: Value) -> None:
        """Hold this value from now on."""
        self.value = value
        self.reduced = None
        value.cells += 1
        self.layout = layout_of(value.stored.spec, self.layout.strides)


@dataclass(frozen=True, slots=True)
class CachedView:
    """The value of a view, and the cell's value from which it was computed."""

    source: Value
    value: Value


class CellTensor(TensorHandle):
    """A tensor that is a cell, or a view of one: the operand of ops. `DTensor` is the only
    subclass. ``_cached_view``: the view's value, if its computation needed communication."""

    _cell: Cell
    _view: ViewStep | None
    _cached_view: CachedView | None

    @property
    def session(self) -> MeshSession:
        return self._cell.session

    @property
    def mesh(self) -> Mesh:
        return self._cell.layout.spec.mesh


@dataclass(frozen=True, slots=True)
class Alias:
    """The result of a view op: another tensor on the same cell."""

    cell: Cell
    view: ViewStep | None


@dataclass(frozen=True, slots=True, eq=False)
class ReadValue:
    """An operand as an op reads it: a cell's value seen through views, or a plain tensor that is
    sent to each rank."""

    value: Value | torch.Tensor
    layout: Layout
    view: ViewStep | None
