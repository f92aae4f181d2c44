"""Lowering what moves values: conversions on one axis, buckets of them, transfers between stages.

    all_gather of h f32[8@tp,16]      h_gathered.0, h_gathered.1 = all_gather(h); wait
                                      h_gathered = join((h_gathered_from0, h_gathered_from1), ...)

A collective becomes: local code that cuts a block for each peer, the start, the wait, local code
that puts the received blocks together. What block a peer gets follows from the index sets of the
two specs, so blocks, units and uneven shards need nothing special. One value is cut and joined
without a copy where it is one block. A bucket sends each peer one flat buffer of the values' blocks
(`packed`, `unpacked`, `gathered`, `written`), so daft sees plain flat messages, and the fold in
rank order makes its elements what each value's own message would make them.

A gather of parameters is started where its step stands in the plan, others where overlap.py says,
and completed by `finish` before the first step that reads one of its results: meanwhile the rank
computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor.daft import Buffer, Recv, Send, Wait
from dtensor.numerics import rest_of
from dtensor.runtime.lower.builder import RankBuilder
from dtensor.sharding.plan.steps import Bucket, Convert, Transfer
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move
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

Shape = tuple[int, ...]
Layout = tuple[tuple[Shape, tuple[tuple[Shape, Where], ...]], ...]
"""Per value: its shape, and for each peer the shape of its block and where it stands."""


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that has been started and not been waited for; ``pieces``: what it makes, by
    their names in the table."""

    step: Convert | Bucket
    pieces: tuple[str, ...]
    label: str
    source: str | None = None


# -- one value -------------------------------------------------------------------------------------


def convert(b: RankBuilder, step: Convert, *, wait: bool = True) -> Started | None:
    """``wait=False``: a message is started, and to be finished before its result is read."""
    started = None
    if step.move.kind in FREE_KINDS:
        _free_move(b, step)
    else:
        started = _start(b, step)
    b.record(step.result, step.move.dst)
    if wait and started is not None:
        finish(b, started)
        return None
    return started


def _free_move(b: RankBuilder, step: Convert) -> None:
    move, here, source = step.move, b.here, step.source or None
    if move.kind == "relabel" or (move.kind == "fill" and here[move.axis] == 0):
        b.renamed(step.operand, step.result, source)
        return
    code, operands, results = b.segment().code, [step.operand], [step.result]
    if move.kind == "slice":
        where = given(move.src, move.dst, here, here)
        code.apply(block, operands, results, where, source=source)
    elif move.dst.placement(move.axis) == Partial("sum"):
        code.apply(torch.zeros_like, operands, results, source=source)
    else:
        code.apply(rest_of, operands, results, "softmax", source=source)


def _start(b: RankBuilder, step: Convert) -> Started:
    """The collective of one move: pack, start."""
    move, source = step.move, step.source or None
    what, result = f"{step.operand} over {move.axis}", step.result
    whole = (b.held(step.operand, move.src),)
    op = None
    match move.kind:
        case "all_reduce" | "reduce_scatter":
            sent = whole if move.kind == "all_reduce" else _cut(b, step)
            made, op = (b.held(result, move.dst),), _op_of(move)
        case "all_gather" | "all_to_all":
            sent = whole if move.kind == "all_gather" else _cut(b, step)
            pieces = (f"{b.value(result)}.{i}" for i in range(b.plan.mesh.axis_size(move.axis)))
            buffers = (Buffer(shape_of(where), move.dst.dtype) for where in _taken(b, move))
            made = tuple(zip(pieces, buffers, strict=True))
        case "slice" | "fill" | "relabel":
            raise AssertionError(f"{move.kind} does not communicate")
    b.collective(move.kind, move.axis, sent, made, what, op=op, source=source, wait=False)
    label = f"{b.label}: {move.kind} {what}"
    return Started(step, tuple(name for name, _ in made), label, source)


def _join(b: RankBuilder, step: Convert, pieces: Sequence[str]) -> None:
    """Put together what came from each peer, where it came in pieces."""
    move, result = step.move, step.result
    if move.kind in ("all_gather", "all_to_all"):
        segment, shape = b.segment(), move.dst.local_shape(b.here)
        local = [f"{result}_from{i}" for i in range(len(pieces))]
        segment.table.update(zip(local, pieces, strict=True))
        wheres, source = _taken(b, move), step.source or None
        segment.code.apply(join, [local], [result], shape, *wheres, source=source)


def _taken(b: RankBuilder, move: Move) -> list[Where]:
    """Where what comes from each peer stands."""
    return [taken(move.src, move.dst, peer, b.here) for peer in _peers(b, move.axis)]


def _cut(b: RankBuilder, step: Convert) -> tuple[tuple[str, Buffer], ...]:
    """A block for each peer: what it is to hold of what I hold."""
    segment, move = b.segment(), step.move
    found: list[tuple[str, Buffer]] = []
    for i, peer in enumerate(_peers(b, move.axis)):
        name = f"{step.result}_to{i}"
        where = given(move.src, move.dst, b.here, peer)
        segment.code.apply(block, [step.operand], [name], where)
        segment.table[name] = f"{b.value(step.result)}.to{i}"
        segment.views[name] = step.operand
        b.shares(segment.table[name], b.value(step.operand))
        found.append((segment.table[name], Buffer(shape_of(where), move.src.dtype)))
        b.nbytes[segment.table[name]] = found[-1][1].nbytes
    return tuple(found)


def _peers(b: RankBuilder, axis: str) -> list[dict[str, int]]:
    return [{**b.here, axis: i} for i in range(b.plan.mesh.axis_size(axis))]


def _op_of(move: Move) -> ReduceOp | None:
    """How a reduction folds; None of a move that does not reduce."""
    placement = move.src.placement(move.axis)
    return placement.op if isinstance(placement, Partial) else None


# -- between stages --------------------------------------------------------------------------------


def transfer(b: RankBuilder, step: Transfer, stage: int | None) -> tuple[int, str] | None:
    """Sent by the stage that has it, received by the one that needs it. Of a send, the step of its
    receive in the schedule, and the value."""
    spec = step.spec
    buffer = Buffer(spec.local_shape(b.here), spec.dtype)
    channel = f"{step.phase} {step.stage}->{step.to_stage}" + (" once" if step.once else "")
    sends = step.stage in b.stages and (stage is None or stage == step.stage)
    receives = step.to_stage in b.stages and (stage is None or stage == step.to_stage)
    source = step.source or None
    what = f"{step.operand} from stage {step.stage} to {step.to_stage}"
    stays = b.peer(step.stage) == b.peer(step.to_stage)
    waited: tuple[int, str] | None = None
    if stays:
        if sends:  # the value is here already when the other stage's action comes
            b.renamed(step.operand, step.result, source)
    elif sends:
        value = b.value(step.operand)
        to = b.peer(step.to_stage)
        b.start(Send(value, to, channel, buffer, label=f"{b.label}: send {what}", source=source))
        waited = b.shared.actions.received_at(step, b.microbatch), value
    elif receives:
        value, label = b.value(step.result), f"{b.label}: receive {what}"
        receive = Recv(value, b.peer(step.stage), channel, buffer, label=label, source=source)
        # during the action before, so that the value is there, and its sender free, when it ends
        if b.microbatch is None:
            b.start(receive)
        else:
            b.start_early(receive)
        b.start(Wait((value,), label=label, source=source))
    if receives or stays:
        b.record(step.result, spec)
    return waited


# -- buckets ---------------------------------------------------------------------------------------


def bucket(b: RankBuilder, step: Bucket, *, wait: bool = True) -> Started | None:
    """A reduction; or a gather, which is to be finished before its results are read, as the former
    are with ``wait=False``."""
    match step.kind:
        case "all_reduce":
            started = _start_reduction(b, step)
        case "reduce_scatter":
            started = _start_scatter(b, step)
        case "all_gather":
            return _start_gather(b, step)
        case _:
            raise AssertionError(f"a bucket does not {step.kind}")
    if not wait:
        return started
    finish(b, started)
    return None


def _start_reduction(b: RankBuilder, step: Bucket) -> Started:
    sent = (b.held(name, m.src) for name, m in zip(step.operands, step.moves, strict=True))
    sums = (b.held(name, m.dst) for name, m in zip(step.results, step.moves, strict=True))
    return _send(b, step, tuple(sent), tuple(sums))


def _start_scatter(b: RankBuilder, step: Bucket) -> Started:
    here = b.here
    peers = _peers(b, step.axis)
    src, dst = step.moves[0].src.dtype, step.moves[0].dst.dtype
    wheres = tuple(tuple(given(m.src, m.dst, here, peer) for peer in peers) for m in step.moves)
    shapes = tuple(m.dst.local_shape(here) for m in step.moves)
    segment = b.segment()
    base = b.value(step.name)
    flat = [f"{base}.to{i}" for i in range(len(peers))]
    local = [f"{step.name}_to{i}" for i in range(len(peers))]
    segment.table.update(zip(local, flat, strict=True))
    segment.code.apply(packed, [step.operands], local, layout=wheres, is_list=True)
    sizes = [sum(math.prod(shape_of(w[i])) for w in wheres) for i in range(len(peers))]
    sent = tuple((name, Buffer((n,), src)) for name, n in zip(flat, sizes, strict=True))
    b.nbytes.update((name, buffer.nbytes) for name, buffer in sent)
    total = f"{base}.total"
    return _send(b, step, sent, ((total, Buffer((sum(map(math.prod, shapes)),), dst)),))


def _start_gather(b: RankBuilder, step: Bucket) -> Started:
    """Send this rank's shards, or its slices of what it holds whole, as one flat buffer."""
    here, dtype = b.here, step.moves[0].src.dtype
    sizes = [
        sum(math.prod(m.src.local_shape(peer)) for m in step.moves) for peer in _peers(b, step.axis)
    ]
    whole = [m.dst if step.in_place else m.src for m in step.moves]
    wheres = tuple((given(w, m.src, here, here),) for w, m in zip(whole, step.moves, strict=True))
    segment = b.segment()
    base = b.value(step.name)
    flat, local = f"{base}.mine", f"{step.name}_mine"
    segment.table[local] = flat
    segment.code.apply(packed, [step.operands], [local], layout=wheres, is_list=True)
    mine = Buffer((sizes[here[step.axis]],), dtype)
    b.nbytes[flat] = mine.nbytes
    pieces = tuple((f"{base}.{i}", Buffer((size,), dtype)) for i, size in enumerate(sizes))
    return _send(b, step, ((flat, mine),), pieces)


def finish(b: RankBuilder, started: Started) -> None:
    """Wait for what was started, and make the values of it that later steps read."""
    step, pieces = started.step, started.pieces
    b.start(Wait(pieces[:1], label=started.label, source=started.source))
    match step:
        case Convert():
            _join(b, step, pieces)
        case Bucket(kind="all_gather"):
            _spread(b, step, pieces)
        case Bucket(kind="reduce_scatter"):
            segment, shapes = b.segment(), tuple(m.dst.local_shape(b.here) for m in step.moves)
            segment.table[f"{step.name}_total"] = pieces[0]
            whole = [[f"{step.name}_total"]]
            segment.code.apply(unpacked, whole, step.results, layout=shapes, is_list=True)
            _record(b, step)
            for name in step.results:
                b.shares(b.value(name), pieces[0])
        case Bucket():
            _record(b, step)


def _spread(b: RankBuilder, step: Bucket, pieces: Sequence[str]) -> None:
    """Put whole values together from the pieces of a gather; of updated parameters, write each
    piece where it stands in them."""
    segment = b.segment()
    local = [f"{step.name}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    layout = _layout(b, step)
    if step.in_place:
        segment.code.apply(written, [step.operands, local], (), layout=layout)
        segment.writes = step.operands
    else:
        segment.code.apply(gathered, [local], step.results, layout=layout, is_list=True)
    b.close()  # the pieces are dropped here
    _record(b, step)


def _send(
    b: RankBuilder,
    step: Bucket,
    sent: tuple[tuple[str, Buffer], ...],
    made: tuple[tuple[str, Buffer], ...],
) -> Started:
    kind, what = step.kind, f"{step.name} over {step.axis}"
    assert kind in ("all_reduce", "reduce_scatter", "all_gather")
    b.collective(kind, step.axis, sent, made, what, op=_op_of(step.moves[0]), wait=False)
    return Started(step, tuple(name for name, _ in made), f"{b.label}: {kind} {what}")


def _record(b: RankBuilder, step: Bucket) -> None:
    for name, move in zip(step.results, step.moves):
        b.record(name, move.dst)


def _layout(b: RankBuilder, step: Bucket) -> Layout:
    """How the flat pieces of a gather are taken apart."""
    here, peers = b.here, _peers(b, step.axis)
    return tuple(
        (
            move.dst.local_shape(here),
            tuple((move.src.local_shape(p), taken(move.src, move.dst, p, here)) for p in peers),
        )
        for move in step.moves
    )


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


def written(values: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], layout: Layout) -> None:
    """Write each peer's flat piece where it stands in the values."""
    for i, piece in enumerate(pieces):
        for value, part, (_, blocks) in zip(values, _parts(piece, i, layout), layout, strict=True):
            if part.numel():
                write(value, part, blocks[i][1])


def _parts(piece: torch.Tensor, peer: int, layout: Layout) -> list[torch.Tensor]:
    return unpacked([piece], [blocks[peer][0] for _, blocks in layout])
