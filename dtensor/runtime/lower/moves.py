"""Lowering of the steps that move values: redistributions on one axis, transfers between stages.

    all_gather of h f32[8@tp,16]      h_gathered.0, h_gathered.1 = all_gather(h); wait
                                      h_gathered = join((h_gathered_from0, h_gathered_from1), ...)

A collective becomes: local code that cuts a block for each peer, the start, the wait, local code
that puts the received blocks together. The block of a peer follows from the index sets of the two
specs, so blocks, units and uneven shards need no special case. One value is cut and joined without
a copy where it is one block. A bucket sends each peer one flat buffer of the values' blocks
(`packed`, `unpacked`, `gathered`, `written`), so daft sees plain flat messages, and the fold in
rank order gives each element the same value as a separate message would.

A gather of parameters is started at its step's place in the plan, others at the place that
overlap.py chooses, and completed by `finish` before the first step that reads one of its results:
meanwhile the rank computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.daft import Buffer, Label, Recv, Send, Wait
from dtensor.numerics import rest_of
from dtensor.runtime.lower.rank_builder import RankBuilder
from dtensor.sharding.plan.steps import Redistribute, Transfer
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.placements import Partial, ReduceOp
from dtensor.sharding.spec.shards import (
    Where,
    block,
    given,
    join,
    shape_of,
    taken,
    write,
)
from dtensor.sharding.spec.spec import TensorSpec

Shape = tuple[int, ...]
Layout = tuple[tuple[Shape, tuple[tuple[Shape, Where], ...]], ...]
"""By value: its shape, and for each peer the shape of its block and the block's place."""


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that has started and is not waited for; ``pieces``: its outputs, by their names
    in the table."""

    step: Redistribute
    pieces: tuple[str, ...]
    label: Label
    source: str | None = None


# -- on one axis -----------------------------------------------------------------------------------


def redistribute(b: RankBuilder, step: Redistribute, *, wait: bool) -> Started | None:
    """Emit a redistribution. If ``wait`` is False and the redistribution communicates, only start
    it and return it: `finish` must come before its results are read. Otherwise return None."""
    if step.is_free:
        _free_move(b, step)
        _record(b, step)
        return None
    started = _start(b, step)
    if not wait:
        return started
    finish(b, started)
    return None


def _free_move(b: RankBuilder, step: Redistribute) -> None:
    (move,), here, source = step.moves, b.here, step.source or None
    if move.kind == "relabel" or (move.kind == "fill" and here[move.axis] == 0):
        b.renamed(step.operands[0], step.name, source)
        return
    code, operands, results = b.segment().code, step.operands, step.results
    if move.kind == "slice":
        where = given(move.src, move.dst, here, here)
        code.apply(block, operands, results, where, source=source)
    else:
        code.apply(rest_of, operands, results, _op_of(move.dst, move.axis), source=source)


def _start(b: RankBuilder, step: Redistribute) -> Started:
    """Pack the message, if it is not the values themselves, and start it."""
    operands = zip(step.operands, step.moves, strict=True)
    kind, axis, source = step.kind, step.axis, step.source or None
    match kind:
        case "all_reduce":
            sent = tuple(b.held(name, move.src) for name, move in operands)
        case "all_gather":
            sent = _mine(b, step) if step.bucket else (b.held(step.operands[0], step.moves[0].src),)
        case "reduce_scatter" | "all_to_all":
            sent = _cut(b, step)
        case "slice" | "fill" | "relabel":
            raise AssertionError(f"{kind} does not communicate")
    results, op = _made(b, step), _op_of(step.moves[0].src, step.axis)
    label = b.collective(
        kind, axis, sent, results, step.label, op=op, source=source, wait=False, of=step
    )
    return Started(step, tuple(name for name, _ in results), label, source)


def _made(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """The outputs of the message: values, or pieces of them from each peer."""
    base, dtype = b.value(step.name), step.moves[0].dst.dtype
    if step.kind in ("all_gather", "all_to_all"):
        if step.bucket:
            peers = _peers(b, step.axis)
            shapes = [(sum(math.prod(m.src.local_shape(p)) for m in step.moves),) for p in peers]
        else:
            shapes = [shape_of(where) for where in _taken(b, step.moves[0])]
        return tuple((f"{base}.{i}", Buffer(shape, dtype)) for i, shape in enumerate(shapes))
    if step.kind == "reduce_scatter" and step.bucket:
        size = sum(math.prod(m.dst.local_shape(b.here)) for m in step.moves)
        return ((f"{base}.total", Buffer((size,), dtype)),)
    return tuple(b.held(n, m.dst) for n, m in zip(step.results, step.moves, strict=True))


def _mine(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """This rank's shards, or its slices of whole values, as one flat buffer."""
    here, flat, local = b.here, f"{b.value(step.name)}.mine", f"{step.name}_mine"
    specs = [m.dst if step.in_place else m.src for m in step.moves]
    wheres = tuple((given(w, m.src, here, here),) for w, m in zip(specs, step.moves, strict=True))
    segment = b.segment()
    segment.table[local] = flat
    segment.code.apply(packed, [step.operands], [local], layout=wheres, is_list=True)
    size = sum(math.prod(m.src.local_shape(here)) for m in step.moves)
    mine = Buffer((size,), step.moves[0].src.dtype)
    b.nbytes[flat] = mine.nbytes
    return ((flat, mine),)


def _cut(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """For each peer its block of this rank's values: a block of one value, or those of all values
    as one flat buffer."""
    peers, segment = _peers(b, step.axis), b.segment()
    wheres = tuple(tuple(given(m.src, m.dst, b.here, peer) for peer in peers) for m in step.moves)
    local = [f"{step.name}_to{i}" for i in range(len(peers))]
    if step.bucket:
        segment.code.apply(packed, [step.operands], local, layout=wheres, is_list=True)
        shapes = [(sum(math.prod(shape_of(w[i])) for w in wheres),) for i in range(len(peers))]
    else:
        for name, where in zip(local, wheres[0], strict=True):
            segment.code.apply(block, step.operands, [name], where)
            segment.views[name] = step.operands[0]
        shapes = [shape_of(where) for where in wheres[0]]
    flat = [f"{b.value(step.name)}.to{i}" for i in range(len(peers))]
    segment.table.update(zip(local, flat, strict=True))
    for name in flat if not step.bucket else ():
        b.shares(name, b.value(step.operands[0]))
    buffers = [Buffer(shape, step.moves[0].src.dtype) for shape in shapes]
    sent = tuple(zip(flat, buffers, strict=True))
    b.nbytes.update((name, buffer.nbytes) for name, buffer in sent)
    return sent


def finish(b: RankBuilder, started: Started) -> None:
    """Wait for a started message, and make the values that later steps read."""
    step, pieces = started.step, started.pieces
    b.start(Wait(pieces[:1], label=started.label, source=started.source))
    match step.kind:
        case "all_gather" | "all_to_all":
            _join(b, step, pieces)
        case "reduce_scatter" if step.bucket:
            segment, shapes = b.segment(), tuple(m.dst.local_shape(b.here) for m in step.moves)
            segment.table[f"{step.name}_total"] = pieces[0]
            whole = [[f"{step.name}_total"]]
            segment.code.apply(unpacked, whole, step.results, layout=shapes, is_list=True)
            for name in step.results:
                b.shares(b.value(name), pieces[0])
        case _:
            pass
    _record(b, step)


def _join(b: RankBuilder, step: Redistribute, pieces: Sequence[str]) -> None:
    """Join whole values from the pieces of a gather; of updated parameters, write each piece into
    its place."""
    segment = b.segment()
    local = [f"{step.name}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    if not step.bucket:
        shape, wheres = step.moves[0].dst.local_shape(b.here), _taken(b, step.moves[0])
        source = step.source or None
        segment.code.apply(join, [local], step.results, shape, *wheres, source=source)
        return
    if step.in_place:
        segment.code.apply(written, [step.operands, local], (), layout=_layout(b, step))
        segment.writes = step.operands
    else:
        layout = _layout(b, step)
        segment.code.apply(gathered, [local], step.results, layout=layout, is_list=True)
    b.close()  # the pieces are dropped here


def _record(b: RankBuilder, step: Redistribute) -> None:
    for name, move in zip(step.results, step.moves):
        b.record(name, move.dst)


def _layout(b: RankBuilder, step: Redistribute) -> Layout:
    """The layout of the flat pieces of a gather."""
    here, peers = b.here, _peers(b, step.axis)
    return tuple(
        (
            move.dst.local_shape(here),
            tuple((move.src.local_shape(p), taken(move.src, move.dst, p, here)) for p in peers),
        )
        for move in step.moves
    )


def _taken(b: RankBuilder, move: Move) -> list[Where]:
    """The places of the pieces from each peer."""
    return [taken(move.src, move.dst, peer, b.here) for peer in _peers(b, move.axis)]


def _peers(b: RankBuilder, axis: str) -> list[dict[str, int]]:
    return [{**b.here, axis: i} for i in range(b.plan.mesh.axis_size(axis))]


def _op_of(spec: TensorSpec, axis: str) -> ReduceOp | None:
    """The fold of a pending axis; None if the axis is not pending."""
    placement = spec.placement(axis)
    return placement.op if isinstance(placement, Partial) else None


# -- between stages --------------------------------------------------------------------------------


def transfer(b: RankBuilder, step: Transfer, stage: int | None) -> tuple[int, str] | None:
    """Send on the stage that has the value, receive on the one that needs it. For a send, returns
    the step of its receive in the schedule, and the value."""
    spec = step.spec
    buffer = Buffer(spec.local_shape(b.here), spec.dtype)
    channel = f"{step.phase} {step.stage}->{step.to_stage}" + (" once" if step.once else "")
    sends = step.stage in b.stages and (stage is None or stage == step.stage)
    receives = step.to_stage in b.stages and (stage is None or stage == step.to_stage)
    source = step.source or None
    what, way = step.operand, f"from stage {step.stage} to {step.to_stage}"
    stays = b.peer(step.stage) == b.peer(step.to_stage)
    waited: tuple[int, str] | None = None
    if stays:
        if sends:  # the value is here already when the other stage's action runs
            b.renamed(step.operand, step.result, source)
    elif sends:
        value = b.value(step.operand)
        to = b.peer(step.to_stage)
        label = b.label.doing("send", what, way)
        b.start(Send(value, to, channel, buffer, label=label, source=source))
        waited = b.shared.actions.received_at(step, b.microbatch), value
    elif receives:
        value, label = b.value(step.result), b.label.doing("receive", what, way)
        receive = Recv(value, b.peer(step.stage), channel, buffer, label=label, source=source)
        # during the action before, so that the value has arrived, and its sender is free, when that
        # ends
        if b.microbatch is None:
            b.start(receive)
        else:
            b.start_early(receive)
        b.start(Wait((value,), label=label, source=source))
    if receives or stays:
        b.record(step.result, spec)
    return waited


# -- functions that generated code calls
# ---------------------------------------------------------------------


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


def written(values: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], layout: Layout) -> None:
    """Write each peer's flat piece into its place in the values."""
    for i, piece in enumerate(pieces):
        for value, part, (_, blocks) in zip(values, _parts(piece, i, layout), layout, strict=True):
            if part.numel():
                write(value, part, blocks[i][1])


def _parts(piece: torch.Tensor, peer: int, layout: Layout) -> list[torch.Tensor]:
    return unpacked([piece], [blocks[peer][0] for _, blocks in layout])
