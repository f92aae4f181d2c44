"""Lowering moves of several values as one message: reductions of gradients, gathers of parameters.

A reduce_scatter sends each peer one flat buffer of the blocks that it is to hold; an all_gather
sends one flat buffer of a rank's shards. Packing and putting together are lines of local code
(`packed`, `unpacked`, `gathered`, `regathered`), so daft sees plain flat messages, and the fold in
rank order makes a bucket's elements what each value's own message would make them.

A gather of parameters is started where its step stands in the plan, and completed by `finish`
before the first step that reads one of its results: meanwhile the rank computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dtensor.daft import Buffer, Collective, Wait
from dtensor.runtime.lower.code import CodeBuilder
from dtensor.sharding.plan.steps import Bucket
from dtensor.sharding.redistribute.moves import Move, overlap, positions
from dtensor.sharding.spec.blocks import Where, block, join, write
from dtensor.sharding.spec.placements import Intervals, Partial
from dtensor.sharding.spec.spec import TensorSpec

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank import RankLowering

Shape = tuple[int, ...]
Layout = tuple[tuple[Shape, tuple[tuple[Shape, Where], ...]], ...]
"""Per value: its shape, and for each peer the shape of its block and where it stands."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather that has been started and not been waited for."""

    step: Bucket
    pieces: tuple[str, ...]  # names in the table
    microbatch: int | None
    label: str


def bucket(rank: RankLowering, step: Bucket, microbatch: int | None) -> None:
    match step.kind:
        case "all_reduce":
            _reduce(rank, step, microbatch)
        case "reduce_scatter":
            _scatter(rank, step, microbatch)
        case "all_gather":
            _start_gather(rank, step, microbatch)
        case _:
            raise AssertionError(f"a bucket does not {step.kind}")


def _reduce(rank: RankLowering, step: Bucket, microbatch: int | None) -> None:
    here = rank.at(microbatch)
    placement = step.moves[0].src.placement(step.axis)
    assert isinstance(placement, Partial)
    buffers = tuple(Buffer(m.src.local_shape(here), m.src.dtype) for m in step.moves)
    sums = tuple(Buffer(m.dst.local_shape(here), m.dst.dtype) for m in step.moves)
    inputs = tuple(rank.value(name, microbatch) for name in step.operands)
    results = tuple(rank.value(name, microbatch) for name in step.results)
    label = f"{rank.label}: all_reduce {step.name} over {step.axis}"
    rank.start(
        Collective(
            "all_reduce",
            rank.plan.mesh.group(rank.rank, step.axis),
            inputs,
            results,
            buffers,
            sums,
            placement.op,
            step.axis,
            label=label,
        )
    )
    rank.start(Wait(results[:1], label=label))
    for name, move in zip(step.results, step.moves, strict=True):
        rank.record(name, move.dst, microbatch)


def _scatter(rank: RankLowering, step: Bucket, microbatch: int | None) -> None:
    here = rank.at(microbatch)
    placement = step.moves[0].src.placement(step.axis)
    assert isinstance(placement, Partial)
    group = rank.plan.mesh.group(rank.rank, step.axis)
    peers = [{**here, step.axis: i} for i in range(len(group))]
    dtype = step.moves[0].src.dtype
    wheres = tuple(
        tuple(_within(m.src, here, overlap(m.src, m.dst, here, peer)) for peer in peers)
        for m in step.moves
    )
    numels = [sum(_numel(of_value[i]) for of_value in wheres) for i in range(len(peers))]
    segment = rank.segment(microbatch)
    local = [f"{step.name}_to{i}" for i in range(len(peers))]
    flat = [f"{rank.value(step.name, microbatch)}.to{i}" for i in range(len(peers))]
    total = f"{rank.value(step.name, microbatch)}.total"
    rank.names(segment, step.operands, microbatch)
    segment.table.update(zip(local, flat, strict=True))
    _line(segment.code, local, "packed", packed, step.operands, wheres)
    for name, numel in zip(flat, numels, strict=True):
        rank.nbytes[name] = numel * dtype.itemsize
    mine = [math.prod(m.dst.local_shape(here)) for m in step.moves]
    label = f"{rank.label}: reduce_scatter {step.name} over {step.axis}"
    rank.start(
        Collective(
            "reduce_scatter",
            group,
            tuple(flat),
            (total,),
            tuple(Buffer((numel,), dtype) for numel in numels),
            (Buffer((sum(mine),), step.moves[0].dst.dtype),),
            placement.op,
            step.axis,
            label=label,
        )
    )
    rank.start(Wait((total,), label=label))
    segment = rank.segment(microbatch)
    segment.table[f"{step.name}_total"] = total
    rank.names(segment, step.results, microbatch)
    shapes = tuple(m.dst.local_shape(here) for m in step.moves)
    _line(segment.code, step.results, "unpacked", unpacked, [f"{step.name}_total"], shapes)
    for name, move in zip(step.results, step.moves, strict=True):
        rank.record(name, move.dst, microbatch)


def _start_gather(rank: RankLowering, step: Bucket, microbatch: int | None) -> None:
    segment = rank.segment(microbatch)
    rank.names(segment, step.operands, microbatch)
    here = rank.at(microbatch)
    whole = tuple((_whole(m.src.local_shape(here)),) for m in step.moves)
    pieces = _send_shards(rank, step, segment_operands=step.operands, wheres=whole, at=microbatch)
    label = f"{rank.label}: all_gather {step.name} over {step.axis}"
    started = Gather(step, pieces, microbatch, label)
    for name in step.results:
        rank.gathers[rank.value(name, microbatch)] = started


def finish(rank: RankLowering, values: Sequence[str], microbatch: int | None) -> None:
    """Complete the gathers that make these plan values."""
    for value in values:
        name = rank.value(value, microbatch)
        if name in rank.gathers:
            _finish_gather(rank, rank.gathers[name])


def _finish_gather(rank: RankLowering, started: Gather) -> None:
    step, microbatch = started.step, started.microbatch
    rank.start(Wait(started.pieces[:1], label=started.label))
    segment = rank.segment(microbatch)
    local = [f"{step.name}_from{i}" for i in range(len(started.pieces))]
    segment.table.update(zip(local, started.pieces, strict=True))
    rank.names(segment, step.results, microbatch)
    layout = _layout(rank, step.moves, microbatch)
    _line(segment.code, step.results, "gathered", gathered, local, layout)
    rank.close()  # the pieces are dropped here
    for name, move in zip(step.results, step.moves, strict=True):
        rank.record(name, move.dst, microbatch)
        del rank.gathers[rank.value(name, microbatch)]


def regather(rank: RankLowering, step: Bucket) -> None:
    """Put updated parameters together again, in place: every rank sends its slices."""
    here = rank.at(None)
    rank.label = "regather"
    rank.close()
    segment = rank.segment(None)
    rank.names(segment, step.operands, None)
    wheres = tuple((_within(m.dst, here, _held(m.src, here)),) for m in step.moves)
    pieces = _send_shards(rank, step, segment_operands=step.operands, wheres=wheres, at=None)
    label = f"{rank.label}: all_gather {step.name} over {step.axis}"
    rank.start(Wait(pieces[:1], label=label))
    segment = rank.segment(None)
    local = [f"{step.name}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    rank.names(segment, step.operands, None)
    layout = segment.code.bind("layout", _layout(rank, step.moves, None))
    function = segment.code.bind("regathered", regathered)
    values, given = _tuple(step.operands), _tuple(local)
    segment.code.line(
        f"{function}({values}, {given}, {layout})", [*step.operands, *local], (), None
    )
    segment.writes = tuple(segment.table[name] for name in step.operands)
    rank.close()
    rank.label = "optimizer"


def _send_shards(
    rank: RankLowering,
    step: Bucket,
    *,
    segment_operands: Sequence[str],
    wheres: tuple[tuple[Where, ...], ...],
    at: int | None,
) -> tuple[str, ...]:
    """Start an all_gather of the operands' blocks in one flat buffer; the pieces' names."""
    here = rank.at(at)
    group = rank.plan.mesh.group(rank.rank, step.axis)
    base, dtype = rank.value(step.name, at), step.moves[0].src.dtype
    numels = [
        sum(math.prod(m.src.local_shape({**here, step.axis: i})) for m in step.moves)
        for i in range(len(group))
    ]
    flat, local = f"{base}.mine", f"{step.name}_mine"
    segment = rank.segment(at)
    segment.table[local] = flat
    _line(segment.code, [local], "packed", packed, segment_operands, wheres)
    own = numels[here[step.axis]]
    rank.nbytes[flat] = own * dtype.itemsize
    pieces = tuple(f"{base}.{i}" for i in range(len(group)))
    rank.start(
        Collective(
            "all_gather",
            group,
            (flat,),
            pieces,
            (Buffer((own,), dtype),),
            tuple(Buffer((numel,), dtype) for numel in numels),
            None,
            step.axis,
            label=f"{rank.label}: all_gather {step.name} over {step.axis}",
        )
    )
    return pieces


def _layout(rank: RankLowering, moves: Sequence[Move], microbatch: int | None) -> Layout:
    """How the flat pieces of a gather of these moves are taken apart."""
    here = rank.at(microbatch)
    found: list[tuple[Shape, tuple[tuple[Shape, Where], ...]]] = []
    for move in moves:
        blocks: list[tuple[Shape, Where]] = []
        for i in range(move.src.mesh.axis_size(move.axis)):
            peer = {**here, move.axis: i}
            where = _within(move.dst, here, _held(move.src, peer))
            blocks.append((move.src.local_shape(peer), where))
        found.append((move.dst.local_shape(here), tuple(blocks)))
    return tuple(found)


def _held(spec: TensorSpec, at: Mapping[str, int]) -> Where:
    return tuple(spec.intervals(dim, at) for dim in range(len(spec.shape)))


def _within(spec: TensorSpec, here: Mapping[str, int], wanted: Sequence[Intervals]) -> Where:
    """Where global indices stand in the shard that the rank at ``here`` holds."""
    return positions(_held(spec, here), wanted)


def _whole(shape: Shape) -> Where:
    return tuple(((0, size),) if size else () for size in shape)


def _numel(where: Where) -> int:
    return math.prod(sum(hi - lo for lo, hi in intervals) for intervals in where)


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _line(
    code: CodeBuilder,
    results: Sequence[str],
    name: str,
    function: object,
    operands: Sequence[str],
    literal: object,
) -> None:
    """``results, = function((operands,), literal)``."""
    called, bound = code.bind(name, function), code.bind("layout", literal)
    text = f"{', '.join(results)}, = {called}({_tuple(operands)}, {bound})"
    code.line(text, operands, results, None)


# -- what generated code calls ---------------------------------------------------------------------


def packed(values: Sequence[torch.Tensor], wheres: Sequence[Sequence[Where]]) -> list[torch.Tensor]:
    """For each peer one flat tensor: the values' blocks for it, ``wheres[value][peer]``."""
    flat: list[torch.Tensor] = []
    for i in range(len(wheres[0])):
        blocks = [block(v, of[i]).reshape(-1) for v, of in zip(values, wheres, strict=True)]
        flat.append(torch.cat(blocks))
    return flat


def unpacked(flat: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The values that one flat tensor holds, as views of it."""
    parts = flat[0].split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def gathered(pieces: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """Whole values from each peer's flat piece."""
    parts = [_parts(piece, i, layout) for i, piece in enumerate(pieces)]
    return [
        join([of[v] for of in parts], shape, *(where for _, where in blocks))
        for v, (shape, blocks) in enumerate(layout)
    ]


def regathered(
    values: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], layout: Layout
) -> None:
    """Write each peer's flat piece where it stands in the values."""
    for i, piece in enumerate(pieces):
        for value, part, (_, blocks) in zip(values, _parts(piece, i, layout), layout, strict=True):
            if part.numel():
                write(value, part, blocks[i][1])


def _parts(piece: torch.Tensor, peer: int, layout: Layout) -> list[torch.Tensor]:
    return unpacked([piece], [blocks[peer][0] for _, blocks in layout])
