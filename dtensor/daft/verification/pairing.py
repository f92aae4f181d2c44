"""Who waits for whom: pairing the starts of all ranks, and running their lists in thought.

The k-th `Send` from s to d on a channel meets the k-th `Recv` at d from s on it; the k-th
collective of a (group, channel) meets the k-th of every member. A start never blocks. A `Wait`
blocks until the partners of what it completes have *started*: that is rendezvous, where a sender
waits too. Buffered sends block less, so what cannot hang here cannot hang there. A channel is
first in, first out on each rank, so that a partner that has started has also started all that
came before on the channel: its transport thread needs no edges of its own.

Starting can only help others, never hinder them, so every order of execution ends in the same
place: one run in thought decides for all (the argument of Kahn networks; `tests/daft` compares
it with trying all interleavings).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Call, Collective, Free, Instruction, Recv, Send, Wait
from dtensor.daft.ir.program import Program, format_instruction

Site: TypeAlias = tuple[int, int]
"""(rank, index of the instruction in the rank's own list)."""
Edges: TypeAlias = Mapping[Site, tuple[Site, ...]]


def instruction_at(program: Program, site: Site) -> Instruction:
    return program.ranks[site[0]].instructions[site[1]]


def show_site(program: Program, site: Site) -> str:
    """`(rank 1, instr 7 wait h)`."""
    text = format_instruction(instruction_at(program, site), brief=True)
    return f"(rank {site[0]}, instr {site[1]} {text})"


def starts_of_waits(instructions: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """For each `Wait` of one rank's list, the indices of the starts that it completes."""
    pending: dict[str, list[int]] = defaultdict(list)
    found: dict[int, tuple[int, ...]] = {}
    completed: set[int] = set()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Send(value=value) | Recv(value=value):
                pending[value].append(index)
            case Collective(outputs=outputs):
                for value in outputs:
                    pending[value].append(index)
            case Wait(values=values):
                starts = {start for value in values for start in pending.pop(value, ())}
                found[index] = tuple(sorted(starts - completed))
                completed |= starts
            case Call() | Free():
                pass
    return found


def pair(program: Program) -> dict[Site, tuple[Site, ...]]:
    """For each start, its partners' starts. Raises `ProgramError` for one that has none."""
    sends: dict[tuple[int, int, str], list[Site]] = defaultdict(list)
    recvs: dict[tuple[int, int, str], list[Site]] = defaultdict(list)
    collectives: dict[tuple[tuple[int, ...], str], dict[int, list[Site]]] = {}
    for rank, rank_program in enumerate(program.ranks):
        for index, instruction in enumerate(rank_program.instructions):
            site = (rank, index)
            match instruction:
                case Send(to=to, channel=channel):
                    sends[rank, to, channel].append(site)
                case Recv(source_rank=source, channel=channel):
                    recvs[source, rank, channel].append(site)
                case Collective(group=group, channel=channel):
                    members = collectives.setdefault((group, channel), {r: [] for r in group})
                    members[rank].append(site)
                case Call() | Wait() | Free():
                    pass
    partners: dict[Site, tuple[Site, ...]] = {}
    for key in sorted(sends.keys() | recvs.keys()):
        if len(sends[key]) != len(recvs[key]):
            source, to, channel = key
            longer = max(sends[key], recvs[key], key=len)
            raise _unmatched(
                program,
                longer[min(len(sends[key]), len(recvs[key]))],
                f"rank {source} starts {len(sends[key])} sends to rank {to} on channel "
                f"{channel!r}, which starts {len(recvs[key])} receives from it",
            )
        for send, recv in zip(sends[key], recvs[key], strict=True):
            partners[send], partners[recv] = (recv,), (send,)
    for (group, channel), members in sorted(collectives.items()):
        counts = [len(members[rank]) for rank in group]
        if len(set(counts)) != 1:
            busiest = max(members.values(), key=len)
            raise _unmatched(
                program,
                busiest[min(counts)],
                f"the members of group {group} start {counts} collectives on channel {channel!r}",
            )
        for sites in zip(*(members[rank] for rank in group), strict=True):
            for site in sites:
                partners[site] = tuple(other for other in sites if other != site)
    return partners


def _unmatched(program: Program, site: Site, fact: str) -> ProgramError:
    source = instruction_at(program, site).source
    return ProgramError(
        f"Program {program.name!r} has a start without a partner: {fact}.\n"
        f"  first without one: {show_site(program, site)}{f'  {source}' if source else ''}\n"
        f"  Fix: give every member the same number of starts on the channel."
    )


def wait_edges(program: Program, partners: Edges) -> dict[Site, tuple[Site, ...]]:
    """For each `Wait`, the starts on other ranks that must have been made before it ends."""
    edges: dict[Site, tuple[Site, ...]] = {}
    for rank, rank_program in enumerate(program.ranks):
        for index, starts in starts_of_waits(rank_program.instructions).items():
            edges[rank, index] = tuple(p for start in starts for p in partners[rank, start])
    return edges


@dataclass(frozen=True, slots=True)
class Trace:
    """The order in which the lists ran, and where each list that did not end is blocked."""

    order: tuple[Site, ...]
    blocked: tuple[Site, ...]


def simulate(lists: Sequence[Sequence[Site]], edges: Edges, seed: int = 0) -> Trace:
    """Run lists one instruction at a time, each in its own order. Seed 0: lockstep."""
    rng = random.Random(seed) if seed else None
    executed: set[Site] = set()
    order: list[Site] = []
    position = [0] * len(lists)
    asleep: dict[Site, list[int]] = defaultdict(list)
    runnable = [index for index, sites in enumerate(lists) if sites]
    turn = 0
    while runnable:
        turn = rng.randrange(len(runnable)) if rng else turn % len(runnable)
        current = runnable[turn]
        site = lists[current][position[current]]
        missing = next((s for s in edges.get(site, ()) if s not in executed), None)
        if missing is not None:
            asleep[missing].append(current)
            del runnable[turn]
            continue
        executed.add(site)
        order.append(site)
        position[current] += 1
        if position[current] == len(lists[current]):
            del runnable[turn]
        else:
            turn += 1
        runnable += asleep.pop(site, [])
    blocked = [sites[at] for sites, at in zip(lists, position, strict=True) if at < len(sites)]
    return Trace(tuple(order), tuple(blocked))


def explain_hang(
    program: Program, lists: Sequence[Sequence[Site]], edges: Edges, trace: Trace
) -> ProgramError:
    """The circle of waits that a blocked `trace` ended in, a line for each."""
    executed = set(trace.order)
    list_of = {site: index for index, sites in enumerate(lists) for site in sites}
    blocked = {list_of[site]: site for site in trace.blocked}
    path: list[Site] = [trace.blocked[0]]
    missing: list[Site] = []
    while True:
        missing.append(next(s for s in edges[path[-1]] if s not in executed))
        following = blocked[list_of[missing[-1]]]
        if following in path:
            break
        path.append(following)
    first = path.index(following)
    lines: list[str] = []
    for wait, start in zip(path[first:], missing[first:], strict=True):
        source = instruction_at(program, start).source
        lines.append(
            f"  {show_site(program, wait)} waits for {show_site(program, start)}"
            f"{f'  {source}' if source else ''}"
        )
    return ProgramError(
        f"Program {program.name!r} can hang: {len(lines)} waits form a circle.\n"
        + "\n".join(lines)
        + "\n  Fix: move a start that is waited for before the wait that holds it up."
    )
