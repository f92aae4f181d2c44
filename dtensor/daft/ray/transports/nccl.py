"""The wire between actors with one GPU each: NCCL's point-to-point messages.

**It has never run on several GPUs.** Tests run it over gloo groups that enforce NCCL's rules,
except `nccl_groups` and the side stream.

    wire = join_nccl(store, (0,), num_actors=2, patience_s=4000.0)          # in the actor of rank 0
    transport = ExchangeTransport(wire, (0, 1))

NCCL has no tags: keys with one number share a communicator, on which all members start messages in
one order (`communicators.py`). A `wait` makes the current stream wait, not the host. Kernels of
several communicators wait at the same time; so that none keeps another from starting, each has few
CTAs and its own stream, and modules are loaded before they run (`first_uses.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import monotonic
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor.daft.ir.instructions import Key
from dtensor.daft.ray.transports.exchange import Finish, Messages, Wire, Work
from dtensor.daft.run.transport import Pending
from dtensor.private_torch import PrefixStore, Store

MAX_CTAS = 4
"""The CTAs of one communicator: `MAX_COMMUNICATORS` fit on the 108 multiprocessors of an A100."""
ABORT_S = 5.0
"""How long `close` waits for aborts; 24 concurrent aborts took 1 s on an H100."""
ENVIRONMENT = {
    # streams that share a hardware queue wait for each other
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # loading a kernel at its first use waits for the device, which may wait for a peer
    "CUDA_MODULE_LOADING": "EAGER",
}


class Group(Protocol):
    """The used part of `ProcessGroupNCCL`."""

    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def abort(self) -> None: ...


MakeGroup: TypeAlias = Callable[[str, int, int], Group]
"""Takes a name, the caller's position and the size; waits until all members call it with the
name."""


def join_nccl(store: Store, ranks: Sequence[int], num_actors: int, patience_s: float) -> NcclWire:
    """Return the wire of an actor, on its only GPU. A single actor needs no NCCL."""
    if num_actors > 1:
        for name, value in ENVIRONMENT.items():  # before CUDA starts in this process
            os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"The actor of ranks {tuple(ranks)} has no CUDA device: its torch is "
            f"{torch.__version__}, CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}.\n"
            f"  Fix: install a CUDA build of torch where Ray starts actors, or use device='cpu'."
        )
    if num_actors > 1 and not dist.is_nccl_available():
        raise RuntimeError(
            f"torch {torch.__version__} is built without NCCL, which {num_actors} GPUs need.\n"
            f"  Fix: install a build with it, or put all ranks on one GPU with ranks_per_actor."
        )
    device = torch.device("cuda", 0)  # Ray shows an actor its own GPU only
    torch.cuda.set_device(device)
    return NcclWire(ranks, device, nccl_groups(store, device, patience_s))


def nccl_groups(store: Store, device: torch.device, patience_s: float) -> MakeGroup:
    """Return a function that creates the NCCL process groups of an actor."""
    nccl: Any = dist

    def make(name: str, position: int, size: int) -> Group:
        """Create a process group in which this actor has ``position`` of ``size``."""
        # Nothing else uses torch's 32 streams of high priority, so each group has its own.
        options = nccl.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # NCCL's watchdog would end the waiting process instead of the lost one. Its limit is longer
        # than the controller's deadlines, so it acts only if the controller has ended.
        options._timeout = timedelta(seconds=patience_s)
        options.config.max_ctas = MAX_CTAS
        group = nccl.ProcessGroupNCCL(PrefixStore(name, store), position, size, options)
        group.eager_connect_single_device(device)
        return group

    return make


@dataclass(frozen=True, slots=True)
class _Done(Pending):
    """Work that has ended."""

    values: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class _OnStream(Pending):
    """Work that is queued on a side stream. `finish` keeps the tensors that it reads alive."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    values: tuple[Tensor, ...]
    finish: Finish

    def wait(self) -> tuple[Tensor, ...]:
        """Let the current stream wait for the work; the host does not block."""
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self.event)
        for value in self.values:
            # the side stream must not reuse the value's memory while the current stream reads it
            value.record_stream(current)
        return self.values


class NcclWire(Wire):
    """The wire of an actor, with a communicator for each number of its keys."""

    def __init__(self, ranks: Sequence[int], device: torch.device, make: MakeGroup) -> None:
        self._ranks = frozenset(ranks)
        self._device = device
        self._make = make
        self._numbers: dict[Key, int] = {}
        self._groups: dict[int, Group] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._closed = False

    def open(self, tags: Mapping[Key, int]) -> None:
        """Create communicators for the numbers of these keys that have none yet."""
        for key in sorted(tags, key=lambda key: tags[key]):
            members, number = key[0], tags[key]
            # members are on different actors, so this actor has at most one
            hosted = [i for i, member in enumerate(members) if member in self._ranks]
            if not hosted:
                continue
            self._numbers[key] = number
            if number not in self._groups:
                name = f"{number}: {key[2]} {members}"
                self._groups[number] = self._make(name, hosted[0], len(members))
                self._connect(key, hosted[0])

    def _connect(self, key: Key, position: int) -> None:
        """Exchange a first message with all members. NCCL connects two members at their first
        message, for which the hosts wait; here all actors do it in the same order, before any
        step."""
        members, _, _ = key
        others = [member for i, member in enumerate(members) if i != position]
        sends = {member: self.empty(1).zero_() for member in others}
        recvs = {member: self.empty(1) for member in others}
        for work in self.post(key, sends, recvs, 0):
            work.wait()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def post(self, key: Key, sends: Messages, recvs: Messages, half: int) -> Sequence[Work]:
        """Start all messages of an exchange as one group operation of NCCL."""
        if self._closed:
            raise RuntimeError("The connections of this actor are closed.")
        group, members = self._groups[self._numbers[key]], key[0]
        group._start_coalescing()  # pyright: ignore[reportPrivateUsage]
        for member, data in recvs.items():
            group.recv([data], members.index(member), 0)
        for member, data in sends.items():
            group.send([data], members.index(member), 0)
        return (group._end_coalescing(),)  # pyright: ignore[reportPrivateUsage]

    def later(self, key: Key, finish: Finish) -> Pending:
        """Run `finish` on the side stream of the key's communicator."""
        if self._device.type != "cuda":
            return _Done(finish())  # the tests' stand-in for NCCL, whose waits block
        number = self._numbers[key]
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(self._device)
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        side: AbstractContextManager[Any] = torch.cuda.stream(stream)
        with side, torch.no_grad():
            values = finish()
            event = torch.cuda.Event()
            event.record(stream)
        return _OnStream(stream, event, values, finish)

    def close(self) -> None:
        """Abort all communicators. Peers that wait for this actor get an error, or the controller
        ends them.

        Aborts run at the same time, since each takes half a second and may wait for another's
        kernel. An abort that takes longer than `ABORT_S` may wait for a lost peer forever; it is
        abandoned, so that the error reaches the controller, which then ends this process.
        """
        self._closed = True
        groups = list(self._groups.values())
        self._groups.clear()
        raised: list[Exception] = []

        def abort(group: Group) -> None:
            try:
                group.abort()
            except Exception as error:
                raised.append(error)

        # not a thread pool, for whose threads the end of the process would wait
        threads = [Thread(target=abort, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        end = monotonic() + ABORT_S
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))
        if raised:
            raise raised[0]
