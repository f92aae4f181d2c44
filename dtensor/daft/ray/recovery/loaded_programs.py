"""What hosts have loaded, as the controller knows it: programs, and what was sent beside them.

    loaded = LoadedOnHosts(device, keeps=True)
    needed = loaded.need(program)                 # ops that hosts may lack: they are sent first
    new = loaded.number(keys)                     # the tags of keys that are new
    parts = loaded.add(handle, hosts)             # by host, what it is sent: its own part
    loaded.teach(tell, 1)                         # the same again, for who takes host 1's place

Each program is here from when it is sent until the hosts are told to forget it. Where lost hosts
are replaced, so are the parts that were sent, `keeps`, for they are to be sent again.

Invariants: tags are never given again. It sends nothing by itself, and knows no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from dtensor.daft.cluster.cluster import Handle
from dtensor.daft.diagnosis.lines import Lines
from dtensor.daft.ir.host_program import host_programs
from dtensor.daft.ir.instructions import Key
from dtensor.daft.ir.program import Program
from dtensor.daft.ray.channel.messages import Packed
from dtensor.daft.ray.ranks.operators import Known, Needed
from dtensor.daft.ray.ranks.ranks import Ranks, SentInputs, packed
from dtensor.daft.ray.transports.slots import Between
from dtensor.daft.verification.pairing import Hosts

Part: TypeAlias = tuple[Packed, Packed]
"""Of a program, as a host is sent it: lists and functions (`ranks.packed`)."""
Tell: TypeAlias = Callable[..., None]
"""A method of `Ranks`, and what to call it with, to one process."""


@dataclass(frozen=True, slots=True)
class ShippedProgram:
    """`parts`: by host, where they are kept; `needed`: what hosts that lack it need before."""

    handle: Handle
    parts: Mapping[int, Part]
    needed: Needed
    lines: Lines


class LoadedOnHosts:
    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self.tags: dict[Key, int] = {}
        self.plain: SentInputs = SentInputs()
        self.programs: dict[int, ShippedProgram] = {}
        self._device = device
        self._keeps = keeps
        self._known = Known()
        self._needed: dict[int, Needed] = {}  # by id of a program that is about to be sent

    def need(self, program: Program) -> Needed:
        """What hosts need before they are sent a program."""
        found = self._needed[id(program)] = Needed.of(program, self._device, self._known)
        return found

    def number(self, keys: Iterable[Key]) -> dict[Key, int]:
        """The tags of those keys that have none yet, which they have from now on."""
        missing = [key for key in keys if key not in self.tags]
        new = {key: len(self.tags) + i for i, key in enumerate(missing)}
        self.tags.update(new)
        return new

    def add(self, handle: Handle, hosts: Hosts) -> Mapping[int, Part]:
        """A program is loaded: what each of its hosts is sent."""
        parts = dict(self._parts(handle, hosts))
        needed = self._needed.pop(id(handle.program))
        lines = Lines.of(handle.program, handle.report.lists)
        kept = parts if self._keeps else {}
        self.programs[handle.id] = ShippedProgram(handle, kept, needed, lines)
        return parts

    def _parts(self, handle: Handle, hosts: Hosts) -> Iterator[tuple[int, Part]]:
        program, lists = handle.program, handle.report.lists
        places = [host for host, _ in handle.places]
        parts = host_programs(program, [hosts[h] for h in places], [lists[h] for h in places])
        if self._device.type == "cpu" and len(places) > 1:  # they may share memory
            between = Between(program, [h for h, ranks in enumerate(hosts) for _ in ranks])
            parts = (replace(own, meetings=between.of(own.ranks)) for own in parts)
        with self._known.by_value():
            yield from zip(places, packed(parts), strict=True)

    def forget(self, program: int) -> None:
        """The hosts forget it, too."""
        self.programs.pop(program, None)

    def start_over(self) -> None:
        """Of plain data that they were sent, hosts have none."""
        self.plain = SentInputs()

    def teach(self, tell: Tell, host: int | None) -> None:
        """Send a process what it needs for all programs, and its own of those of a host."""
        for number, known in self.programs.items():
            if known.needed:
                tell(Ranks.provide, known.needed)
            if host is not None and host in known.parts:
                tell(Ranks.learn, number, *known.parts[host])

    def lines(self, program: int) -> Lines | None:
        known = self.programs.get(program)
        return None if known is None else known.lines

    def replayable(self, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """What replayable writes of programs write, by rank and name."""
        for known in self.programs.values():
            lists = known.handle.program.ranks
            for rank in ranks:
                for own in lists[rank : rank + 1]:  # none of a rank that joined later
                    yield from ((rank, name) for name in own.replayable)

    def state(self, program: int, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """What a run of it may read of the tables of these ranks, besides what it is given."""
        lists = self.programs[program].handle.program.ranks
        return ((rank, name) for rank in ranks for name in lists[rank].state)
