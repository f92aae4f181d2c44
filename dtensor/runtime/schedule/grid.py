"""A grid of pipeline actions: which rank runs which stage on which microbatch, and in what order.

    F0 F1 .  B0 F2 B1 .  B2      # a row per rank, a column per step: 1F1B, 3 microbatches
    .  F0 B0 F1 B1 F2 B2 .       # `.`: idle; `2F0`: stage 2, if ranks have several stages

`F` is a forward, `B` a backward. A backward may be split into `I`, the gradients of the stage's
inputs, and `W`, the gradients of its weights (Qi et al. 2023, arXiv:2401.10241). Invariants,
checked by `validate`: each stage and microbatch has one F and either one B or one I and one W;
F(s, m) comes after F(s-1, m), B or I(s, m) after F(s, m) and after B or I(s+1, m), and W(s, m)
after I(s, m); a stage is on one rank. A step has no duration: `timeline` replays with costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dtensor.errors import PlanningError
from dtensor.runtime.drawing import Box, RankRow, drawing, round_step
from dtensor.showing import table

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

Event = tuple[Literal["output", "gradient"], int, int]
"""What an action may wait for: the output of a stage, or the gradient of its input, as (kind,
stage, microbatch)."""

_TOKEN = re.compile(r"(?P<stage>\d+)?(?P<kind>[FBIW])(?P<microbatch>\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's F, B, I or W on one microbatch; prints as `2F0`."""

    kind: Kind
    microbatch: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanningError(f'An action is "F", "B", "I" or "W", not {self.kind!r}.')
        if self.microbatch < 0 or self.stage < 0:
            raise PlanningError(
                "Stages and microbatches are numbered from 0, and this action has "
                f"stage={self.stage}, microbatch={self.microbatch}."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def held(self) -> int:
        """The change in the number of activations that the stage holds: 1 for F, -1 for B or W."""
        match self.kind:
            case "F":
                return 1
            case "B" | "W":
                return -1
            case "I":
                return 0

    def gives(self) -> tuple[Event, ...]:
        """Return the events that occur when the action ends."""
        match self.kind:
            case "F":
                return (("output", self.stage, self.microbatch),)
            case "B" | "I":
                return (("gradient", self.stage, self.microbatch),)
            case "W":
                return ()

    def takes(self, num_stages: int) -> tuple[Event, ...]:
        """Return the events that the action waits for."""
        m, s = self.microbatch, self.stage
        match self.kind:
            case "F":
                return (("output", s - 1, m),) if s > 0 else ()
            case "B" | "I":
                above: tuple[Event, ...] = (("gradient", s + 1, m),) if s + 1 < num_stages else ()
                return (("output", s, m), *above)
            case "W":
                return (("gradient", s, m),)


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
        """The number of stages: one more than the highest stage."""
        return 1 + max((a.stage for _, _, a in self.actions()), default=-1)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches: one more than the highest microbatch."""
        return 1 + max((a.microbatch for _, _, a in self.actions()), default=-1)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (step, rank, action), sorted by step, then rank."""
        for step, column in enumerate(zip(*self.ranks, strict=True)):
            for rank, action in enumerate(column):
                if action is not None:
                    yield step, rank, action

    def order(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of one rank in order, without its idle steps."""
        return tuple(action for action in self.ranks[rank] if action is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(sorted({action.stage for action in self.order(rank)}))

    def first(self, num_microbatches: int) -> Grid:
        """Return the grid of only the first microbatches, for a batch with few rows."""
        if num_microbatches >= self.num_microbatches:
            return self
        orders = [self.order(rank) for rank in range(self.num_ranks)]
        return place([[a for a in order if a.microbatch < num_microbatches] for order in orders])

    def home(self) -> tuple[int, ...]:
        """Return the rank of each stage."""
        rank_of = {a.stage: rank for _, rank, a in self.actions()}
        return tuple(rank_of[stage] for stage in range(self.num_stages))

    def _entries(self) -> list[list[str]]:
        """Return the texts of the entries. They omit the stage if each rank has only the stage with
        the rank's number."""
        short = all(set(self.stages_of(rank)) <= {rank} for rank in range(self.num_ranks))
        return [
            ["." if a is None else str(a)[len(str(a.stage)) * short :] for a in row]
            for row in self.ranks
        ]

    def __str__(self) -> str:
        return "\n".join(table(self._entries(), "<", gap=" "))

    def _repr_svg_(self) -> str:
        """Return the drawing in a notebook: a box for each action, placed by its step."""
        rows = [
            RankRow(
                name=f"rank {rank}",
                lanes=(
                    tuple(
                        Box(step, step + 1, action.kind, str(action), text)
                        for step, (action, text) in enumerate(zip(row, texts, strict=True))
                        if action is not None
                    ),
                ),
            )
            for rank, (row, texts) in enumerate(zip(self.ranks, self._entries(), strict=True))
        ]
        every = max(1, int(round_step(self.num_steps, 24)))
        return drawing(
            rows,
            heights=(18.0,),
            length=self.num_steps,
            ticks=[(step + 0.5, str(step)) for step in range(0, self.num_steps, every)],
            title=f"{self.num_stages} stages, {self.num_microbatches} microbatches, "
            f"{self.num_steps} steps in order",
            width=max(6.0, min(34.0, 1700 / self.num_steps)) * self.num_steps,
        )

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Return the grid that ``text`` shows: a line per rank, `.` for idle; short rows are filled
        with idle steps. In `F0`, without a stage, the stage is the number of the row."""
        lines = [line.split() for line in text.splitlines() if line.strip()]
        steps = max(map(len, lines), default=0)
        return cls(
            tuple(
                tuple(None if e == "." else parse_action(e, rank) for e in line)
                + (None,) * (steps - len(line))
                for rank, line in enumerate(lines)
            )
        )


def parse_action(entry: str, rank: int) -> Action:
    """Return the action of a text such as `2F0`; `F0` is of the stage with the rank's number.
    Raises PlanningError for any other text."""
    match = _TOKEN.fullmatch(entry)
    if match is None:
        raise PlanningError(
            f"{entry!r} on rank {rank} of a schedule is no action. Write `F0` or `B0` (the forward "
            "or backward of microbatch 0), `I0` or `W0` (the backward's halves: inputs, weights), "
            "`2F0` (of stage 2), or `.` (idle)."
        )
    kind = KINDS["FBIW".index(match["kind"])]
    stage = rank if match["stage"] is None else int(match["stage"])
    return Action(kind, int(match["microbatch"]), stage)


# -- checks of a grid ------------------------------------------------------------------------------


def validate(grid: Grid) -> None:
    """Raise PlanningError if the grid breaks an invariant of this module."""
    seen: dict[Action, tuple[int, int]] = {}
    home: dict[int, int] = {}
    for step, rank, action in grid.actions():
        if action in seen:
            earlier = seen[action]
            places = (action, earlier), (action, (step, rank))
            raise _broken(grid, f"{action} occurs twice", *places)
        if home.setdefault(action.stage, rank) != rank:
            raise PlanningError(
                f"Stage {action.stage} runs on rank {home[action.stage]} and on rank {rank} "
                f"({action} at step {step}), and its parameters are on one.\n{grid}"
            )
        seen[action] = (step, rank)
    for stage in range(grid.num_stages):
        for microbatch in range(grid.num_microbatches):
            _complete(grid, seen, stage, microbatch)
    given = {event: action for action in seen for event in action.gives()}
    for action, (step, rank) in seen.items():
        for event in action.takes(grid.num_stages):
            needed = given[event]
            if seen[needed][0] >= step:
                fact = f"{action} is not after {needed}, whose result it needs"
                raise _broken(grid, fact, (needed, seen[needed]), (action, (step, rank)))


def _complete(grid: Grid, seen: Container[Action], stage: int, microbatch: int) -> None:
    """Raise PlanningError if an F, and a B or an I and a W, is missing or superfluous."""
    f, b, i, w = (Action(kind, microbatch, stage) for kind in KINDS)
    missing = [f] if f not in seen else []
    if b not in seen:
        halves = [x for x in (i, w) if x not in seen]
        missing += [b] if len(halves) == 2 else halves
    if missing:
        raise PlanningError(f"{missing[0]} is missing from the schedule:\n{grid}")
    twice = [x for x in (i, w) if x in seen] if b in seen else []
    if twice:
        raise PlanningError(f"{twice[0]} repeats a half of {b}: remove one of them.\n{grid}")


def _broken(grid: Grid, fact: str, *places: tuple[Action, tuple[int, int]]) -> PlanningError:
    where = ", ".join(f"{a} at step {step} on rank {rank}" for a, (step, rank) in places)
    return PlanningError(f"{fact}: {where}.\n{grid}")


def place(orders: Sequence[Sequence[Action]]) -> Grid:
    """Return the grid in which each action has the earliest step that its rank's order and its
    inputs allow. Raises PlanningError if the orders wait for each other."""
    times = replay(orders, lambda action: 1)
    steps = max((end for row in times for _, end in row), default=0)
    rows: list[list[Action | None]] = [[None] * int(steps) for _ in orders]
    for row, order, times_of_rank in zip(rows, orders, times, strict=True):
        for action, (begin, _) in zip(order, times_of_rank, strict=True):
            row[int(begin)] = action
    return Grid(tuple(map(tuple, rows)))


def replay(
    orders: Sequence[Sequence[Action]], lasts: Callable[[Action], float]
) -> list[list[tuple[float, float]]]:
    """Return, by rank, when each of its actions begins and ends, if each begins as soon as its
    rank is free and its inputs exist. Raises PlanningError if the orders wait for each other."""
    num_stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    done: dict[Event, float] = {}
    free = [0.0] * len(orders)
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for action in order[len(times[rank]) :]:
                needed = action.takes(num_stages)
                if any(event not in done for event in needed):
                    break
                begin = max([free[rank], *(done[event] for event in needed)])
                free[rank] = begin + lasts(action)
                done.update(dict.fromkeys(action.gives(), free[rank]))
                times[rank].append((begin, free[rank]))
                moved = True
    stuck = [str(o[len(t)]) for o, t in zip(orders, times, strict=True) if len(t) < len(o)]
    if stuck:
        raise PlanningError(f"These orders wait for each other: {', '.join(stuck)} are next.")
    return times
