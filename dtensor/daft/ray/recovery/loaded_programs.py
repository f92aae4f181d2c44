"""The controller's record of the programs that are loaded on hosts.

    loaded = LoadedOnHosts(device, keeps=True)
    needed = loaded.need(program)                 # custom ops, which are sent first
    new = loaded.number(program, keys, host_of)   # tags of the messages' keys that have none yet
    parts = loaded.add(handle, hosts)             # host to its part of the program
    loaded.load_on(tell, 1)                       # send everything to the replacement of host 1

With `keeps`, which is set if lost hosts are replaced, the record keeps the parts, to send them
again. Invariant: a tag is never reused; on GPUs several keys may share a tag.
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
from dtensor.daft.ray.ranks.operators import KnownOps, Needed
from dtensor.daft.ray.ranks.ranks import Ranks, SentInputs, packed
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.slots import CrossHostKeys
from dtensor.daft.verification.pairing import Hosts

Part: TypeAlias = tuple[Packed, Packed]
"""A host's part of a program: instruction lists, and functions (`ranks.packed`)."""
Tell: TypeAlias = Callable[..., None]
"""`tell(method, *arguments)` calls a method of `Ranks` in one process."""


@dataclass(frozen=True, slots=True)
class ShippedProgram:
    """A program on hosts. `parts`: host to its part, {} if parts are not kept; `needed`: the custom
    ops and settings that hosts need before they load it."""

    handle: Handle
    parts: Mapping[int, Part]
    needed: Needed
    lines: ProgramLines


class LoadedOnHosts:
    """The programs that are loaded on the hosts of a launch. `tags`: message key to its tag;
    `sent_inputs`: the plain inputs that hosts have."""

    def __init__(self, device: torch.device, *, keeps: bool, in_order: bool = False) -> None:
        self.tags: dict[Key, int] = {}
        self.sent_inputs: SentInputs = SentInputs()
        self.programs: dict[int, ShippedProgram] = {}
        self._communicators = Communicators(in_order)
        self._device = device
        self._keeps = keeps
        self._known_ops = KnownOps()
        self._needed: dict[int, Needed] = {}  # by id of a program that is about to be sent

    def need(self, program: Program) -> Needed:
        """Return what hosts need before they load a program: custom ops, and settings."""
        needed = self._needed[id(program)] = Needed.of(program, self._device, self._known_ops)
        return needed

    def number(
        self, program: Program, keys: Sequence[Key], host_of: Sequence[int]
    ) -> dict[Key, int]:
        """Give tags to keys that have none, or on GPUs need another; return these tags."""
        if self._device.type == "cuda":
            new = self._communicators.number(program, keys, host_of)
        else:
            missing = [key for key in keys if key not in self.tags]
            new = {key: len(self.tags) + i for i, key in enumerate(missing)}
        self.tags.update(new)
        return new

    def add(self, handle: Handle, hosts: Hosts) -> Mapping[int, Part]:
        """Record a program that is being loaded; return the part of each of its hosts."""
        parts = dict(self._parts(handle, hosts))
        needed = self._needed.pop(id(handle.program))
        lines = ProgramLines.of(handle.program, handle.report.lists)
        stored_parts = parts if self._keeps else {}
        self.programs[handle.id] = ShippedProgram(handle, stored_parts, needed, lines)
        return parts

    def _parts(self, handle: Handle, hosts: Hosts) -> Iterator[tuple[int, Part]]:
        """Yield (host, packed part of the program) for each host that takes part."""
        program, lists = handle.program, handle.report.lists
        places = [host for host, _ in handle.places]
        parts = host_programs(program, [hosts[h] for h in places], [lists[h] for h in places])
        if self._device.type == "cpu" and len(places) > 1:  # they may share memory
            cross_host_keys = CrossHostKeys(
                program, [h for h, ranks in enumerate(hosts) for _ in ranks]
            )
            parts = (replace(part, meetings=cross_host_keys.of(part.ranks)) for part in parts)
        with self._known_ops.by_value():
            yield from zip(places, packed(parts), strict=True)

    def forget(self, program: int) -> None:
        """Remove a program that the hosts unload."""
        self.programs.pop(program, None)

    def start_over(self) -> None:
        """Record that hosts have forgotten the plain data that they were sent."""
        self.sent_inputs = SentInputs()

    def load_on(self, tell: Tell, host: int | None) -> None:
        """Send a new process what all programs need, and the host's parts of programs; no parts if
        `host` is None, for a spare."""
        for number, shipped in self.programs.items():
            if shipped.needed:
                tell(Ranks.provide, shipped.needed)
            if host is not None and host in shipped.parts:
                tell(Ranks.learn, number, *shipped.parts[host])

    def lines(self, program: int) -> ProgramLines | None:
        shipped = self.programs.get(program)
        return None if shipped is None else shipped.lines

    def replayable(self, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the values, (rank, name), that replayable writes of these ranks change."""
        for shipped in self.programs.values():
            rank_programs = shipped.handle.program.ranks
            for rank in ranks:
                for rank_program in rank_programs[rank : rank + 1]:  # [] if the rank joined later
                    yield from ((rank, name) for name in rank_program.replayable)

    def state(self, program: int, ranks: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the state of these ranks, (rank, name), that a run of a program may read."""
        rank_programs = self.programs[program].handle.program.ranks
        return ((rank, name) for rank in ranks for name in rank_programs[rank].state)
