"""Simulates NCCL between simulated GPUs: point-to-point messages of `ProcessGroupNCCL`.

    fabric = Fabric(world)
    group = fabric.group("tp", position=0, size=2)     # blocks until position 1 calls it, too
    group._start_coalescing()
    group.send([x], 1, 0)
    group.recv([y], 1, 0)
    work = group._end_coalescing()                     # one kernel on the group's own stream
    work.wait()                                        # the current stream waits, not the host

Comments give the source of each rule; "PG" is ProcessGroupNCCL.hpp of torch 2.13, with lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dtensor.private_torch import disable_current_modes
from dtensor.testing.gpus.host import VisibleGpu, here, line_here
from dtensor.testing.gpus.memory import Access
from dtensor.testing.gpus.tensors import SimTensor
from dtensor.testing.gpus.world import Kernel, Point, Stream, World

Direction: TypeAlias = Literal["send", "recv"]
_OPPOSITE: dict[Direction, Direction] = {"send": "recv", "recv": "send"}


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


@dataclass(slots=True)
class Fabric:
    """The communicators of all simulated GPUs. ``connects_eagerly``: hosts do not wait for their
    peers at the first message."""

    world: World
    connects_eagerly: bool = False
    members: dict[str, dict[int, Group]] = field(default_factory=dict[str, dict[int, "Group"]])
    connections: set[Connection] = field(default_factory=set[Connection])
    """The ends of connections that hosts have reached."""

    def group(self, name: str, position: int, size: int) -> Group:
        """Return a member of a new group, on the current GPU. This blocks until all members call it
        with the name (NCCL 2.28 User Guide, "Creating a Communicator")."""
        gpu = here().current
        group = Group(self, name, position, gpu)
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
class GroupKernel(Kernel):
    """The kernel of a group call: all its sends and receives, at the same time (User Guide, "Group
    Calls"). It ends when the kernels of the peers have taken part.

    ``pending``: the tensors of messages that were not exchanged yet, by direction and peer;
    ``alive``: tensors that are kept alive until a `Work.wait`, or until the kernel ends (PG
    252-257, 487-494, 1426-1432).
    """

    group: Group | None = None
    pending: dict[tuple[Direction, int], Tensor] = field(default_factory=dict)
    alive: list[SimTensor] = field(default_factory=list["SimTensor"])

    def replayed(self, stream: Stream) -> GroupKernel:
        pending = dict(self.pending)
        return replace(self, stream=stream, is_launch=False, pending=pending, alive=[])

    def end(self) -> None:
        Kernel.end(self)
        for tensor in self.alive:  # a host that sees the end of the kernel may free them
            tensor.block.recorded[self.stream.number] = self.stream
        self.alive = []

    def run(self) -> bool:
        """Exchange the messages whose peer's kernel is the first on its stream. Return whether
        there was one."""
        group, has_progress = self.group, False
        assert group is not None
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


@dataclass(slots=True)
class Work:
    """The result of a group call. `wait` makes the current stream wait, not the host (PG
    274-304)."""

    kernel: GroupKernel
    point: Point

    def wait(self) -> None:
        here().current.stream.wait_for(self.point)
        self.kernel.alive = []


class Group:
    """A member of a communicator, on one GPU, with a stream of its own for messages."""

    def __init__(self, fabric: Fabric, name: str, position: int, gpu: VisibleGpu) -> None:
        self.fabric, self.name, self.position, self.gpu = fabric, name, position, gpu
        self.stream: Stream = gpu.device.stream(f"NCCL {name} #{position}")
        self.stream.keeps_order = True
        self._messages: list[Message] | None = None

    def _start_coalescing(self) -> None:
        assert self._messages is None, "a group call within a group call"
        self._messages = []

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("send", tensors, rank)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("recv", tensors, rank)

    def _add(self, direction: Direction, tensors: list[Tensor], peer: int) -> None:
        """Add a message to the group call. Raises ValueError for CPU tensors and for tensors that
        are not contiguous, as torch does, and for empty tensors, whose effect in a group call NCCL
        does not document."""
        (tensor,) = tensors
        assert self._messages is not None, "a message outside a group call may wait for ever"
        if not isinstance(tensor, SimTensor):
            raise ValueError(f"Tensors must be CUDA and dense ({line_here()})")
        if not tensor.is_contiguous() or not tensor.numel():
            raise ValueError(f"Tensors must be contiguous and not empty ({line_here()})")
        self._messages.append(Message(direction, tensor, peer))

    def _end_coalescing(self) -> Work:
        messages, self._messages = self._messages or [], None
        if not self.fabric.connects_eagerly:
            self._connect(messages)
        line = line_here()
        self.stream.wait_for(here().current.stream.point)  # ProcessGroupNCCL.cpp, `syncStream`
        pending: dict[tuple[Direction, int], Tensor]
        pending = {(m.direction, m.peer): m.tensor.elem for m in messages}
        what = f"NCCL {self.name} " + ", ".join(f"{d} {p}" for d, p in sorted(pending))
        tensors = [message.tensor for message in messages]
        kernel = GroupKernel(
            what, line, self.stream, None, group=self, pending=pending, alive=tensors
        )
        self.stream.put(kernel)
        now = Access(what, line, f"{self.gpu.device}, {self.stream.name}")
        sent = [m.tensor.block.used for m in messages if m.direction == "send"]
        received = [m.tensor.block.used for m in messages if m.direction == "recv"]
        self.gpu.memory.access(self.stream, sent, received, now)
        return Work(kernel, self.stream.point)

    def _connect(self, messages: list[Message]) -> None:
        """Wait for the hosts of new peers: the first message of each direction between two members
        connects them (NCCL's src/transport.cc, `ncclTransportP2pSetup`)."""
        fabric = self.fabric
        ends = {Connection(self.name, self.position, m.peer, m.direction) for m in messages}
        new = ends - fabric.connections
        if not new:
            return
        with fabric.world.lock:
            fabric.connections |= new
            fabric.world.lock.notify_all()
        what = f"NCCL connects {self.name} #{self.position} for the first time ({line_here()})"
        fabric.world.wait(lambda: all(c.other_end in fabric.connections for c in new), what)

    def abort(self) -> None:
        with self.fabric.world.lock:
            self.fabric.members.get(self.name, {}).pop(self.position, None)


MakeGroup: TypeAlias = Callable[[str, int, int], Group]
