"""The wire between actors with one GPU each: NCCL's point-to-point messages, and nothing else.

**It has never run on GPUs**: that needs two of them. Tests run everything here but `nccl_groups`
and the side stream, over gloo groups that hold callers to NCCL's rules.

    wire = join_nccl(store, (0,), num_actors=2, patience_s=4000.0)          # the actor of rank 0
    transport = ExchangeTransport(wire, (0, 1))

The same exchanges and folds as on CPUs, as bytes, on device tensors: the bits are those of all
ranks on one such GPU. What differs from gloo:

- NCCL has no tags. Keys with one number share a communicator, FIFO, whose ranks are positions in
  their members: all members start their messages in one order (`communicators.py`), both halves of
  a large all_reduce at once.
- Making a communicator blocks until all its members come. All are made at `open`, in the order of
  their numbers, the same on all actors: so the first one not made yet never lacks a member.
- The messages of an exchange are one NCCL group (`batch_isend_irecv`): alone, a send could wait
  for the peer's receive that is queued behind the peer's send.
- A `wait` makes the current stream wait, and not the host; the second half of a large all_reduce is
  queued on a side stream of its key. So a lost peer may be noticed at a later instruction than its
  own: the controller, whose clock runs out first, names the actor.
- The host does wait where communicators are made, where two ranks of one exchange their first
  message (NCCL connects them then), both in `open`, and where a call reads a value of the device: a
  check of indices, the vote, results that are copied to the CPU.
- Kernels of several communicators wait for peers at the same time. None may keep another from
  starting, or a program that is sound could hang: hence few CTAs each, at most
  `MAX_COMMUNICATORS` of them, a stream of its own for each, as many hardware queues, and modules
  loaded before they run (`first_uses.py`).
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
"""Of one communicator: `MAX_COMMUNICATORS` fit on the 108 multiprocessors of an A100."""
ABORT_S = 5.0
"""How long `close` waits for aborts: 24 at once took 1 s on an H100."""
ENVIRONMENT = {
    # Streams that share a hardware queue wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Loading a kernel at its first use waits for the device, which may wait for a peer.
    "CUDA_MODULE_LOADING": "EAGER",
}


class Group(Protocol):
    """What is used of `ProcessGroupNCCL`."""

    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def abort(self) -> None: ...


MakeGroup: TypeAlias = Callable[[str, int, int], Group]
"""(name, own position, size); blocks until all members call it with this name."""


def join_nccl(store: Store, ranks: Sequence[int], num_actors: int, patience_s: float) -> NcclWire:
    """The wire of an actor on its only GPU; a single actor needs no NCCL."""
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
    nccl: Any = dist

    def make(name: str, position: int, size: int) -> Group:
        # The pool of streams of high priority is used by nothing else here, so that up to 32
        # groups have one each.
        options = nccl.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # NCCL's watchdog ends the process that waits, not the one that is lost: only if the
        # controller, whose deadlines are shorter, is gone.
        options._timeout = timedelta(seconds=patience_s)
        options.config.max_ctas = MAX_CTAS
        group = nccl.ProcessGroupNCCL(PrefixStore(name, store), position, size, options)
        group.eager_connect_single_device(device)
        return group

    return make


@dataclass(frozen=True, slots=True)
class _Done(Pending):
    values: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class _OnStream(Pending):
    """Queued on a side stream. `finish` keeps what it reads alive until the wait."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    values: tuple[Tensor, ...]
    finish: Finish

    def wait(self) -> tuple[Tensor, ...]:
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self.event)
        for value in self.values:
            # Made on the side stream, which must not reuse the memory while this one reads it.
            value.record_stream(current)
        return self.values


class NcclWire(Wire):
    def __init__(self, ranks: Sequence[int], device: torch.device, make: MakeGroup) -> None:
        self._ranks = frozenset(ranks)
        self._device = device
        self._make = make
        self._numbers: dict[Key, int] = {}
        self._groups: dict[int, Group] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._closed = False

    def open(self, tags: Mapping[Key, int]) -> None:
        for key in sorted(tags, key=lambda key: tags[key]):
            members, number = key[0], tags[key]
            # Members are on different actors, so at most one is here.
            hosted = [i for i, member in enumerate(members) if member in self._ranks]
            if not hosted:
                continue
            self._numbers[key] = number
            if number not in self._groups:
                name = f"{number}: {key[2]} {members}"
                self._groups[number] = self._make(name, hosted[0], len(members))
                self._connect(key, hosted[0])

    def _connect(self, key: Key, position: int) -> None:
        """NCCL connects two members where they exchange their first message, for which their hosts
        wait for each other: here, before any step, in the one order of all actors."""
        members, _, _ = key
        others = [member for i, member in enumerate(members) if i != position]
        sends = {member: self.empty(1).zero_() for member in others}
        recvs = {member: self.empty(1) for member in others}
        for work in self.post(key, sends, recvs, 0):
            work.wait()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def post(self, key: Key, sends: Messages, recvs: Messages, half: int) -> Sequence[Work]:
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
        if self._device.type != "cuda":
            return _Done(finish())  # the stand-in: its waits block
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
        """Abort: peers that wait for this actor get an error, or are ended by the controller.

        All at once: one takes half a second, and may wait for the kernel of another. One that is
        not over in `ABORT_S` may wait for a kernel of a lost peer, for ever: the error for which
        all this is done must get to the controller, which then ends this process.
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

        # not a pool: the end of this process would wait for its threads
        threads = [Thread(target=abort, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        end = monotonic() + ABORT_S
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))
        if raised:
            raise raised[0]
