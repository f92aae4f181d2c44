"""The wire between actors with one GPU each: NCCL's collectives and point-to-point messages.

**It has never run on several GPUs.** Tests run it on simulated GPUs, except `nccl_groups`.

    wire = join_nccl(store, (0,), num_actors=2, patience_s=4000.0)          # in the actor of rank 0
    transport = ExchangeTransport(wire, (0, 1))

    all_to_all, broadcast, all_gather of equal shapes      NCCL's collective, in the value's dtype
    sums of integers and of floats of at least 32 bits     NCCL's collective, in the value's dtype
    sums of two 16-bit floats, returned in their dtype     NCCL's collective: one rounded addition
    other sums of 16-bit floats up to `SMALL_ALL_REDUCE`   NCCL's collective, in float32
    larger ones                                            an exchange, folded in float32: casting
                                                           them would double the bytes
    max and min of integers (all_reduce)                   NCCL's collective
    max and min of floats                                  an exchange: NCCL's max drops NaN
    other reductions, uneven pieces, shifts, transfers     an exchange

`in_order`: all reductions are exchanges, whose folds have the group's order. NCCL's sums have an
order of their own, and are equal on all members.

NCCL has no tags: keys with one number share a communicator, on which all members start messages in
one order (`communicators.py`). A `wait` makes the current stream wait, not the host. Kernels of
several communicators wait at the same time; so that none keeps another from starting, all of them
fit on the GPU (`CTAS`), each has its own stream, and modules are loaded before they run
(`first_uses.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor.collectives import SMALL_ALL_REDUCE
from dtensor.daft.ir.instructions import Buffer, Collective, Key
from dtensor.daft.ray.transports.exchange import Finish, Messages, Posted, Wire, Work
from dtensor.daft.run.transport import Begin, Pending
from dtensor.numerics import is_integer, is_narrow
from dtensor.private_torch import PrefixStore, Store, foreach_copy_

CTAS = (0, 32, 4)
"""The most CTAs of a communicator by its number modulo 3; 0: as many as NCCL chooses, at most 64.
The kernels that wait at the same time fit on the 108 multiprocessors of an A100: one communicator,
up to 3, or up to `MAX_COMMUNICATORS` (`communicators.py`)."""
TYPED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool)
    + (torch.int64, torch.int32, torch.int8, torch.uint8)
)
"""The dtypes of NCCL. Values of other dtypes are sent as bytes."""
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
ABORT_S = 5.0
"""How long `close` waits for aborts; 24 concurrent aborts took 1 s on an H100."""
ENVIRONMENT = {
    # streams that share a hardware queue wait for each other
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # loading a kernel at its first use waits for the device, which may wait for a peer
    "CUDA_MODULE_LOADING": "EAGER",
    # with registered buffers, a rank that replays a graph could not meet a rank without one
    "NCCL_GRAPH_REGISTER": "0",
    # connecting a ring or a tree at the first collective that uses it waits for all members
    "NCCL_RUNTIME_CONNECT": "0",
}


class Group(Protocol):
    """The used part of `ProcessGroupNCCL`."""

    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], op: Any, /) -> Work: ...
    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], /) -> Work: ...
    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, /) -> Work: ...
    def abort(self) -> None: ...


MakeGroup: TypeAlias = Callable[[str, int, int, int], Group]
"""Takes a name, the caller's position, the size, and the maximum of CTAs; waits until all members
call it with the name."""


def join_nccl(
    store: Store,
    ranks: Sequence[int],
    num_actors: int,
    patience_s: float,
    in_order: bool = False,
) -> NcclWire:
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
    return NcclWire(ranks, device, nccl_groups(store, device, patience_s), in_order)


def nccl_groups(store: Store, device: torch.device, patience_s: float) -> MakeGroup:
    """Return a function that creates the NCCL process groups of an actor."""
    nccl: Any = dist

    def make(name: str, position: int, size: int, max_ctas: int) -> Group:
        """Create a process group in which this actor has ``position`` of ``size``."""
        # Nothing else uses torch's 32 streams of high priority, so each group has its own.
        options = nccl.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # NCCL's watchdog would end the waiting process instead of the lost one. Its limit is longer
        # than the controller's deadlines, so it acts only if the controller has ended.
        options._timeout = timedelta(seconds=patience_s)
        if max_ctas:
            options.config.max_ctas = max_ctas
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

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        make: MakeGroup,
        in_order: bool = False,
    ) -> None:
        self._ranks = frozenset(ranks)
        self._device = device
        self._make = make
        self._in_order = in_order
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
                ctas = CTAS[number % len(CTAS)]
                self._groups[number] = self._make(name, hosted[0], len(members), ctas)
                self._connect(key, hosted[0])

    def _connect(self, key: Key, position: int) -> None:
        """Exchange a first message with all members. NCCL connects two members at their first
        message, for which the hosts wait; here all actors do it in the same order, before any
        step."""
        members, _, kind = key
        others = [member for i, member in enumerate(members) if i != position]
        sends = {member: self.empty(1).zero_() for member in others}
        recvs = {member: self.empty(1) for member in others}
        for work in self.post(key, sends, recvs, 0):
            work.wait()
        if kind == "collective":
            self._group(key).allreduce([self.empty(1).zero_()], OPS["sum"]).wait()

    def _group(self, key: Key) -> Group:
        if self._closed:
            raise RuntimeError("The connections of this actor are closed.")
        return self._groups[self._numbers[key]]

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def post(self, key: Key, sends: Messages, recvs: Messages, half: int) -> Sequence[Work]:
        """Start all messages of an exchange as one group operation of NCCL."""
        group, members = self._group(key), key[0]
        group._start_coalescing()  # pyright: ignore[reportPrivateUsage]
        for member, data in recvs.items():
            group.recv([data], members.index(member), 0)
        for member, data in sends.items():
            group.send([data], members.index(member), 0)
        return (group._end_coalescing(),)  # pyright: ignore[reportPrivateUsage]

    def begin(self, key: Key, rank: int, collective: Collective) -> Begin | None:
        if not is_native(collective, self._in_order):
            return None
        return partial(self._start_native, NATIVE[collective.kind], key, collective)

    def _start_native(
        self,
        start: StartNative,
        key: Key,
        collective: Collective,
        values: Sequence[Tensor],
        rows: Sequence[int] = (),
    ) -> Pending:
        """Start a collective of NCCL. Its results are allocated on the current stream."""
        work, outs = start(self._group(key), collective, values, self._device)

        def finish() -> tuple[Tensor, ...]:
            dtypes = [buffer.dtype for buffer in collective.out_buffers]
            return tuple(out.to(dtype) for out, dtype in zip(outs, dtypes, strict=True))

        return Posted((work,), finish)

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


# -- NCCL's collectives ----------------------------------------------------------------------------


def is_native(collective: Collective, in_order: bool) -> bool:
    """Return whether a collective is one of NCCL. All members decide alike: apart from an
    all_to_all, whose pieces are sent one by one, the buffers are the same on all of them."""
    match collective.kind:
        case "all_reduce" | "reduce_scatter":
            buffers, is_sum = collective.in_buffers, collective.op == "sum"
            native = not in_order and None not in dtypes_of_reduction(collective)
            if collective.does.divided:
                native = native and is_sum and len(set(buffers)) == 1
        case "all_gather" | "broadcast":
            buffers = collective.out_buffers
            native = len(set(buffers)) == 1
        case "all_to_all":
            return collective.sizes is None
        case _:
            return False
    return native and any(buffer.nbytes for buffer in buffers)


def dtypes_of_reduction(collective: Collective) -> list[torch.dtype | None]:
    """Return the dtype in which NCCL reduces each input; None if the input needs an exchange."""
    small = sum(buffer.nbytes for buffer in collective.in_buffers) <= SMALL_ALL_REDUCE
    op, is_pair = collective.op, len(collective.group) == 2

    def dtype_of(given: torch.dtype, made: torch.dtype) -> torch.dtype | None:
        if op == "sum" and is_narrow(given) and given in TYPED:
            return given if is_pair and given == made else torch.float32 if small else None
        reducible = is_integer(given) if op in ("max", "min") else given != torch.bool
        return given if op in OPS and reducible and given in TYPED else None

    made = collective.out_buffers
    if collective.kind == "reduce_scatter":
        made = made * len(collective.in_buffers)
    pairs = zip(collective.in_buffers, made, strict=True)
    return [dtype_of(given.dtype, to.dtype) for given, to in pairs]


StartNative: TypeAlias = Callable[
    [Group, Collective, Sequence[Tensor], torch.device], tuple[Work, Sequence[Tensor]]
]
"""Starts a collective; returns its work, and the results when the work has ended."""


def _all_reduce(
    group: Group, collective: Collective, values: Sequence[Tensor], device: torch.device
) -> tuple[Work, Sequence[Tensor]]:
    """Reduce copies of the values, in one group call."""
    outs = [
        torch.empty(value.shape, dtype=dtype, device=device)
        for value, dtype in zip(values, dtypes_of_reduction(collective), strict=True)
    ]
    foreach_copy_(outs, list(values))
    group._start_coalescing()  # pyright: ignore[reportPrivateUsage]
    for out in outs:
        if out.numel():
            group.allreduce([out], OPS[collective.op or ""])
    return group._end_coalescing(), outs  # pyright: ignore[reportPrivateUsage]


def _all_gather(
    group: Group, collective: Collective, values: Sequence[Tensor], device: torch.device
) -> tuple[Work, Sequence[Tensor]]:
    """Gather into one tensor, of which each result is a part."""
    num, buffer = len(collective.group), collective.out_buffers[0]
    out = _empty(Buffer((num, *buffer.shape), buffer.dtype), device)
    work = group._allgather_base(_typed(out), _typed(values[0]))  # pyright: ignore[reportPrivateUsage]
    return work, out.unbind(0)


def _reduce_scatter(
    group: Group, collective: Collective, values: Sequence[Tensor], device: torch.device
) -> tuple[Work, Sequence[Tensor]]:
    dtype, (buffer,) = dtypes_of_reduction(collective)[0], collective.out_buffers
    out = torch.empty(buffer.shape, dtype=dtype, device=device)
    sent = _end_to_end(values).to(out.dtype)
    return group._reduce_scatter_base(out, sent), (out,)  # pyright: ignore[reportPrivateUsage]


def _all_to_all(
    group: Group, collective: Collective, values: Sequence[Tensor], device: torch.device
) -> tuple[Work, Sequence[Tensor]]:
    outs = [_empty(buffer, device) for buffer in collective.out_buffers]
    return group.alltoall([_typed(out) for out in outs], [_typed(v) for v in values]), outs


def _broadcast(
    group: Group, collective: Collective, values: Sequence[Tensor], device: torch.device
) -> tuple[Work, Sequence[Tensor]]:
    out = _empty(collective.out_buffers[0], device)
    for value in values:
        out.copy_(value)
    return group.broadcast(_typed(out), 0), (out,)


NATIVE: Mapping[str, StartNative] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
"""The functions that start collectives of NCCL, by kind."""


def _empty(buffer: Buffer, device: torch.device) -> Tensor:
    return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _typed(tensor: Tensor) -> Tensor:
    """Return a flat view (a copy if it is not contiguous), of bytes if NCCL lacks the dtype."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.dtype in TYPED else flat.view(torch.uint8)


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    """Return the elements of equal pieces, end to end: without a copy if they lie so in memory, as
    the blocks of a value along its first dim do."""
    first, size = pieces[0], pieces[0].numel()
    start, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    lie_so = all(
        piece.is_contiguous()
        and piece.storage_offset() == start + i * size
        and piece.untyped_storage().data_ptr() == memory
        for i, piece in enumerate(pieces)
    )
    if lie_so:
        return first.as_strided((size * len(pieces),), (1,), start)
    return torch.cat([piece.reshape(-1) for piece in pieces])
