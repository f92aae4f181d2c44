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
docs/design/0009-several-programs.md, and tests/daft/pairs.py tries all interleavings. What they
share decides what *another order of submission* would give, and that is what is found here.

It believes what calls declare to write, and knows nothing of values that share storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Call, Collective, Recv, Send, inputs_of, outputs_of
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.routes import Key, key_of
from dtensor.daft.tasks.frozen import Frozen
from dtensor.daft.verification.pairing import instruction_at, show_site
from dtensor.daft.verification.verifier import verify


@dataclass(frozen=True, slots=True)
class Bound:
    """A program with what its runs are bound to: `stored` inputs, that are names in the ranks'
    tables (`Stored`), and outputs that are kept there (`keep`). To the order they are state too."""

    program: Program
    stored: Mapping[str, str] = field(default_factory=dict[str, str])
    keep: Mapping[str, str] = field(default_factory=dict[str, str])


Loadable: TypeAlias = Program | Bound | Frozen


@dataclass(frozen=True, slots=True, kw_only=True)
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
        number = f"{len(self.conflicts)} conflict{'s' if len(self.conflicts) > 1 else ''}"
        channels = (f'{members} "{channel}"' for members, channel, _ in self.channels)
        rows = [
            ("may overlap", "yes" if self.independent else "yes, submitted in one order"),
            ("timing", "changes no result"),
            (
                "order",
                "changes no result" if self.commutes else f"decides the results: {number} in state",
            ),
            ("actors", ", ".join(self.actors) or "none in both"),
            ("channels", ", ".join(channels) or "none in both"),
        ]
        lines = [f"interference of {self.first} and {self.second}"]
        lines += [f"  {title:<14} {text}" for title, text in rows]
        if self.conflicts:
            lines.append("  conflicts in state")
            lines += [f"    {conflict}" for conflict in self.conflicts]
        return "\n".join(lines)


def interference(first: Loadable, second: Loadable) -> Interference:
    """Of two programs of one cluster, or two compiled functions' (`Frozen`) of one launch.

    `ProgramError` for one that is not sound, and for two that no cluster loads together.
    """
    if isinstance(first, Frozen) != isinstance(second, Frozen):
        raise TypeError(
            f"A compiled function's program and a cluster's have no actor in common: "
            f"{type(first).__name__}, {type(second).__name__}.\n"
            f"  Fix: compare two of one sort."
        )
    one, other = _Footprint(first), _Footprint(second)
    if not isinstance(first, Frozen):
        if one.program.size != other.program.size:
            raise ProgramError(
                f"Programs {one.name!r} and {other.name!r} are for clusters of "
                f"{one.program.size} and {other.program.size} ranks.\n"
                f"  Fix: give both a list, empty or not, for every rank of one cluster."
            )
        check_state([one.program], other.program)
        for footprint in (one, other):
            verify(footprint.program)
    return Interference(
        first=one.name,
        second=other.name,
        actors=tuple(title for place, title in one.actors.items() if place in other.actors),
        channels=tuple(sorted(one.channels & other.channels)),
        conflicts=tuple(
            Conflict(
                actor=one.actors[place],
                value=value,
                first=one.uses[place, value],
                second=other.uses[place, value],
            )
            for place, value in sorted(one.uses.keys() & other.uses.keys())
            if one.uses[place, value].writes or other.uses[place, value].writes
        ),
    )


def check_state(loaded: Iterable[Program], program: Program) -> None:
    """`ProgramError` unless state that `program` shares with others has one size in all of them:
    each one's bound on memory rests on it. A size that is not declared agrees with any."""
    own = [_state_sizes(program, rank) for rank in range(program.size)]
    for other in loaded if any(own) else ():
        for rank, sizes in enumerate(own):
            theirs = _state_sizes(other, rank)
            for name in sorted(sizes.keys() & theirs.keys()):
                if sizes[name] != theirs[name]:
                    raise ProgramError(
                        f"State {name!r} of rank {rank} has {sizes[name]} bytes in program "
                        f"{program.name!r}, and {theirs[name]} in {other.name!r} on the same "
                        f"actors.\n  Fix: declare one size for it, or give one of them another "
                        f"name."
                    )


def _state_sizes(program: Program, rank: int) -> dict[str, int]:
    own = program.ranks[rank]
    state = set(own.state)
    return {name: nbytes for name, nbytes in own.nbytes if name in state}


class _Footprint:
    """The actors, channels and state that a program uses. A rank is an actor's place."""

    def __init__(self, given: Loadable) -> None:
        stored: Mapping[str, str] = {}
        keep: Mapping[str, str] = {}
        match given:
            case Frozen():
                self.program = given.program
                places: Sequence[int] = given.actors
                titles: Sequence[str] = given.names
            case Program() | Bound():
                self.program = given if isinstance(given, Program) else given.program
                places = range(self.program.size)
                titles = [f"rank {rank}" for rank in places]
                if isinstance(given, Bound):
                    stored, keep = given.stored, given.keep
            case _:
                assert_never(given)
        self.name = self.program.name
        self.actors = {
            place: title
            for place, title, own in zip(places, titles, self.program.ranks, strict=True)
            if own.instructions or own.outputs
        }
        self.channels: set[Key] = set()
        self.uses: dict[tuple[int, str], Use] = {}
        for rank, place in enumerate(places):
            self._find(rank, place, stored, keep)
        if isinstance(given, Frozen):
            self.channels.clear()  # its connections are its own

    def _find(
        self, rank: int, place: int, stored: Mapping[str, str], keep: Mapping[str, str]
    ) -> None:
        own = self.program.ranks[rank]
        shared = {name: name for name in own.state}
        shared |= {name: stored[name] for name in own.inputs if name in stored}
        for index, instruction in enumerate(own.instructions):
            if isinstance(instruction, Send | Recv | Collective):
                self.channels.add(key_of(rank, instruction))
            changed = instruction.writes if isinstance(instruction, Call) else ()
            writes = (*changed, *outputs_of(instruction))
            for name in (*writes, *inputs_of(instruction)):
                if name in shared:
                    self._use(place, shared[name], name in writes, (rank, index))
        for name in own.outputs:
            if name in shared:
                self._use(place, shared[name], False)
            if name in keep:
                self._use(place, keep[name], True)
        for name in own.inputs:
            if name in stored:
                self._use(place, stored[name], False)

    def _use(
        self, place: int, value: str, writes: bool, site: tuple[int, int] | None = None
    ) -> None:
        known = self.uses.get((place, value))
        if known is None or (writes and not known.writes):
            at = ("", None)
            if site is not None:
                at = show_site(self.program, site), instruction_at(self.program, site).source
            self.uses[place, value] = Use(
                program=self.name, writes=writes, instruction=at[0], source=at[1]
            )
