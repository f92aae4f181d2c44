"""A schedule as the planner's timetable, and its prediction of a step's time.

    plan(Request(..., timetable=GridTimetable(OneFOneB(8).grid(4, 4))))
    GridTimetable(grid).cost(planned)      # Cost(seconds=..., compute_seconds=..., ...)

One action of each kind and stage is priced, step by step, in the order in which the ranks run it:
messages start and are waited for where `lower` places them. The schedule's grid is then replayed on
the virtual clock with these, after the work that is done once and before the end of the step. The
ranks of one stage that differ in other axes do the same on equal shards, so the one at coordinate
0, which has the largest, represents all.

Invariant: the time equals that of `simulate`, which runs the program instruction by instruction;
tests compare them. Not modelled: contention between channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.rank_builder import ProgramContext, Roles
from dtensor.runtime.schedule import Grid, Kind, held_at_once, in_flight
from dtensor.runtime.schedule.clock import Begin, Interval, Item, Stretch, Until, folded, run
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
    updates_of,
)
from dtensor.sharding.redistribute.topology import sent_bytes


@dataclass(frozen=True, slots=True)
class GridTimetable:
    """The planner's `Timetable` of a grid. None: a microbatch passes all stages and, if there is a
    backward, returns."""

    grid: Grid | None

    @property
    def text(self) -> str:
        return "" if self.grid is None else str(self.grid)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return () if self.grid is None else in_flight(self.grid)

    def held(self, stages: Sequence[int]) -> Collection[tuple[int, tuple[int, ...]]]:
        if self.grid is None:  # the later stages run while earlier ones keep a microbatch
            return {(at, (1,) * at + (0,) * (len(stages) - at)) for at in range(len(stages))}
        return held_at_once(self.grid, stages)

    def first(self, num_microbatches: int) -> GridTimetable:
        """The timetable of the first microbatches alone."""
        return self if self.grid is None else GridTimetable(self.grid.first(num_microbatches))

    def cost(self, plan: PlanRecord) -> Cost:
        return _Prediction(plan if isinstance(plan, Plan) else Plan.of(plan), self.grid).cost()


ONE_BY_ONE = GridTimetable(None)


class _Prediction:
    """The action lists of the stage axis' ranks, and their replay."""

    def __init__(self, plan: Plan, grid: Grid | None) -> None:
        self.plan = plan
        self.shared = ProgramContext(plan, Actions(plan, grid), torch.device("cpu"))
        trains = bool(updates_of(plan.steps))
        self.agrees = self.shared.agrees(Roles(optimizer="optimizer" if trains else None))
        self._actions: dict[tuple[Kind, int], _RankItems] = {}

    def cost(self) -> Cost:
        """The cost of the slowest rank."""
        begin = self.plan.topology.step_latency
        ranks = [self._rank(rank) for rank in range(len(self.plan.hosted))]
        lists = {own.rank: own.items for own in ranks}
        times = run(lists, begin)
        end = max((end for own in times.values() for _, end in own), default=begin)
        spent = [_spent(items, times[rank], end) for rank, items in lists.items()]
        slowest = max(spent, key=lambda rank: rank.compute_seconds + rank.communication_seconds)
        bubble = _bubble(ranks, times) if self.plan.num_stages > 1 else 0.0
        host_wait = begin + slowest.host_wait_seconds
        return replace(slowest, bubble=bubble, host_wait_seconds=host_wait)

    def _rank(self, rank: int) -> _RankItems:
        """All actions of a rank in a step, folded."""
        items_of_rank = _RankItems(self, rank)
        items_of_rank.steps([s for s in self.plan.steps if s.once and items_of_rank.concerns(s)])
        items_of_rank.finish(items_of_rank.under_way)
        sends = [(-1, send) for send in items_of_rank.sends]  # with the step of its receive
        begun: set[int] = set()
        began = 0
        for step, action in self.shared.actions.of(rank):
            sends = items_of_rank.wait_sends(sends, step)
            posted, began = began, len(items_of_rank.items)
            done_in_action, m = self._action(action.kind, action.stage), action.microbatch
            items_of_rank.items[posted:posted] = [_of(item, m) for item in done_in_action.receives]
            began += len(done_in_action.receives)
            items_of_rank.first = items_of_rank.first or len(items_of_rank.items)
            items_of_rank.items += [_of(item, m) for item in done_in_action.items]
            for send in done_in_action.sends:
                at = self.shared.actions.received_at(send.step, m)
                sends.append((at, replace(send, microbatch=m)))
            begun |= done_in_action.begun
        items_of_rank.wait_sends(sends, None)
        items_of_rank.last = len(items_of_rank.items)
        items_of_rank.end(begun)
        return items_of_rank

    def _action(self, kind: Kind, stage: int) -> _RankItems:
        """The items of an action of this kind, for any microbatch."""
        key = kind, stage
        if key not in self._actions:
            items_of_action = _RankItems(self, self.plan.stage_ranks[stage])
            steps, late = self.shared.overlapped(kind, stage)
            items_of_action.steps(steps, stage, late)
            items_of_action.finish(items_of_action.under_way)
            for step in self.shared.actions.sums(kind, stage):
                items_of_action.work(step)
            items_of_action.items = folded(items_of_action.rank, items_of_action.items)
            self._actions[key] = items_of_action
        return self._actions[key]


@dataclass(frozen=True, slots=True)
class _Send:
    step: Transfer
    microbatch: int | None = None

    @property
    def value(self) -> tuple[str, int | None]:
        """The sent value: a wait completes all sends of it."""
        return self.step.operand, self.microbatch


class _RankItems:
    """The items of one rank of the stage axis, under construction; `_Walk` of program.py makes
    instructions of the same steps."""

    def __init__(self, of: _Prediction, rank: int) -> None:
        self.of, self.plan, self.rank = of, of.plan, rank
        self.stages = of.plan.hosted[rank]
        self.items: list[Item] = []
        self.receives: list[Begin] = []  # begun during the action before
        self.sends: list[_Send] = []
        self.under_way: dict[str, str] = {}  # value to the message that makes it
        self.reduced: tuple[str, ...] = ()  # gradients whose reduction has begun last
        self.begun: set[int] = set()  # ids of steps that ran before the end
        self.agreed = False
        self.first = self.last = 0  # of the items of the schedule's actions, and after them

    def concerns(self, step: Step) -> bool:
        return any(step.is_on(stage) for stage in self.stages)

    def steps(
        self, steps: Sequence[Step], stage: int | None = None, late: Collection[int] = ()
    ) -> None:
        """``late``: the ids of steps that are waited for only before their results are read."""
        for step in steps:
            self.finish(step.reads)
            match step:
                case Compute():
                    self.work(step)
                case Redistribute() if step.is_free:
                    self.work(step)
                case Redistribute() if step.is_alone:
                    self._message(step, wait=id(step) not in late)
                case Redistribute() if step.tied:
                    self._tie(step)
                case Redistribute() if not step.in_place:
                    if step.phase == "optimizer" and id(step) in late:
                        self.begun.add(id(step))
                        self.finish(self.reduced)
                        self.reduced = step.results
                    wait = step.kind != "all_gather" and id(step) not in late
                    self._message(step, wait=wait)
                case Transfer():
                    self._transfer(step, stage)
                case Norm():
                    self._votes(step.dtype.itemsize)
                case Accumulate() | Update() | Redistribute():
                    pass  # accumulation follows its action; updates are the end

    def end(self, begun: Collection[int]) -> None:
        """Sums of gradients that have not ``begun``, the commit point, the updates."""
        end = (s for s in self.plan.steps if s.phase == "optimizer" and id(s) not in begun)
        mine = [s for s in end if self.concerns(s)]
        self.steps(mine)
        if self.of.agrees and not self.agreed:
            self._votes(0)
        updates = {s.parameter: s for s in reversed(mine) if isinstance(s, Update)}
        for step in reversed(updates.values()):
            self.work(step)
        for step in mine:
            if isinstance(step, Redistribute) and step.in_place:
                self._message(step, wait=True)

    def work(self, step: Step) -> None:
        spent = self.of.shared.seconds(step)
        self.items.append(Stretch.of(spent.compute, spent.host))

    def finish(self, values: Iterable[str]) -> None:
        """Wait for the messages that make these values."""
        for value in tuple(values) if self.under_way else ():
            name = self.under_way.get(value)
            if name is not None:
                self.items.append(Until((name,)))
                self.under_way = {v: n for v, n in self.under_way.items() if n != name}

    def wait_sends(
        self, sends: list[tuple[int, _Send]], step: int | None
    ) -> list[tuple[int, _Send]]:
        """Wait for sends whose receives start before ``step``; returns the others."""
        latest = {send.value: at for at, send in sorted(sends, key=lambda item: item[0])}
        due = {value for value, at in latest.items() if step is None or at < step}
        names = tuple((s.step.result, s.microbatch) for _, s in sends if s.value in due)
        if names:
            self.items.append(Until(names))
        return [(at, send) for at, send in sends if send.value not in due]

    # -- messages ------------------------------------------------------------------------------

    def _message(self, step: Redistribute, *, wait: bool) -> None:
        name = step.name
        spent = self.of.shared.seconds(step)
        message = Begin(name, (self.rank,), step.axis, spent.communication, spent.host)
        self.items.append(message)
        if wait:
            self.items.append(Until((name,)))
        else:
            self.under_way |= dict.fromkeys(step.gives, name)

    def _transfer(self, step: Transfer, stage: int | None) -> None:
        """``stage``: of the action, None before all actions."""
        members = self.plan.stage_ranks[step.stage], self.plan.stage_ranks[step.to_stage]
        if members[0] == members[1]:
            return
        channel = step.phase, step.stage, step.to_stage, step.once
        spent = self.of.shared.seconds(step)
        name = step.result if stage is not None else (step.result, None)
        begin = Begin(name, members, channel, spent.communication, spent.host)
        if self.rank == members[0] and stage in (None, step.stage):
            self.items.append(begin)
            self.sends.append(_Send(step))
            return
        (self.items if stage is None else self.receives).append(begin)
        self.items.append(Until((name,)))

    def _tie(self, step: Redistribute) -> None:
        hosts = tuple(dict.fromkeys(self.plan.stage_ranks[stage] for stage in step.tied))
        if len(hosts) > 1:
            nbytes = step.moves[0].src.max_local_nbytes
            self._all_reduce(f"tied {step.of[0]}", step.axis, hosts, len(hosts), nbytes)

    def _votes(self, nbytes: int) -> None:
        """The commit point, with the sums of squares of a norm, of ``nbytes``."""
        self.agreed = True
        nbytes += WORD.nbytes if self.of.agrees else 0
        for axis, num in self.plan.mesh.shape.items():
            if num > 1:
                every = tuple(range(num)) if axis == self.plan.stage_axis else (self.rank,)
                self._all_reduce(axis, axis, every, num, nbytes)

    def _all_reduce(
        self, channel: str, axis: str, members: tuple[int, ...], num: int, nbytes: int
    ) -> None:
        topology = self.plan.topology
        seconds = topology.collective_seconds(
            "all_reduce", axis, num=num, bytes_sent=sent_bytes("all_reduce", nbytes, num)
        )
        host = topology.launch_seconds("all_reduce", num)
        self.items += [Begin(channel, members, channel, seconds, host), Until((channel,))]


def _of(item: Item, microbatch: int) -> Item:
    """The item of an action of the microbatch."""
    match item:
        case Stretch():
            return item
        case Begin():
            return replace(item, name=(item.name, microbatch))
        case Until():
            return Until(tuple((name, microbatch) for name in item.names))


def _bubble(ranks: Sequence[_RankItems], times: Mapping[int, Sequence[Interval]]) -> float:
    """The fraction of the ranks' time, from the first action of all to the last, in which they wait
    for other stages, but not in a collective."""
    first, last, busy = math.inf, 0.0, 0.0
    for rank_items in ranks:
        of_stages = {
            i.name for i in rank_items.items if isinstance(i, Begin) and len(i.members) > 1
        }
        actions = slice(rank_items.first, rank_items.last)
        for item, (begin, end) in zip(
            rank_items.items[actions], times[rank_items.rank][actions], strict=True
        ):
            if isinstance(item, Begin) or end == begin:
                continue
            first, last = min(first, begin), max(last, end)
            if isinstance(item, Stretch) or of_stages.isdisjoint(item.names):
                busy += end - begin
    return 1 - busy / ((last - first) * len(ranks)) if last > first else 0.0


def _spent(items: Sequence[Item], times: Sequence[Interval], last: float) -> Cost:
    """Seconds in which a rank computes, waits for messages in flight, for launches, and for other
    ranks, up to the ``last`` one's end."""
    begun: dict[Hashable, float] = {}
    alone = {i.name for i in items if isinstance(i, Begin) and len(i.members) == 1}
    computes = communicates = host_waits = host = 0.0
    waits = last - times[-1][1] if times else 0.0
    for item, (begin, end) in zip(items, times, strict=True):
        match item:
            case Stretch():
                computes += item.computes
                communicates += item.seconds - item.computes
                host_waits += end - begin - item.seconds
                host += item.host
            case Begin():
                begun[item.name] = begin
                host += item.host
            case Until():
                since = min(end, max(begin, min(begun[name] for name in item.names)))
                communicates += end - since
                if alone.issuperset(item.names):
                    host_waits += since - begin
                else:
                    waits += since - begin
    return Cost(computes, communicates, 0.0, waits, host_waits, host)
