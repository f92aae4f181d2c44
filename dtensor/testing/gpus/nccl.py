"""Simulates NCCL between simulated GPUs: collectives and messages of `ProcessGroupNCCL`.

    fabric = Fabric(world)
    group = fabric.group("tp", position=0, size=2)     # blocks until position 1 calls it, too
    group._start_coalescing()
    group.send([x], 1, 0)
    group.recv([y], 1, 0)
    work = group._end_coalescing()                     # one kernel on the group's own stream
    work.wait()                                        # the current stream waits, not the host
    group.allreduce([x], dist.ReduceOp.SUM).wait()

The kernel of a collective runs when it is the first on the streams of all members, and adds in a
random order. Members whose collectives differ in kind, dtype or size raise RuntimeError, where NCCL
may hang or give wrong values; so do kernels that wait at the same time and do not fit on a GPU.
Comments give the source of each rule; "PG" is ProcessGroupNCCL.hpp of torch 2.13, with lines.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor.private_torch import disable_current_modes
from dtensor.testing.gpus.host import VisibleGpu, here, line_here
from dtensor.testing.gpus.memory import Access
from dtensor.testing.gpus.tensors import SimTensor
from dtensor.testing.gpus.world import Kernel, Point, Stream, World

Direction: TypeAlias = Literal["send", "recv"]
_OPPOSITE: dict[Direction, Direction] = {"send": "recv", "recv": "send"}
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
"""torch/csrc/cuda/nccl.cpp, `to_nccl_data_type`."""
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.fmax, dist.ReduceOp.MIN: torch.fmin,
}  # fmt: skip
"""NCCL's maximum of floats is fmaxf, which drops NaN (src/device/reduce_kernel.h)."""
MULTIPROCESSORS = 108
MAX_CTAS = 64
"""The most CTAs that NCCL gives a kernel (src/include/device.h, MAXCHANNELS)."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The end of a connection at one member of a group: for sends to, or receives from, a peer."""

    group: str
    position: int
    peer: int
    direction: Direction

    @property
    def other_end(self) -> Connection:
        return Connection(self.group, self.peer, self.position, _OPPOSITE[self.direction])


@dataclass(frozen=True, slots=True)
class GroupCall:
    """The collectives of one kind and dtype, or a message of ``kind`` "send", in a group call of a
    member of a communicator. ``nbytes``: of their inputs."""

    group: str
    position: int
    kind: str
    dtype: torch.dtype
    nbytes: int


@dataclass(slots=True)
class Fabric:
    """The communicators of all simulated GPUs. ``connects_eagerly``: hosts do not wait for their
    peers at the first message; ``calls``: the number of each call so far."""

    world: World
    connects_eagerly: bool = False
    members: dict[str, dict[int, Group]] = field(default_factory=dict[str, dict[int, "Group"]])
    connections: set[Connection] = field(default_factory=set[Connection])
    """The ends of connections that hosts have reached."""
    calls: Counter[GroupCall] = field(default_factory=Counter[GroupCall])

    def group(self, name: str, position: int, size: int, max_ctas: int = 0) -> Group:
        """Return a member of a new group, on the current GPU. This blocks until all members call it
        with the name (NCCL 2.28 User Guide, "Creating a Communicator")."""
        gpu = here().current
        group = Group(self, name, position, size, gpu, max_ctas or MAX_CTAS)
        with self.world.lock:
            members = self.members.setdefault(name, {})
            members[position] = group
            self.world.lock.notify_all()
        self.world.wait(lambda: len(members) == size, f"the communicator {name} is made")
        return group


@dataclass(frozen=True, slots=True)
class Message:
    direction: Direction
    tensor: SimTensor
    peer: int


@dataclass(eq=False, slots=True)
class NcclKernel(Kernel):
    """A kernel of a group call. ``alive``: tensors that are kept alive until a `Work.wait`, or
    until the kernel ends (PG 252-257, 487-494, 1426-1432)."""

    group: Group | None = None
    alive: list[SimTensor] = field(default_factory=list["SimTensor"])

    def end(self) -> None:
        Kernel.end(self)
        for tensor in self.alive:  # a host that sees the end of the kernel may free them
            tensor.block.recorded[self.stream.number] = self.stream
        self.alive = []

    def running_group(self) -> Group:
        """Return the group of this kernel, which may run. Raises RuntimeError if the kernels that
        may run, and so keep their multiprocessors, do not fit on the GPU."""
        firsts = (each.queue[0] for each in self.stream.device.streams if each.queue)
        waiting = [each.group for each in firsts if isinstance(each, NcclKernel) and each.group]
        if sum(group.ctas for group in waiting) > MULTIPROCESSORS:
            names = ", ".join(f"{group.name} with {group.ctas} CTAs" for group in waiting)
            raise RuntimeError(f"{self.stream.device}: {names} wait at the same time")
        assert self.group is not None
        return self.group


@dataclass(eq=False, slots=True)
class GroupKernel(NcclKernel):
    """The kernel of a group call: all its sends and receives, at the same time (User Guide, "Group
    Calls"). It ends when the kernels of the peers have taken part.

    ``pending``: the tensors of messages that were not exchanged yet, by direction and peer.
    """

    pending: dict[tuple[Direction, int], Tensor] = field(default_factory=dict)

    def replayed(self, stream: Stream) -> GroupKernel:
        pending = dict(self.pending)
        return replace(self, stream=stream, is_launch=False, pending=pending, alive=[])

    def run(self) -> bool:
        """Exchange the messages whose peer's kernel is the first on its stream. Return whether
        there was one."""
        group, has_progress = self.running_group(), False
        for (direction, peer), own_tensor in list(self.pending.items()):
            head = group.fabric.members[group.name][peer].stream.head
            key = (_OPPOSITE[direction], group.position)
            if not isinstance(head, GroupKernel) or key not in head.pending:
                continue
            peer_tensor = head.pending.pop(key)
            del self.pending[direction, peer]
            sends = direction == "send"
            to, source = (peer_tensor, own_tensor) if sends else (own_tensor, peer_tensor)
            if to.numel() != source.numel():
                raise RuntimeError(
                    f"{self.what} ({self.line}): {source.numel()} elements are sent, "
                    f"{to.numel()} awaited"
                )
            with torch.no_grad(), disable_current_modes():
                to.copy_(source)
            has_progress = True
            if not head.pending:
                head.end()
        if not self.pending and not self.is_done:
            self.end()
        return has_progress


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective of a group call. ``given``, ``made``: the tensors that the member reads and
    writes; ``op``: the reduction; ``root``: the position of the member that a broadcast sends from.
    """

    kind: str
    given: Sequence[SimTensor]
    made: Sequence[SimTensor]
    op: Any = None
    root: int = 0

    @property
    def signature(self) -> tuple[object, ...]:
        """The properties that are equal on all members. The pieces of an all_to_all are compared
        one by one."""
        sizes = [tensor.numel() for tensor in self.made] if self.kind != "all_to_all" else []
        return (self.kind, self.op, self.root, self.made[0].dtype, *sizes)


@dataclass(eq=False, slots=True)
class CollectiveKernel(NcclKernel):
    """The kernel of a group call of collectives, one after the other."""

    operations: Sequence[Operation] = ()

    def replayed(self, stream: Stream) -> CollectiveKernel:
        return replace(self, stream=stream, is_launch=False, alive=[])

    def run(self) -> bool:
        """Run the collectives of all members, if their kernels are the first on their streams."""
        group = self.running_group()
        members = group.fabric.members[group.name]
        heads = [member.stream.head for _, member in sorted(members.items())]
        kernels = [head for head in heads if isinstance(head, CollectiveKernel)]
        if len(kernels) < group.size:
            return False
        signatures = [[each.signature for each in kernel.operations] for kernel in kernels]
        if any(each != signatures[0] for each in signatures):
            lines = "; ".join(f"{k.what} ({k.line}): {s}" for k, s in zip(kernels, signatures))
            raise RuntimeError(f"the members of {group.name} start different collectives: {lines}")
        with torch.no_grad(), disable_current_modes():
            for operations in zip(*(kernel.operations for kernel in kernels), strict=True):
                _collect(operations, group.fabric.world.rng)
        for kernel in kernels:
            kernel.end()
        return True


def _collect(members: Sequence[Operation], draw: random.Random) -> None:
    """Read the inputs of all members and write their outputs."""
    first, size = members[0], len(members)
    given = [[tensor.elem.clone() for tensor in member.given] for member in members]
    made = [[tensor.elem for tensor in member.made] for member in members]

    def total(parts: Sequence[Tensor]) -> Tensor:
        return functools.reduce(_FOLDS[first.op], draw.sample(parts, len(parts)))

    match first.kind:
        case "all_reduce":
            results = [[total([each for (each,) in given])]] * size
        case "reduce_scatter":
            pieces = zip(*(each.chunk(size) for (each,) in given), strict=True)
            results = [[total(parts)] for parts in pieces]
        case "all_gather":
            results = [[torch.cat([each for (each,) in given])]] * size
        case "broadcast":
            results = [given[first.root]] * size
        case "all_to_all":
            results = [[own[to] for own in given] for to in range(size)]
        case _:
            raise AssertionError(first.kind)
    for outs, values in zip(made, results, strict=True):
        for out, value in zip(outs, values, strict=True):
            if out.numel() != value.numel():
                raise RuntimeError(f"{value.numel()} elements are sent, {out.numel()} awaited")
            out.copy_(value.reshape(out.shape))


@dataclass(slots=True)
class Work:
    """The result of a group call. `wait` makes the current stream wait, not the host (PG
    274-304)."""

    kernel: NcclKernel
    point: Point

    def wait(self) -> None:
        here().current.stream.wait_for(self.point)
        self.kernel.alive = []


class Group:
    """A member of a communicator, on one GPU, with a stream of its own for messages."""

    def __init__(
        self, fabric: Fabric, name: str, position: int, size: int, gpu: VisibleGpu, ctas: int
    ) -> None:
        self.fabric, self.name, self.position, self.size = fabric, name, position, size
        self.gpu, self.ctas = gpu, ctas
        self.stream: Stream = gpu.device.stream(f"NCCL {name} #{position}")
        self.stream.keeps_order = True
        self._started: list[Message | Operation] | None = None

    def _start_coalescing(self) -> None:
        assert self._started is None, "a group call within a group call"
        self._started = []

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("send", tensors, rank)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("recv", tensors, rank)

    def allreduce(self, tensors: list[Tensor], op: Any = dist.ReduceOp.SUM, /) -> Any:
        return self._collective("all_reduce", tensors, tensors, op=op)

    def broadcast(self, tensor: Tensor, root: int, /) -> Any:
        given = [tensor] if self.position == root else []
        return self._collective("broadcast", given, [tensor], root=root)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], /) -> Any:
        return self._collective("all_to_all", inputs, outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Any:
        assert output.numel() == self.size * input.numel()
        return self._collective("all_gather", [input], [output])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, /) -> Any:
        assert input.numel() == self.size * output.numel()
        return self._collective("reduce_scatter", [input], [output], op=dist.ReduceOp.SUM)

    def _collective(
        self, kind: str, given: list[Tensor], made: list[Tensor], op: Any = None, root: int = 0
    ) -> Any:
        """Add a collective to the group call, or start it if there is none. Raises ValueError for
        tensors that torch refuses."""
        own, outs = [_on_gpu(tensor) for tensor in given], [_on_gpu(tensor) for tensor in made]
        if len({tensor.dtype for tensor in (*own, *outs)}) > 1 or outs[0].dtype not in _DTYPES:
            raise ValueError(f"Tensors must have one dtype of NCCL ({line_here()})")
        operation = Operation(kind, own, outs, op, root)
        if self._started is None:
            return self._launch([operation])
        self._started.append(operation)
        return None

    def _add(self, direction: Direction, tensors: list[Tensor], peer: int) -> None:
        """Add a message to the group call. Raises ValueError for empty tensors, whose effect in a
        group call NCCL does not document."""
        (tensor,) = tensors
        assert self._started is not None, "a message outside a group call may wait for ever"
        if not tensor.numel():
            raise ValueError(f"Tensors must not be empty ({line_here()})")
        self._started.append(Message(direction, _on_gpu(tensor), peer))

    def _end_coalescing(self) -> Work:
        started, self._started = self._started or [], None
        return self._launch(started)

    def _launch(self, started: Sequence[Message | Operation]) -> Work:
        """Put the kernel of a group call on the group's stream, behind the current stream."""
        messages = [each for each in started if isinstance(each, Message)]
        operations = [each for each in started if isinstance(each, Operation)]
        assert not messages or not operations, "a group call has messages or collectives"
        if not self.fabric.connects_eagerly:
            self._connect(messages)
        line = line_here()
        self.stream.wait_for(here().current.stream.point)  # ProcessGroupNCCL.cpp, `syncStream`
        read = [m.tensor for m in messages if m.direction == "send"]
        read += [tensor for each in operations for tensor in each.given]
        written = [m.tensor for m in messages if m.direction == "recv"]
        written += [tensor for each in operations for tensor in each.made]
        names = sorted(f"{m.direction} {m.peer}" for m in messages)
        what = f"NCCL {self.name} " + ", ".join(names or [each.kind for each in operations])
        kernel: NcclKernel
        if operations:
            kernel = CollectiveKernel(what, line, self.stream, None, operations=operations)
        else:
            pending: dict[tuple[Direction, int], Tensor]
            pending = {(m.direction, m.peer): m.tensor.elem for m in messages}
            kernel = GroupKernel(what, line, self.stream, None, pending=pending)
        kernel.group, kernel.alive = self, [*read, *written]
        self._count(messages, operations)
        self.stream.put(kernel)
        now = Access(what, line, f"{self.gpu.device}, {self.stream.name}")
        reads, writes = [t.block.used for t in read], [t.block.used for t in written]
        self.gpu.memory.access(self.stream, reads, writes, now)
        return Work(kernel, self.stream.point)

    def _count(self, messages: Sequence[Message], operations: Sequence[Operation]) -> None:
        nbytes = Counter[tuple[str, torch.dtype]]()
        for each in operations:
            for tensor in each.given:
                nbytes[each.kind, tensor.dtype] += tensor.nbytes
        counts = list(nbytes.items())
        sent = [m.tensor for m in messages if m.direction == "send"]
        counts += [(("send", tensor.dtype), tensor.nbytes) for tensor in sent]
        with self.fabric.world.lock:
            for (kind, dtype), total in counts:
                self.fabric.calls[GroupCall(self.name, self.position, kind, dtype, total)] += 1

    def _connect(self, messages: Sequence[Message]) -> None:
        """Wait for the hosts of new peers: the first message of each direction between two members
        connects them (NCCL's src/transport.cc, `ncclTransportP2pSetup`), and the first collective
        connects all members (src/group.cc, `ncclCollPreconnectFunc`)."""
        fabric, every = self.fabric, range(self.size)
        if messages:
            own = {Connection(self.name, self.position, m.peer, m.direction) for m in messages}
            others = {end.other_end for end in own - fabric.connections}
        else:
            own = {Connection(self.name, self.position, self.position, "send")}
            others = {Connection(self.name, each, each, "send") for each in every}
        if own <= fabric.connections:
            return
        with fabric.world.lock:
            fabric.connections |= own
            fabric.world.lock.notify_all()
        what = f"NCCL connects {self.name} #{self.position} for the first time ({line_here()})"
        fabric.world.wait(lambda: others <= fabric.connections, what)

    def abort(self) -> None:
        with self.fabric.world.lock:
            self.fabric.members.get(self.name, {}).pop(self.position, None)


def _on_gpu(tensor: Tensor) -> SimTensor:
    """Return the tensor. Raises ValueError for CPU tensors and for tensors that are not contiguous,
    as torch does."""
    if not isinstance(tensor, SimTensor):
        raise ValueError(f"Tensors must be CUDA and dense ({line_here()})")
    if not tensor.is_contiguous():
        raise ValueError(f"Tensors must be contiguous ({line_here()})")
    return tensor
