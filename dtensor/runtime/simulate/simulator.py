"""Simulation of a step: its program on a virtual clock (runtime/schedule/clock.py).

    trace = simulate(plan, OneFOneB(8).grid(4, 4), topology)
    print(trace); trace.save("trace.json")

One rank represents all ranks of a stage: the rank at coordinate 0 of the other axes, which has the
largest shards, or, with stated sizes, the rank that holds most bytes of the inputs. An actor would
run the same program, after one `CALL` of the controller. A `Call` takes the time of its ops by the
roofline model, a message the time of the alpha-beta model. Contention between channels is not
modelled. Invariants: the trace ends at the time of `plan.cost`; memory equals `plan.memory`, except
that a plan without microbatches counts gradients from the start of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dtensor.daft import (
    Call,
    Collective,
    Commit,
    Free,
    Instruction,
    RankProgram,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.instructions import Start, key_of
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import Functions
from dtensor.runtime.lower.program import lower_rank
from dtensor.runtime.lower.rank_builder import LocalCode, ProgramContext, RankBuilder, Roles
from dtensor.runtime.schedule import Grid
from dtensor.runtime.schedule.clock import Begin, Interval, Item, Until, run
from dtensor.runtime.simulate.trace import CALL, Span, Trace, Track, span_of
from dtensor.sharding.plan.cost.seconds import StepSeconds
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.spec import compared_ranks


def simulate(plan: Plan, grid: Grid | None, topology: Topology | None = None) -> Trace:
    """Return the predicted trace of one run. ``topology``: by default the plan's."""
    plan = replace(plan, topology=topology or plan.topology)
    ranks = representatives(plan)
    state = {
        i.name: f"state {i.label}"
        for i in plan.inputs
        if i.kind in ("parameter", "buffer", "constant")
    }
    shared = ProgramContext(plan, Actions(plan, grid), torch.device("cpu"), priced=True)
    roles = Roles.of_plan(plan, state)
    functions = Functions()
    programs: dict[int, RankProgram] = {}
    lists: dict[int, list[Item]] = {}
    builders: dict[int, RankBuilder] = {}
    for rank in ranks:
        builder = RankBuilder(shared=shared, rank=rank, functions=functions, roles=roles)
        programs[rank] = lower_rank(builder)
        lists[rank] = _items(builder, programs[rank])
        builders[rank] = builder
    call = plan.topology.step_latency
    times = run(lists, call)
    spans: list[Span] = []
    changes: list[tuple[tuple[float, int], ...]] = []
    for rank, program in programs.items():
        if call:
            spans.append(Span(rank=rank, track="wait", label=CALL, begin=0.0, end=call))
        spans += _spans(rank, program, times[rank])
        changes.append(tuple(_memory_changes(builders[rank], program, times[rank], call)))
    return Trace(
        name=plan.name,
        ranks=ranks,
        alike=plan.mesh.size // len(ranks),
        spans=tuple(sorted(spans, key=lambda s: (s.begin, s.rank, s.end))),
        peak_bytes=tuple(max(held for _, held in rank_changes) for rank_changes in changes),
        held_bytes=tuple(changes),
    )


def representatives(plan: Plan) -> tuple[int, ...]:
    """Return the rank that represents the others, for each coordinate of the stage axis."""
    axis, held = plan.stage_axis, [item.held for item in plan.inputs]
    origin = dict.fromkeys(plan.mesh.axes, 0)
    if any(spec.is_sized for spec in held):
        ranks = compared_ranks(held[0].mesh)
        origin |= max(ranks, key=lambda at: sum(spec.local_nbytes(at) for spec in held))
    if axis is None:
        return (plan.mesh.rank(origin),)
    stages = range(plan.mesh.axis_size(axis))
    return tuple(plan.mesh.rank({**origin, axis: at}) for at in stages)


def _state_bytes(plan: Plan, stages: tuple[int, ...]) -> int:
    """Return the bytes of the optimizer's state and of the copies with which a step is undone."""
    memories = [plan.memory[stage] for stage in stages]
    return sum(memory.optimizer + memory.masters + memory.snapshots for memory in memories)


# -- a rank's list ---------------------------------------------------------------------------------


def _items(builder: RankBuilder, program: RankProgram) -> list[Item]:
    """Return the rank's items on the clock, one for each instruction that takes time."""
    calls = (i.work for i in builder.instructions if isinstance(i, LocalCode))
    waits = starts_of_waits(program.instructions)
    items: list[Item] = []
    for at, item in enumerate(program.instructions):
        match item:
            case Call():
                items.append(next(calls))
            case Send() | Recv() | Collective():
                members, *channel = key_of(builder.rank, item)
                spent = _message_seconds(builder, item)
                begin = Begin(at, members, tuple(channel), spent.communication, spent.host)
                items.append(begin)
            case Wait():
                items.append(Until(waits[at]))
            case Free() | Vote() | Commit():
                pass
    return items


def _message_seconds(builder: RankBuilder, item: Start) -> StepSeconds:
    """Return the seconds of the plan's step if the message is one, else by the message's bytes."""
    plan = builder.plan
    if id(item) in builder.priced.messages:
        return builder.priced.messages[id(item)]
    match item:
        case Send(buffer=buffer) | Recv(buffer=buffer):
            return builder.shared.message_seconds(
                "transfer", plan.stage_axis or "", 2, buffer.nbytes
            )
        case Collective(kind=kind, group=group, in_buffers=buffers):
            nbytes = sum(buffer.nbytes for buffer in buffers)
            axis = _axis_of(plan, group)
            return builder.shared.message_seconds(kind, axis, len(group), nbytes)


def _axis_of(plan: Plan, group: tuple[int, ...]) -> str:
    """Return the axis of the mesh along which the ranks of a group differ."""
    first, second = (plan.mesh.coordinates(rank) for rank in group[:2])
    return next(axis for axis in first if first[axis] != second[axis])


# -- results ---------------------------------------------------------------------------------------


def _with_intervals(
    program: RankProgram, times: Sequence[Interval]
) -> Iterator[tuple[Instruction, Interval | None]]:
    """Yield each instruction with its interval, or with None if it takes no time."""
    intervals = iter(times)
    for item in program.instructions:
        yield item, None if isinstance(item, Free | Vote | Commit) else next(intervals)


def _spans(rank: int, program: RankProgram, times: Sequence[Interval]) -> Iterator[Span]:
    for item, interval in _with_intervals(program, times):
        if interval is not None and interval[1] > interval[0]:
            yield span_of(rank, _track(item), item, *interval)


def _track(item: Instruction) -> Track:
    match item:
        case Call():
            return "compute"
        case Wait():
            return "wait"
        case _:
            return "communication"


def _memory_changes(
    b: RankBuilder, program: RankProgram, times: Sequence[Interval], begin: float
) -> Iterator[tuple[float, int]]:
    """Yield (time, bytes held from then on). A storage is held while a value of the table uses it,
    the results of a message from its start, and temporary values of a call while it runs."""
    held = _state_bytes(b.plan, b.stages)
    sizes, users = dict(program.nbytes), Counter[str]()
    segments = (item for item in b.instructions if isinstance(item, LocalCode))

    def change(values: Sequence[str], sign: int) -> int:
        """Add (1) or remove (-1) users of storages. Return the change of the bytes held."""
        change_of_bytes = 0
        for value in values:
            storage = b.priced.storage.get(value, value)
            before = users[storage] > 0
            users[storage] += sign
            if before != (users[storage] > 0):
                change_of_bytes += sign * sizes.get(storage, 0)
        return change_of_bytes

    held += change((*program.inputs, *program.state), 1)
    yield 0.0, held
    now = begin
    for item, interval in _with_intervals(program, times):
        temporary = _peak_in_call(b, next(segments), item.outputs) if isinstance(item, Call) else 0
        if temporary:
            yield now, held + temporary
        if isinstance(item, Call | Wait) and interval is not None:
            now = interval[1]
        match item:
            case Recv(value=value, buffer=buffer):
                sizes[value] = buffer.nbytes
            case Collective(outputs=made, out_buffers=buffers):
                sizes.update(  # rows of experts have their balanced sizes already
                    (value, buffer.nbytes)
                    for value, buffer in zip(made, buffers, strict=True)
                    if not buffer.bounded
                )
            case _:
                pass
        changed = change(item.outputs, 1)
        if isinstance(item, Free):
            changed += change(item.values, -1)
        if changed:
            held += changed
            yield now, held


def _peak_in_call(b: RankBuilder, segment: LocalCode, outputs: Sequence[str]) -> int:
    """Return the peak bytes of a call's temporary values, which are freed after their last use."""
    last_use: dict[str, int] = {}  # by storage, the line
    for number, line in enumerate(segment.code.lines):
        for name in line.reads:
            value = b.table_name(segment, name)
            last_use[b.priced.storage.get(value, value)] = number
    returned = {b.priced.storage.get(value, value) for value in outputs}
    live: list[tuple[int, int]] = []  # last line, bytes
    held = peak = 0
    for line, value in segment.results:
        if value in b.priced.storage:
            continue
        held -= sum(nbytes for end, nbytes in live if end < line)
        live = [(end, nbytes) for end, nbytes in live if end >= line]
        end = len(segment.code.lines) if value in returned else last_use.get(value, line)
        live.append((end, b.nbytes[value]))
        held += b.nbytes[value]
        peak = max(peak, held)
    return peak
