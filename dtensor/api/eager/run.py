"""Running one op on DTensors: plan it once per kind of operands, then one call per op.

    execute(aten.mul.Tensor, (x, 2.0), {})  ->  Ran(values=(Value,), planned=...)

The key of the cache is the op, its arguments without tensors, and how each operand is held and
seen; a plan serves every session, a loaded program one. A run is a call of the session's cluster
that nobody waits for: its results stay on the ranks under fresh names.

Invariants: operands belong to one session and one mesh. What would be sent without being told is
reported (policy.py) before anything runs. A failure names the user's line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from dtensor.api.eager import policy
from dtensor.api.eager.errors import dtensor, elsewhere, op_name, plain, with_line
from dtensor.api.eager.graph import OneOp, PlannedOp, plan_op
from dtensor.api.eager.lines import run_on
from dtensor.api.eager.values import (
    Cell,
    Layout,
    Operand,
    Value,
    View,
    contiguous_strides,
    fresh_name,
    layout_of,
)
from dtensor.daft import Stored
from dtensor.errors import PlanningError
from dtensor.runtime.lower.program import lower
from dtensor.sharding.ops import call as sharding_call
from dtensor.sharding.ops.call import Slot
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Partial, Placement
from dtensor.sharding.spec.spec import TensorSpec, make_spec

if TYPE_CHECKING:
    from dtensor.api.session import Session

MAX_PROGRAMS = 4096
"""Plans of single ops, and programs of them per session, that are kept; the oldest goes first."""

aten = torch.ops.aten
_OPEN_NUMBERS: dict[str, frozenset[int | str]] = {
    "aten.add.Tensor": frozenset({1, "alpha"}),
    "aten.sub.Tensor": frozenset({1, "alpha"}),
    "aten.mul.Tensor": frozenset({1}),
    "aten.div.Tensor": frozenset({1}),
    "aten.add.Scalar": frozenset({1, 2, "alpha"}),
    "aten.sub.Scalar": frozenset({1, 2, "alpha"}),
    "aten.mul.Scalar": frozenset({1}),
    "aten.div.Scalar": frozenset({1}),
    "aten.addcmul.default": frozenset({"value"}),
    "aten.addcdiv.default": frozenset({"value"}),
    "aten.lerp.Scalar": frozenset({2}),
}
"""The arguments that a training loop changes from step to step: given at each run, not planned."""


@dataclass(slots=True)
class Call:
    """An op's call taken apart: ``key`` is what a plan depends on."""

    operands: list[Any] = field(default_factory=list)  # DTensors, and plain tensors of one element
    places: dict[int, int] = field(default_factory=dict)  # by id of the tensor
    numbers: list[float] = field(default_factory=list)

    def key(self, value: Any, *, is_open: bool = False) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is float:
            if is_open:
                self.numbers.append(value)
                return (Slot, value == 0.0)
            return (float, repr(value))  # so that 0.0, -0.0, 1 and True are four keys, nan one
        if kind is list or kind is tuple:
            return (kind, *(self.key(v) for v in value))
        if kind is bool or kind is complex:
            return (kind, repr(value))
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        place = self.places.get(id(tensor))
        if place is None:
            place = self.places[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
        return (torch.Tensor, place)

    def structure(self, value: Any, numbers: list[str] | None = None) -> Any:
        """The argument with `Operand`s for tensors, and `Slot`s for the numbers that are open."""
        if isinstance(value, torch.Tensor):
            return sharding_call.Operand(self.places[id(value)])
        if isinstance(value, (list, tuple)):
            return type(value)(self.structure(v) for v in value)
        if numbers is not None and type(value) is float:
            numbers.append(f"number_{len(numbers)}")
            return Slot.of(value, numbers[-1])
        return value


@dataclass(slots=True, eq=False)
class Entry:
    """A planned op, and its program on each session that ran it."""

    planned: PlannedOp
    name: str
    programs: WeakKeyDictionary[Session, Any] = field(default_factory=WeakKeyDictionary)


@dataclass(frozen=True, slots=True)
class Ran:
    planned: PlannedOp
    values: tuple[Value | None, ...]


_entries: OrderedDict[Any, Entry] = OrderedDict()
_loaded: WeakKeyDictionary[Session, OrderedDict[Entry, None]] = WeakKeyDictionary()


def execute(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    write: Any = None,
    pinned: Mapping[str, Placement] | None = None,
    like: Any = None,
    told: bool = False,
) -> Ran:
    """Run one op; ``target`` None: bring ``args[0]`` to ``pinned``, or out of its views.

    Args:
        write: the DTensor among args that the op changes; the result is its whole cell.
        like: a DTensor that says where an op without operands runs.
        told: the user asked for what is sent.
    """
    call = Call()
    found = _open(target)
    key = (
        target,
        *(call.key(v, is_open=i in found) for i, v in enumerate(args)),
        *((k, call.key(v, is_open=k in found)) for k, v in kwargs.items()),
    )
    session, mesh = _home(target, call.operands, like, args)
    operands = [_operand(x, mesh, whole=target is None or x is write) for x in call.operands]
    at = None if write is None else call.places[id(write)]
    pins = None if pinned is None else tuple(pinned.items())
    held = tuple((o.layout, o.view) if isinstance(o, Operand) else (o[0], None) for o in operands)
    whole = (key, held, at, pins, mesh)
    entry = _entries.get(whole)
    if entry is None and call.numbers:
        entry = _entries.get((whole, tuple(map(repr, call.numbers))))
    if entry is None:
        entry = _plan(whole, call, target, args, kwargs, held, at, pinned, mesh)
    if entry.planned.moves and not told:
        policy.check(entry.name, entry.planned.moves)
    return _run(session, entry, call, operands)


def _open(target: Any) -> frozenset[int | str]:
    found = _open_of.get(target)
    if found is None:
        name = str(target)
        if target is not None and target._schema.is_mutable:
            base, _, overload = name.rpartition(".")
            name = f"{base.removesuffix('_')}.{overload}"
        found = _open_of[target] = _OPEN_NUMBERS.get(name, frozenset())
    return found


_open_of: dict[Any, frozenset[int | str]] = {}


def _operand(x: Any, mesh: Mesh, whole: bool) -> Operand | tuple[Layout, torch.Tensor]:
    """What is read of a DTensor; a plain tensor is given to every rank.

    That is one number, or in a backward pass what autograd makes: zeros for a part of a split
    that has no gradient.
    """
    if isinstance(x, dtensor()):
        return x.operand(whole=whole)
    spec = make_spec(tuple(x.shape), x.dtype, mesh)
    return layout_of(spec, contiguous_strides(spec.shape)), x.detach()


def _home(target: Any, operands: Sequence[Any], like: Any, args: Any) -> tuple[Session, Mesh]:
    """Where the op runs: where its operands are. PlanningError where they are in two places."""
    kind = dtensor()
    first: Any = like
    for x in operands:
        if isinstance(x, kind):
            first = x if first is None else first
            if x.session is not first.session:
                raise elsewhere(target, first, x)
        elif x.dim() and torch._C._current_graph_task_id() == -1:
            raise plain(target, operands)
    first.session.check()
    for x in operands:
        if isinstance(x, kind) and x._cell.layout.spec.on:
            raise with_line(
                PlanningError(
                    f"{op_name(target)} takes a DTensor that only a part of the mesh holds.\n"
                    f"  {x._cell.layout.spec} on {x.mesh}\n"
                    f"fix: dt.distribute(x.full_tensor(), mesh), or compute where it was made"
                )
            )
    return first.session, first.mesh


def _plan(
    whole: Any,
    call: Call,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    held: tuple[tuple[Layout, View | None], ...],
    write: int | None,
    pinned: Mapping[str, Placement] | None,
    mesh: Mesh,
) -> Entry:
    found = _open(target)
    numbers: list[str] = []

    def structure(place: int | str, value: Any) -> Any:
        return call.structure(value, numbers if place in found else None)

    op = OneOp(
        target=target,
        args=tuple(structure(i, v) for i, v in enumerate(args)),
        kwargs={k: structure(k, v) for k, v in kwargs.items()},
        operands=held,
        labels=_labels(target, call, args, kwargs),
        mesh=mesh,
        write=write,
        pinned=pinned,
    )
    try:
        planned = plan_op(op)
    except PlanningError as error:
        raise with_line(error) from None
    last = held[0][1] if target is None else None  # a view that takes communication to see
    entry = Entry(planned, op_name(target if last is None else last.target))
    if planned.folded:
        whole = (whole, tuple(map(repr, call.numbers)))
    _entries[whole] = entry
    if len(_entries) > MAX_PROGRAMS:
        _entries.popitem(last=False)
    return entry


_seen: dict[tuple[Layout, View], PlannedOp] = {}


def pending_of(spec: TensorSpec) -> dict[str, Placement]:
    """A view of a pending value is pending: every view is linear."""
    return {axis: p for axis, p in spec.sharding.items() if isinstance(p, Partial)}


def seen(layout: Layout, view: View) -> PlannedOp:
    """What it takes to see a cell through a view, and how the view is placed then."""
    found = _seen.get((layout, view))
    if found is None:
        spec = layout.spec
        op = OneOp(
            target=None,
            args=(),
            kwargs={},
            operands=((layout, view),),
            labels=("x",),
            mesh=spec.mesh,
            pinned=pending_of(spec),
        )
        try:
            found = _seen[layout, view] = plan_op(op)
        except PlanningError as error:
            raise with_line(error) from None
    return found


def _labels(
    target: Any, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """What torch's schema calls each operand; numbered within a list."""
    names = [a.name for a in target._schema.arguments] if target is not None else ["x"]
    labels: dict[int, str] = {}
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            labels.setdefault(call.places[id(value)], name)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    labels.setdefault(call.places[id(item)], f"{name}_{i}")
    return tuple(labels[i] for i in range(len(call.operands)))


def _run(
    session: Session,
    entry: Entry,
    call: Call,
    operands: Sequence[Operand | tuple[Layout, torch.Tensor]],
) -> Ran:
    planned = entry.planned
    program = entry.programs.get(session)
    if program is None:
        program = _load(session, entry)
    feed: dict[str, object] = dict(planned.constants)
    for name, operand in zip(planned.inputs, operands, strict=True):
        if name is not None:
            feed[name] = Stored(operand.value.name) if isinstance(operand, Operand) else operand[1]
    for index, number in enumerate(call.numbers):
        if f"number_{index}" in planned.numbers:
            feed[f"number_{index}"] = number
    names = [fresh_name() for _ in planned.plan.outputs]
    keep = {f"result {o.of}": names[int(o.of)] for o in planned.plan.outputs}
    run_on(session, program, feed, keep)
    made = iter(names)
    values = tuple(
        None if meta is None else Value(session, next(made), meta.spec) for meta in planned.results
    )
    for extra in planned.reduced:
        kept = Value(session, names[extra.index], extra.spec)
        tensor = call.operands[extra.operand]
        operand = operands[extra.operand]
        if isinstance(operand, Operand) and tensor._cell.value is operand.value:
            tensor._cell.reduced = kept
    return Ran(planned, values)


def _load(session: Session, entry: Entry) -> Any:
    lowered = lower(entry.planned.plan, None, device=session.cluster.device)
    program = session.cluster.load(lowered.program)
    entry.programs[session] = program
    known = _loaded.setdefault(session, OrderedDict())
    known[entry] = None
    if len(known) > MAX_PROGRAMS:
        oldest, _ = known.popitem(last=False)
        session.cluster.unload(oldest.programs.pop(session))
    return program


def cells_of(ran: Ran) -> tuple[Cell | None, ...]:
    """A new cell for each value that an op returned."""
    return tuple(
        None
        if value is None or meta is None
        else Cell(value.session, layout_of(value.spec, meta.strides), value)
        for value, meta in zip(ran.values, ran.planned.results, strict=True)
    )
