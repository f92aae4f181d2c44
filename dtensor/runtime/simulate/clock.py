"""The program of a step run against a virtual clock: who computes, sends and waits when.

    trace = simulate(plan, OneFOneB(8).grid(4, 4), topology)
    print(trace); trace.save("trace.json")

The ranks of one stage that differ in other axes do the same on equal shards, so one of them stands
for all: the one at coordinate 0, which has the largest. Its list of instructions is the one that an
actor would run. A `Call` lasts as long as its ops by the roofline; a message as long as the
alpha-beta model says, in the background, after those before it on its channel; a `Wait` until its
messages are complete. A message begins when all its members have started it; those that no rank
here stands for start when ours does. The controller's call stands before it all, as one `CALL`.

What a rank holds: values by their storage, of which a view has none of its own, the optimizer's
state, and what a call makes for itself while it runs. So it is what `plan.memory` predicts, but for
gradients that are not made yet, which a plan without microbatches counts from the start.

Not modelled: contention between channels; what `Free` and an empty `Wait` take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from dtensor.daft.ir.instructions import Key, Start, key_of, outputs_of
from dtensor.daft.verification.pairing import starts_of_waits
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.builder import LocalCode, RankBuilder, Roles, Shared
from dtensor.runtime.lower.code import Functions
from dtensor.runtime.lower.program import lower_rank
from dtensor.runtime.schedule import Grid
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
    lists: list[_SimulatedRank] = []
    for rank in ranks:
        builder = RankBuilder(shared=shared, rank=rank, functions=functions, roles=roles)
        program = lower_rank(builder)
        calls, held = _calls(builder, program), _state_bytes(plan, builder.stages)
        lists.append(_SimulatedRank(rank, program, calls, builder.storage, held))
    clock = _Clock(plan, {one.rank: one for one in lists})
    clock.run()
    return Trace(
        name=plan.name,
        ranks=ranks,
        alike=plan.mesh.size // len(ranks),
        spans=tuple(sorted(clock.spans, key=lambda s: (s.begin, s.rank, s.end))),
        peak_bytes=tuple(max(held for _, held in one.changes) for one in lists),
        held_bytes=tuple(tuple(one.changes) for one in lists),
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
    """What stands beside the program's values: the optimizer's state, and copies to undo a step."""
    own = [plan.memory[stage] for stage in stages]
    return sum(memory.optimizer + memory.masters + memory.snapshots for memory in own)


def _calls(b: RankBuilder, program: RankProgram) -> list[_SimulatedCall]:
    calls = (item for item in program.instructions if isinstance(item, Call))
    segments = (item for item in b.instructions if isinstance(item, LocalCode))
    return [
        _SimulatedCall(segment.seconds, _held_within(b, segment, call.outputs))
        for segment, call in zip(segments, calls, strict=True)
    ]


def _held_within(b: RankBuilder, segment: LocalCode, outputs: Sequence[str]) -> int:
    """Bytes, at most, of what a call makes, while it runs: values die at their last use."""
    last: dict[str, int] = {}  # by storage
    for line, (_, reads, _) in enumerate(segment.code.lines):
        for name in reads:
            value = b.place(segment, name)
            last[b.storage.get(value, value)] = line
    stay = {b.storage.get(value, value) for value in outputs}
    live: list[tuple[int, int]] = []  # last line, bytes
    held = most = 0
    for line, value in segment.made:
        if value in b.storage:
            continue
        held -= sum(nbytes for end, nbytes in live if end < line)
        live = [(end, nbytes) for end, nbytes in live if end >= line]
        end = len(segment.code.lines) if value in stay else last.get(value, line)
        live.append((end, b.nbytes[value]))
        held += b.nbytes[value]
        most = max(most, held)
    return most


@dataclass(frozen=True, slots=True)
class _SimulatedCall:
    """``held``: bytes, at most, of what it makes while it runs."""

    seconds: float
    held: int


@dataclass(slots=True)
class _SimulatedRank:
    """One rank's list and how far it is. ``storage``: of values that are views, whose they are;
    ``users``: by storage, how many values of the table lie in it."""

    rank: int
    program: RankProgram
    calls: list[_SimulatedCall]  # in order
    storage: dict[str, str]
    held: int
    at: int = 0
    called: int = 0
    now: float = 0.0
    users: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    messages: dict[int, _Message] = field(default_factory=dict)  # by the place of the start


@dataclass(slots=True)
class _Message:
    """A transfer or collective: complete when all members that are simulated have started it."""

    seconds: float
    members: int
    channels: tuple[tuple[int, Key], ...]
    started: dict[int, float] = field(default_factory=dict[int, float])
    end: float | None = None
    items: dict[int, Start] = field(default_factory=dict)


class _Clock:
    def __init__(self, plan: Plan, ranks: dict[int, _SimulatedRank]) -> None:
        self.plan = plan
        self.ranks = ranks
        self.spans: list[Span] = []
        self.messages: dict[tuple[Key, int], _Message] = {}
        self.counts: dict[tuple[int, Key], int] = defaultdict(int)
        self.free: dict[tuple[int, Key], float] = defaultdict(float)

    def run(self) -> None:
        for rank in self.ranks.values():
            rank.sizes = dict(rank.program.nbytes)
            rank.waits = starts_of_waits(rank.program.instructions)
            rank.changes.append((0.0, rank.held))
            self._hold(rank, (*rank.program.inputs, *rank.program.state))
            rank.now = self.plan.topology.step_latency
            if rank.now:
                span = Span(rank=rank.rank, track="wait", name=CALL, begin=0.0, end=rank.now)
                self.spans.append(span)
        moved = True
        while moved:
            moved = False
            for rank in self.ranks.values():
                while rank.at < len(rank.program.instructions) and self._step(rank):
                    rank.at += 1
                    moved = True
        stuck = [r.rank for r in self.ranks.values() if r.at < len(r.program.instructions)]
        assert not stuck, f"ranks {stuck} wait for ever; the verifier refuses such programs"

    def _step(self, rank: _SimulatedRank) -> bool:
        """Run the rank's next instruction; False where it waits for what has not begun."""
        item = rank.program.instructions[rank.at]
        match item:
            case Call():
                call = rank.calls[rank.called]
                rank.called += 1
                self._span(rank.rank, "compute", item, rank.now, rank.now + call.seconds)
                if call.held:
                    rank.changes.append((rank.now, rank.held + call.held))
                rank.now += call.seconds
                self._hold(rank, item.outputs)
            case Send() | Recv() | Collective():
                self._start(rank, item)
            case Wait():
                messages = [rank.messages[start] for start in rank.waits[rank.at]]
                if any(m.end is None for m in messages):
                    return False
                end = max([rank.now, *(m.end for m in messages if m.end is not None)])
                self._span(rank.rank, "wait", item, rank.now, end)
                rank.now = end
            case Free():
                self._hold(rank, item.values, -1)
            case Vote() | Commit():
                pass
        return True

    def _hold(self, rank: _SimulatedRank, values: tuple[str, ...], sign: int = 1) -> None:
        """Values come into the table, or leave it: a storage is held while one lies in it."""
        held = rank.held
        for value in values:
            storage = rank.storage.get(value, value)
            before = rank.users[storage] > 0
            rank.users[storage] += sign
            if before != (rank.users[storage] > 0):
                rank.held += sign * rank.sizes.get(storage, 0)
        if held != rank.held:
            rank.changes.append((rank.now, rank.held))

    def _start(self, rank: _SimulatedRank, item: Start) -> None:
        key = key_of(rank.rank, item)
        members = key[0]
        number = self.counts[rank.rank, key]
        self.counts[rank.rank, key] += 1
        known = [member for member in members if member in self.ranks]
        message = self.messages.get((key, number))
        if message is None:
            # a channel that is shared by ranks: they are busy with it one message after the other
            message = _Message(self._seconds(item), len(known), tuple((m, key) for m in known))
            self.messages[key, number] = message
        message.started[rank.rank] = rank.now
        message.items[rank.rank] = item
        rank.messages[rank.at] = message
        match item:
            case Recv(value=value, buffer=buffer):
                rank.sizes[value] = buffer.nbytes
            case Collective(outputs=made, out_buffers=buffers):
                rank.sizes.update((v, buffer.nbytes) for v, buffer in zip(made, buffers))
            case Send():
                pass
        self._hold(rank, outputs_of(item))
        if len(message.started) < message.members:
            return
        begin = max([*message.started.values(), *(self.free[c] for c in message.channels)])
        message.end = begin + message.seconds
        self.free.update(dict.fromkeys(message.channels, message.end))
        for member, started in message.items.items():
            self._span(member, "communication", started, begin, message.end)

    def _seconds(self, item: Start) -> float:
        topology = self.plan.topology
        match item:
            case Send(buffer=buffer) | Recv(buffer=buffer):
                axis = self.plan.stage_axis or ""
                return topology.collective_seconds(
                    "transfer", axis, num=2, bytes_sent=buffer.nbytes
                )
            case Collective(group=group):
                axis, num = self._axis(group), len(group)
                sent = ring_bytes(item.kind, sum(buffer.nbytes for buffer in item.in_buffers), num)
                return topology.collective_seconds(item.kind, axis, num=num, bytes_sent=sent)

    def _axis(self, group: tuple[int, ...]) -> str:
        """The axis along which the members lie."""
        first, second = (self.plan.mesh.coordinates(rank) for rank in group[:2])
        return next(axis for axis in first if first[axis] != second[axis])

    def _span(self, rank: int, track: Track, item: Instruction, begin: float, end: float) -> None:
        if end > begin:
            self.spans.append(span_of(rank, track, item, begin, end))
