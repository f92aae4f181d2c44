"""What two programs on the same actors have in common, and whether their runs may overlap.

    print(interference(train, evaluate))

    interference of train and evaluate
      may overlap    yes, submitted in one order
      timing         changes no result
      order          decides the results: 1 conflict in state
      actors         rank 0, rank 1
      channels       (0, 1) "values"
      conflicts in state
        w of rank 0, read-write
          train writes it at (rank 0, instr 3 call update(w, g) writes w)  train.py:31
          evaluate reads it at (rank 0, instr 0 y = call net(w, x))  evaluate.py:8

Runs have one total order, in which one controller submits them, and each actor carries out its
parts in that order, one after the other. So an actor may be in the later of two runs while another
is still in the earlier: they overlap. Given that, programs that are sound alone cannot hang, and
their values are those of one run after the other, whatever they share: the proof is in
docs/design/0019-runs-on-their-own-ranks.md, and tests/daft/pairs.py tries all interleavings. The
shared state decides the results of *another order of submission*: that is found here.

It believes what calls declare to write, and knows nothing of values that share storage.
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
)
from dtensor.daft.ir.program import Program
from dtensor.daft.tasks.lower_tasks import LoweredTasks
from dtensor.daft.verification.pairing import show_site
from dtensor.daft.verification.verifier import check_state, verify


@dataclass(frozen=True, slots=True)
class Bound:
    """A program with what its runs are bound to: `stored` inputs, that are names in the ranks'
    tables (`Stored`), and outputs that are kept there (`keep`). To the order they are state too."""

    program: Program
    stored: Mapping[str, str] = field(default_factory=dict[str, str])
    keep: Mapping[str, str] = field(default_factory=dict[str, str])


Loadable: TypeAlias = Program | Bound | LoweredTasks


@dataclass(frozen=True, slots=True)
class Use:
    """How a program uses a value of state: its first instruction that writes it, or else reads it.

    `instruction` is "" for what a run does before or after the instructions.
    """

    program: str
    writes: bool
    instruction: str = ""
    source: str | None = None

    def __str__(self) -> str:
        where = self.instruction or "as its runs are bound"
        line = f"  {self.source}" if self.source else ""
        return f"{self.program} {'writes' if self.writes else 'reads'} it at {where}{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """State of an actor that both use and one at least writes."""

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
    """What the programs `first` and `second` share: actors, channels, state in conflict.

    There is no field for hanging, nor for results that depend on timing: what a cluster loads and
    runs has neither.
    """

    first: str
    second: str
    actors: tuple[str, ...]
    channels: tuple[Key, ...]
    conflicts: tuple[Conflict, ...]

    @property
    def independent(self) -> bool:
        """Whether no actor takes part in both, so that their runs need no order at all."""
        return not self.actors

    @property
    def commutes(self) -> bool:
        """Whether runs submitted in the other order give the same results (Bernstein, 1966)."""
        return not self.conflicts

    def __str__(self) -> str:
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
    """What two programs share: `first` and `second` are of one cluster, or two compiled functions'
    (`LoweredTasks`) of one launch.

    `ProgramError` for one that is not sound, and for two that no cluster loads together.
    """
    frozen = isinstance(first, LoweredTasks)
    if frozen != isinstance(second, LoweredTasks):
        raise TypeError(
            f"A compiled function's program and a cluster's have no actor in common: "
            f"{type(first).__name__}, {type(second).__name__}.\n"
            f"  Fix: compare two of one sort."
        )
    one, other = _Footprint(first), _Footprint(second)
    if not frozen:
        if one.program.size != other.program.size:
            raise ProgramError(
                f"Programs {one.program.name!r} and {other.program.name!r} are for clusters of "
                f"{one.program.size} and {other.program.size} ranks.\n"
                f"  Fix: give both a list, empty or not, for every rank of one cluster."
            )
        check_state([one.program], other.program)
        for footprint in (one, other):
            verify(footprint.program)
    channels = set[Key]() if frozen else one.channels & other.channels
    return Interference(
        first=one.program.name,
        second=other.program.name,
        actors=tuple(title for place, title in one.actors.items() if place in other.actors),
        channels=tuple(sorted(channels)),  # a compiled function's connections are its own
        conflicts=tuple(
            Conflict(actor=one.actors[place], value=value, first=use, second=same)
            for (place, value), use in sorted(one.uses.items(), key=lambda item: item[0])
            if (same := other.uses.get((place, value))) and (use.writes or same.writes)
        ),
    )


class _Footprint:
    """The actors, channels and state that a program uses. A rank is an actor's place."""

    def __init__(self, given: Loadable) -> None:
        self.program = given if isinstance(given, Program) else given.program
        self.actors: dict[int, str] = {}
        self.channels: set[Key] = set()
        self.uses: dict[tuple[int, str], Use] = {}
        bound = given if isinstance(given, Bound) else Bound(self.program)
        for rank, rank_program in enumerate(self.program.ranks):
            place, title = rank, f"rank {rank}"
            if isinstance(given, LoweredTasks):
                place, title = given.actors[rank], given.names[rank]
            if rank_program.instructions or rank_program.outputs:
                self.actors[place] = title
            starts = [
                i for i in rank_program.instructions if isinstance(i, Send | Recv | Collective)
            ]
            self.channels.update(key_of(rank, start) for start in starts)
            for value, use in _uses(rank, bound):
                known = self.uses.get((place, value))
                if known is None or (use.writes and not known.writes):
                    self.uses[place, value] = use


def _uses(rank: int, bound: Bound) -> Iterator[tuple[str, Use]]:
    """Values of a rank's table, in the order in which a run uses them."""
    program, rank_program = bound.program, bound.program.ranks[rank]
    shared = {name: name for name in rank_program.state}
    shared |= {name: bound.stored[name] for name in rank_program.inputs if name in bound.stored}
    for index, i in enumerate(rank_program.instructions):
        writes = (*i.writes, *i.outputs)
        for name in (*writes, *i.inputs):
            if name in shared:
                at = show_site(program, (rank, index))
                yield shared[name], Use(program.name, name in writes, at, i.source)
    for name in rank_program.outputs:
        if name in bound.keep:
            yield bound.keep[name], Use(program.name, writes=True)
    for name in (*rank_program.outputs, *rank_program.inputs):
        if name in shared:
            yield shared[name], Use(program.name, writes=False)
