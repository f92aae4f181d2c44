"""One list for each host: the lists of the ranks that it hosts, in an order that never blocks.

Example: ranks 0 and 1 on one host, each `send, recv, wait`: seed 0 gives send 0, send 1, recv 0,
recv 1, wait 0, wait 1. Another seed gives another legal interleaving, and the same results.

Invariants: every rank keeps its own order; all hosts' lists are parts of *one* order in which
every `Wait` comes after the starts that it needs, so that a single thread never blocks on a rank
of its own host, and hosts never block each other for good.
"""

from __future__ import annotations

from typing import TypeAlias

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Instruction
from dtensor.daft.ir.program import Program
from dtensor.daft.verification.pairing import (
    Site,
    explain_hang,
    instruction_at,
    pair,
    simulate,
    wait_edges,
)

Hosts: TypeAlias = tuple[tuple[int, ...], ...]
HostList: TypeAlias = tuple[tuple[int, Instruction], ...]


def merge(program: Program, hosts: Hosts, seed: int = 0) -> tuple[HostList, ...]:
    """For each host, (rank, instruction) in the order in which its thread runs them."""
    return tuple(
        tuple((site[0], instruction_at(program, site)) for site in sites)
        for sites in merge_sites(program, hosts, seed)
    )


def merge_sites(program: Program, hosts: Hosts, seed: int = 0) -> tuple[tuple[Site, ...], ...]:
    """As `merge`, but (rank, index) pairs. Raises `ProgramError` for a program that can hang."""
    check_hosts(program, hosts)
    edges = wait_edges(program, pair(program))
    lists = rank_lists(program)
    trace = simulate(lists, edges, seed)
    if trace.blocked:
        raise explain_hang(program, lists, edges, trace)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    merged: list[list[Site]] = [[] for _ in hosts]
    for site in trace.order:
        merged[host_of[site[0]]].append(site)
    return tuple(map(tuple, merged))


def rank_lists(program: Program) -> tuple[tuple[Site, ...], ...]:
    return tuple(
        tuple((rank, index) for index in range(len(p.instructions)))
        for rank, p in enumerate(program.ranks)
    )


def check_hosts(program: Program, hosts: Hosts) -> None:
    if sorted(rank for ranks in hosts for rank in ranks) != list(range(program.size)):
        raise ProgramError(
            f"Every rank has one host: program {program.name!r} has {program.size} ranks, "
            f"the hosts have {hosts}."
        )
