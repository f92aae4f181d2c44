"""The controller's record of loaded programs on hosts, and of data that was sent with them.

    loaded = LoadedOnHosts(device, keeps=True)
    needed = loaded.need(program)                 # ops that hosts may lack: they are sent first
    new = loaded.number(program, keys, host_of)   # the tags of keys that are new
    parts = loaded.add(handle, hosts)             # by host, its own part to send
    loaded.load_on(tell, 1)                         # the same again, for host 1's replacement

A program is in the record from its load until its unload on hosts. If lost hosts are replaced
(`keeps`), the record also has the parts that were sent, to send them again.

Invariants: tags are never reused, but keys may share one on GPUs. It sends nothing by itself, and
knows no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.channel.messages import Packed
from dtensor.daft.ray.ranks.operators import Known, Needed
from dtensor.daft.ray.ranks.ranks import Ranks, SentInputs, packed
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.slots import CrossHostKeys
from dtensor.daft.verification.pairing import Hosts

Part: TypeAlias = tuple[Packed, Packed]
"""The part of a program that a host gets: lists and functions (`ranks.packed`)."""
Tell: TypeAlias = Callable[..., None]
"""Calls a method of `Ranks` in one process, with arguments."""


@dataclass(frozen=True, slots=True)
class ShippedProgram:
    """`parts`: by host, if they are kept; `needed`: the needs of hosts without it."""

    handle: Handle
    parts: Mapping[int, Part]
    needed: Needed
    lines: ProgramLines


class LoadedOnHosts:
    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self.tags: dict[Key, int] = {}
        self.plain: SentInputs = SentInputs()
        self.programs: dict[int, ShippedProgram] = {}
        self._communicators = Communicators()
        self._device = device
        self._keeps = keeps
        self._known = Known()
        self._needed: dict[int, Needed] = {}  # by id of a program that is about to be sent

    def need(self, program: Program) -> Needed:
        """The operators and settings that hosts need before they get a program."""
        needed = self._needed[id(program)] = Needed.of(program, self._device, self._known)
        return needed

    def number(
        self, program: Program, keys: Sequence[Key], host_of: Sequence[int]
    ) -> dict[Key, int]:
        """Give tags to those keys that have none yet, or need another; returns them."""
        if self._device.type == "cuda":
            new = self._communicators.number(program, keys, host_of)
        else:
            missing = [key for key in keys if key not in self.tags]
            new = {key: len(self.tags) + i for i, key in enumerate(missing)}
        self.tags.update(new)
        return new

    def add(self, handle: Handle, hosts: Hosts) -> Mapping[int, Part]:
        """Record a loaded program; returns the part of each of its hosts."""
        parts = dict(self._parts(handle, hosts))
        needed = self._needed.pop(id(handle.program))
        lines = ProgramLines.of(handle.program, handle.report.lists)
        kept = parts if self._keeps else {}
        self.programs[handle.id] = ShippedProgram(handle, kept, needed, lines)
        return parts

    def _parts(self, handle: Handle, hosts: Hosts) -> Iterator[tuple[int, Part]]:
        program, lists = handle.program, handle.report.lists
        places = [host for host, _ in handle.places]
        parts = host_programs(program, [hosts[h] for h in places], [lists[h] for h in places])
        if self._device.type == "cpu" and len(places) > 1:  # they may share memory
            between = CrossHostKeys(program, [h for h, ranks in enumerate(hosts) for _ in ranks])
            parts = (replace(own, meetings=between.of(own.ranks)) for own in parts)
        with self._known.by_value():
            yield from zip(places, packed(parts), strict=True)

    def forget(self, program: int) -> None:
        """Remove the program; the hosts do the same."""
        self.programs.pop(program, None)

    def start_over(self) -> None:
        """Hosts have lost all plain data that they were sent."""
        self.plain = SentInputs()

    def load_on(self, tell: Tell, host: int | None) -> None:
        """Send a process the data that all programs need, and the parts of a host."""
        for number, known in self.programs.items():
            if known.needed:
                tell(Ranks.provide, known.needed)
            if host is not None and host in known.parts:
                tell(Ranks.learn, number, *known.parts[host])

    def lines(self, program: int) -> ProgramLines | None:
        known = self.programs.get(program)
        return None if known is None else known.lines

    def replayable(self, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The values that replayable writes of programs change, by rank and name."""
        for known in self.programs.values():
            lists = known.handle.program.ranks
            for rank in ranks:
                for own in lists[rank : rank + 1]:  # empty for a rank that joined later
                    yield from ((rank, name) for name in own.replayable)

    def state(self, program: int, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The state in the tables of these ranks that a run of it may read."""
        lists = self.programs[program].handle.program.ranks
        return ((rank, name) for rank in ranks for name in lists[rank].state)
