"""The breakdown of timed runs of a step: a `Profile`, from the time stamps of each rank.

    profile_of(measured, plan, predicted)  # what `step.profile` returns

    kernels      the time of each op, without "dispatch"
    waiting      in Wait, by the ranks waited for
    overhead     controller: Python before and after the run;  channel: the run, less the longest
                 rank's time;  engine: between instructions;  starts: of messages;
                 dispatch: the time of the op on one element, or of the op if that is less
    other_ranks  the time of other ranks of the process, which take turns with the rank
    idle         before the rank's first instruction and after its last, while other ranks run
Each figure is the median over steps. The cost of the time stamps is subtracted.
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
from dtensor.runtime.lower import detect_nan, moves, updates
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.code import ADDING, COPIES, QUICK, overload_of
from dtensor.runtime.lower.rank_builder import ProgramContext
from dtensor.runtime.optimizer.gradient_norm import clip_divisor, sum_of_squares
from dtensor.runtime.profile import LAYERS, Profile, RankProfile, Spent
from dtensor.runtime.simulate.simulator import representatives
from dtensor.runtime.simulate.trace import CALL, Trace
from dtensor.sharding.local import expert_rows
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
    **dict.fromkeys((expert_rows.pieces_by_expert, expert_rows.pieces_by_token), PACKING),
    **dict.fromkeys((expert_rows.rows_by_expert, expert_rows.rows_by_token), PACKING),
    **dict.fromkeys((expert_rows.check_received, expert_rows.check_held), CHECKS),
    **dict.fromkeys((sum_of_squares, clip_divisor), NORM),
    detect_nan.check_finite: CHECKS,
    updates.step_optimizer: UPDATE,
    updates.compute_owned: UPDATE,
    updates.replace_state: UPDATE,
}


# -- the cost of a stamp and of a call -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Least costs on one rank, in seconds. They are subtracted from measured times."""

    stamp: float  # of the time stamp of one line
    instruction: float  # of the two time stamps of one instruction
    quick: float  # of a line, with its stamp, that calls an op by the function of torch
    overload: float  # of a line, with its stamp, that calls an op by its overload


_NUM_LINES = 64
_KINDS: Mapping[str, tuple[str, object]] = {
    "stamp": ("y = x", None),
    "quick": ("y = relu(x)", torch.relu),
    "overload": ("y = relu_(x)", torch.ops.aten.relu.default),
}


def measure_floors(cluster: Cluster) -> tuple[Floors, ...]:
    """Measure and return the floors of each rank, on all ranks at once, in some milliseconds."""
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
    """Return the floors of one rank from its outputs in several runs."""
    medians: dict[str, float] = {}
    for number, kind in enumerate(_KINDS):
        first = 1 + number * _NUM_LINES  # after the line that makes x
        durations = [
            after - before
            for lines in map(lines_of, runs)
            for before, after in zip(
                lines[first : first + _NUM_LINES], lines[first + 1 :], strict=False
            )
        ]
        medians[kind] = statistics.median(durations)
    costs = [float(cost) for run in runs if isinstance(cost := run["cost"], torch.Tensor)]
    return Floors(instruction=min(costs), **medians)


def instruction_seconds(device: torch.device) -> torch.Tensor:
    """Return the extra seconds of an instruction that is timed. Runs on ranks."""
    stamps = Stamps({}, device)
    timed = stamps.timed((0, 0), _do_nothing)
    untimed_s, timed_s = (min(_mean_s(step) for _ in range(5)) for step in (_do_nothing, timed))
    return torch.tensor(max(0.0, timed_s - untimed_s), dtype=torch.float64)


def _mean_s(step: Callable[[], None], times: int = 200) -> float:
    """Return the mean seconds of one call."""
    begin = time.monotonic()
    for _ in range(times):
        step()
    return (time.monotonic() - begin) / times


def _do_nothing() -> None:
    pass


# -- timed runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One timed step."""

    controller: float  # seconds of the controller before and after the run
    run: float  # seconds from the call of the run until its results arrived
    outputs: Sequence[Mapping[str, object]]  # by rank, with the outputs of `Stamps`

    @property
    def seconds(self) -> float:
        return self.controller + self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a step."""

    program: Program
    lists: Sequence[Sequence[Site]]  # by process, the instructions that it runs
    ranks: tuple[int, ...]  # the program's ranks in the plan's order
    floors: Sequence[Floors]
    steps: Sequence[TimedStep]
    plain: Sequence[float]  # seconds of steps that ran without time stamps


def profile_of(measured: Measured, plan: Plan, predicted: Trace) -> Profile:
    """Return the profile of a step. ``predicted``: the simulated trace of the same step."""
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
            _rank_profile(rank, [of_step[rank] for of_step in parts], measured, plan, predicted)
            for rank in range(len(measured.ranks))
        ),
    )


@dataclass(slots=True)
class _Parts:
    """The parts of one rank's time in one step, in seconds."""

    kernels: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    times: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))  # by op
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
    """The call in a line of generated code. ``kind``: how it calls the op; "none": no op."""

    name: str
    kind: Literal["quick", "overload", "python", "none"]


def _parts_of(measured: Measured, step: TimedStep) -> list[_Parts]:
    """Return the parts of each rank's time in one step."""
    program = measured.program
    ops = {name: _ops_of(function) for name, function in program.functions}
    parts = [_Parts() for _ in measured.ranks]
    number = {rank: i for i, rank in enumerate(measured.ranks)}
    spans: dict[int, float] = {}
    for sites in measured.lists:
        local_ranks = sorted({rank for rank, _ in sites if rank in number})
        lines = {rank: iter(lines_of(step.outputs[number[rank]])) for rank in local_ranks}
        waits = {rank: _peers_of_waits(program, rank, number) for rank in local_ranks}
        events = sorted(
            (begin, end, rank, index)
            for rank in local_ranks
            for index, begin, end in times_of(step.outputs[number[rank]])
        )
        spent = dict.fromkeys(local_ranks, 0.0)
        last_end = events[0][0] if events else 0.0
        for begin, end, rank, index in events:
            parts_of_rank, floors = parts[number[rank]], measured.floors[number[rank]]
            gap = max(0.0, begin - last_end - floors.instruction)
            parts_of_rank.overhead["engine"] += gap
            seconds = end - begin
            match item := program.ranks[rank].instructions[index]:
                case Call():
                    seconds = _add_call(
                        parts_of_rank, item, seconds, ops[item.fn], lines[rank], floors
                    )
                case Wait():
                    parts_of_rank.waiting[waits[rank][index]] += seconds
                    parts_of_rank.waits[waits[rank][index]] += 1
                case Send() | Recv() | Collective():
                    parts_of_rank.overhead["starts"] += seconds
                case Free() | Vote() | Commit():
                    parts_of_rank.overhead["engine"] += seconds
            spent[rank] += gap + seconds
            last_end = end
        for rank in local_ranks:
            parts[number[rank]].other_ranks = sum(spent.values()) - spent[rank]
            spans[number[rank]] = sum(spent.values())
    longest = max(spans.values(), default=0.0)
    for rank, parts_of_rank in enumerate(parts):
        parts_of_rank.idle = longest - spans.get(rank, 0.0)
        parts_of_rank.overhead["controller"] = step.controller
        parts_of_rank.overhead["channel"] = max(0.0, step.run - longest)
    return parts


def _add_call(
    parts: _Parts,
    call: Call,
    call_seconds: float,
    ops: Sequence[_Op],
    stamps: Iterator[float],
    floors: Floors,
) -> float:
    """Add the seconds of a call to the parts. Return them without the cost of time stamps."""
    if not ops:
        parts.kernels[call.fn] += call_seconds
        parts.times[call.fn] += 1
        return call_seconds
    before, inside = next(stamps), 0.0
    for op in ops:
        after = next(stamps)
        seconds, before = max(0.0, after - before - floors.stamp), after
        inside += seconds
        if op.kind == "none":
            parts.overhead["dispatch"] += seconds
            continue
        floor = {"quick": floors.quick, "overload": floors.overload}.get(op.kind, floors.stamp)
        dispatch = min(seconds, max(0.0, floor - floors.stamp))
        parts.overhead["dispatch"] += dispatch
        parts.kernels[op.name] += seconds - dispatch
        parts.times[op.name] += 1
    around = max(0.0, call_seconds - inside - (len(ops) + 1) * floors.stamp)
    parts.overhead["engine"] += around
    return inside + around


def _ops_of(function: Function) -> tuple[_Op, ...]:
    """Return the op that each time-stamped line of a function calls."""
    bindings = dict(function.bindings)
    return tuple(_op(line, bindings) for line in function.statements)


def _op(line: CodeLine, bindings: Mapping[str, object]) -> _Op:
    target = bindings.get(line.called)
    if not callable(target):  # the line gives a value a name, or calls a method of a value
        return _Op(line.op or COPIES, "overload" if line.op else "none")
    return _Op(line.op or _name_of(target), _kind_of(target))


def _kind_of(target: object) -> Literal["quick", "overload", "python"]:
    if isinstance(target, OpOverload):
        return "overload"
    return "quick" if overload_of(target) in QUICK else "python"


def _name_of(target: Callable[..., object]) -> str:
    """Return the name of an op (``mm``, ``dt.attention``), or the purpose or name of a function."""
    if (overload := overload_of(target)) is not None:
        return op_name(overload)
    return _HELPERS.get(target) or target.__name__


def _peers_of_waits(
    program: Program, rank: int, number: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Return, by index of a wait, the plan's ranks that it waits for."""
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


# -- medians, with predictions ---------------------------------------------------------------------


def _rank_profile(
    rank: int, parts: Sequence[_Parts], measured: Measured, plan: Plan, predicted: Trace
) -> RankProfile:
    """Return the profile of a rank. ``parts``: its parts in each timed step."""

    def median(of: Callable[[_Parts], float]) -> float:
        return statistics.median(map(of, parts))

    kernels = _predicted_kernels(plan, rank)
    representative = _representative(plan, rank)
    dispatch = max(0.0, predicted.spent(representative, "compute") - sum(kernels.values()))
    seconds_by_label = _waits_of(predicted, representative)
    waits = _predicted_waits(measured, rank, seconds_by_label)
    channel = seconds_by_label.get(CALL, 0.0)
    layers: dict[str, float | None] = {"channel": channel, "dispatch": dispatch}
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
    busy = sum(kernels.values()) + dispatch + sum(waits.values()) + channel
    return RankProfile(
        rank=rank,
        kernels={
            op: spent  # a view has no kernel: all its time is dispatch
            for op, spent in sorted(ops.items(), key=lambda item: (-item[1].seconds, item[0]))
            if spent.seconds or spent.predicted
        },
        waiting=waiting,
        overhead=overhead,
        other_ranks=Spent(seconds=median(lambda p: p.other_ranks)),
        idle=Spent(seconds=median(lambda p: p.idle), predicted=max(0.0, predicted.seconds - busy)),
    )


def _predicted_kernels(plan: Plan, rank: int) -> dict[str, float]:
    """Return a rank's predicted seconds by op, without the seconds of dispatch."""
    latency = plan.topology.op_latency
    coordinates = plan.mesh.coordinates(rank)
    stage_coordinate = coordinates[plan.stage_axis] if plan.stage_axis else 0
    inner_coordinates = {axis: coordinates.get(axis, 0) for axis in plan.inner.axes}
    shared = ProgramContext(plan, Actions(plan, None), torch.device("cpu"))
    kernels: dict[str, float] = defaultdict(float)
    for step in plan.steps:
        name = _step_name(shared, step, inner_coordinates)
        for stage in plan.hosted[stage_coordinate] if name else ():
            if name and stage in step.stages:
                times = step_times(plan, step)
                seconds = step_seconds(plan, step, stage).compute
                kernels[name] += max(0.0, seconds - latency) * times
    return dict(kernels)


def _step_name(shared: ProgramContext, step: Step, coordinates: Mapping[str, int]) -> str | None:
    """Return the name of a step's computation, as in the code of a rank, or None if it has none.
    ``coordinates``: of the rank."""
    match step:
        case Compute():
            return _name_of(shared.local_call(step, coordinates).target)
        case Accumulate():
            return ADDING
        case Update():
            return UPDATE
        case Redistribute():
            return PACKING
        case _:
            return None


def _representative(plan: Plan, rank: int) -> int:
    """Return the rank of a predicted trace that represents this rank."""
    coordinates = plan.mesh.coordinates(rank)
    return next(
        other
        for other in representatives(plan)
        if plan.stage_axis is None
        or plan.mesh.coordinates(other)[plan.stage_axis] == coordinates[plan.stage_axis]
    )


def _waits_of(predicted: Trace, rank: int) -> dict[Label, float]:
    """Return the predicted seconds of the rank's waits, by the label of the wait."""
    seconds_by_label: dict[Label, float] = defaultdict(float)
    for span in predicted.spans:
        if span.rank == rank and span.track == "wait":
            seconds_by_label[span.label] += span.seconds
    return dict(seconds_by_label)


def _predicted_waits(
    measured: Measured, rank: int, seconds_by_label: Mapping[Label, float]
) -> dict[tuple[int, ...], float]:
    """Return the predicted seconds of the rank's waits, by the ranks waited for. A wait is found by
    its label, which is the same on the representative of the rank."""
    number = {program_rank: i for i, program_rank in enumerate(measured.ranks)}
    program_rank = measured.ranks[rank]
    instructions = measured.program.ranks[program_rank].instructions
    peers_of: dict[Label | None, tuple[int, ...]] = {}
    for index, peers in _peers_of_waits(measured.program, program_rank, number).items():
        if peers:
            peers_of.setdefault(instructions[index].label, peers)
    seconds_by_peers: dict[tuple[int, ...], float] = defaultdict(float)
    for label, seconds in seconds_by_label.items():
        if label in peers_of:
            seconds_by_peers[peers_of[label]] += seconds
    return dict(seconds_by_peers)
