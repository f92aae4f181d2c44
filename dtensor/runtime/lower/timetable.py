"""A schedule's prediction of the time of a step, for the planner.

    plan(Request(..., timetable=GridTimetable(OneFOneB(8).grid(4, 4))))
    GridTimetable(grid).cost(planned)      # Cost(seconds=..., compute_seconds=..., ...)

One action of each kind and stage is priced, with messages where `lower` puts them (overlap.py), and
the grid is replayed on the virtual clock with these prices. Of the ranks of one stage, only the
rank with the largest shards is priced. Contention between channels is not modelled. Invariant: the
time equals the time of `simulate`, which replays the program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.daft.ir.instructions import WORD
from dtensor.runtime.lower.actions import Actions
from dtensor.runtime.lower.overlap import StepWalk
from dtensor.runtime.lower.rank_builder import ProgramContext, Roles
from dtensor.runtime.schedule import Action, Grid, Kind, held_at_once, in_flight
from dtensor.runtime.schedule.clock import Begin, Interval, Item, Stretch, Until, folded, run
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
    at_the_commit,
    updates_whole,
)


@dataclass(frozen=True, slots=True)
class GridTimetable:
    """The planner's `Timetable` of a grid. If ``grid`` is None, each microbatch passes all stages
    and, if the plan has a backward, returns before the next one starts."""

    grid: Grid | None

    @property
    def text(self) -> str:
        return "" if self.grid is None else str(self.grid)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return () if self.grid is None else in_flight(self.grid)

    def held(self, stages: Sequence[int]) -> Collection[tuple[int, tuple[int, ...]]]:
        if self.grid is None:  # while a stage runs, each earlier stage holds the one microbatch
            return {(at, (1,) * at + (0,) * (len(stages) - at)) for at in range(len(stages))}
        return held_at_once(self.grid, stages)

    def first(self, num_microbatches: int) -> GridTimetable:
        """Return the timetable of only the first microbatches."""
        return self if self.grid is None else GridTimetable(self.grid.first(num_microbatches))

    def cost(self, plan: PlanRecord) -> Cost:
        return _Prediction(plan if isinstance(plan, Plan) else Plan.of(plan), self.grid).cost()


ONE_BY_ONE = GridTimetable(None)


class _Prediction:
    """Prices a plan: builds the items of each rank of the stage axis, and replays them."""

    def __init__(self, plan: Plan, grid: Grid | None) -> None:
        self.plan = plan
        self.shared = ProgramContext(plan, Actions(plan, grid), torch.device("cpu"))
        self.has_commit_point = self.shared.has_commit_point(Roles.of_plan(plan))
        self._actions: dict[tuple[Kind, int], _RankItems] = {}

    def cost(self) -> Cost:
        """Return the cost of the slowest rank."""
        begin = self.plan.topology.step_latency
        ranks = [self._rank_items(rank) for rank in range(len(self.plan.hosted))]
        lists = {rank_items.rank: rank_items.items for rank_items in ranks}
        times = run(lists, begin)
        end = max((end for intervals in times.values() for _, end in intervals), default=begin)
        spent = [_rank_cost(items, times[rank], end) for rank, items in lists.items()]
        slowest = max(spent, key=lambda rank: rank.compute_seconds + rank.communication_seconds)
        bubble = _bubble(ranks, times) if self.plan.num_stages > 1 else 0.0
        host_wait = begin + slowest.host_wait_seconds
        return replace(slowest, bubble=bubble, host_wait_seconds=host_wait)

    def _rank_items(self, rank: int) -> _RankItems:
        """Return the items of a rank in one step."""
        walk = _RankItems(self, rank)
        walk.run_steps([s for s in self.plan.steps if s.once and walk.concerns(s)])
        walk.complete(walk.in_flight)
        walk.add_sends(walk.sent_transfers, None)
        action_start = 0
        for number, (step, action) in enumerate(self.shared.actions.of(rank)):
            walk.complete_sends(step)
            walk.run_round(self.plan, number)
            previous_start, action_start = action_start, len(walk.items)
            priced, m = self._action_items(walk, action), action.microbatch
            receives = [_in_microbatch(item, m) for item in priced.receives]
            walk.items[previous_start:previous_start] = receives
            action_start += len(receives)
            walk.first = walk.first or len(walk.items)
            walk.items += [_in_microbatch(item, m) for item in priced.items]
            walk.add_sends(priced.sent_transfers, m)
        walk.complete_sends(None)
        walk.last = len(walk.items)
        walk.end_step()
        return walk

    def _action_items(self, rank: _RankItems, action: Action) -> _RankItems:
        """Return the items of an action. They are folded, for any microbatch, unless reductions of
        gradients are in flight on the rank."""
        walk = _RankItems(self, rank.rank)
        key: tuple[Kind, int] = action.kind, action.stage
        reduces = bool(rank.reducing) or action in self.shared.actions.reductions
        if reduces:
            walk.in_flight, walk.reducing = rank.in_flight, rank.reducing
            walk.ran_early = rank.ran_early
        elif key in self._actions:
            return self._actions[key]
        walk.run_ordered(self.shared.order_of(action), action.stage)
        if reduces:
            rank.in_flight = walk.in_flight
        else:
            walk.items = folded(walk.rank, walk.items)
            self._actions[key] = walk
        return walk


class _RankItems(StepWalk[Hashable]):
    """The items of one rank of the stage axis, or of one of its actions."""

    def __init__(self, prediction: _Prediction, rank: int) -> None:
        self.plan, self.shared, self.rank = prediction.plan, prediction.shared, rank
        super().__init__(self.plan.hosted[rank])
        self.has_commit_point = prediction.has_commit_point
        self.items: list[Item] = []
        self.receives: list[Begin] = []  # of an action; they begin during the action before it
        self.sent_transfers: list[Transfer] = []
        self.send_names: dict[str, list[Hashable]] = {}  # by value, its sends that are not complete
        self.committed = False  # the commit point is among the items
        self.first = self.last = 0  # the items from first to last are of the schedule's actions

    def end_step(self) -> None:
        """Add the reductions of gradients that have not run early, the commit point, the updates,
        and the gathers of updated parameters."""
        steps = self.end_steps(self.plan)
        before, after = at_the_commit(steps)
        self.run_steps(before)
        self.complete(self.in_flight)
        updates = {s.parameter: s for s in reversed(steps) if isinstance(s, Update)}
        for step in reversed(updates.values()):
            if step.owner is not None:  # into new memory
                self.compute(step)
        if self.has_commit_point and not self.committed:
            self._add_votes(0)
        self.run_steps(after)
        for step in reversed(updates.values()):
            if step.owner is None:
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

    def accumulate(self, step: Accumulate) -> None:
        self.compute(step)

    def redistribute(self, step: Redistribute, *, wait: bool) -> Hashable | None:
        if step.is_free:
            self.compute(step)
            return None
        name: Hashable = (step.name, None) if step.phase == "optimizer" else step.name
        spent = self.shared.seconds(step)
        channel = f"{step.axis} delayed" if self.in_round else step.axis
        self.items.append(Begin(name, (self.rank,), channel, spent.communication, spent.host))
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
        self._add_votes(step.dtype.itemsize, commits=not updates_whole(self.plan.steps))

    def wait(self, message: Hashable) -> None:
        self.items.append(Until((message,)))

    def wait_sends(self, values: Sequence[str]) -> None:
        self.items.append(Until(tuple(n for v in values for n in self.send_names.pop(v))))

    def _add_votes(self, nbytes: int, *, commits: bool = True) -> None:
        """Add the commit point, which also sums the ``nbytes`` of a norm's squares, or only the
        sum of these bytes."""
        self.committed = self.committed or commits
        nbytes += WORD.nbytes if self.has_commit_point and commits else 0
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
    """Return the item of an action for one microbatch. A name that is a tuple is unique already."""

    def unique(name: Hashable) -> Hashable:
        return name if isinstance(name, tuple) else (name, microbatch)

    match item:
        case Stretch():
            return item
        case Begin():
            return replace(item, name=unique(item.name))
        case Until():
            return Until(tuple(map(unique, item.names)))


def _bubble(ranks: Sequence[_RankItems], times: Mapping[int, Sequence[Interval]]) -> float:
    """Return the fraction of the ranks' time in which they wait for messages of other stages,
    between the first and the last action of all ranks."""
    first, last, busy = math.inf, 0.0, 0.0
    for rank_items in ranks:
        between_stages = {
            i.name for i in rank_items.items if isinstance(i, Begin) and len(i.members) > 1
        }
        actions = slice(rank_items.first, rank_items.last)
        for item, (begin, end) in zip(
            rank_items.items[actions], times[rank_items.rank][actions], strict=True
        ):
            if isinstance(item, Begin) or end == begin:
                continue
            first, last = min(first, begin), max(last, end)
            if isinstance(item, Stretch) or between_stages.isdisjoint(item.names):
                busy += end - begin
    return 1 - busy / ((last - first) * len(ranks)) if last > first else 0.0


def _rank_cost(items: Sequence[Item], times: Sequence[Interval], last: float) -> Cost:
    """Return the seconds in which a rank computes, and in which it waits for messages in flight,
    for launches and for other ranks. ``last``: when the last rank ends."""
    begun: dict[Hashable, float] = {}
    local_messages = {i.name for i in items if isinstance(i, Begin) and len(i.members) == 1}
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
                if local_messages.issuperset(item.names):
                    host_waits += since - begin
                else:
                    waits += since - begin
    return Cost(computes, communicates, 0.0, waits, host_waits, host)
