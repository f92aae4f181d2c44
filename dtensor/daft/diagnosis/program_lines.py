"""Describe the lists of a program's hosts as plain data, for diagnosis by another process.

    lines = ProgramLines.of(program, report.lists)
    lines.at(0, 7)        # ListLine(rank=0, index=7, kind="wait", text="wait s", ...)
    lines.at(0, 7).partners                                      # ((1, 1, 4),)
    ProgramLines.read(json.loads(json.dumps(lines.data())))      # an equal object

Here host 0 waits until rank 1 has started the instruction at position 4 of host 1's list. The data
is JSON, so that reading it runs no code. Creating it takes about 10 us per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dtensor.daft.ir.instructions import Call, Collective, Free, Recv, Send, Vote, Wait
from dtensor.daft.ir.program import Program
from dtensor.daft.ir.text import excerpt
from dtensor.daft.verification.pairing import (
    Site,
    instruction_at,
    pair,
    starts_of_waits,
    wait_edges,
)

LineKind: TypeAlias = Literal["call", "start", "wait", "other"]
Partner: TypeAlias = tuple[int, int, int]
"""A partner of a wait: (rank on another host, its host, position in that host's list that it must
pass)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLine:
    """An instruction in a host's list. `index`: its position in the rank's own list. `source`: the
    user's line; for a wait, the line of the messages that it waits for."""

    rank: int
    index: int
    kind: LineKind
    text: str
    label: str
    source: str | None
    partners: tuple[Partner, ...]


class ProgramLines:
    """The lines of a program. `known_as`: names of ranks for users, or "", by rank."""

    def __init__(
        self, program: str, known_as: Sequence[str], sources: Sequence[str], rows: Sequence[Any]
    ) -> None:
        self.program = program
        self.known_as = tuple(known_as)
        self._sources = sources
        self._rows = rows  # rows[host][position]: the fields of a `ListLine`

    @staticmethod
    def of(program: Program, lists: Sequence[Sequence[Site]]) -> ProgramLines:
        """Create the lines of a program. `lists`: the sites of each host, see `Report.lists`."""
        position_of = {
            site: (h, at) for h, sites in enumerate(lists) for at, site in enumerate(sites)
        }
        edges = wait_edges(program, pair(program))
        waits = [starts_of_waits(rank_program.instructions) for rank_program in program.ranks]
        sources: dict[str | None, int] = {None: -1}

        def row(site: Site) -> list[Any]:
            """Return the fields of the `ListLine` of an instruction; its source is an index into
            `sources`."""
            rank, index = site
            instruction = instruction_at(program, site)
            kind: LineKind = "other"
            concerned = [instruction]
            partners = list[Partner]()
            match instruction:
                case Call():
                    kind = "call"
                case Send() | Recv() | Collective():
                    kind = "start"
                case Wait():
                    kind = "wait"
                    concerned += [instruction_at(program, (rank, s)) for s in waits[rank][index]]
                    others = dict.fromkeys((other[0], *position_of[other]) for other in edges[site])
                    partners = [p for p in others if p[1] != position_of[site][0]]
                case _:
                    pass
            # short texts for instructions that never block, which are half of a list
            never_blocks = isinstance(instruction, Free | Vote)
            text = type(instruction).__name__.lower() if never_blocks else excerpt(instruction)
            label = next((str(i.label) for i in concerned if i.label is not None), "")
            source = next((i.source for i in concerned if i.source), None)
            number = sources.setdefault(source, len(sources) - 1)
            return [rank, index, kind, text, label, number, partners]

        rows = [[row(site) for site in sites] for sites in lists]
        return ProgramLines(
            program.name, program.known_as, [s for s in sources if s is not None], rows
        )

    @staticmethod
    def read(data: Any) -> ProgramLines:
        """The inverse of `data`."""
        return ProgramLines(data["program"], data["known_as"], data["sources"], data["hosts"])

    def data(self) -> dict[str, Any]:
        """Return the lines as JSON types."""
        return {
            "program": self.program,
            "known_as": list(self.known_as),
            "sources": list(self._sources),
            "hosts": self._rows,
        }

    def at(self, host: int, position: int) -> ListLine | None:
        """Return the instruction at a position of a host's list, or None if there is none."""
        rows = self._rows[host] if host < len(self._rows) else ()
        if not 0 <= position < len(rows):
            return None
        rank, index, kind, text, label, source, partners = rows[position]
        return ListLine(
            rank=rank,
            index=index,
            kind=kind,
            text=text,
            label=label,
            source=None if source < 0 else str(self._sources[source]),
            partners=tuple((r, h, at) for r, h, at in partners),
        )
