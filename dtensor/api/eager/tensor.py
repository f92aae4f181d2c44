"""`DTensor`: a tensor whose shards live on the actors of a cluster.

    x = distribute(torch.randn(8, 16), Mesh(tp=2), tp=Row())
    x.shape, str(x.spec)               # (8, 16), "f32[8@tp,16]"
    y = (x @ w).relu()                 # op by op on the actors; nothing waits
    print(y); y.full_tensor(); y.local_tensors()

It is a torch.Tensor with the global shape: autograd, `nn.Module`, `torch.optim` and
`torch.nn.functional` take it as it is. Below autograd each ATen op arrives in `__torch_dispatch__`
and becomes a program of its own (ops.py, run.py), made by the planner, the lowering
and the execution of `dt.compile`. Reading a value waits for it; nothing else does.

Invariants: tensors that share storage in PyTorch share it here (values.py). Mixing clusters,
meshes, or plain tensors of more than one number, is an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtensor.api.eager import functions, lines, ops, run
from dtensor.api.eager.values import (
    Cell,
    Made,
    Operand,
    Value,
    View,
    contiguous_strides,
    fresh_name,
    held_by,
    layout_of,
)
from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.shards import assemble_at, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec

if TYPE_CHECKING:
    from dtensor.api.session import Session

__all__ = ["DTensor", "distribute", "fresh_name", "held_by", "spec"]


class DTensor(torch.Tensor):
    """Global ``shape`` and ``dtype``; ``spec`` says how it is split. Made by `distribute`, by
    compiled functions and by ops on DTensors."""

    _cell: Cell
    _view: View | None
    _made: Made | None

    def __new__(cls, spec: TensorSpec, session: Session, name: str) -> DTensor:
        """The tensor whose shards are stored under ``name``, which it drops with itself."""
        strides = contiguous_strides(spec.shape)
        return cls.of(Cell(session, layout_of(spec, strides), Value(session, name, spec)))

    def __init__(self, spec: TensorSpec, session: Session, name: str) -> None:
        pass

    @staticmethod
    def of(cell: Cell, view: View | None = None) -> DTensor:
        """The tensor that is a cell, or a view of it."""
        spec = cell.layout.spec
        tensor: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DTensor,
            spec.shape if view is None else view.shape,
            strides=cell.layout.strides if view is None else view.strides,
            storage_offset=0 if view is None else view.offset,
            dtype=spec.dtype if view is None else view.dtype,
            device=torch.device("cpu"),
        )
        tensor._cell = cell
        tensor._view = view
        tensor._made = None
        return tensor

    # -- what it stands on ------------------------------------------------------------------------

    def alias(self) -> DTensor:
        """Another tensor on the same cell, without history."""
        return DTensor.of(self._cell, self._view)

    def operand(self, *, whole: bool = False) -> Operand:
        """What an op reads. A view that takes communication to see is made once and kept.

        ``whole``: the cell and the view, whatever it takes to see.
        """
        cell = self._cell
        if cell.value is None:
            ops.fill(DTensor.of(cell), 0)
        assert cell.value is not None
        value = cell.reduced or cell.value
        layout = cell.layout if value is cell.value else layout_of(value.spec, cell.layout.strides)
        view = self._view
        if view is None or whole or not run.seen(layout, view).moves:
            return Operand(value, layout, view)
        made = self._see()
        return Operand(made, layout_of(made.spec, self.stride()), None)

    def value(self, *, told: bool = False) -> Value:
        """Its own shards, not those of what it is a view of; ``told``: to be read by the user."""
        if self._view is None:
            self.operand()
            assert self._cell.value is not None
            return self._cell.value
        self.operand(whole=True)
        return self._see(told=told)

    def _see(self, *, told: bool = False) -> Value:
        """The view's own value, made where what it was made from has changed; kept, so that its
        name stays valid."""
        now = self._cell.value
        assert now is not None
        if self._made is None or self._made.of is not now:
            pinned = run.pending_of(self._cell.layout.spec)
            (new,) = run.execute(None, (self,), {}, pinned=pinned, told=told).values
            assert new is not None
            self._made = Made(now, new)
        return self._made.value

    @property
    def spec(self) -> TensorSpec:
        """Global shape, dtype and placement: ``str(x.spec)`` is "f32[8@tp,16]"."""
        layout = self._cell.layout
        if self._view is None:
            return layout.spec
        if self._made is not None and self._made.of is self._cell.value:
            return self._made.value.spec
        result = run.seen(layout, self._view).results[0]
        assert result is not None
        return result.spec

    @property
    def session(self) -> Session:
        return self._cell.session

    @property
    def mesh(self) -> Mesh:
        return self._cell.layout.spec.mesh

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Under which its shards stand in the ranks' tables, as long as nothing writes to it."""
        return self.value().name

    # -- values -----------------------------------------------------------------------------------

    def local_tensors(self) -> list[torch.Tensor]:
        """The shards, one per rank that holds the value, in rank order; CPU copies. Waits."""
        return lines.fetch(self.value(told=True))

    def full_tensor(self) -> torch.Tensor:
        """The global value as one CPU tensor; pending values are reduced. Waits.

        Differentiable: the gradient is placed as this tensor is.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return functions.FullTensor.apply(self)
        return self.full_value()

    def full_value(self) -> torch.Tensor:
        """The global value, without history."""
        value = self.value(told=True)
        shards = dict(zip(held_by(value.spec), lines.fetch(value), strict=True))
        return assemble_at(shards, value.spec)

    def redistribute(self, **placements: Placement) -> DTensor:
        """The same value under other placements; the collectives run on the actors.

        Axes that are not named stay as they are. Differentiable: the gradient goes back to this
        tensor's placement; that of a pending sum is replicated where the sum was pending.
        """
        from dtensor.api.stating.checks import check_fit
        from dtensor.api.stating.placing import restated
        from dtensor.sharding.ops.call import Meta

        spec = self.spec
        check_placements(self.mesh, placements)
        held = restated(spec)
        wanted = {**held, **placements}
        if set(placements) >= set(held):  # the user's order says which axis is major
            wanted = dict(placements)
        meta = Meta(spec.shape, spec.dtype)
        check_fit("the tensor", meta, wanted, "redistribute", self.mesh)
        target = make_spec(spec.shape, spec.dtype, self.mesh, wanted)
        return functions.Redistribute.apply(self, target)

    # -- torch ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return functions.torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return ops.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> DTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.alias()

    @data.setter
    def data(self, other: object) -> None:
        if not isinstance(other, DTensor) or (other.shape, other.dtype, other.stride()) != (
            self.shape,
            self.dtype,
            self.stride(),
        ):
            what = other.spec if isinstance(other, DTensor) else type(other).__name__
            raise PlanningError(
                f"x.data = y takes a DTensor of the same shape, dtype and strides.\n"
                f"  x: {self.spec}\n  y: {what}\n"
                f"fix: make a new tensor, as in torch.nn.Parameter(y)"
            )
        self._cell, self._view, self._made = other._cell, other._view, None

    def tolist(self) -> Any:
        """The values as Python numbers. Waits."""
        return self.full_value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global value as an array of its own. Waits."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use x.detach().numpy()")
        return self.full_value().numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if not self.is_leaf:
            raise RuntimeError("only a leaf is deep-copied: this DTensor has history; x.detach()")
        if id(self) in memo:
            return memo[id(self)]
        old = self._cell
        if id(old) not in memo:
            self.operand()
            memo[id(old)] = Cell(old.session, old.layout, old.value)
        new = DTensor.of(memo[id(old)], self._view)
        new.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True  # type: ignore[attr-defined]
        if self.grad is not None:
            new.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a DTensor is a handle to shards on a cluster and cannot be pickled: {self.spec}\n"
            f"fix: x.full_tensor(), or dt.gather_state_dict(model, opt)"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        head = f"DTensor({self.spec}, {self.mesh}"
        if self.session.closed or self.session.cluster.failure is not None:
            return f"{head}, values lost with their launch)"
        text = repr(self.full_value())
        text = text.removeprefix("tensor(").removesuffix(")").replace("\n", "\n ")
        tail = ""
        if self.grad_fn is not None:
            tail = f",\n        grad_fn=<{self.grad_fn.name().removesuffix('0')}>"
        elif self.requires_grad:
            tail = ",\n        requires_grad=True"
        return f"{head},\n        {text}{tail})"


def spec(text: str, mesh: Mesh, *, requires_grad: bool = False) -> TensorSpec:
    """The spec that ``text`` denotes, as in ``spec("f32[8@tp,16]", Mesh(tp=2))``.

    It stands for an argument in ``plan`` and in `dtensor.testing`; ``requires_grad`` marks an
    input whose gradient is wanted. The grammar is in dtensor/sharding/spec/spec.py.
    """
    return parse(text, mesh, requires_grad=requires_grad)


def distribute(tensor: torch.Tensor, mesh: Mesh, **placements: Placement) -> DTensor:
    """Put a tensor's shards on the ranks of ``mesh``. Axes that are not named: Replicate.

    The result is a leaf; it requires grad where ``tensor`` does. Raises PlanningError for an axis
    that the mesh lacks and a placement that does not fit.
    """
    from dtensor.api.session import session_for

    if isinstance(tensor, DTensor):
        raise PlanningError(
            f"distribute takes a plain tensor, not {tensor.spec} on {tensor.mesh}.\n"
            f"fix: x.redistribute(...), or dt.transfer(x, mesh, ...) to another mesh"
        )
    check_placements(mesh, placements)
    placed = make_spec(tuple(tensor.shape), tensor.dtype, mesh, placements)
    session = session_for(mesh)
    name = fresh_name()
    data = tensor.detach()
    session.put([{name: shard_of(data, placed, mesh.coordinates(r))} for r in range(mesh.size)])
    made = DTensor(placed, session, name)
    made.requires_grad_(tensor.requires_grad)
    return made


def check_placements(mesh: Mesh, placements: Mapping[str, Placement]) -> None:
    for axis, placement in placements.items():
        mesh.axis_size(axis)
        if not isinstance(placement, Placement):
            raise PlanningError(
                f"{axis}={placement!r} is not a placement; write {axis}=dt.Row(), dt.Column(), "
                f"dt.Shard(dim), dt.Replicate() or dt.Partial()"
            )
