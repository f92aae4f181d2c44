"""Define the interface of transports, and the transport among ranks of one process.

    begin = transport.begin(rank, start)            # when the program is loaded
    pending = begin([x])                            # starts the exchange; never blocks
    pending = begin([x, y], [2, 0])                 # sized: 2 rows arrive from the first member
    (y,) = pending.wait()                           # blocks until it is complete

Ranks of several processes use `ExchangeTransport` (gloo, NCCL) or `SameHostTransport` (shared
memory), both in ray/transports. `register_transport("cpu", "hosts", connect)` replaces one.
Tensors given to a start stay unchanged until its `wait`; results are contiguous and share no
storage, except that on GPUs the results of an all_gather may be parts of one tensor. Reductions are
`numerics.fold` in group order, so all transports give the same bits, except sums of NCCL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer, Collective, Key, Recv, Send, Start, key_of
from dtensor.daft.verification.pairing import Site, instruction_at
from dtensor.numerics import fold
from dtensor.private_torch import Store


class Pending(ABC):
    """A transfer or collective that was started."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until it is complete; return the values of the instruction's outputs."""


class Begin(Protocol):
    """A function that starts one instruction of a program."""

    def __call__(self, values: Sequence[Tensor], rows: Sequence[int] = (), /) -> Pending:
        """Start the instruction. ``values``: the values that it sends. ``rows``: if it is a sized
        collective, the number of rows that each member sends to this rank."""
        ...


class Prepared:
    """The functions that start the transfers and collectives of a loaded program, by site."""

    def __init__(self, begins: Mapping[Site, Begin]) -> None:
        self.begins = begins

    def close(self) -> None:
        """Release the resources of the program, which is unloaded."""


class Transport(ABC):
    """Transfers and collectives among ranks."""

    def prepare(self, program: HostProgram, number: int = 0) -> Prepared:
        """Prepare the starts of a program when it is loaded. All processes that run a part of the
        program pass the same unique `number`."""
        begins: dict[Site, Begin] = {}
        for site in program.sites:
            instruction = instruction_at(program, site)
            if isinstance(instruction, Send | Recv | Collective):
                begins[site] = self.begin(site[0], instruction)
        return Prepared(begins)

    def open(self, tags: Mapping[Key, int]) -> None:  # noqa: B027 - optional
        """Prepare connections for a program that is about to be loaded. ``tags``: its keys that
        cross hosts, with numbers from the controller. All hosts call it in the same order."""

    def set_wait_report(self, report: Callable[[int], None]) -> None:  # noqa: B027
        """Set a function that is called with the rank that a wait begins to wait for, or -1 when
        the wait ends."""

    @abstractmethod
    def begin(self, rank: int, start: Start) -> Begin:
        """Return the function that starts this instruction of a rank in each run."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Peers that wait for this process then fail instead of blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The data with which a process connects its `ranks` to the ranks of other processes.

    With several hosts: `index` is this host's number, and `host_of` the host of each rank. `store`
    is a store at the controller for this meeting only. `meet` writes a text under `here<index>` in
    it and returns when all hosts have done so. `address`: the controller's. `secret`: the launch's.
    `patience_s`: how long a process waits for a lost peer if the controller is lost too.
    `in_order`: whether all reductions are folds in the order of the group.
    """

    ranks: tuple[int, ...]
    index: int = 0
    host_of: tuple[int, ...] = ()
    store: Store | None = None
    meet: Callable[[str], None] | None = None
    address: str = ""
    secret: bytes = field(default=b"", repr=False)
    patience_s: float = 60.0
    in_order: bool = False

    def of_hosts(self) -> tuple[Store, Callable[[str], None]]:
        """Return `store` and `meet`, which exist if there are several hosts."""
        assert self.store is not None and self.meet is not None, "the ranks are in one process"
        return self.store, self.meet


Connect: TypeAlias = Callable[[Meeting], Transport]
Locality: TypeAlias = Literal["process", "hosts"]
"""Whether all ranks are in one process, or in the processes of several hosts."""

TRANSPORTS: dict[tuple[str, Locality], Connect] = {}
"""The functions that create transports, by device type and locality of the ranks."""


def register_transport(device: str, locality: Locality, connect: Connect) -> Connect:
    """Use ``connect`` for all ranks that are connected from now on."""
    TRANSPORTS[device, locality] = connect
    return connect


class Undeclared(ValueError):
    """A value differs from its declaration in the program: a fault of the code that made it."""


def check_value(value: object, buffer: Buffer, name: str) -> Tensor:
    """Return the value. Raises Undeclared if it is not a tensor of the declared shape and dtype."""
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


def check_rows(
    start: Collective, values: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]
) -> None:
    """Raise Undeclared unless the values of a sized collective have the rows that the counts
    promise to each member, and the rows from each member are within the bounds."""
    for member, value, name, rows in zip(start.group, values, start.inputs, sent, strict=True):
        if len(value) != rows:
            raise Undeclared(
                f"The value {name!r} has {len(value)} rows, and the counts promise {rows} to rank "
                f"{member}."
            )
    bounds = zip(start.group, start.outputs, start.out_buffers, received, strict=True)
    for member, name, buffer, rows in bounds:
        if rows > buffer.shape[0]:
            raise Undeclared(f"Rank {member} sends {rows} rows of {name!r}, declared is {buffer}.")


class _Exchange:
    """One transfer or collective in progress: the inputs of its members, then their results."""

    __slots__ = ("missing", "parts", "results")

    def __init__(self, size: int) -> None:
        self.missing = size
        self.parts: list[Sequence[Tensor]] = [()] * size
        self.results: list[tuple[Tensor, ...]] = []


class _MemberResults(Pending):
    """One member's results of an exchange. Not a dataclass, because each start creates one."""

    __slots__ = ("exchange", "position")

    def __init__(self, exchange: _Exchange, position: int) -> None:
        self.exchange = exchange
        self.position = position

    def wait(self) -> tuple[Tensor, ...]:
        """Return the results, and forget them. Raises RuntimeError if a member has not started."""
        exchange = self.exchange
        if exchange.missing:
            raise RuntimeError(f"A wait would block: {exchange.missing} ranks have not started.")
        results, exchange.results[self.position] = exchange.results[self.position], ()
        return results  # removed above, so that `Free` drops the last reference


class _Channel:
    """The exchanges of one key: the k-th start of each member belongs to the k-th exchange."""

    __slots__ = ("counts", "index", "open")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.index = {rank: i for i, rank in enumerate(group)}
        self.counts = [0] * len(group)
        self.open: dict[int, _Exchange] = {}


class LocalTransport(Transport):
    """The transport among ranks of one process: plain tensor operations on their device.

    The last member to start an exchange computes the results of all members. A wait never blocks,
    because the merged list puts it after the starts that it needs; otherwise it raises. Results are
    copies, so ranks never share storage. Not thread-safe.
    """

    def __init__(self) -> None:
        self._channels: dict[Key, _Channel] = {}

    def begin(self, rank: int, start: Start) -> Begin:
        return partial(self._start, rank, start)

    def close(self) -> None:
        self._channels.clear()

    def _start(
        self, rank: int, start: Start, values: Sequence[Tensor], rows: Sequence[int] = ()
    ) -> Pending:
        """Add a rank's values to its current exchange of the key; the last member computes the
        results. ``rows`` is not needed, since all values are at hand."""
        key = key_of(rank, start)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(key[0])
        position = channel.index[rank]
        number = channel.counts[position]
        channel.counts[position] = number + 1
        current = channel.open.get(number)
        if current is None:
            current = channel.open[number] = _Exchange(len(channel.counts))
        current.parts[position] = values
        current.missing -= 1
        if not current.missing:
            del channel.open[number]
            if isinstance(start, Collective):
                current.results = exchange(start, current.parts)
            else:
                current.results = [(), tuple(map(copied, current.parts[0]))]
            current.parts = []
        return _MemberResults(current, position)


def connect_process(meeting: Meeting) -> Transport:
    """Return the transport among ranks of one process."""
    return LocalTransport()


for _device in ("cpu", "cuda"):
    register_transport(_device, "process", connect_process)


def exchange(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Compute the results of all members from the inputs of all members, in group order."""
    if collective.op is not None and not collective.does.divided:  # all results are equal
        first = combined(collective, parts)
        return [first, *(tuple(map(copied, first)) for _ in parts[1:])]
    results: list[tuple[Tensor, ...]] = []
    for member in range(len(parts)):
        contributions = [collective.given(part, of, member) for of, part in enumerate(parts)]
        combined_values = combined(collective, contributions)
        results.append(
            combined_values if collective.op is not None else tuple(map(copied, combined_values))
        )
    return results


def combined(collective: Collective, parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return a member's results: the left fold of all members' contributions in group order, or the
    contributions themselves if the collective does not reduce."""
    if collective.op is None:
        return tuple(tensor for part in parts for tensor in part)
    op, columns = collective.op, zip(*parts, strict=True)
    outs = collective.out_buffers  # a sum may have a wider dtype
    return tuple(fold(column, op, out.dtype) for column, out in zip(columns, outs, strict=True))


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
