"""Lowering what moves values: conversions on one axis, and transfers between stages.

A collective becomes: local code that cuts a block for each peer, the start, the wait, local code
that puts the received blocks together. What block a peer gets follows from the index sets of the
two specs (sharding/redistribute/moves.py), so blocks, units and uneven shards need nothing special.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Buffer as WireBuffer
from dtensor.daft import Collective, Recv, Send, Wait
from dtensor.numerics import ReduceOp
from dtensor.sharding.plan.steps import Convert, Transfer
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move, overlap, positions
from dtensor.sharding.spec.blocks import block, join
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank import RankLowering


def convert(rank: RankLowering, step: Convert, microbatch: int | None) -> None:
    move = step.move
    if move.kind in FREE_KINDS:
        _free_move(rank, step, microbatch)
    else:
        communicate(rank, move, step.operand, step.result, microbatch, step.source or None)
    rank.record(step.result, move.dst, microbatch)


def _free_move(rank: RankLowering, step: Convert, microbatch: int | None) -> None:
    segment = rank.segment(microbatch)
    move, here = step.move, rank.at(microbatch)
    source = step.source or None
    rank.names(segment, (step.operand, step.result), microbatch)
    match move.kind:
        case "slice":
            where = _within(move.src, move.dst, here, here)
            segment.code.apply(block, "block", [step.operand], step.result, where, source=source)
        case "zero_fill" if here[move.axis] > 0:
            segment.code.apply(
                torch.zeros_like, "zeros_like", [step.operand], step.result, source=source
            )
        case _:
            segment.code.line(
                f"{step.result} = {step.operand}", [step.operand], [step.result], source
            )


def communicate(
    rank: RankLowering,
    move: Move,
    operand: str,
    result: str,
    microbatch: int | None,
    source: str | None,
) -> None:
    """The collective of one move: pack, start, wait, put together."""
    group = rank.plan.mesh.group(rank.rank, move.axis)
    here = rank.at(microbatch)
    peers = [{**here, move.axis: i} for i in range(len(group))]
    value_in, value_out = rank.value(operand, microbatch), rank.value(result, microbatch)
    pieces_in: list[str] = [value_in]
    shapes_in: list[tuple[int, ...]] = [move.src.local_shape(here)]
    pieces_out: list[str] = [value_out]
    shapes_out: list[tuple[int, ...]] = [move.dst.local_shape(here)]
    op: ReduceOp | None = None
    match move.kind:
        case "all_reduce":
            op = _op_of(move)
        case "reduce_scatter":
            op = _op_of(move)
            pieces_in, shapes_in = _pack(rank, move, operand, result, microbatch, peers)
        case "all_gather":
            pieces_out = [f"{value_out}.{i}" for i in range(len(group))]
            shapes_out = [move.src.local_shape(peer) for peer in peers]
        case "all_to_all":
            pieces_in, shapes_in = _pack(rank, move, operand, result, microbatch, peers)
            pieces_out = [f"{value_out}.{i}" for i in range(len(group))]
            shapes_out = [_shape(overlap(move.src, move.dst, peer, here)) for peer in peers]
        case _:
            raise AssertionError(f"{move.kind} does not communicate")
    label = f"{rank.label}: {move.kind} {operand} over {move.axis}"
    rank.start(
        Collective(
            move.kind,
            group,
            tuple(pieces_in),
            tuple(pieces_out),
            tuple(WireBuffer(s, move.src.dtype) for s in shapes_in),
            tuple(WireBuffer(s, move.dst.dtype) for s in shapes_out),
            op,
            move.axis,
            label=label,
            source=source,
        )
    )
    rank.start(Wait(tuple(pieces_out[:1]), label=label, source=source))
    if move.kind in ("all_gather", "all_to_all"):
        _unpack(rank, move, result, pieces_out, microbatch, peers, source)


def _pack(
    rank: RankLowering,
    move: Move,
    operand: str,
    result: str,
    microbatch: int | None,
    peers: Sequence[Mapping[str, int]],
) -> tuple[list[str], list[tuple[int, ...]]]:
    """A block for each peer: what it is to hold of what I hold."""
    segment = rank.segment(microbatch)
    here = rank.at(microbatch)
    rank.names(segment, (operand,), microbatch)
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for i, peer in enumerate(peers):
        name = f"{result}_to{i}"
        where = _within(move.src, move.dst, here, peer)
        segment.code.apply(block, "block", [operand], name, where)
        segment.table[name] = f"{rank.value(result, microbatch)}.to{i}"
        names.append(segment.table[name])
        shapes.append(_shape(where))
        rank.nbytes[names[-1]] = WireBuffer(shapes[-1], move.src.dtype).nbytes
    return names, shapes


def _unpack(
    rank: RankLowering,
    move: Move,
    result: str,
    pieces: Sequence[str],
    microbatch: int | None,
    peers: Sequence[Mapping[str, int]],
    source: str | None,
) -> None:
    segment = rank.segment(microbatch)
    here = rank.at(microbatch)
    local = [f"{result}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    rank.names(segment, (result,), microbatch)
    held = [move.dst.intervals(d, here) for d in range(len(move.dst.shape))]
    wheres = [positions(held, overlap(move.src, move.dst, peer, here)) for peer in peers]
    segment.code.apply(
        join,
        "join",
        local,
        result,
        move.dst.local_shape(here),
        *wheres,
        source=source,
        packed=True,
    )


def transfer(
    rank: RankLowering,
    step: Transfer,
    microbatch: int | None,
    stage: int | None,
) -> None:
    """Sent by the stage that has it, received by the one that needs it."""
    here = rank.at(microbatch)
    buffer = WireBuffer(step.spec.local_shape(here), step.spec.dtype)
    channel = f"{step.phase} {step.stage}->{step.to_stage}"
    if step.once:
        channel += " once"
    sends = step.stage in rank.stages and (stage is None or stage == step.stage)
    receives = step.to_stage in rank.stages and (stage is None or stage == step.to_stage)
    source = step.source or None
    what = f"{step.operand} from stage {step.stage} to {step.to_stage}"
    if sends and receives:  # both stages live on this rank
        segment = rank.segment(microbatch)
        rank.names(segment, (step.operand, step.result), microbatch)
        segment.code.line(f"{step.result} = {step.operand}", [step.operand], [step.result], source)
    elif rank.peer(step.stage) == rank.peer(step.to_stage):
        if sends:  # the value is here already when the other stage's action comes
            segment = rank.segment(microbatch)
            rank.names(segment, (step.operand, step.result), microbatch)
            segment.code.line(
                f"{step.result} = {step.operand}", [step.operand], [step.result], source
            )
    elif sends:
        value = rank.value(step.operand, microbatch)
        label = f"{rank.label}: send {what}"
        rank.start(
            Send(value, rank.peer(step.to_stage), channel, buffer, label=label, source=source)
        )
        rank.sends.append((rank.actions.received_at(step, microbatch), value))
    elif receives:
        value = rank.value(step.result, microbatch)
        label = f"{rank.label}: receive {what}"
        receive = Recv(value, rank.peer(step.stage), channel, buffer, label=label, source=source)
        # during the action before, so that the value is there, and its sender free, when it ends
        if microbatch is None:
            rank.start(receive)
        else:
            rank.start_early(receive)
        rank.start(Wait((value,), label=label, source=source))
    if receives or rank.peer(step.stage) == rank.peer(step.to_stage):
        rank.record(step.result, step.spec, microbatch)


def _within(
    src: TensorSpec, dst: TensorSpec, sender: Mapping[str, int], receiver: Mapping[str, int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The block of ``sender``'s shard that ``receiver`` is to hold, in local positions."""
    held = [src.intervals(d, sender) for d in range(len(src.shape))]
    return positions(held, overlap(src, dst, sender, receiver))


def _shape(where: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, ...]:
    return tuple(sum(hi - lo for lo, hi in intervals) for intervals in where)


def _op_of(move: Move) -> ReduceOp:
    placement = move.src.placement(move.axis)
    assert isinstance(placement, Partial)
    return placement.op
