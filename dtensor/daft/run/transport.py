"""The engine's interface to transports, and the transport among ranks of one process.

A transport starts transfers and collectives; each start returns a `Pending`, whose `wait` returns
the results (none for a send). `LocalTransport` serves ranks of one process, `ExchangeTransport`
(`ray/transports/exchange.py`) ranks of several, over gloo or NCCL, and `SameHostTransport`
(`ray/transports/same_host.py`) those of one host, through memory. A program's starts are `Prepared`
when it is loaded, so that a start in a step needs no look-up.

`TRANSPORTS` has the transport that connects ranks on a type of device, in one process or on several
hosts:

    register_transport("cpu", "hosts", connect)     # connect(Meeting(...)) -> a Transport

Processes that connect after that use it; on Ray the function is sent to the hosts.

Invariants: a start never blocks; its tensors stay unchanged until its `wait` (the verifier ensures
that); the results of `wait` are contiguous and share no storage with other tensors. Reductions are
`numerics.fold` in group order, so that every transport gives the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, key_of
from dtensor.daft.verification.pairing import Site, instruction_at
from dtensor.numerics import fold
from dtensor.private_torch import Store


class Pending(ABC):
    """A start that is not complete yet."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until complete; the values made, in the order of the instruction's outputs."""


Begin: TypeAlias = Callable[[Sequence[Tensor]], Pending]
"""Starts one instruction of a program, with the values that it reads."""


class Prepared:
    """The starts of a loaded program's list, by their sites."""

    def __init__(self, begins: Mapping[Site, Begin]) -> None:
        self.begins = begins

    def close(self) -> None:
        """The program is unloaded."""


class Transport(ABC):
    def prepare(self, program: HostProgram, number: int = 0) -> Prepared:
        """Prepare a program. All processes that run a part of it prepare it, under this `number`,
        which no other program has."""
        begins: dict[Site, Begin] = {}
        for site in program.sites:
            instruction = instruction_at(program, site)
            if isinstance(instruction, Send | Recv | Collective):
                begins[site] = self.begin(site[0], instruction)
        return Prepared(begins)

    def open(self, tags: Mapping[Key, int]) -> None:  # noqa: B027 - most need nothing
        """Prepare the keys of a program that is about to be loaded and that cross hosts, by the
        controller's numbers of them; all hosts do, in one order."""

    def tell_whom_it_awaits(self, told: Callable[[int], None]) -> None:  # noqa: B027
        """`told`: takes the rank that a wait begins to wait for, -1 when it does not wait."""

    @abstractmethod
    def begin(self, rank: int, start: Start) -> Begin:
        """The function that starts this instruction of a rank, once for each run."""

    @abstractmethod
    def close(self) -> None:
        """Break all connections; waits of peers then fail instead of blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The data with which a process connects its `ranks` to those of the others.

    For several hosts: `index` is this one's number, `host_of` each rank's host; `store` is at the
    controller, for this meeting alone, and `meet` writes a text under `here<index>` in it and
    returns when all hosts have. `address`: the controller's; `secret`: the launch's; `patience_s`:
    the time after which no process waits for a lost one, if the controller is lost too.
    """

    ranks: tuple[int, ...]
    index: int = 0
    host_of: tuple[int, ...] = ()
    store: Store | None = None
    meet: Callable[[str], None] | None = None
    address: str = ""
    secret: bytes = field(default=b"", repr=False)
    patience_s: float = 60.0

    def of_hosts(self) -> tuple[Store, Callable[[str], None]]:
        """The store where hosts meet, and the function to meet."""
        assert self.store is not None and self.meet is not None, "the ranks are in one process"
        return self.store, self.meet


Connect: TypeAlias = Callable[[Meeting], Transport]
Locality: TypeAlias = Literal["process", "hosts"]
"""Whether all ranks are in one process, or in those of several hosts."""

TRANSPORTS: dict[tuple[str, Locality], Connect] = {}
"""Transports by the type of device and the ranks' locality."""


def register_transport(device: str, locality: Locality, connect: Connect) -> Connect:
    """Use ``connect`` wherever ranks are connected from now on."""
    TRANSPORTS[device, locality] = connect
    return connect


class Undeclared(ValueError):
    """A value that differs from its program's declaration: a fault of the code that made it."""


def check_value(value: object, buffer: Buffer, name: str) -> Tensor:
    """The value, if it is the declared tensor."""
    if not isinstance(value, Tensor):
        raise Undeclared(
            f"Only tensors are sent, {name!r} is a {type(value).__name__}; declared: {buffer}."
        )
    if not buffer.accepts(value):
        raise Undeclared(
            f"The value {name!r} differs from its declaration: it is "
            f"{value.dtype}{list(value.shape)}, declared is {buffer}."
        )
    return value


class _Meeting:
    """One transfer or collective: its members' inputs, then the results of each."""

    __slots__ = ("missing", "parts", "results")

    def __init__(self, size: int) -> None:
        self.missing = size
        self.parts: list[Sequence[Tensor]] = [()] * size
        self.results: list[tuple[Tensor, ...]] = []


class _MemberResults(Pending):
    """A member's results of a meeting. Not a dataclass, for speed: one is made for each start."""

    __slots__ = ("at", "meeting")

    def __init__(self, meeting: _Meeting, at: int) -> None:
        self.meeting = meeting
        self.at = at

    def wait(self) -> tuple[Tensor, ...]:
        meeting = self.meeting
        if meeting.missing:
            raise RuntimeError(f"A wait would block: {meeting.missing} ranks have not started.")
        # a meeting is complete when its results exist, so each member takes its own once
        taken, meeting.results[self.at] = meeting.results[self.at], ()
        return taken


class _Channel:
    """The starts of one key: each member's k-th is of the k-th transfer or collective."""

    __slots__ = ("counts", "index", "open")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.index = {rank: i for i, rank in enumerate(group)}
        self.counts = [0] * len(group)
        self.open: dict[int, _Meeting] = {}


class LocalTransport(Transport):
    """Among ranks of one process: plain tensor operations on their device.

    Ranks 0 and 1 each start an all_reduce; the second start computes both results, and each rank's
    `wait` takes its own. Waits never block, as the merged list puts them after the starts that they
    need; one that would block is an error. Every result is a copy, so that ranks never share
    storage. It is not safe for several threads.
    """

    def __init__(self) -> None:
        self._channels: dict[Key, _Channel] = {}

    def begin(self, rank: int, start: Start) -> Begin:
        return partial(self._start, rank, start)

    def close(self) -> None:
        self._channels.clear()

    def _start(self, rank: int, start: Start, values: Sequence[Tensor]) -> Pending:
        key = key_of(rank, start)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(key[0])
        at = channel.index[rank]
        number = channel.counts[at]
        channel.counts[at] = number + 1
        meeting = channel.open.get(number)
        if meeting is None:
            meeting = channel.open[number] = _Meeting(len(channel.counts))
        meeting.parts[at] = values
        meeting.missing -= 1
        if not meeting.missing:
            del channel.open[number]
            if isinstance(start, Collective):
                meeting.results = exchange(start, meeting.parts)
            else:
                meeting.results = [(), tuple(map(copied, meeting.parts[0]))]
            meeting.parts = []
        return _MemberResults(meeting, at)


def connect_process(meeting: Meeting) -> Transport:
    """The transport among ranks of one process."""
    return LocalTransport()


for _device in ("cpu", "cuda"):
    register_transport(_device, "process", connect_process)


def exchange(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Each member's results from each member's inputs, both in group order."""
    if collective.op is not None and not collective.does.divided:  # one fold is the result of all
        first = combined(collective, parts)
        return [first, *(tuple(map(copied, first)) for _ in parts[1:])]
    results: list[tuple[Tensor, ...]] = []
    for member in range(len(parts)):
        given = [contribution(collective, part, member) for part in parts]
        combined_values = combined(collective, given)
        results.append(
            combined_values if collective.op is not None else tuple(map(copied, combined_values))
        )
    return results


def contribution(collective: Collective, values: Sequence[Tensor], member: int) -> Sequence[Tensor]:
    """Which of a rank's inputs go to a member of the group, by its position there."""
    return collective.does.given(values, member)


def combined(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """A member's results from each member's contribution to it, in group order: a left fold, or the
    parts themselves."""
    if collective.op is None:
        return tuple(tensor for part in parts for tensor in part)
    op, columns = collective.op, zip(*parts, strict=True)
    outs = collective.out_buffers  # a sum may have a wider dtype
    return tuple(fold(column, op, out.dtype) for column, out in zip(columns, outs, strict=True))


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
