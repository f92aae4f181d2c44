"""Compare two programs on the same actors: what they share, and whether their order matters.

    print(interference(train, evaluate))

    interference of train and evaluate
      order          decides the results: 1 conflict in state
      ...
        w of rank 0, read-write
          train writes it at (rank 0, instr 3 call update(w, g) writes w)  train.py:31

Every actor executes runs in the order of submission, so runs may overlap without hanging or
changing results. Another order changes results if one program writes state that the other uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import (
    Collective,
    Key,
    Recv,
    Send,
    key_of,
    values_read,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.tasks.lower_tasks import LoweredTasks
from dtensor.daft.verification.pairing import show_site
from dtensor.daft.verification.verifier import check_state, verify


@dataclass(frozen=True, slots=True)
class Bound:
    """A program with bindings to values in the ranks' tables, which count as state. `stored`: input
    -> name in the tables (`Stored`). `keep`: output -> name under which it is kept."""

    program: Program
    stored: Mapping[str, str] = field(default_factory=dict[str, str])
    keep: Mapping[str, str] = field(default_factory=dict[str, str])


Loadable: TypeAlias = Program | Bound | LoweredTasks


@dataclass(frozen=True, slots=True)
class Use:
    """How a program uses a value of state: the first instruction that writes it, or else reads it.
    `instruction`: "" if the run uses it before or after its instructions."""

    program: str
    writes: bool
    instruction: str = ""
    source: str | None = None

    def __str__(self) -> str:
        position = self.instruction or "as its runs are bound"
        line = f"  {self.source}" if self.source else ""
        return f"{self.program} {'writes' if self.writes else 'reads'} it at {position}{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A value of an actor's state that both programs use and at least one writes."""

    actor: str
    value: str
    first: Use
    second: Use

    @property
    def kind(self) -> Literal["read-write", "write-write"]:
        """Whether both write."""
        return "write-write" if self.first.writes and self.second.writes else "read-write"

    def __str__(self) -> str:
        return f"{self.value} of {self.actor}, {self.kind}\n      {self.first}\n      {self.second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What the programs `first` and `second` share: actors, channels, and conflicts in state."""

    first: str
    second: str
    actors: tuple[str, ...]
    channels: tuple[Key, ...]
    conflicts: tuple[Conflict, ...]

    @property
    def independent(self) -> bool:
        """Whether no actor takes part in both programs, so that their runs need no order."""
        return not self.actors

    @property
    def commutes(self) -> bool:
        """Whether both orders of submission give the same results (Bernstein, 1966)."""
        return not self.conflicts

    def __str__(self) -> str:
        """Return a report of the shared actors, channels and conflicts."""
        num = len(self.conflicts)
        order = f"decides the results: {num} conflict{'s' if num > 1 else ''} in state"
        channels = (f'{members} "{channel}"' for members, channel, _ in self.channels)
        lines = [
            f"interference of {self.first} and {self.second}",
            f"  may overlap    {'yes' if self.independent else 'yes, submitted in one order'}",
            "  timing         changes no result",
            f"  order          {order if num else 'changes no result'}",
            f"  actors         {', '.join(self.actors) or 'none in both'}",
            f"  channels       {', '.join(channels) or 'none in both'}",
            *(["  conflicts in state"] if num else []),
            *(f"    {conflict}" for conflict in self.conflicts),
        ]
        return "\n".join(lines)


def interference(first: Loadable, second: Loadable) -> Interference:
    """Return what ``first`` and ``second`` share: two programs of one cluster, or two compiled
    functions of one launch.

    Raises TypeError if only one is a compiled function (`LoweredTasks`), ProgramError if a program
    is not sound or no cluster can load both.
    """
    is_lowered = isinstance(first, LoweredTasks)
    if is_lowered != isinstance(second, LoweredTasks):
        raise TypeError(
            f"A compiled function's program and a cluster's have no actor in common: "
            f"{type(first).__name__}, {type(second).__name__}.\n"
            f"  Fix: compare two of one sort."
        )
    used_by_first, used_by_second = _Footprint(first), _Footprint(second)
    if not is_lowered:
        if used_by_first.program.size != used_by_second.program.size:
            raise ProgramError(
                f"Programs {used_by_first.program.name!r} and {used_by_second.program.name!r} are "
                f"for clusters of {used_by_first.program.size} and "
                f"{used_by_second.program.size} ranks.\n"
                f"  Fix: give both a list, empty or not, for every rank of one cluster."
            )
        check_state([used_by_first.program], used_by_second.program)
        for footprint in (used_by_first, used_by_second):
            verify(footprint.program)
    channels = set[Key]() if is_lowered else used_by_first.channels & used_by_second.channels
    return Interference(
        first=used_by_first.program.name,
        second=used_by_second.program.name,
        actors=tuple(
            title for actor, title in used_by_first.actors.items() if actor in used_by_second.actors
        ),
        channels=tuple(sorted(channels)),  # compiled functions share no connections
        conflicts=tuple(
            Conflict(actor=used_by_first.actors[actor], value=value, first=use, second=other_use)
            for (actor, value), use in sorted(used_by_first.uses.items(), key=lambda item: item[0])
            if (other_use := used_by_second.uses.get((actor, value)))
            and (use.writes or other_use.writes)
        ),
    )


class _Footprint:
    """The actors, channels and state that a program uses. A cluster's ranks count as actors."""

    def __init__(self, loadable: Loadable) -> None:
        """Collect the actors, channels and state that ``loadable`` uses. For each value of state, a
        use that writes is preferred to an earlier one that reads."""
        self.program = loadable if isinstance(loadable, Program) else loadable.program
        self.actors: dict[int, str] = {}
        self.channels: set[Key] = set()
        self.uses: dict[tuple[int, str], Use] = {}
        bound = loadable if isinstance(loadable, Bound) else Bound(self.program)
        for rank, rank_program in enumerate(self.program.ranks):
            actor, title = rank, f"rank {rank}"
            if isinstance(loadable, LoweredTasks):
                actor, title = loadable.actors[rank], loadable.names[rank]
            if rank_program.instructions or rank_program.outputs:
                self.actors[actor] = title
            starts = [
                i for i in rank_program.instructions if isinstance(i, Send | Recv | Collective)
            ]
            self.channels.update(key_of(rank, start) for start in starts)
            for value, use in _uses(rank, bound):
                earlier = self.uses.get((actor, value))
                if earlier is None or (use.writes and not earlier.writes):
                    self.uses[actor, value] = use


def _uses(rank: int, bound: Bound) -> Iterator[tuple[str, Use]]:
    """Yield the uses of values in a rank's table, in the order of a run."""
    program, rank_program = bound.program, bound.program.ranks[rank]
    state_name = {name: name for name in rank_program.state}
    state_name |= {name: bound.stored[name] for name in rank_program.inputs if name in bound.stored}
    for index, i in enumerate(rank_program.instructions):
        writes = (*i.writes, *i.outputs)
        for name in (*writes, *values_read(i)):
            if name in state_name:
                position = show_site(program, (rank, index))
                yield state_name[name], Use(program.name, name in writes, position, i.source)
    for name in rank_program.outputs:
        if name in bound.keep:
            yield bound.keep[name], Use(program.name, writes=True)
    for name in (*rank_program.outputs, *rank_program.inputs):
        if name in state_name:
            yield state_name[name], Use(program.name, writes=False)
