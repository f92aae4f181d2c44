"""`DTensor`: a tensor whose shards live on the actors of a cluster.

    x = distribute(torch.randn(8, 16), Mesh(tp=2), tp=Row())
    x.shape, str(x.spec)               # (8, 16), "f32[8@tp,16]"
    x.full_tensor(); x.local_tensors()

A DTensor holds a handle; its shards are named values in the actors' tables. Reading it waits.
Ops on DTensors run inside functions given to `dt.compile`; outside, an op raises and says so.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtensor.errors import PlanningError
from dtensor.sharding.local import assemble_at, shard_of
from dtensor.sharding.mesh import Mesh
from dtensor.sharding.placements import Placement
from dtensor.sharding.spec import TensorSpec, make_spec
from dtensor.sharding.spec_text import parse

if TYPE_CHECKING:
    from dtensor.api.session import Session

_names = itertools.count()


class DTensor:
    """Global ``shape`` and ``dtype``; ``spec`` says how it is split. Made by `distribute` and by
    compiled functions; immutable."""

    def __init__(self, spec: TensorSpec, session: Session, name: str) -> None:
        self.spec = spec
        self.session = session
        self.name = name
        weakref.finalize(self, session.forget, name, held_by(spec))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def mesh(self) -> Mesh:
        return self.spec.mesh

    def local_tensors(self) -> list[torch.Tensor]:
        """The shards, one per rank that holds the value, in rank order; CPU copies. Waits."""
        ranks = held_by(self.spec)
        return self.session.fetch(self.name, ranks)

    def full_tensor(self) -> torch.Tensor:
        """The global value as one CPU tensor; pending values are reduced. Waits."""
        shards = dict(zip(held_by(self.spec), self.local_tensors(), strict=True))
        return assemble_at(shards, self.spec)

    def redistribute(self, **placements: Placement) -> DTensor:
        """The same value under other placements; the collectives run on the actors."""
        from dtensor.api.compiled import compile
        from dtensor.api.placing import restated

        held = restated(self.spec)
        wanted = {**held, **placements}
        if set(placements) >= set(held):  # the user's order says which axis is major
            wanted = dict(placements)
        return compile(_identity, self.mesh, out=wanted)(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise _outside(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        # a method of torch.Tensor: say where it works rather than that it does not exist
        if name.startswith("__") or name not in dir(torch.Tensor):
            raise AttributeError(f"'DTensor' object has no attribute {name!r}")
        raise _outside(name)

    def _operator(self, *_: object) -> Any:
        raise _outside("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __pow__ = _operator
    __getitem__ = __iadd__ = __imul__ = __isub__ = __abs__ = __invert__ = _operator
    __lt__ = __le__ = __gt__ = __ge__ = _operator
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __rpow__ = __itruediv__ = _operator
    __and__ = __or__ = __xor__ = _operator

    def __eq__(self, other: object) -> Any:
        raise _outside("an operator")

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] - by identity, as torch's

    def __bool__(self) -> bool:
        raise _outside("the truth value")

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError(f"a scalar has no length: {self.spec}")
        return self.spec.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.spec.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def item(self) -> Any:
        """The one element, as a Python number. Waits."""
        return self.full_tensor().item()

    def __float__(self) -> float:
        if self.spec.shape:
            raise ValueError(f"only a scalar converts to a float, not {self.spec}")
        return float(self.full_tensor())

    def __repr__(self) -> str:
        return f"DTensor({self.spec}, {self.mesh})"


def _outside(what: str) -> TypeError:
    return TypeError(
        f"{what} on a DTensor outside dt.compile: ops run inside a compiled function for now. "
        f"fix: f = dt.compile(lambda x: ..., mesh) and f(x), or x.full_tensor() for a plain tensor"
    )


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def held_by(spec: TensorSpec) -> tuple[int, ...]:
    """The ranks of the part of the mesh that holds the value."""
    on = dict(spec.on)
    mesh = spec.mesh
    return tuple(
        rank
        for rank in range(mesh.size)
        if all(mesh.coordinates(rank)[axis] == index for axis, index in on.items())
    )


def fresh_name() -> str:
    return f"tensor {next(_names)}"


def spec(text: str, mesh: Mesh, *, requires_grad: bool = False) -> TensorSpec:
    """The spec that ``text`` denotes, as in ``spec("f32[8@tp,16]", Mesh(tp=2))``.

    It stands for an argument in ``plan`` and in `dtensor.testing`; ``requires_grad`` marks an
    input whose gradient is wanted. The grammar is in dtensor/sharding/spec.py.
    """
    return parse(text, mesh, requires_grad=requires_grad)


def distribute(tensor: torch.Tensor, mesh: Mesh, **placements: Placement) -> DTensor:
    """Put a tensor's shards on the ranks of ``mesh``. Axes that are not named: Replicate.

    Raises PlanningError for an axis that the mesh lacks and a placement that does not fit.
    """
    from dtensor.api.session import session_for

    for axis, placement in placements.items():
        mesh.axis_size(axis)
        if not isinstance(placement, Placement):
            raise PlanningError(
                f"{axis}={placement!r} is not a placement; write {axis}=dt.Row(), dt.Column(), "
                f"dt.Shard(dim), dt.Replicate() or dt.Partial()"
            )
    placed = make_spec(tuple(tensor.shape), tensor.dtype, mesh, placements)
    session = session_for(mesh)
    name = fresh_name()
    data = tensor.detach()
    session.put([{name: shard_of(data, placed, mesh.coordinates(r))} for r in range(mesh.size)])
    return DTensor(placed, session, name)
