"""The program of a step run against a virtual clock: who computes, sends and waits when.

    trace = simulate(plan, OneFOneB(8).grid(4, 4), topology)
    print(trace); trace.save("trace.json")

The ranks of one stage that differ in other axes do the same on equal shards, so one of them stands
for all: the one at coordinate 0, which has the largest. Its list of instructions is the one that an
actor would run. A `Call` lasts as long as its ops by the roofline; a message as long as the
alpha-beta model says, in the background, after those before it on its channel; a `Wait` until its
messages are complete. A message begins when all its members have started it; those that no rank
here stands for start when ours does. The controller's call stands before it all, as one `CALL`.

Invariant: it ends when `plan.cost` says, which replays one action of each kind. Not modelled:
contention between channels; what `Free` and an empty `Wait` take.
"""

from __future__ import annotations

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
from dtensor.daft.ir.instructions import Start, key_of, outputs_of
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.builder import LocalCode, RankBuilder, Roles, Shared
from dtensor.runtime.lower.code import Functions
from dtensor.runtime.lower.program import lower_rank
from dtensor.runtime.schedule import Grid
from dtensor.runtime.schedule.clock import Begin, Interval, Item, Stretch, Until, run
from dtensor.runtime.simulate.trace import CALL, Span, Trace, Track, span_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Update
from dtensor.sharding.redistribute.topology import Topology, ring_bytes


def simulate(plan: Plan, grid: Grid | None, topology: Topology | None = None) -> Trace:
    """The predicted trace of one run. ``topology``: to price with; default the plan's."""
    plan = replace(plan, topology=topology or plan.topology)
    ranks = representatives(plan)
    trains = any(isinstance(step, Update) for step in plan.steps)
    state = {
        i.name: f"state {i.label}"
        for i in plan.inputs
        if i.kind in ("parameter", "buffer", "constant")
    }
    shared = Shared(plan, Actions(plan, grid), torch.device("cpu"), priced=True)
    roles = Roles(optimizer="optimizer" if trains else None, state=state)
    functions = Functions()
    programs: dict[int, RankProgram] = {}
    lists: dict[int, list[Item]] = {}
    held: dict[int, int] = {}
    for rank in ranks:
        builder = RankBuilder(shared=shared, rank=rank, functions=functions, roles=roles)
        programs[rank] = lower_rank(builder)
        lists[rank] = _items(builder, programs[rank])
        held[rank] = _state_bytes(plan, builder.stages) if trains else 0
    call = plan.topology.step_latency
    times = run(lists, call)
    spans: list[Span] = []
    changes: list[tuple[tuple[float, int], ...]] = []
    for rank, program in programs.items():
        if call:
            spans.append(Span(rank=rank, track="wait", name=CALL, begin=0.0, end=call))
        spans += _spans(rank, program, times[rank])
        changes.append(tuple(_held(program, times[rank], held[rank], call)))
    return Trace(
        name=plan.name,
        ranks=ranks,
        alike=plan.mesh.size // len(ranks),
        spans=tuple(sorted(spans, key=lambda s: (s.begin, s.rank, s.end))),
        peak_bytes=tuple(max(held for _, held in of) for of in changes),
        held_bytes=tuple(changes),
    )


def representatives(plan: Plan) -> tuple[int, ...]:
    """A rank for each coordinate of the stage axis: the one at 0 of all other axes."""
    axis = plan.stage_axis
    if axis is None:
        return (0,)
    return tuple(
        plan.mesh.rank({a: at if a == axis else 0 for a in plan.mesh.axes})
        for at in range(plan.mesh.axis_size(axis))
    )


def _state_bytes(plan: Plan, stages: tuple[int, ...]) -> int:
    """The optimizer's state, which the program's values do not show."""
    return sum(plan.memory[s].optimizer + plan.memory[s].masters for s in stages)


# -- a rank's list ---------------------------------------------------------------------------------


def _items(builder: RankBuilder, program: RankProgram) -> list[Item]:
    """What the rank does, by its instructions that take time."""
    calls = (i.seconds for i in builder.instructions if isinstance(i, LocalCode))
    waits = starts_of_waits(program.instructions)
    items: list[Item] = []
    for at, item in enumerate(program.instructions):
        match item:
            case Call():
                seconds = next(calls)
                items.append(Stretch(seconds, seconds))
            case Send() | Recv() | Collective():
                members, *channel = key_of(builder.rank, item)
                seconds = _seconds(builder, item)
                items.append(Begin(at, members, tuple(channel), seconds))
            case Wait():
                items.append(Until(waits[at]))
            case Free() | Vote() | Commit():
                pass
    return items


def _seconds(builder: RankBuilder, item: Start) -> float:
    """Of a message: as the step says whose it is; of others, by what is sent."""
    plan = builder.plan
    if id(item) in builder.prices:
        return builder.prices[id(item)]
    match item:
        case Send(buffer=buffer) | Recv(buffer=buffer):
            kind, axis, num, sent = "transfer", plan.stage_axis or "", 2, buffer.nbytes
        case Collective(kind=kind, group=group):
            axis, num = _axis(plan, group), len(group)
            sent = ring_bytes(kind, sum(buffer.nbytes for buffer in item.in_buffers), num)
    return plan.topology.collective_seconds(kind, axis, num=num, bytes_sent=sent)


def _axis(plan: Plan, group: tuple[int, ...]) -> str:
    """The axis along which the members lie."""
    first, second = (plan.mesh.coordinates(rank) for rank in group[:2])
    return next(axis for axis in first if first[axis] != second[axis])


# -- what comes of it ------------------------------------------------------------------------------


def _timed(
    program: RankProgram, times: Sequence[Interval]
) -> Iterator[tuple[Instruction, Interval | None]]:
    """Each instruction and when it is; None of those that take no time."""
    each = iter(times)
    for item in program.instructions:
        yield item, None if isinstance(item, Free | Vote | Commit) else next(each)


def _spans(rank: int, program: RankProgram, times: Sequence[Interval]) -> Iterator[Span]:
    for item, interval in _timed(program, times):
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


def _held(
    program: RankProgram, times: Sequence[Interval], state_bytes: int, begin: float
) -> Iterator[tuple[float, int]]:
    """(From when on, bytes held); what a message makes is held when it is started."""
    sizes = dict(program.nbytes)
    held = state_bytes + sum(sizes.get(name, 0) for name in (*program.inputs, *program.state))
    yield 0.0, held
    now = begin
    for item, interval in _timed(program, times):
        if isinstance(item, Call | Wait) and interval is not None:
            now = interval[1]
        come = sum(sizes.get(name, 0) for name in outputs_of(item))
        gone = sum(sizes.get(name, 0) for name in item.values) if isinstance(item, Free) else 0
        if come != gone:
            held += come - gone
            yield now, held
