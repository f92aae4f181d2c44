"""The values of DTensors: values that never change, cells that do, and views of cells.

    w = (x @ y)            a Cell that holds a Value: shards under one name on the ranks
    v = w[1:].t()          the same Cell, seen through the views slice and t
    v.mul_(2)              a new Value is computed and the Cell holds it; w and v both see it

So aliasing is PyTorch's: tensors that share storage there share a cell here, and a view is read
from its cell's present value. A Value is dropped on the ranks when nothing refers to it. The user's
tensor is a CellTensor: a cell, or a view of one.

Invariants: a Value's shards are never written again, so cells may share one (a clone costs
nothing). The exception is a Value that only one cell has ever held, which a compiled function may
change in place: then a new Value has the same shards. A cell's shape, dtype and strides are fixed;
its placement is that of the value it holds. Views are interned, like layouts: equal ones are one
object, compared by identity.

Not here: the computation of a value (execute_op.py), the backward of a view (views.py).
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
    """A value on the ranks of a session, which is dropped there with this object.

    ``returned``: its shards' output, if they also come back with the run that makes them.
    """

    __slots__ = ("cells", "owns_shards", "returned", "run", "session", "stored")

    def __init__(
        self, session: MeshSession, stored: StoredTensor, returned: Returned | None = None
    ) -> None:
        self.session: MeshSession = session
        self.stored: StoredTensor = stored
        self.owns_shards: bool = True  # False once another Value has its shards
        self.returned: Returned | None = returned
        self.cells: int = 0  # number of cells that have held it
        self.run: Any = None  # the future of the run that has changed it in place

    def after_write(self, run: Any) -> Value:
        """A new Value for its shards, since a run writes to them; this one is not valid any
        more."""
        new = Value(self.session, self.stored)
        new.run = run
        self.owns_shards = False
        return new

    def __del__(self) -> None:
        if self.owns_shards:
            self.session.forget(self.stored)


@dataclass(frozen=True, slots=True, eq=False)
class ViewStep:
    """A view op on a cell (``parent`` None) or on a view, and its layout.

    ``args`` are the op's arguments after the tensor.
    """

    parent: ViewStep | None
    target: Any
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def steps(self) -> tuple[ViewStep, ...]:
        """The views from the cell to this one."""
        return (*(self.parent.steps() if self.parent is not None else ()), self)


class Cell:
    """Storage, which a tensor and its views share.

    ``value`` is None until the first write (`torch.empty_like`); ``layout`` is the value's layout.
    ``reduced``: the same value, reduced for an op that needed it, so that the next one need not
    reduce it again.
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
        """Hold another value from now on."""
        self.value = value
        self.reduced = None
        value.cells += 1
        self.layout = layout_of(value.stored.spec, self.layout.strides)


@dataclass(frozen=True, slots=True)
class CachedView:
    """A view's own value, and the value of its cell from which it was made."""

    source: Value
    value: Value


class CellTensor(TensorHandle):
    """A tensor that is a cell, or a view of one: the operand of ops. `DTensor` is the only kind.

    ``_cached_view``: the view's own value, if it took communication to make it.
    """

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
    """An operand as an op reads it: a whole value seen through views; or a plain tensor, given to
    each rank."""

    value: Value | torch.Tensor
    layout: Layout
    view: ViewStep | None
