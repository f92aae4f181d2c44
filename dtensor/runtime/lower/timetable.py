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
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.rank_builder import ProgramContext, Roles
from dtensor.runtime.lower.walk import StepWalk
from dtensor.runtime.schedule import Grid, Kind, held_at_once, in_flight
from dtensor.runtime.schedule.clock import Begin, Interval, Item, Stretch, Until, folded, run
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.steps import Norm, Redistribute, Step, Transfer, Update, updates_of


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
        lists = {rank_items.rank: rank_items.items for rank_items in ranks}
        times = run(lists, begin)
        end = max((end for intervals in times.values() for _, end in intervals), default=begin)
        spent = [_spent(items, times[rank], end) for rank, items in lists.items()]
        slowest = max(spent, key=lambda rank: rank.compute_seconds + rank.communication_seconds)
        bubble = _bubble(ranks, times) if self.plan.num_stages > 1 else 0.0
        host_wait = begin + slowest.host_wait_seconds
        return replace(slowest, bubble=bubble, host_wait_seconds=host_wait)

    def _rank(self, rank: int) -> _RankItems:
        """Return the items of a rank in one step."""
        walk = _RankItems(self, rank)
        walk.run_steps([s for s in self.plan.steps if s.once and walk.concerns(s)])
        walk.complete(walk.in_flight)
        walk.add_sends(walk.sent_transfers, None)
        action_start = 0
        for step, action in self.shared.actions.of(rank):
            walk.complete_sends(step)
            previous_start, action_start = action_start, len(walk.items)
            priced, m = self._action(action.kind, action.stage), action.microbatch
            receives = [_in_microbatch(item, m) for item in priced.receives]
            walk.items[previous_start:previous_start] = receives
            action_start += len(receives)
            walk.first = walk.first or len(walk.items)
            walk.items += [_in_microbatch(item, m) for item in priced.items]
            walk.add_sends(priced.sent_transfers, m)
            walk.ran_early |= priced.ran_early
        walk.complete_sends(None)
        walk.last = len(walk.items)
        walk.end_step()
        return walk

    def _action(self, kind: Kind, stage: int) -> _RankItems:
        """Return the folded items of an action of this kind, for any microbatch."""
        key = kind, stage
        if key not in self._actions:
            walk = _RankItems(self, self.plan.stage_ranks[stage])
            steps, late = self.shared.overlapped(kind, stage)
            walk.run_steps(steps, stage, late)
            walk.complete(walk.in_flight)
            for step in self.shared.actions.sums(kind, stage):
                walk.compute(step)
            walk.items = folded(walk.rank, walk.items)
            self._actions[key] = walk
        return self._actions[key]


class _RankItems(StepWalk[str]):
    """The items of one rank of the stage axis, or of one of its actions."""

    def __init__(self, prediction: _Prediction, rank: int) -> None:
        self.plan, self.shared, self.rank = prediction.plan, prediction.shared, rank
        super().__init__(self.plan.hosted[rank])
        self.agrees = prediction.agrees
        self.items: list[Item] = []
        self.receives: list[Begin] = []  # of an action; they begin during the action before it
        self.sent_transfers: list[Transfer] = []
        self.send_names: dict[str, list[Hashable]] = {}  # by value, its sends that are not complete
        self.agreed = False  # the commit point is among the items
        self.first = self.last = 0  # the items from first to last are of the schedule's actions

    def end_step(self) -> None:
        """Add the reductions of gradients that have not run early, the commit point, the updates,
        and the gathers of updated parameters."""
        steps = self.end_steps(self.plan)
        self.run_steps(steps)
        if self.agrees and not self.agreed:
            self._add_votes(0)
        updates = {s.parameter: s for s in reversed(steps) if isinstance(s, Update)}
        for step in reversed(updates.values()):
            self.compute(step)
        for step in steps:
            if isinstance(step, Redistribute) and step.in_place:
                self.redistribute(step, wait=True)

    def add_sends(self, transfers: Sequence[Transfer], microbatch: int | None) -> None:
        """Record sends that have started."""
        for step in transfers:
            value = f"{step.operand}@{microbatch}"
            self.sends.append((self.shared.actions.received_at(step, microbatch), value))
            self.send_names.setdefault(value, []).append((step.result, microbatch))

    def compute(self, step: Step) -> None:
        spent = self.shared.seconds(step)
        self.items.append(Stretch.of(spent.compute, spent.host))

    def redistribute(self, step: Redistribute, *, wait: bool) -> str | None:
        if step.is_free:
            self.compute(step)
            return None
        name, spent = step.name, self.shared.seconds(step)
        self.items.append(Begin(name, (self.rank,), step.axis, spent.communication, spent.host))
        if wait:
            self.wait(name)
        return None if wait else name

    def transfer(self, step: Transfer, stage: int | None) -> None:
        members = self.plan.stage_ranks[step.stage], self.plan.stage_ranks[step.to_stage]
        if members[0] == members[1]:
            return
        channel = step.phase, step.stage, step.to_stage, step.once
        spent = self.shared.seconds(step)
        name = step.result if stage is not None else (step.result, None)
        begin = Begin(name, members, channel, spent.communication, spent.host)
        if self.rank == members[0] and stage in (None, step.stage):
            self.items.append(begin)
            self.sent_transfers.append(step)
            return
        (self.items if stage is None else self.receives).append(begin)
        self.items.append(Until((name,)))

    def sum_tied(self, step: Redistribute) -> None:
        hosts = tuple(dict.fromkeys(self.plan.stage_ranks[stage] for stage in step.tied))
        if len(hosts) > 1:
            nbytes = step.moves[0].src.max_local_nbytes
            self._add_all_reduce(f"tied {step.of[0]}", step.axis, hosts, len(hosts), nbytes)

    def norm(self, step: Norm) -> None:
        self._add_votes(step.dtype.itemsize)

    def wait(self, message: str) -> None:
        self.items.append(Until((message,)))

    def wait_sends(self, values: Sequence[str]) -> None:
        self.items.append(Until(tuple(n for v in values for n in self.send_names.pop(v))))

    def _add_votes(self, nbytes: int) -> None:
        """Add the commit point, which also sums the ``nbytes`` of a norm's squares."""
        self.agreed = True
        nbytes += WORD.nbytes if self.agrees else 0
        for axis, num in self.plan.mesh.shape.items():
            if num > 1:
                members = tuple(range(num)) if axis == self.plan.stage_axis else (self.rank,)
                self._add_all_reduce(axis, axis, members, num, nbytes)

    def _add_all_reduce(
        self, channel: str, axis: str, members: tuple[int, ...], num: int, nbytes: int
    ) -> None:
        spent = self.shared.message_seconds("all_reduce", axis, num, nbytes)
        self.items.append(Begin(channel, members, channel, spent.communication, spent.host))
        self.wait(channel)


def _in_microbatch(item: Item, microbatch: int) -> Item:
    """Return the item of an action for one microbatch."""
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
