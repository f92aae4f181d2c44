"""Running one op on DTensors: it is planned once for each kind of operands, then called.

    execute(aten.mul.Tensor, (x, 2.0), {})  ->  OpResult(values=(Value,), planned=...)

Plans are cached by the op, its arguments without tensors, each operand's layout and views, and the
registered kernels. A plan serves every session; each session caches its loaded programs. A run is
asynchronous, and its results stay on the ranks under new names. Invariants: operands belong to one
session and one mesh. Communication that the user did not request is reported (policy.py) before
anything runs. A failure names the user's line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from dtensor.api.eager.errors import (
    note_line,
    op_name,
    plain_tensor_error,
    two_homes_error,
    with_line,
    with_line_of_run,
)
from dtensor.api.eager.functions import is_function_argument
from dtensor.api.eager.op_program import CallKey, OneOp, PlannedOp, plan_op
from dtensor.api.eager.policy import RECORDINGS, check_moves
from dtensor.api.eager.values import (
    CachedView,
    Cell,
    CellTensor,
    ReadValue,
    Value,
    ViewStep,
    fresh_name,
)
from dtensor.api.store.handle import Layout, layout_of
from dtensor.api.store.program_cache import ClusterProgram, ProgramCache
from dtensor.api.store.session import MeshSession
from dtensor.api.values.randomness import Counter, random_inputs
from dtensor.daft import DaftError, Stored
from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.kernels.registry import current
from dtensor.numerics import contiguous_strides
from dtensor.private_torch import current_graph_task_id
from dtensor.runtime.lower.program import lower
from dtensor.sharding.ops.call import STEP
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import PARTIAL, Placement
from dtensor.sharding.spec.spec import TensorSpec, make_spec

MAX_PROGRAMS = 4096
"""The number of plans of single ops, and of their programs on each session, that stay cached."""

aten: Any = torch.ops.aten
_RUN_NUMBER_ARGUMENTS: dict[str, frozenset[int | str]] = {
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
"""Arguments that a training loop changes from step to step, by op: the program takes them as
inputs of each run, so that a plan serves all their values."""


@dataclass(slots=True, eq=False)
class Entry:
    """A planned op."""

    planned: PlannedOp
    name: str
    key: Any  # its key in the cache


@dataclass(frozen=True, slots=True)
class OpResult:
    """The values that a run of an op returns; None where the op returns None."""

    planned: PlannedOp
    values: tuple[Value | None, ...]

    def cells(self) -> tuple[Cell | None, ...]:
        """Return a new cell for each value."""
        return tuple(
            None if value is None or layout is None else Cell(value.session, layout, value)
            for value, layout in zip(self.values, self.planned.results, strict=True)
        )


_entries: OrderedDict[Any, Entry] = OrderedDict()
_draws = Counter("eager")
"""Counts the runs of random ops."""


def execute(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    write: CellTensor | None = None,
    pinned: Mapping[str, Placement] | None = None,
    like: Cell | None = None,
    requested: bool = False,
) -> OpResult:
    """Run one op. ``target`` None: redistribute ``args[0]`` to ``pinned``, or compute the value of
    a view.

    Args:
        write: the DTensor among args that the op changes; the result is the new value of its cell.
        pinned: placements of the results, by axis; None: the cheapest.
        like: determines the session and mesh of an op without operands.
        requested: whether the user requested the communication.
    """
    with CALL_LOCK:
        return _execute_locked(target, args, kwargs, write, pinned, like, requested)


def _execute_locked(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    write: CellTensor | None,
    pinned: Mapping[str, Placement] | None,
    like: Cell | None,
    requested: bool,
) -> OpResult:
    """Find or make the plan of an op, check the communication policy, and run it. A plan that has
    folded run numbers is cached under these numbers too."""
    call = CallKey()
    run_number_arguments = _run_number_arguments(target)
    key = (
        target,
        *(call.key(v, is_run_number=i in run_number_arguments) for i, v in enumerate(args)),
        *((k, call.key(v, is_run_number=k in run_number_arguments)) for k, v in kwargs.items()),
    )
    session, mesh = _session_and_mesh(target, call.operands, like)
    reads = [_read_operand(x, mesh, keep_view=target is None or x is write) for x in call.operands]
    layouts_and_views = tuple((r.layout, r.view) for r in reads)
    written_operand = None if write is None else call.index_of[id(write)]
    pins = None if pinned is None else tuple(pinned.items())
    key_of_entry = (key, layouts_and_views, written_operand, pins, mesh, current())
    entry = _entries.get(key_of_entry)
    if entry is None and call.numbers:
        entry = _entries.get((key_of_entry, tuple(map(repr, call.numbers))))
    if entry is None:
        names: list[str] = []
        op = OneOp(
            target=target,
            args=tuple(
                call.structure(v, names if i in run_number_arguments else None)
                for i, v in enumerate(args)
            ),
            kwargs={
                k: call.structure(v, names if k in run_number_arguments else None)
                for k, v in kwargs.items()
            },
            operands=layouts_and_views,
            labels=_labels(target, call, args, kwargs),
            mesh=mesh,
            write=written_operand,
            pinned=pinned,
        )
        entry = _plan(op, key_of_entry, call.numbers)
    _entries.move_to_end(entry.key)
    if entry.planned.moves and not requested:
        check_moves(entry.name, entry.planned.moves)
    for collectives in RECORDINGS:
        collectives += entry.planned.plan.collectives
    return _run(session, entry, call, reads)


@cache
def _run_number_arguments(target: Any) -> frozenset[int | str]:
    """Return the indices and names of an op's arguments that are inputs of each run."""
    name = str(target)
    if target is not None and target._schema.is_mutable:
        base, _, overload = name.rpartition(".")
        name = f"{base.removesuffix('_')}.{overload}"
    return _RUN_NUMBER_ARGUMENTS.get(name, frozenset())


def _session_and_mesh(
    target: Any, operands: Sequence[Any], like: Cell | None
) -> tuple[MeshSession, Mesh]:
    """Return the session and mesh of the op's operands. Raises PlanningError if they differ."""
    first: Any = None
    for x in operands:
        if isinstance(x, CellTensor):
            first = x if first is None else first
            if x.session is not first.session:
                raise two_homes_error(target, first, x)
        elif x.dim() and current_graph_task_id() == -1 and is_function_argument(x):
            raise plain_tensor_error(target, operands)
    cell = like if first is None else first._cell
    assert cell is not None
    cell.session.check()
    for x in operands:
        if isinstance(x, CellTensor) and x._cell.layout.spec.on:
            raise with_line(
                PlanningError(
                    f"{op_name(target)} takes a DTensor that only a part of the mesh holds.\n"
                    f"  {x._cell.layout.spec} on {x.mesh}\n"
                    f"fix: dt.distribute(x.full_tensor(), mesh), or compute where it was made"
                )
            )
    return cell.session, cell.layout.spec.mesh


def _labels(
    target: Any, call: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the name of each operand in torch's schema, with a number if it is in a list."""
    names = [a.name for a in target._schema.arguments] if target is not None else ["x"]
    labels: dict[int, str] = {}
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            labels.setdefault(call.index_of[id(value)], name)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    labels.setdefault(call.index_of[id(item)], f"{name}_{i}")
    return tuple(labels[i] for i in range(len(call.operands)))


def _plan(op: OneOp, key: Any, numbers: Sequence[float]) -> Entry:
    """Plan an op and cache it. If the plan folded the run numbers, they become part of its key."""
    try:
        planned = plan_op(op)
    except PlanningError as error:
        raise with_line(error) from None
    view = op.operands[0][1] if op.target is None else None  # a view that needs communication
    key = (key, tuple(map(repr, numbers))) if planned.folded else key
    entry = _entries[key] = Entry(planned, op_name(op.target if view is None else view.target), key)
    if len(_entries) > MAX_PROGRAMS:
        _entries.popitem(last=False)
    return entry


def _run(session: MeshSession, entry: Entry, call: CallKey, reads: Sequence[ReadValue]) -> OpResult:
    """Run a planned op, loading its program at first use, and return its values."""
    planned = entry.planned
    programs: ProgramCache[ClusterProgram] | None = session.loaded.get(execute)
    if programs is None:
        programs = session.loaded[execute] = ProgramCache(MAX_PROGRAMS)
    program = programs.get(entry) or programs.load(entry, lambda: _load(session, planned))
    feed: dict[str, object] = dict(planned.constants)
    for name, read in zip(planned.inputs, reads, strict=True):
        if name is not None:
            value = read.value
            feed[name] = Stored(value.stored.label) if isinstance(value, Value) else value
    for index, number in enumerate(call.numbers):
        if f"number_{index}" in planned.numbers:
            feed[f"number_{index}"] = number
    if STEP in planned.numbers:
        feed |= random_inputs(_draws.advance(), "eager")
    names = [fresh_name() for _ in planned.plan.outputs]
    keep = {f"result {o.of}": names[int(o.of)] for o in planned.plan.outputs}
    note_line(session)
    try:
        future = session.run(program.handle, [feed] * session.mesh.size, keep)
        if session.at_once:
            future.check()
        else:
            program.last_run = future
    except DaftError as error:
        raise with_line_of_run(session, error) from error.__cause__
    fresh_names = iter(names)
    values = tuple(
        None if layout is None else Value(session, session.stored(next(fresh_names), layout.spec))
        for layout in planned.results
    )
    for extra in planned.reduced:
        reduced = Value(session, session.stored(names[extra.index], extra.spec))
        x = call.operands[extra.operand]
        if isinstance(x, CellTensor) and x._cell.value is reads[extra.operand].value:
            x._cell.reduced = reduced
    return OpResult(planned, values)


def _load(session: MeshSession, planned: PlannedOp) -> ClusterProgram:
    lowered = lower(planned.plan, None, device=session.cluster.device)
    return ClusterProgram(session.cluster, session.cluster.load(lowered))


# -- cells and views -----------------------------------------------------------------------------


def fill(cell: Cell, number: Any) -> None:
    """Set a cell's value to one number everywhere."""
    spec = cell.layout.spec
    cpu = torch.device("cpu")
    result = execute(
        aten.full.default,
        (list(spec.shape), number),
        {"dtype": spec.dtype, "device": cpu},
        pinned=spec.sharding,
        like=cell,
    )
    assert result.values[0] is not None
    cell.set(result.values[0])


def _read_operand(x: torch.Tensor, mesh: Mesh, *, keep_view: bool) -> ReadValue:
    """Return how an op reads an operand: a DTensor as its cell's value, seen through its view. If
    the view needs communication and not ``keep_view``, the view's own value is read, which is
    computed once and cached. A plain tensor has one element, or it is autograd's zeros for a
    missing gradient."""
    if not isinstance(x, CellTensor):
        spec = make_spec(tuple(x.shape), x.dtype, mesh)
        return ReadValue(x.detach(), layout_of(spec, contiguous_strides(spec.shape)), None)
    cell, view = x._cell, x._view
    if cell.value is None:
        fill(cell, 0)
        assert cell.value is not None
    value = cell.reduced or cell.value
    layout = (
        cell.layout if value is cell.value else layout_of(value.stored.spec, cell.layout.strides)
    )
    if view is None or keep_view or not _planned_view(layout, view).moves:
        return ReadValue(value, layout, view)
    cached = own_value(x)
    return ReadValue(cached, layout_of(cached.stored.spec, x.stride()), None)


def own_value(x: CellTensor, *, requested: bool = False) -> Value:
    """Return the value of a tensor: of its cell or, if it is a view, of the view. The value of a
    view is cached until its cell changes. ``requested``: the user has asked for the value, so its
    communication is not implicit."""
    cell = x._cell
    if cell.value is None:
        fill(cell, 0)
    source = cell.value
    assert source is not None
    if x._view is None:
        return source
    if x._cached_view is None or x._cached_view.source is not source:
        pinned = _pending_of(cell.layout.spec)
        (new,) = execute(None, (x,), {}, pinned=pinned, requested=requested).values
        assert new is not None
        x._cached_view = CachedView(source, new)
    return x._cached_view.value


def spec_of(x: CellTensor) -> TensorSpec:
    """Return the spec of a tensor: of its cell or, if it is a view, of the view's value."""
    layout = x._cell.layout
    if x._view is None:
        return layout.spec
    if x._cached_view is not None and x._cached_view.source is x._cell.value:
        return x._cached_view.value.stored.spec
    result = _planned_view(layout, x._view).results[0]
    assert result is not None
    return result.spec


@lru_cache(MAX_PROGRAMS)
def _planned_view(layout: Layout, view: ViewStep) -> PlannedOp:
    """Return the plan that computes the value of a view, with its placement."""
    op = OneOp(
        target=None,
        args=(),
        kwargs={},
        operands=((layout, view),),
        labels=("x",),
        mesh=layout.spec.mesh,
        pinned=_pending_of(layout.spec),
    )
    try:
        return plan_op(op)
    except PlanningError as error:
        raise with_line(error) from None


def _pending_of(spec: TensorSpec) -> dict[str, Placement]:
    """Return the placements by pending sums, which a view keeps, because every view is linear."""
    return {axis: p for axis, p in spec.sharding.items() if p == PARTIAL}


def make_shards_private(call: Sequence[Any], changed: Sequence[int]) -> None:
    """Give each of these leaves of a call its own copy of its shards, so that a function can write
    them in place. Raises PlanningError if a leaf is a view, a pending sum or not a DTensor, or if
    another leaf shares its memory."""
    for index in changed:
        x = call[index]
        fact = fix = ""
        if not isinstance(x, CellTensor):
            raise with_line(
                PlanningError(
                    "an argument that the function changes is no DTensor.\n"
                    "fix: x = dt.distribute(x, mesh) before the calls"
                )
            )
        if x._view is not None:
            fact = "is a view of another DTensor"
            fix = "pass the whole, and take the view in the function"
        elif sum(isinstance(y, CellTensor) and y._cell is x._cell for y in call) > 1:
            fact = "shares its memory with another argument"
            fix = "pass the other one's .clone(), or the tensor once"
        elif PARTIAL in x._cell.layout.spec.placements:
            fact = "is a pending sum"
            fix = "x = x.redistribute(...) before the call"
        if fact:
            fact = f"an argument that the function changes {fact}."
            raise with_line(PlanningError(f"{fact}\n  {spec_of(x)}\nfix: {fix}"))
        if own_value(x).cells > 1:  # a clone shares the shards
            (new,) = execute(
                None, (x,), {}, pinned=x._cell.layout.spec.sharding, requested=True
            ).values
            assert new is not None
            x._cell.set(new)


def mark_changed(call: Sequence[Any], indices: Sequence[int], run: Any) -> None:
    """Record that a run writes the shards of these leaves in place, for their views and for
    autograd. Reading them raises the run's failure."""
    for index in indices:
        x = call[index]
        assert isinstance(x, CellTensor) and x._cell.value is not None
        x._cell.set(x._cell.value.after_write(run))
        torch.autograd.graph.increment_version(x)


def fetch(value: Value) -> list[torch.Tensor]:
    """Return the shards, one per rank that holds the value. Waits for the value."""
    try:
        if value.run is not None:
            run, value.run = value.run, None  # its failure is raised once
            run.check()
        if value.returned is not None:
            return value.session.returned(value.returned, value.stored.at)
        shards = value.session.launch.store.fetch([value.stored])[value.stored.label]
        return [shards[rank] for rank in value.stored.at]
    except DaftError as error:
        raise with_line_of_run(value.session, error) from error.__cause__
