"""Match the sends, receives and collectives of all ranks; find hangs; order the lists of each host.

The k-th `Send` on a channel matches the k-th `Recv`; the k-th collective of a (group, channel)
matches the k-th of every member. A start never blocks. A `Wait` blocks until the partners of the
starts that it completes have started (rendezvous; buffered sends block less). A start never delays
another rank, so all orders of execution end in the same state, and one simulated order shows
whether a program can hang (as in Kahn networks; `tests/daft` compares it with all interleavings).

The merged lists of all hosts are parts of one order in which every `Wait` follows the starts that
it needs. So the single thread of a host never blocks on a rank of the same host, and hosts cannot
block each other forever. With seed 0, lists `a b` and `c d` of one host become `a c b d`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import (
    Collective,
    Instruction,
    Key,
    Recv,
    Send,
    Wait,
    awaited,
    key_of,
)
from dtensor.daft.ir.program import Program
from dtensor.daft.ir.text import excerpt

Site: TypeAlias = tuple[int, int]
"""(rank, index of the instruction in the rank's own list)."""
Edges: TypeAlias = Mapping[Site, tuple[Site, ...]]
Hosts: TypeAlias = tuple[tuple[int, ...], ...]
HostList: TypeAlias = tuple[tuple[int, Instruction], ...]


def instruction_at(program: Program | HostProgram, site: Site) -> Instruction:
    return program.ranks[site[0]].instructions[site[1]]


def show_site(program: Program, site: Site) -> str:
    """Return text such as `(rank 1, instr 7 wait h)`."""
    text = excerpt(instruction_at(program, site))
    return f"(rank {site[0]}, instr {site[1]} {text})"


def fault(program: Program, site: Site, fact: str, fix: str) -> ProgramError:
    """Return the error for an instruction: the fact, the user's line, and the fix."""
    source = instruction_at(program, site).source
    return ProgramError(
        f"Program {program.name!r}, {show_site(program, site)}: {fact}.\n"
        + (f"  at {source}\n" if source else "")
        + f"  Fix: {fix}."
    )


def starts_of_waits(instructions: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Return, by the index of each `Wait` in a list, the indices of the starts that it
    completes."""
    pending: dict[str, list[int]] = defaultdict(list)
    starts_by_wait: dict[int, tuple[int, ...]] = {}
    completed: set[int] = set()
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Wait):
            starts = {start for value in instruction.values for start in pending.pop(value, ())}
            starts_by_wait[index] = tuple(sorted(starts - completed))
            completed |= starts
        elif isinstance(instruction, Send | Recv | Collective):
            for value in awaited(instruction):
                pending[value].append(index)
    return starts_by_wait


def pair(program: Program) -> dict[Site, tuple[Site, ...]]:
    """Return the matching starts of the other ranks for each start. Raises ProgramError if a start
    has no partner."""
    starts: dict[Key, dict[int, list[Site]]] = {}
    for rank, rank_program in enumerate(program.ranks):
        for index, instruction in enumerate(rank_program.instructions):
            if isinstance(instruction, Send | Recv | Collective):
                key = key_of(rank, instruction)
                members = starts.setdefault(key, {member: [] for member in key[0]})
                members[rank].append((rank, index))
    partners: dict[Site, tuple[Site, ...]] = {}
    for key in sorted(starts, key=lambda key: (key[2] == "collective", *key)):
        members = starts[key]
        if len({len(sites) for sites in members.values()}) != 1:
            raise _unmatched(program, key, members)
        for sites in zip(*members.values(), strict=True):
            for site in sites:
                partners[site] = tuple(other for other in sites if other != site)
    return partners


def _unmatched(program: Program, key: Key, members: Mapping[int, list[Site]]) -> ProgramError:
    """Return the error for a key with different numbers of starts on its ranks."""
    ranks, channel, kind = key
    counts = [len(members[rank]) for rank in ranks]
    site = max(members.values(), key=len)[min(counts)]
    fact = f"the members of group {ranks} start {counts} collectives on channel {channel!r}"
    if kind == "transfer":
        fact = (
            f"rank {ranks[0]} starts {counts[0]} sends to rank {ranks[1]} on channel {channel!r}, "
            f"which starts {counts[1]} receives from it"
        )
    source = instruction_at(program, site).source
    return ProgramError(
        f"Program {program.name!r} has a start without a partner: {fact}.\n"
        f"  first without one: {show_site(program, site)}{f'  {source}' if source else ''}\n"
        f"  Fix: give every member the same number of starts on the channel."
    )


def wait_edges(program: Program, partners: Edges) -> dict[Site, tuple[Site, ...]]:
    """Return, for each `Wait`, the starts on other ranks that must happen before it can end."""
    edges: dict[Site, tuple[Site, ...]] = {}
    for rank, rank_program in enumerate(program.ranks):
        for index, starts in starts_of_waits(rank_program.instructions).items():
            edges[rank, index] = tuple(p for start in starts for p in partners[rank, start])
    return edges


def rehearse(
    program: Program, lists: Sequence[Sequence[Site]], edges: Edges, seed: int = 0
) -> list[Site]:
    """Simulate the lists together and return one order of all their instructions.

    Seed 0 takes one instruction of each list in turn; other seeds draw the next list at random.
    Raises ProgramError if the lists can hang.
    """
    rng = random.Random(seed) if seed else None
    executed: set[Site] = set()
    order: list[Site] = []
    positions = [0] * len(lists)
    lists_waiting_for: dict[Site, list[int]] = defaultdict(list)
    runnable = [index for index, sites in enumerate(lists) if sites]
    turn = 0
    while runnable:
        turn = rng.randrange(len(runnable)) if rng else turn % len(runnable)
        current = runnable[turn]
        site = lists[current][positions[current]]
        missing = next((s for s in edges.get(site, ()) if s not in executed), None)
        if missing is not None:
            lists_waiting_for[missing].append(current)
            del runnable[turn]
            continue
        executed.add(site)
        order.append(site)
        positions[current] += 1
        if positions[current] == len(lists[current]):
            del runnable[turn]
        else:
            turn += 1
        runnable += lists_waiting_for.pop(site, [])
    blocked = {
        index: sites[next_index]
        for index, (sites, next_index) in enumerate(zip(lists, positions, strict=True))
        if next_index < len(sites)
    }
    if blocked:
        raise _explain_hang(program, lists, edges, executed, blocked)
    return order


def _explain_hang(
    program: Program,
    lists: Sequence[Sequence[Site]],
    edges: Edges,
    executed: set[Site],
    blocked: Mapping[int, Site],
) -> ProgramError:
    """Return the error that shows the circle of waits. `blocked`: the next wait of each list."""
    list_of = {site: index for index, sites in enumerate(lists) for site in sites}
    path: list[Site] = [next(iter(blocked.values()))]
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


def merge(program: Program, hosts: Hosts, seed: int = 0) -> tuple[HostList, ...]:
    """Return the (rank, instruction) list that the thread of each host runs.

    `hosts`: the ranks of each host. `seed`: selects one of the legal orders. Raises ProgramError if
    the program can hang.
    """
    return tuple(
        tuple((site[0], instruction_at(program, site)) for site in sites)
        for sites in merge_sites(program, hosts, seed)
    )


def merge_sites(
    program: Program, hosts: Hosts, seed: int = 0, edges: Edges | None = None
) -> tuple[tuple[Site, ...], ...]:
    """Return the (rank, index) list that the thread of each host runs. ``seed`` selects one of the
    legal orders; ``edges``: see `wait_edges`, computed if None. Raises ProgramError if the program
    can hang."""
    check_hosts(program, hosts)
    edges = wait_edges(program, pair(program)) if edges is None else edges
    lists = [
        [(rank, index) for index in range(len(rank_program.instructions))]
        for rank, rank_program in enumerate(program.ranks)
    ]
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    merged: list[list[Site]] = [[] for _ in hosts]
    for site in rehearse(program, lists, edges, seed):
        merged[host_of[site[0]]].append(site)
    return tuple(map(tuple, merged))


def check_hosts(program: Program, hosts: Hosts) -> None:
    """Raise ProgramError unless each rank of the program is in exactly one host."""
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(program.size)):
        raise ProgramError(
            f"Every rank has one host: program {program.name!r} has {program.size} ranks, "
            f"the hosts have {hosts}."
        )
