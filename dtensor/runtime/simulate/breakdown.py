"""The breakdown of timed runs of a step: a `Profile`, from the stamps of each rank.

    floors = measure_floors(cluster)       # the cost of stamps on each rank, and of calls of ops
    profile_of(measured, plan, predicted)  # `step.profile` makes it

The parts of a rank's time:

    kernels      the time of each op, less "dispatch"
    waiting      in Wait, by the ranks waited for
    overhead     controller: Python before the run and after it;  channel: the run less the longest
                 list;  engine: between instructions, their table;  starts: of messages;
                 dispatch: a call of the op on one element, or the call if that is less
    other_ranks  of the same process, which take turns with it
    idle         before the rank's first instruction and after its last, while others run

Durations are taken with a rank's own clock, so hosts need not agree on one. The cost of stamps is
subtracted. Each figure is a median over steps. Not here: running the steps
(api/launch/profiling.py).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dtensor.daft import (
    Call,
    Cluster,
    Collective,
    Commit,
    Free,
    Function,
    Label,
    Program,
    RankProgram,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.ir.instructions import key_of
from dtensor.daft.run.timestamps import Stamps, lines_of, times_of
from dtensor.daft.verification.pairing import Site, starts_of_waits
from dtensor.private_torch import OpOverload
from dtensor.runtime.lower import detect_nan, moves, step_end
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import ADDING, COPIES, QUICK, overload_of
from dtensor.runtime.lower.rank_builder import ProgramContext
from dtensor.runtime.optimizer.shard_optimizer import clip_divisor, sum_of_squares
from dtensor.runtime.profile import LAYERS, Profile, RankProfile, Spent
from dtensor.runtime.simulate.simulator import representatives
from dtensor.runtime.simulate.trace import CALL, Trace
from dtensor.sharding.plan.cost.seconds import step_seconds, step_times
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Accumulate, Compute, Redistribute, Step, Update
from dtensor.sharding.plan.text.words import op_name
from dtensor.sharding.spec.shards import block, join, write

PACKING, NORM, CHECKS = "pack and join", "norm", "checks"
UPDATE = "update"
_HELPERS: Mapping[object, str] = {
    **dict.fromkeys((block, join, write, moves.packed, moves.unpacked), PACKING),
    **dict.fromkeys((moves.gathered, moves.written), PACKING),
    **dict.fromkeys((sum_of_squares, clip_divisor), NORM),
    detect_nan.check_finite: CHECKS,
    step_end.step_optimizer: UPDATE,
}


# -- the cost of a stamp and of a call
# ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Costs on one rank, in seconds. ``stamp``: of a line; ``instruction``: of the two of an
    instruction; ``quick``, ``overload``: of a line that calls an op on one element, by the function
    that torch generates for it, or by its overload; stamp included."""

    stamp: float
    instruction: float
    quick: float
    overload: float


_NUM_LINES = 64
_KINDS: Mapping[str, tuple[str, object]] = {
    "stamp": ("y = x", None),
    "quick": ("y = relu(x)", torch.relu),
    "overload": ("y = relu_(x)", torch.ops.aten.relu.default),
}


def measure_floors(cluster: Cluster) -> tuple[Floors, ...]:
    """The floors by rank; it takes some milliseconds, all ranks at once."""
    texts = [text for text, _ in _KINDS.values() for _ in range(_NUM_LINES)]
    lines = ["x = ones(1, device=device)", *texts, "cost = instruction_seconds(device)"]
    bindings: dict[str, object] = {
        "ones": torch.ones,
        "relu": torch.relu,
        "relu_": torch.ops.aten.relu.default,
        "device": cluster.device,
        "instruction_seconds": instruction_seconds,
    }
    body = Body((), tuple(map(CodeLine, lines)), ("cost",))
    function = Function.straight("floors", body, bindings)
    call = Call("floors", (), ("cost",))
    rank_program = RankProgram(instructions=(call,), outputs=("cost",), nbytes=(("cost", 8),))
    program = Program(
        name="floors",
        ranks=(rank_program,) * cluster.size,
        functions=(("floors", function),),
        stage_of=(0,) * cluster.size,
    )
    handle = cluster.load(program)
    fed = [dict[str, object]()] * cluster.size
    runs = [cluster.run(handle, fed, mode="timed").get() for _ in range(3)]
    cluster.unload(handle)
    return tuple(_floors([run[rank] for run in runs[1:]]) for rank in range(cluster.size))


def _floors(runs: Sequence[Mapping[str, object]]) -> Floors:
    medians: dict[str, float] = {}
    for number, kind in enumerate(_KINDS):
        first = 1 + number * _NUM_LINES  # after the line that makes x
        lasted = [
            after - before
            for lines in map(lines_of, runs)
            for before, after in zip(
                lines[first : first + _NUM_LINES], lines[first + 1 :], strict=False
            )
        ]
        medians[kind] = statistics.median(lasted)
    costs = [float(cost) for run in runs if isinstance(cost := run["cost"], torch.Tensor)]
    return Floors(instruction=min(costs), **medians)


def instruction_seconds(device: torch.device) -> torch.Tensor:
    """Runs on actors: the extra seconds of a timed step of the engine."""
    stamps = Stamps({}, device)
    timed = stamps.timed((0, 0), _nothing)
    plain, noted = (min(_each(step) for _ in range(5)) for step in (_nothing, timed))
    return torch.tensor(max(0.0, noted - plain), dtype=torch.float64)


def _each(step: Callable[[], None], times: int = 200) -> float:
    begin = time.monotonic()
    for _ in range(times):
        step()
    return (time.monotonic() - begin) / times


def _nothing() -> None:
    pass


# -- timed runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """``controller``: seconds of the controller before and after the run; ``run``: from its call
    until its results were there; ``outputs``: by rank, with those of `Stamps`."""

    controller: float
    run: float
    outputs: Sequence[Mapping[str, object]]

    @property
    def seconds(self) -> float:
        return self.controller + self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``program``: the program that ran, ``lists`` its sites by host, ``ranks`` its ranks in the
    plan's order; ``plain``: seconds of steps that were not timed."""

    program: Program
    lists: Sequence[Sequence[Site]]
    ranks: tuple[int, ...]
    floors: Sequence[Floors]
    steps: Sequence[TimedStep]
    plain: Sequence[float]


def profile_of(measured: Measured, plan: Plan, predicted: Trace) -> Profile:
    """``predicted``: the simulated trace of the same step."""
    parts = [_parts_of(measured, step) for step in measured.steps]
    seconds = statistics.median(measured.plain)
    timed = statistics.median(step.seconds for step in measured.steps)
    return Profile(
        name=plan.name,
        seconds=seconds,
        predicted=predicted.seconds,
        hardware=plan.topology.title,
        instrumentation=timed - seconds,
        num_steps=len(measured.steps),
        ranks=tuple(
            _rank_profile(rank, [own[rank] for own in parts], measured, plan, predicted)
            for rank in range(len(measured.ranks))
        ),
    )


@dataclass(slots=True)
class _Parts:
    """Seconds and times of one rank in one step."""

    kernels: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    times: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    waiting: dict[tuple[int, ...], float] = field(
        default_factory=lambda: defaultdict[tuple[int, ...], float](float)
    )
    waits: dict[tuple[int, ...], int] = field(
        default_factory=lambda: defaultdict[tuple[int, ...], int](int)
    )
    overhead: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0.0))
    other_ranks: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class _Op:
    """The call in a line of generated code. ``kind``: its way; "none" calls nothing."""

    name: str
    kind: Literal["quick", "overload", "python", "none"]


def _parts_of(measured: Measured, step: TimedStep) -> list[_Parts]:
    """The parts by rank of the plan."""
    program = measured.program
    ops = {name: _ops_of(function) for name, function in program.functions}
    parts = [_Parts() for _ in measured.ranks]
    number = {rank: i for i, rank in enumerate(measured.ranks)}
    spans: dict[int, float] = {}
    for sites in measured.lists:
        here = sorted({rank for rank, _ in sites if rank in number})
        lines = {rank: iter(lines_of(step.outputs[number[rank]])) for rank in here}
        waits = {rank: _peers_of_waits(program, rank, number) for rank in here}
        events = sorted(
            (begin, end, rank, index)
            for rank in here
            for index, begin, end in times_of(step.outputs[number[rank]])
        )
        spent = dict.fromkeys(here, 0.0)
        last = events[0][0] if events else 0.0
        for begin, end, rank, index in events:
            parts_of_rank, floors = parts[number[rank]], measured.floors[number[rank]]
            gap = max(0.0, begin - last - floors.instruction)
            parts_of_rank.overhead["engine"] += gap
            lasted = end - begin
            match item := program.ranks[rank].instructions[index]:
                case Call():
                    lasted = _call(parts_of_rank, item, lasted, ops[item.fn], lines[rank], floors)
                case Wait():
                    parts_of_rank.waiting[waits[rank][index]] += lasted
                    parts_of_rank.waits[waits[rank][index]] += 1
                case Send() | Recv() | Collective():
                    parts_of_rank.overhead["starts"] += lasted
                case Free() | Vote() | Commit():
                    parts_of_rank.overhead["engine"] += lasted
            spent[rank] += gap + lasted
            last = end
        for rank in here:
            parts[number[rank]].other_ranks = sum(spent.values()) - spent[rank]
            spans[number[rank]] = sum(spent.values())
    longest = max(spans.values(), default=0.0)
    for rank, parts_of_rank in enumerate(parts):
        parts_of_rank.idle = longest - spans.get(rank, 0.0)
        parts_of_rank.overhead["controller"] = step.controller
        parts_of_rank.overhead["channel"] = max(0.0, step.run - longest)
    return parts


def _call(
    parts: _Parts,
    call: Call,
    lasted: float,
    ops: Sequence[_Op],
    stamps: Iterator[float],
    floors: Floors,
) -> float:
    """Share out the seconds of a call; returns them without the cost of stamps."""
    if not ops:
        parts.kernels[call.fn] += lasted
        parts.times[call.fn] += 1
        return lasted
    before, inside = next(stamps), 0.0
    for op in ops:
        after = next(stamps)
        seconds, before = max(0.0, after - before - floors.stamp), after
        inside += seconds
        if op.kind == "none":
            parts.overhead["dispatch"] += seconds
            continue
        least = 0.0 if op.kind == "python" else _floor_of(floors, op.kind) - floors.stamp
        dispatched = min(seconds, max(0.0, least))
        parts.overhead["dispatch"] += dispatched
        parts.kernels[op.name] += seconds - dispatched
        parts.times[op.name] += 1
    around = max(0.0, lasted - inside - (len(ops) + 1) * floors.stamp)
    parts.overhead["engine"] += around
    return inside + around


def _floor_of(floors: Floors, kind: Literal["quick", "overload"]) -> float:
    return floors.quick if kind == "quick" else floors.overload


def _ops_of(function: Function) -> tuple[_Op, ...]:
    """By stamped line of its body."""
    bindings = dict(function.bindings)
    return tuple(_op(line, bindings) for line in function.statements)


def _op(line: CodeLine, bindings: Mapping[str, object]) -> _Op:
    target = bindings.get(line.called)
    if not callable(target):  # a name for a value, or a method of one
        return _Op(line.op or COPIES, "overload" if line.op else "none")
    return _Op(line.op or _name_of(target), _kind_of(target))


def _kind_of(target: object) -> Literal["quick", "overload", "python"]:
    if isinstance(target, OpOverload):
        return "overload"
    return "quick" if overload_of(target) in QUICK else "python"


def _name_of(target: Callable[..., object]) -> str:
    """``mm``; ``dt.attention``; for Python code the function's name, or its purpose."""
    if (overload := overload_of(target)) is not None:
        return op_name(overload)
    return _HELPERS.get(target) or target.__name__


def _peers_of_waits(
    program: Program, rank: int, number: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """By index of a wait, the plan's ranks that it waits for."""
    instructions = program.ranks[rank].instructions
    peers_by_wait: dict[int, tuple[int, ...]] = {}
    for index, starts in starts_of_waits(instructions).items():
        peers: set[int] = set()
        for start in starts:
            item = instructions[start]
            assert isinstance(item, Send | Recv | Collective), "a wait completes a start"
            peers.update(key_of(rank, item)[0])
        peers_by_wait[index] = tuple(sorted(number[peer] for peer in peers - {rank}))
    return peers_by_wait


# -- medians, with predictions -------------------------------------------------------------


def _rank_profile(
    rank: int, parts: Sequence[_Parts], measured: Measured, plan: Plan, predicted: Trace
) -> RankProfile:
    def median(of: Callable[[_Parts], float]) -> float:
        return statistics.median(map(of, parts))

    kernels = _predicted_kernels(plan, rank)
    like = _representative(plan, rank)
    dispatch = max(0.0, predicted.spent(like, "compute") - sum(kernels.values()))
    spans = _waits_of(predicted, like)
    waits, called = _predicted_waits(measured, rank, spans), spans.get(CALL, 0.0)
    layers: dict[str, float | None] = {"channel": called, "dispatch": dispatch}
    overhead = {
        layer: Spent(
            seconds=median(lambda p, of=layer: p.overhead[of]), predicted=layers.get(layer)
        )
        for layer in LAYERS
    }
    ops = {
        op: Spent(
            seconds=median(lambda p, of=op: p.kernels.get(of, 0.0)),
            predicted=kernels.get(op, 0.0),
            times=max(p.times.get(op, 0) for p in parts),
        )
        for op in dict.fromkeys((*(op for p in parts for op in p.kernels), *kernels))
    }
    waiting = {
        peers: Spent(
            seconds=median(lambda p, of=peers: p.waiting.get(of, 0.0)),
            predicted=waits.get(peers, 0.0),
            times=max(p.waits.get(peers, 0) for p in parts),
        )
        for peers in sorted({peers for p in parts for peers in p.waiting if peers} | {*waits})
    }
    shown = sum(kernels.values()) + dispatch + sum(waits.values()) + called
    return RankProfile(
        rank=rank,
        kernels={
            op: spent  # a view takes no time: it is dispatch
            for op, spent in sorted(ops.items(), key=lambda item: (-item[1].seconds, item[0]))
            if spent.seconds or spent.predicted
        },
        waiting=waiting,
        overhead=overhead,
        other_ranks=Spent(seconds=median(lambda p: p.other_ranks)),
        idle=Spent(seconds=median(lambda p: p.idle), predicted=max(0.0, predicted.seconds - shown)),
    )


def _predicted_kernels(plan: Plan, rank: int) -> dict[str, float]:
    """Return a rank's predicted seconds by op, without the seconds of dispatch."""
    latency = plan.topology.op_latency
    coordinates = plan.mesh.coordinates(rank)
    place = coordinates[plan.stage_axis] if plan.stage_axis else 0
    here = {axis: coordinates.get(axis, 0) for axis in plan.inner.axes}
    shared = ProgramContext(plan, Actions(plan, None), torch.device("cpu"))
    kernels: dict[str, float] = defaultdict(float)
    for step in plan.steps:
        name = _step_name(shared, step, here)
        for stage in plan.hosted[place] if name else ():
            if name and stage in step.stages:
                times = step_times(plan, step)
                seconds = step_seconds(plan, step, stage).compute
                kernels[name] += max(0.0, seconds - latency) * times
    return dict(kernels)


def _step_name(shared: ProgramContext, step: Step, here: Mapping[str, int]) -> str | None:
    """The name of a step's computation, as in lines of code of the rank ``here``."""
    match step:
        case Compute():
            return _name_of(shared.local_call(step, here).target)
        case Accumulate():
            return ADDING
        case Update():
            return UPDATE
        case Redistribute():
            return PACKING
        case _:
            return None


def _representative(plan: Plan, rank: int) -> int:
    """The rank of a predicted trace that represents this one."""
    coordinates = plan.mesh.coordinates(rank)
    return next(
        one
        for one in representatives(plan)
        if plan.stage_axis is None
        or plan.mesh.coordinates(one)[plan.stage_axis] == coordinates[plan.stage_axis]
    )


def _waits_of(predicted: Trace, rank: int) -> dict[Label, float]:
    """Return the predicted seconds of the rank's waits, by the label of the wait."""
    seconds_by_label: dict[Label, float] = defaultdict(float)
    for span in predicted.spans:
        if span.rank == rank and span.track == "wait":
            seconds_by_label[span.label] += span.seconds
    return dict(seconds_by_label)


def _predicted_waits(
    measured: Measured, rank: int, spans: Mapping[Label, float]
) -> dict[tuple[int, ...], float]:
    """Seconds by peers: instructions of equal ranks have the same labels."""
    number = {of: i for i, of in enumerate(measured.ranks)}
    place = measured.ranks[rank]
    instructions = measured.program.ranks[place].instructions
    peers_of: dict[Label | None, tuple[int, ...]] = {}
    for index, peers in _peers_of_waits(measured.program, place, number).items():
        if peers:
            peers_of.setdefault(instructions[index].label, peers)
    seconds_by_peers: dict[tuple[int, ...], float] = defaultdict(float)
    for label, seconds in spans.items():
        if label in peers_of:
            seconds_by_peers[peers_of[label]] += seconds
    return dict(seconds_by_peers)
