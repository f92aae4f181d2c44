"""`DTensor`: a tensor whose shards live on the actors of a cluster.

    x = distribute(torch.randn(8, 16), Mesh(tp=2), tp=Row())
    x.shape, str(x.spec)               # (8, 16), "f32[8@tp,16]"
    y = (x @ w).relu()                 # op by op on the actors; nothing waits
    print(y); y.full_tensor(); y.local_tensors()

It is a torch.Tensor with the global shape, for autograd, `nn.Module` and `torch.optim`. Below
autograd, each ATen op becomes a planned program (dispatch.py, execute_op.py). Only reading a value
waits. Tensors that share storage in PyTorch share it here (values.py). Mixing clusters, meshes, or
plain tensors of more than one element is an error that names both operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtensor.api.eager.dispatch import dispatch, like_spec
from dtensor.api.eager.execute_op import execute, fetch, own_value, spec_of
from dtensor.api.eager.functions import torch_function
from dtensor.api.eager.values import Alias, Cell, CellTensor, Value, ViewStep, fresh_name
from dtensor.api.model.stating.stated_placements import check_fit, ordered_placements
from dtensor.api.store.handle import Layout, contiguous, contiguous_layout
from dtensor.api.store.session import MeshSession, session_for
from dtensor.api.values.lazy_parameters import LazyTensor, fault_in
from dtensor.daft import Future, GroupFuture
from dtensor.daft.tasks.values import SENT_AS
from dtensor.errors import PlanningError, check_dense, check_kind
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.private_torch import make_wrapper_subclass
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.redistribute.between_meshes import holders_of
from dtensor.sharding.spec.mesh import Mesh, check_mesh
from dtensor.sharding.spec.parse import parse
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.shards import assemble_at, shard_of
from dtensor.sharding.spec.spec import TensorSpec, make_spec
from dtensor.showing import html_text, screen


class DTensor(CellTensor):
    """A tensor with a global ``shape`` and ``dtype`` that is split as ``spec`` says. `distribute`,
    compiled functions and ops on DTensors return DTensors."""

    def __new__(cls, spec: TensorSpec, session: MeshSession, name: str) -> DTensor:
        """Make a tensor of the shards that are stored under ``name``. They are dropped with it."""
        value = Value(session, session.stored(name, spec))
        return cls.of(Cell(session, contiguous_layout(spec), value))

    def __init__(self, spec: TensorSpec, session: MeshSession, name: str) -> None:
        pass

    @staticmethod
    def of(cell: Cell, view: ViewStep | None = None) -> DTensor:
        """Return a tensor of a cell, or of a view of the cell."""
        spec = cell.layout.spec
        tensor: Any = make_wrapper_subclass(  # type: ignore[attr-defined]
            DTensor,
            spec.shape if view is None else view.shape,
            strides=cell.layout.strides if view is None else view.strides,
            storage_offset=0 if view is None else view.offset,
            dtype=spec.dtype if view is None else view.dtype,
            device=torch.device("cpu"),
        )
        tensor._cell = cell
        tensor._view = view
        tensor._cached_view = None
        return tensor

    # -- the value on the ranks -------------------------------------------------------------------

    def value(self, *, requested: bool = False) -> Value:
        """Return the value of this tensor, for a view the value of the view and not of its cell.
        ``requested``: the user reads it, so its communication is not implicit."""
        return own_value(self, requested=requested)

    @property
    def spec(self) -> TensorSpec:
        """Global shape, dtype and placement: ``str(x.spec)`` is "f32[8@tp,16]"."""
        return spec_of(self)

    @property
    def held(self) -> Layout:
        """The spec as a contiguous layout: the same object for equal specs, which is faster to
        compare than a spec."""
        if self._view is None:
            return contiguous(self._cell.layout)
        return contiguous_layout(spec_of(self))

    @property
    def name(self) -> str:
        """The name of the shards in the ranks' tables, until the tensor is written."""
        return self.value().stored.label

    # -- values -----------------------------------------------------------------------------------

    def local_tensors(self) -> list[torch.Tensor]:
        """Return CPU copies of the shards, one per rank that holds the value, in rank order. Waits
        for the value."""
        return fetch(self.value(requested=True))

    def full_tensor(self) -> torch.Tensor:
        """Return the global value as one CPU tensor, with pending sums reduced. Waits for the
        value. Differentiable: the gradient is placed as this tensor is."""
        if self.requires_grad and torch.is_grad_enabled():
            return _FullTensor.apply(self)
        return self.full_value()

    def full_value(self) -> torch.Tensor:
        """Return the global value as a CPU tensor without autograd history. Waits for the value."""
        value = self.value(requested=True)
        shards = dict(zip(value.stored.at, fetch(value), strict=True))
        return assemble_at(shards, value.stored.spec)

    def redistribute(self, **placements: Placement) -> DTensor:
        """Return the same value with other placements. Collectives run on the actors.

        Axes that are not named keep their placements. Differentiable: the gradient has this
        tensor's placement, but Replicate in place of a pending sum.
        """
        spec = self.spec
        check_placements(self.mesh, placements)
        present = ordered_placements(spec)
        stated = {**present, **placements}
        if set(placements) >= set(present):  # the user's order says which axis is major
            stated = dict(placements)
        meta = Meta(spec.shape, spec.dtype)
        check_fit("the tensor", meta, stated, "redistribute", self.mesh)
        target = make_spec(spec.shape, spec.dtype, self.mesh, stated)
        return _Redistribute.apply(self, target)

    # -- torch ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, after fetching lazy parameters among its arguments."""
        if any(issubclass(kind, LazyTensor) for kind in types):
            fault_in((args, kwargs))
        return torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an ATen op below autograd, as a planned program on the ranks."""
        return _as_tensors(dispatch(func, args, kwargs or {}))

    @property
    def data(self) -> DTensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DTensor.of(self._cell, self._view)

    @data.setter
    def data(self, other: object) -> None:
        if not isinstance(other, DTensor) or (other.shape, other.dtype, other.stride()) != (
            self.shape,
            self.dtype,
            self.stride(),
        ):
            other_text = other.spec if isinstance(other, DTensor) else type(other).__name__
            raise PlanningError(
                f"x.data = y takes a DTensor of the same shape, dtype and strides.\n"
                f"  x: {self.spec}\n  y: {other_text}\n"
                f"fix: make a new tensor, as in torch.nn.Parameter(y)"
            )
        self._cell, self._view, self._cached_view = other._cell, other._view, None

    def tolist(self) -> Any:
        """Return the global value as nested lists. Waits for the value."""
        return self.full_value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global value as a new array. Waits for the value."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use x.detach().numpy()")
        return self.full_value().numpy()

    def __format__(self, spec: str) -> str:
        """A tensor without dims is formatted as its number, as in ``f"{x:.2f}"`` and ``f"{x}"``;
        this waits for the number. Other tensors, and parameters, are formatted as their text."""
        is_number = self.dim() == 0 and (spec or not isinstance(self, torch.nn.Parameter))
        return format(self.item() if is_number else str(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a leaf in a new cell with the same value. Tensors that share a cell still do."""
        if not self.is_leaf:
            raise RuntimeError("only a leaf is deep-copied: this DTensor has history; x.detach()")
        if id(self) in memo:
            return memo[id(self)]
        old = self._cell
        if id(old) not in memo:
            own_value(DTensor.of(old))  # there is one from now on
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
        return screen(f"{head},\n        {text}{tail})")

    def _repr_html_(self) -> str:
        return html_text(repr(self))


def _sent_to_actor(x: DTensor) -> torch.Tensor:
    # imported here because few programs spawn actors
    from dtensor.api.eager.actor_arguments import sent_to_actor

    return sent_to_actor(x)


SENT_AS[DTensor] = _sent_to_actor


def _as_tensors(result: Any) -> Any:
    """Return a result of `dispatch` with DTensors in place of cells and aliases."""
    match result:
        case Cell():
            return DTensor.of(result)
        case Alias(cell, view):
            return DTensor.of(cell, view)
        case list() | tuple():
            return type(result)(map(_as_tensors, result))
        case _:
            return result


class _Redistribute(torch.autograd.Function):
    """Changes the placements. The gradient has the operand's placements, without pending sums."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: TensorSpec) -> DTensor:  # type: ignore[override]
        """Return x with the target's placements, reusing x's value if they are the same."""
        before = x.spec
        ctx.gradient_spec = like_spec(before)
        if before == target:
            value = x.value()
            return DTensor.of(Cell(value.session, contiguous_layout(value.stored.spec), value))
        result = execute(None, (x,), {}, pinned=target.sharding, requested=True)
        return _as_tensors(result.cells()[0])

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        return _Redistribute.apply(grad, ctx.gradient_spec), None


class _FullTensor(torch.autograd.Function):
    """Gathers the global value as a plain tensor, and distributes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.gradient_spec = like_spec(x.spec)
        ctx.session = x.session
        return x.full_value()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:  # type: ignore[override]
        return _Placed.apply(grad, ctx.gradient_spec, ctx.session)


class _Placed(torch.autograd.Function):
    """Distributes the gradient of a gathered value, and gathers the gradient's own gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor, spec: TensorSpec, session: MeshSession
    ) -> DTensor:
        return put_shards(grad, spec, session)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _FullTensor.apply(grad), None, None


def put_shards(tensor: torch.Tensor, spec: TensorSpec, session: MeshSession) -> DTensor:
    """Put a tensor's shards on the ranks that ``spec`` names, and return them as a DTensor."""
    name, mesh = fresh_name(), spec.mesh
    values: list[dict[str, object]] = [{} for _ in range(mesh.size)]
    for rank in holders_of(spec):
        values[rank][name] = shard_of(tensor, spec, mesh.coordinates(rank))
    with CALL_LOCK:
        session.put(values)
    return DTensor(spec, session, name)


# -- functions for the user ------------------------------------------------------------------------


def spec(text: str, mesh: Mesh, *, requires_grad: bool = False) -> TensorSpec:
    """Return the spec that a text denotes, as in ``spec("f32[8@tp,16]", Mesh(tp=2))``.

        >>> dt.spec("f32[8@tp,3*16]{sum@dp}", dt.Mesh(dp=2, tp=2)).sharding
        {'dp': Partial("sum"), 'tp': Shard(0)}

    A spec can take the place of a tensor argument in ``plan`` and in `dtensor.testing`.

    Args:
        text: a dtype and the global shape. ``8@tp``: split over tp; ``8@(tp,dp)``: over two axes,
            tp first; ``3*16@tp``: in blocks; ``4@tp*16``: units of 16; ``(6|2)@tp``: sizes by
            rank; ``8@tp:zigzag``: a `Zigzag`; ``{sum@tp}``: pending.
        mesh: has the axes that are named.
        requires_grad: marks an input whose gradient is wanted.

    Raises PlanningError for a text that is not a spec, or an axis that the mesh lacks.
    """
    check_kind("a spec", text, str, "a text", 'dt.spec("f32[8@tp,16]", mesh)')
    check_mesh(mesh)
    check_kind("requires_grad", requires_grad, bool, "True or False", "requires_grad=True")
    return parse(text, mesh, requires_grad=requires_grad)


def distribute(tensor: torch.Tensor, mesh: Mesh, **placements: Placement) -> DTensor:
    """Put a tensor's shards on the ranks of ``mesh``. ``placements``: by axis, as in
    ``tp=dt.Row()``; Replicate on other axes.

        >>> x = dt.distribute(torch.ones(4, 3), dt.Mesh(tp=2), tp=dt.Row())
        >>> str(x.spec), str(x.sum(0).spec), x.sum().full_tensor()
        ('f32[4@tp,3]', 'f32[3]{sum@tp}', tensor(12.))

    The result is a leaf, which requires grad if ``tensor`` does. Raises PlanningError for an axis
    that the mesh lacks, or a placement that does not fit.
    """
    if isinstance(tensor, DTensor):
        raise PlanningError(
            f"distribute takes a plain tensor, not {tensor.spec} on {tensor.mesh}.\n"
            f"fix: x.redistribute(...), or dt.transfer(x, mesh, ...) to another mesh"
        )
    future = isinstance(tensor, Future | GroupFuture)
    fix = "future.get()" if future else "torch.tensor(...)"
    check_kind("the first argument of distribute", tensor, torch.Tensor, "a tensor", fix)
    check_dense("the first argument of distribute", tensor, name="pass x")
    check_placements(mesh, placements)
    target = make_spec(tuple(tensor.shape), tensor.dtype, mesh, placements)
    distributed = put_shards(tensor.detach(), target, session_for(mesh))
    distributed.requires_grad_(tensor.requires_grad)
    return distributed


def check_placements(mesh: Mesh, placements: Mapping[str, Placement]) -> None:
    """Raises PlanningError for an unknown axis, or a value that is not a placement."""
    check_mesh(mesh)
    for axis, placement in placements.items():
        mesh.axis_size(axis)
        if not isinstance(placement, Placement):
            raise PlanningError(
                f"{axis}={placement!r} is not a placement; write {axis}=dt.Row(), dt.Column(), "
                f"dt.Shard(dim), dt.Replicate() or dt.Partial()"
            )
