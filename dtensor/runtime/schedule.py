"""Pipeline schedules as data: which rank runs which stage on which microbatch, and when.

A `Grid` holds one row per rank of the pipeline and one column per step; an entry is an `Action`,
or None where the rank idles. It prints as a table and parses back to the same value. 1F1B on two
stages with three microbatches:

    F0 F1 .  B0 F2 B1 .  B2
    .  F0 B0 F1 B1 F2 B2 .

An entry is `F0`, the forward of microbatch 0, where every rank holds exactly the stage of its own
number; otherwise `2F0`, with the stage first, as torch.distributed.pipelining writes it.

Invariants, checked by `validate`: each (kind, stage, microbatch) stands once; F(s, m) strictly
after F(s-1, m); B(s, m) strictly after F(s, m) and B(s+1, m); a stage keeps to one rank. A step is
an order, not a duration: `bubble` replays the order with costs.

It does not communicate, does not place parameters, and does not split a backward in two (I, W).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dtensor.errors import PlanningError

__all__ = [
    "Action",
    "Custom",
    "GPipe",
    "Grid",
    "OneFOneB",
    "Schedule",
    "bubble",
    "in_flight",
    "validate",
]

Kind = Literal["F", "B"]

_TOKEN = re.compile(r"(?P<stage>\d+)?(?P<kind>[FB])(?P<microbatch>\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's forward ("F") or backward ("B") on one microbatch; prints as `2F0`."""

    kind: Kind
    microbatch: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in ("F", "B"):
            raise PlanningError(f'An action is "F" or "B", and this one is {self.kind!r}.')
        if self.microbatch < 0 or self.stage < 0:
            raise PlanningError(
                "Stages and microbatches are numbered from 0, and this action has "
                f"stage={self.stage}, microbatch={self.microbatch}."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Actions by rank of the pipeline (rows, all of one length) and step (columns)."""

    ranks: tuple[tuple[Action | None, ...], ...]

    def __post_init__(self) -> None:
        lengths = sorted({len(row) for row in self.ranks})
        if len(lengths) != 1 or lengths == [0]:
            raise PlanningError(
                "A grid has at least one rank, and all its rows have the same number of steps, at "
                f"least one; these rows have {lengths} steps. Fill a row with None (`.` in text)."
            )

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0])

    @property
    def num_stages(self) -> int:
        """One more than the highest stage."""
        return 1 + max((a.stage for _, _, a in self.actions()), default=-1)

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch."""
        return 1 + max((a.microbatch for _, _, a in self.actions()), default=-1)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """(step, rank, action) in the order of steps, then ranks."""
        for step, column in enumerate(zip(*self.ranks, strict=True)):
            for rank, action in enumerate(column):
                if action is not None:
                    yield step, rank, action

    def order(self, rank: int) -> tuple[Action, ...]:
        """What one rank does, in order, without its idle steps."""
        return tuple(action for action in self.ranks[rank] if action is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(sorted({action.stage for action in self.order(rank)}))

    def __str__(self) -> str:
        short = all(set(self.stages_of(rank)) <= {rank} for rank in range(self.num_ranks))
        rows = [
            ["." if a is None else str(a)[len(str(a.stage)) * short :] for a in row]
            for row in self.ranks
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    @classmethod
    def parse(cls, text: str) -> Grid:
        """The grid that `text` shows: a line per rank, `.` for idle; short rows are filled up.

        `F0` without a stage is the stage that has the number of its row.
        """
        lines = [line.split() for line in text.splitlines() if line.strip()]
        rows = [[_parse_entry(entry, rank) for entry in line] for rank, line in enumerate(lines)]
        return _fill(rows)


def _parse_entry(entry: str, rank: int) -> Action | None:
    if entry == ".":
        return None
    found = _TOKEN.fullmatch(entry)
    if found is None:
        raise PlanningError(
            f"{entry!r} on rank {rank} of a schedule is no action. Write `F0` or `B0` (the forward "
            "or backward of microbatch 0), `2F0` (of stage 2), or `.` (idle)."
        )
    kind: Kind = "F" if found["kind"] == "F" else "B"
    stage = rank if found["stage"] is None else int(found["stage"])
    return Action(kind, int(found["microbatch"]), stage)


def _fill(rows: Sequence[Sequence[Action | None]]) -> Grid:
    steps = max(map(len, rows), default=0)
    return Grid(tuple((*row, *[None] * (steps - len(row))) for row in rows))


# -- what users choose ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GPipe:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    With p stages on p ranks and m microbatches the bubble is (p-1)/(m+p-1) of the time, and every
    stage holds the activations of all m microbatches. Backwards run in ascending order, unlike in
    the paper's figure, so that gradients add up in the same order under every schedule.

    v stages per rank, round-robin: stage s runs on rank s mod p, and each rank ends one stage on
    all microbatches before the next (breadth-first: Lamy-Poirier 2023, arXiv:2211.05953). For
    m >= p the bubble is then (p-1)/(v m + p-1).
    """

    microbatches: int

    def __post_init__(self) -> None:
        _check_microbatches(self.microbatches)

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        if num_ranks < 1 or num_stages < 1 or num_stages % num_ranks:
            raise PlanningError(
                f"GPipe deals stages out to ranks in turn, and {num_stages} stages do not divide "
                f"over {num_ranks} ranks. Use a multiple of {num_ranks} stages."
            )
        orders: list[list[Action]] = []
        for rank in range(num_ranks):
            mine = range(rank, num_stages, num_ranks)
            forwards = [Action("F", m, s) for s in mine for m in range(self.microbatches)]
            backwards = [Action("B", m, s) for s in mine[::-1] for m in range(self.microbatches)]
            orders.append(forwards + backwards)
        return _place(orders)


@dataclass(frozen=True, slots=True)
class OneFOneB:
    """One forward, one backward (PipeDream-flush: Narayanan et al. 2021, arXiv:2006.09503).

    With p stages on p ranks and m microbatches the bubble is (p-1)/(m+p-1) of the time, as for
    GPipe, but stage s holds the activations of at most min(p-s, m) microbatches.
    """

    microbatches: int

    def __post_init__(self) -> None:
        _check_microbatches(self.microbatches)

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        if num_ranks < 1 or num_stages != num_ranks:
            raise PlanningError(
                f"1F1B holds one stage per rank, and there are {num_stages} stages for {num_ranks} "
                f"ranks. State {max(num_ranks, 1)} stages, or use GPipe(microbatches="
                f"{self.microbatches}), which takes several stages per rank."
            )
        orders: list[list[Action]] = []
        for stage in range(num_stages):
            # The forwards that fill the pipeline below this stage before its first backward.
            ahead = min(num_stages - stage - 1, self.microbatches)
            order = [Action("F", m, stage) for m in range(ahead)]
            for m in range(self.microbatches):
                if ahead + m < self.microbatches:
                    order.append(Action("F", ahead + m, stage))
                order.append(Action("B", m, stage))
            orders.append(order)
        return _place(orders)


@dataclass(frozen=True, slots=True)
class Custom:
    """A schedule written by hand, as `Grid.parse` reads it; validated when it is made."""

    text: str

    def __post_init__(self) -> None:
        validate(Grid.parse(self.text))

    @property
    def microbatches(self) -> int:
        return Grid.parse(self.text).num_microbatches

    def grid(self, num_stages: int, num_ranks: int) -> Grid:
        grid = Grid.parse(self.text)
        if (grid.num_stages, grid.num_ranks) != (num_stages, num_ranks):
            raise PlanningError(
                f"This schedule is for {grid.num_stages} stages on {grid.num_ranks} ranks, and the "
                f"model has {num_stages} stages on {num_ranks} ranks:\n{grid}"
            )
        return grid


Schedule = GPipe | OneFOneB | Custom


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise PlanningError(
            f"A schedule has at least one microbatch, and this one has {microbatches}."
        )


# -- what a grid says ----------------------------------------------------------------------------


def validate(grid: Grid) -> None:
    """Raise `PlanningError` unless the grid keeps every invariant of this module."""
    seen: dict[Action, tuple[int, int]] = {}
    home: dict[int, int] = {}
    for step, rank, action in grid.actions():
        if action in seen:
            earlier = seen[action]
            raise _broken(grid, f"{action} stands twice", (action, earlier), (action, (step, rank)))
        if home.setdefault(action.stage, rank) != rank:
            raise PlanningError(
                f"Stage {action.stage} runs on rank {home[action.stage]} and on rank {rank} "
                f"({action} at step {step}), and its parameters are on one.\n{grid}"
            )
        seen[action] = (step, rank)
    for stage in range(grid.num_stages):
        for microbatch in range(grid.num_microbatches):
            for kind in ("F", "B"):
                action = Action(kind, microbatch, stage)
                if action not in seen:
                    raise PlanningError(f"{action} is missing from the schedule:\n{grid}")
    for action, (step, rank) in seen.items():
        for needed in _needs(action, grid.num_stages):
            if seen[needed][0] >= step:
                fact = f"{action} is not after {needed}, whose result it needs"
                raise _broken(grid, fact, (needed, seen[needed]), (action, (step, rank)))


def _broken(grid: Grid, fact: str, *places: tuple[Action, tuple[int, int]]) -> PlanningError:
    where = ", ".join(f"{a} at step {step} on rank {rank}" for a, (step, rank) in places)
    return PlanningError(f"{fact}: {where}.\n{grid}")


def bubble(grid: Grid, forward: float = 1.0, backward: float = 2.0) -> float:
    """The fraction of the ranks' time that is idle, from the first action to the last.

    Each rank runs its actions in the grid's order, each as soon as its inputs are there; a
    forward and a backward of a stage last `forward` and `backward` units of time, a transfer none.
    """
    cost = {"F": forward, "B": backward}
    done: dict[Action, float] = {}
    free = [0.0] * grid.num_ranks
    busy = 0.0
    # In the order of steps, whatever an action needs has been timed before it.
    for _, rank, action in grid.actions():
        ready = max((done[needed] for needed in _needs(action, grid.num_stages)), default=0.0)
        free[rank] = done[action] = max(ready, free[rank]) + cost[action.kind]
        busy += cost[action.kind]
    total = max(free) * grid.num_ranks
    return 1.0 - busy / total if total else 0.0


def in_flight(grid: Grid) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations it holds at once.

    An activation lives from its forward to the end of its backward.
    """
    held = [0] * grid.num_stages
    most = [0] * grid.num_stages
    for _, _, action in grid.actions():
        held[action.stage] += 1 if action.kind == "F" else -1
        most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


def _needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions whose results this one takes."""
    m, s = action.microbatch, action.stage
    if action.kind == "F":
        return (Action("F", m, s - 1),) if s > 0 else ()
    above = (Action("B", m, s + 1),) if s + 1 < num_stages else ()
    return (Action("F", m, s), *above)


def _place(orders: Sequence[Sequence[Action]]) -> Grid:
    """Give each action the earliest step that its rank's order and its inputs allow."""
    num_stages = 1 + max(action.stage for order in orders for action in order)
    at: dict[Action, int] = {}
    rows: list[list[Action | None]] = [[] for _ in orders]
    position = [0] * len(orders)
    step = 0
    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        for rank, order in enumerate(orders):
            action = order[position[rank]] if position[rank] < len(order) else None
            if action is not None and all(
                at.get(needed, step) < step for needed in _needs(action, num_stages)
            ):
                at[action] = step
                position[rank] += 1
            else:
                action = None
            rows[rank].append(action)
        if all(row[-1] is None for row in rows):
            stuck = [str(o[position[r]]) for r, o in enumerate(orders) if position[r] < len(o)]
            raise PlanningError(f"These orders wait for each other: {', '.join(stuck)} are next.")
        step += 1
    return _fill(rows)
