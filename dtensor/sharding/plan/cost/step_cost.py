"""The cost of one execution of a step on one rank: FLOP, bytes of memory traffic, and messages.

    cost = step_cost(plan, step, stage=0)           # StepCost(flops=..., bytes=..., messages=...)
    cost.compute_seconds(topology), cost.communication_seconds(topology)
    cost.resized(Resized({"dp": 2}, {"dp": 8}))     # the cost if dp had 8 ranks instead of 2

Costs are for the rank with the largest shards. Resizing assumes that each op keeps its strategy:
bytes and FLOP scale with the axes that split them. Costs do not contain names, so equal steps have
equal costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, assert_never

import torch

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)
from dtensor.sharding.redistribute.moves import Move, bytes_sent_together
from dtensor.sharding.redistribute.topology import Topology, sent_bytes
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec

Sizes = Mapping[str, int]
"""Axis -> its number of ranks, or of microbatches for the microbatch axis."""


@dataclass(frozen=True, slots=True)
class Resized:
    """New ``sizes`` of some axes, and the sizes of all axes as ``planned``."""

    planned: Sizes
    sizes: Sizes

    def factor(self, axes: frozenset[str]) -> float:
        """Return the ratio of the new size of a shard that these axes split to its planned size."""
        factor = 1.0
        for axis, size in self.sizes.items():
            if axis in axes:
                factor *= self.planned[axis] / size
        return factor


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of FLOP or bytes on one rank. It is inversely proportional to the size of each of
    ``axes``, the axes that split it."""

    number: float
    axes: frozenset[str] = frozenset()

    def resized(self, to: Resized) -> Amount:
        return replace(self, number=self.number * to.factor(self.axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """A collective over ``num`` ranks of ``axis``, or a transfer; each rank sends ``sent``."""

    kind: str
    axis: str
    num: int
    sent: tuple[Amount, ...]
    dtype: torch.dtype

    @property
    def bytes_sent(self) -> float:
        return sum(amount.number for amount in self.sent)

    def seconds(self, topology: Topology) -> float:
        return topology.collective_seconds(
            self.kind, self.axis, num=self.num, bytes_sent=self.bytes_sent
        )

    def starts(self, topology: Topology) -> float:
        """Return the part of the seconds that does not depend on the bytes: the latencies."""
        return self.seconds(topology) - self.bytes_sent / topology.bandwidth_of(self.axis)

    def resized(self, to: Resized) -> StepMessage:
        """Return the message if axes had other sizes."""
        sent = tuple(amount.resized(to) for amount in self.sent)
        if self.axis not in to.sizes:
            return replace(self, sent=sent)
        num, planned = to.sizes[self.axis], to.planned[self.axis]
        # bytes sent, new over planned: each of n ranks sends (n - 1) / n of the value, or a shard
        ratio = planned / num
        if self.kind != "shift":
            ratio *= (num - 1) / (planned - 1)
        return replace(
            self, num=num, sent=tuple(replace(each, number=each.number * ratio) for each in sent)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of a step. ``bytes``: read and written in device memory. ``rate``: which rates of
    the topology apply to FLOP and bytes; None if the step only sends messages."""

    flops: Amount = Amount(0)
    bytes: tuple[Amount, ...] = ()
    messages: tuple[StepMessage, ...] = ()
    rate: Literal["op", "attention", "update"] | None = None

    def compute_seconds(self, topology: Topology) -> float:
        """Return the seconds of the device's computation; 0 if the step only sends messages."""
        bytes_moved = sum(amount.number for amount in self.bytes)
        match self.rate:
            case None:
                return 0.0
            case "update":
                return topology.update_seconds(bytes_moved=bytes_moved)
            case "op" | "attention":
                return topology.compute_seconds(
                    flops=self.flops.number,
                    bytes_moved=bytes_moved,
                    attention=self.rate == "attention",
                )

    def host_seconds(self, topology: Topology) -> float:
        """Return the seconds that the rank's host needs to launch the step."""
        op_seconds = 0.0 if self.rate is None else topology.launch_seconds("op")
        return op_seconds + sum(topology.launch_seconds(m.kind, m.num) for m in self.messages)

    def communication_seconds(self, topology: Topology) -> float:
        return sum(message.seconds(topology) for message in self.messages)

    def resized(self, to: Resized) -> StepCost:
        """Return the cost of the step if axes had other sizes. Messages over an axis that was
        planned with one rank do not exist, so they cannot be resized."""
        return replace(
            self,
            flops=self.flops.resized(to),
            bytes=tuple(amount.resized(to) for amount in self.bytes),
            messages=tuple(message.resized(to) for message in self.messages),
        )


def step_cost(plan: PlanRecord, step: Step, stage: int) -> StepCost:
    """Return the cost of one execution on a rank of ``stage``. A transfer counts at its sender."""
    match step:
        case Compute() if step.is_view:
            return StepCost(rate="op")
        case Compute():
            specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
            axes = frozenset[str]().union(*(shard_bytes(spec).axes for spec in specs))
            if step.results[0] in plan.standing:
                specs = _written_in_place(plan, step)
            return StepCost(
                flops=Amount(step.flops, axes),
                bytes=tuple(shard_bytes(spec) for spec in specs),
                rate="attention" if step.rule.kind == "attention" else "op",
            )
        case Redistribute() if step.is_free:
            # it does not communicate, but the local copy takes time
            copied = () if step.kind == "relabel" else step.moves
            return StepCost(bytes=tuple(shard_bytes(move.dst) for move in copied), rate="op")
        case Accumulate():
            return StepCost(bytes=(shard_bytes(step.src), shard_bytes(step.dst, 2)), rate="op")
        case Update() if step.owner is not None:
            if not step.is_fullest:
                return StepCost()
            moved = 3 * step.spec.nbytes + 2 * (step.state_bytes + step.master_bytes)
            return StepCost(flops=Amount(step.flops), bytes=(Amount(moved),), rate="op")
        case Update():
            state = 2 * (step.state_bytes + step.master_bytes)  # read and written
            bytes_moved = shard_bytes(step.spec, 3), Amount(state, shard_bytes(step.spec).axes)
            return StepCost(bytes=bytes_moved, rate="update")
        case Redistribute() | Transfer() | Norm():
            return StepCost(messages=messages_of(plan, step, stage))
        case _:
            assert_never(step)


def messages_of(
    plan: PlanRecord, step: Redistribute | Transfer | Norm, stage: int
) -> tuple[StepMessage, ...]:
    """Return the messages that a rank of ``stage`` sends; () if it only receives."""
    match step:
        case Redistribute():
            if step.is_free or not step.is_on(stage):
                return ()
            return (_message(step.moves[:1] if step.tied else step.moves),)
        case Transfer(spec=spec):
            if stage != step.stage:
                return ()
            axis, sent = plan.stage_axis or "", (shard_bytes(spec),)
            return (StepMessage(kind="transfer", axis=axis, num=2, sent=sent, dtype=spec.dtype),)
        case Norm(dtype=dtype):
            return tuple(
                StepMessage(
                    kind="all_reduce",
                    axis=axis,
                    num=num,
                    sent=(Amount(sent_bytes("all_reduce", dtype.itemsize, num)),),
                    dtype=dtype,
                )
                for axis, num in plan.mesh.shape.items()
                if num > 1
            )


def _message(moves: Iterable[Move]) -> StepMessage:
    """Return the message that makes these moves, which have one kind and one axis."""
    moves = tuple(moves)
    first, sent = moves[0], dict[frozenset[str], int]()  # bytes by the axes that split them
    for move, nbytes in zip(moves, bytes_sent_together(moves), strict=True):
        axes = shard_bytes(move.src).axes - {move.axis}
        sent[axes] = sent.get(axes, 0) + nbytes
    return StepMessage(
        kind=first.kind,
        axis=first.axis,
        num=first.src.mesh.axis_size(first.axis),
        sent=tuple(Amount(number, axes) for axes, number in sent.items()),
        dtype=first.src.dtype,
    )


@lru_cache(maxsize=1 << 13)
def shard_bytes(spec: TensorSpec, times: int = 1) -> Amount:
    """Return the bytes of the largest shard, multiplied by ``times``."""
    axes = (axis for axis, p in spec.sharding.items() if isinstance(p, Shard))
    return Amount(times * spec.max_local_nbytes, frozenset(axes))


def _written_in_place(plan: PlanRecord, step: Compute) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors that an op reads and writes, if its result is written into
    the storage of an input: () for a view of it. An op that changes a part of the state counts only
    the other operands, once as read and once as written."""
    from dtensor.sharding.ops.in_place import writes_of  # few programs change state

    result, specs = step.results[0], step.operand_specs
    bases = {name: base for write in plan.state_writes for name, base in write.writes}
    if result not in bases:
        return ()
    other_specs = tuple(spec for at, spec in enumerate(specs) if at != bases[result])
    writes = writes_of(step.op.call)
    assert writes is not None
    state = specs[bases[result]]
    return (*other_specs, *other_specs) if writes.partial else (*specs, state)
