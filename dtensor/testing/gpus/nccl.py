"""NCCL between simulated GPUs: what it promises, and no more.

    fabric = Fabric(world)
    group = fabric.group("tp", position=0, size=2)     # blocks until position 1 has come
    group._start_coalescing()
    group.send([x], 1, 0)
    group.recv([y], 1, 0)
    work = group._end_coalescing()                     # one kernel on the group's own stream
    work.wait()                                        # the current stream waits, not the host

Stands for `torch.distributed.ProcessGroupNCCL` of point-to-point messages. The rules, each with
what it was read from: "PG" is torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp of torch 2.13, with
lines; NCCL's transport.cc and its documentation have no lines, for the copies that were read name
no release ("User Guide" is NVIDIA's for NCCL 2.28).

- Making a communicator waits on the host for all members (User Guide, "Creating a Communicator").
- A group of sends and receives is one kernel, and its messages go at the same time (User Guide,
  "Group Calls", "Point-to-point communication"). It ends when the kernels of the peers have taken
  part; a message goes when both kernels are first on their streams.
- The first send or receive between two members makes the host wait for the peer's host, for each
  direction (src/transport.cc, `ncclTransportP2pSetup`: `connectSend` and `connectRecv` say with
  whom it is not connected yet; it takes the peer's data by `bootstrapRecv`, and at its end both
  wait for each other once more), unless `connects_eagerly`.
- Messages run on a stream of the group's own, and the caller's waits at `wait`, not the host (PG
  274-304). The group's begins behind the caller's (ProcessGroupNCCL.cpp, `syncStream`).
- Until `wait` the tensors are kept alive. Afterwards nothing but the stream that waited protects
  them, for none is recorded on the group's stream (PG 252-257, 487-494). Without a `wait` they are
  kept until the messages have ended (PG 1426-1432). torch has a switch, and may record them
  (PG 182-187): that would promise more.
- Messages of CPU tensors, empty or not contiguous ones are refused: the first and the last by
  torch ("Tensors must be CUDA and dense", "must be contiguous"), empty ones here, as nothing
  documents what NCCL does with them within a group.

Not modelled: CTAs and channels, the watchdog, bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dtensor.private_torch import disable_current_modes
from dtensor.testing.gpus.host import Seen, here, line_here
from dtensor.testing.gpus.memory import Access
from dtensor.testing.gpus.tensors import SimTensor
from dtensor.testing.gpus.world import Clock, Kernel, Stream, World

Direction: TypeAlias = Literal["send", "recv"]
_BACK: dict[Direction, Direction] = {"send": "recv", "recv": "send"}


@dataclass(frozen=True, slots=True)
class Connection:
    """Of a host, for messages of one direction with a peer."""

    group: str
    position: int
    peer: int
    direction: Direction

    @property
    def back(self) -> Connection:
        return Connection(self.group, self.peer, self.position, _BACK[self.direction])


@dataclass(slots=True)
class Fabric:
    """What connects all simulated GPUs."""

    world: World
    connects_eagerly: bool = False
    members: dict[str, dict[int, Group]] = field(default_factory=dict[str, dict[int, "Group"]])
    come: set[Connection] = field(default_factory=set[Connection])
    """Connections for which a host has come."""

    def group(self, name: str, position: int, size: int) -> Group:
        """Blocks until all members call it with this name."""
        seen = here().current
        group = Group(self, name, position, seen)
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
    """Sends and receives of one group call. ``left``: those that have not gone."""

    group: Group | None = None
    left: dict[tuple[Direction, int], Tensor] = field(default_factory=dict)
    held: list[SimTensor] = field(default_factory=list["SimTensor"])
    """Until somebody has waited, or it has ended."""

    def end(self) -> None:
        Kernel.end(self)
        for tensor in self.held:  # who sees that it has ended may free them
            tensor.block.recorded[self.stream.number] = self.stream
        self.held = []

    def run(self) -> bool:
        group, went = self.group, False
        assert group is not None
        for (direction, peer), mine in list(self.left.items()):
            head = group.fabric.members[group.name][peer].stream.head
            key = (_BACK[direction], group.position)
            if not isinstance(head, GroupKernel) or key not in head.left:
                continue
            theirs = head.left.pop(key)
            del self.left[direction, peer]
            to, source = (theirs, mine) if direction == "send" else (mine, theirs)
            if to.numel() != source.numel():
                raise RuntimeError(
                    f"{self.what} ({self.line}): {source.numel()} elements are sent, "
                    f"{to.numel()} awaited"
                )
            with torch.no_grad(), disable_current_modes():
                to.copy_(source)
            went = True
            if not head.left:
                head.end()
        if not self.left and not self.is_done:
            self.end()
        return went


@dataclass(slots=True)
class Work:
    """What a group call gives."""

    kernel: GroupKernel
    clock: Clock

    def wait(self) -> None:
        stream, kernel = here().current.stream, self.kernel
        stream.follow(self.clock)
        if not kernel.is_done:
            stream.put(
                Kernel(
                    f"waits for {kernel.what}", kernel.line, stream, None, lambda: kernel.is_done
                )
            )
        kernel.held = []


class Group:
    """Of one communicator, on one GPU."""

    def __init__(self, fabric: Fabric, name: str, position: int, seen: Seen) -> None:
        self.fabric, self.name, self.position, self.seen = fabric, name, position, seen
        self.stream: Stream = seen.device.stream(f"NCCL {name} #{position}")
        self._messages: list[Message] | None = None

    def _start_coalescing(self) -> None:
        assert self._messages is None, "a group call within a group call"
        self._messages = []

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("send", tensors, rank)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        self._add("recv", tensors, rank)

    def _add(self, direction: Direction, tensors: list[Tensor], peer: int) -> None:
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
        current, line = here().current.stream, line_here()
        self.stream.follow(current.clock)
        if (last := current.last) is not None and not last.is_done:
            started = f"waits for {last.what}"
            self.stream.put(Kernel(started, line, self.stream, None, lambda: last.is_done))
        left: dict[tuple[Direction, int], Tensor]
        left = {(m.direction, m.peer): m.tensor.elem for m in messages}
        what = f"NCCL {self.name} " + ", ".join(f"{d} {p}" for d, p in sorted(left))
        tensors = [message.tensor for message in messages]
        kernel = GroupKernel(what, line, self.stream, None, group=self, left=left, held=tensors)
        self.stream.put(kernel)
        now = Access(what, line, f"{self.seen.device}, {self.stream.name}")
        sent = [m.tensor.block for m in messages if m.direction == "send"]
        received = [m.tensor.block for m in messages if m.direction == "recv"]
        self.seen.memory.access(self.stream, sent, received, now)
        return Work(kernel, dict(self.stream.clock))

    def _connect(self, messages: list[Message]) -> None:
        fabric = self.fabric
        wanted = {Connection(self.name, self.position, m.peer, m.direction) for m in messages}
        new = wanted - fabric.come
        if not new:
            return
        with fabric.world.lock:
            fabric.come |= new
            fabric.world.lock.notify_all()
        what = f"NCCL connects {self.name} #{self.position} for the first time ({line_here()})"
        fabric.world.wait(lambda: all(each.back in fabric.come for each in new), what)

    def abort(self) -> None:
        with self.fabric.world.lock:
            self.fabric.members.get(self.name, {}).pop(self.position, None)


MakeGroup: TypeAlias = Callable[[str, int, int], Group]
