"""Lowering of the steps that move values: redistributions on one axis, transfers between stages.

    all_gather of h f32[8@tp,16]      h_gathered.0, h_gathered.1 = all_gather(h); wait
                                      h_gathered = join((h_gathered_from0, h_gathered_from1), ...)

A collective becomes local code that cuts a block for each peer, the start, the wait, and local code
that joins the received blocks. The blocks follow from the index sets of the two specs, so uneven
shards need no special case. A value that is one block is cut and joined without a copy. A bucket
sends each peer one flat buffer with the blocks of all its values; the reduction in rank order then
gives each element the same value as separate messages would. A shift sends local tensors as they
are. Exchanges of rows of experts are sized
by the counts of all ranks, which are gathered before and stay in pieces, one for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dtensor.daft import Buffer, Label, Recv, Send, Sizes, Wait
from dtensor.numerics import rest_of
from dtensor.runtime.lower import experts
from dtensor.runtime.lower.rank_builder import RankBuilder
from dtensor.sharding.local.expert_rows import (
    check_received,
    held_counts,
    pieces_by_expert,
    pieces_by_token,
    rows_by_expert,
    rows_by_token,
)
from dtensor.sharding.plan.steps import Redistribute, Transfer
from dtensor.sharding.redistribute.moves import Move
from dtensor.sharding.spec.placements import (
    REPLICATE,
    Partial,
    ReduceOp,
    cuts_experts,
)
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
"""For each value: its shape, and for each peer the shape and the place of the peer's block."""


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that has started and is not complete; ``pieces``: the names of its outputs in
    the table."""

    step: Redistribute
    pieces: tuple[str, ...]
    label: Label
    source: str | None = None


# -- on one axis -----------------------------------------------------------------------------------


def redistribute(
    b: RankBuilder, step: Redistribute, *, wait: bool, channel: str = ""
) -> Started | None:
    """Emit a redistribution. If ``wait`` is False and the redistribution communicates, only start
    it and return it: `finish` must come before its results are read. Otherwise return None.
    ``channel``: the channel of the message; by default the axis."""
    if step.is_free:
        _free_move(b, step)
        _record(b, step)
        return None
    started = _start(b, step, channel or step.axis)
    if not wait:
        return started
    finish(b, started)
    return None


def _free_move(b: RankBuilder, step: Redistribute) -> None:
    """Emit the local code of a redistribution that does not communicate: "relabel" keeps the value,
    "fill" keeps it on rank 0 of the axis and gives the op's identity to others, "slice" takes the
    rank's block."""
    (move,), coordinates, source = step.moves, b.coordinates, step.source or None
    if move.kind == "relabel" or (move.kind == "fill" and coordinates[move.axis] == 0):
        b.assign(step.operands[0], step.name, source)
        return
    code, operands, results = b.segment().code, step.operands, step.results
    if move.kind == "hold":
        pieces = [_pieces_of_counts(b, step.operands[0], move.axis)]
        part = _parts(b, move.dst, move.axis)[coordinates[move.axis]]
        code.apply(held_counts, pieces, results, part, b.shared.device, source=source)
    elif move.kind == "slice":
        block_ranges = given(move.src, move.dst, coordinates, coordinates)
        code.apply(block, operands, results, block_ranges, source=source)
    else:
        code.apply(rest_of, operands, results, _reduction_of(move.dst, move.axis), source=source)


def _start(b: RankBuilder, step: Redistribute, channel: str) -> Started:
    """Emit the code that packs the message, if it must be packed, and the start."""
    operands = zip(step.operands, step.moves, strict=True)
    kind, axis, source = step.kind, step.axis, step.source or None
    match kind:
        case "all_to_all" if step.counts:
            return _start_sized(b, step)
        case "all_gather" if step.moves[0].gathers_counts:
            return _start_counts(b, step)
        case "all_reduce" | "shift":
            sent = tuple(b.named_buffer(name, move.src) for name, move in operands)
        case "all_gather":
            sent = (
                _pack_contribution(b, step)
                if step.bucket
                else (b.named_buffer(step.operands[0], step.moves[0].src),)
            )
        case "reduce_scatter" | "all_to_all":
            sent = _pack_blocks(b, step)
        case "slice" | "fill" | "relabel" | "hold":
            raise AssertionError(f"{kind} does not communicate")
    results, op = _output_buffers(b, step), _reduction_of(step.moves[0].src, step.axis)
    label = b.collective(
        kind, channel, sent, results, step.label, op=op, source=source, wait=False, of=step,
        distance=step.moves[0].distance, group=b.group(axis), way=f"over {axis}",
    )  # fmt: skip
    return Started(step, tuple(name for name, _ in results), label, source)


def _output_buffers(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """Return the outputs of the message, which are values or the pieces that peers send."""
    base, dtype = b.value(step.name), step.moves[0].dst.dtype
    if step.kind in ("all_gather", "all_to_all"):
        if step.bucket:
            received = [[math.prod(shape) for shape, _ in blocks] for _, blocks in _layout(b, step)]
            shapes = [(sum(sizes),) for sizes in zip(*received, strict=True)]
        else:
            shapes = [shape_of(where) for where in _places_by_peer(b, step.moves[0])]
        return tuple((f"{base}.{i}", Buffer(shape, dtype)) for i, shape in enumerate(shapes))
    if step.kind == "reduce_scatter" and step.bucket:
        size = sum(math.prod(m.dst.local_shape(b.coordinates)) for m in step.moves)
        return ((f"{base}.total", Buffer((size,), dtype)),)
    return tuple(b.named_buffer(n, m.dst) for n, m in zip(step.results, step.moves, strict=True))


def _pack_contribution(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """Emit the code that packs what this rank contributes to a gather: its shards or, in place, its
    slices of full values. Return the one flat buffer."""
    coordinates, flat, local = b.coordinates, f"{b.value(step.name)}.mine", f"{step.name}_mine"
    specs = step.written_specs if step.in_place else [m.src for m in step.moves]
    wheres = tuple(
        (given(w, m.src, coordinates, coordinates),) for w, m in zip(specs, step.moves, strict=True)
    )
    segment = b.segment()
    segment.table[local] = flat
    segment.code.apply(packed, [step.operands], [local], layout=wheres, is_list=True)
    size = sum(math.prod(m.src.local_shape(coordinates)) for m in step.moves)
    buffer = Buffer((size,), step.moves[0].src.dtype)
    b.nbytes[flat] = buffer.nbytes
    return ((flat, buffer),)


def _pack_blocks(b: RankBuilder, step: Redistribute) -> tuple[tuple[str, Buffer], ...]:
    """Emit the code that cuts this rank's values into a block for each peer. Return the blocks; in
    a bucket, the blocks of one peer are one flat buffer."""
    peers, segment = _peers(b, step.axis), b.segment()
    wheres = tuple(
        tuple(given(m.src, m.dst, b.coordinates, peer) for peer in peers) for m in step.moves
    )
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
        b.record_sharing(name, b.value(step.operands[0]))
    buffers = [Buffer(shape, step.moves[0].src.dtype) for shape in shapes]
    sent = tuple(zip(flat, buffers, strict=True))
    b.nbytes.update((name, buffer.nbytes) for name, buffer in sent)
    return sent


def finish(b: RankBuilder, started: Started) -> None:
    """Emit the wait for a started message, and the code that makes the values of its outputs."""
    step, pieces = started.step, started.pieces
    b.emit(Wait(pieces[:1], label=started.label, source=started.source))
    match step.kind:
        case "all_gather" if step.moves[0].gathers_counts:
            return  # the counts of the ranks stay in pieces
        case "all_to_all" if step.counts:
            _join_rows(b, step, pieces)
        case "all_gather" | "all_to_all":
            _join(b, step, pieces)
        case "reduce_scatter" if step.bucket:
            segment, shapes = (
                b.segment(),
                tuple(m.dst.local_shape(b.coordinates) for m in step.moves),
            )
            segment.table[f"{step.name}_total"] = pieces[0]
            flat_value = [[f"{step.name}_total"]]
            segment.code.apply(unpacked, flat_value, step.results, layout=shapes, is_list=True)
            for name in step.results:
                b.record_sharing(b.value(name), pieces[0])
        case _:
            pass
    _record(b, step)


def _join(b: RankBuilder, step: Redistribute, pieces: Sequence[str]) -> None:
    """Emit the code that joins the pieces from all peers, or writes the pieces of updated
    parameters into their places."""
    segment = b.segment()
    local = [f"{step.name}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    if not step.bucket:
        shape, wheres = (
            step.moves[0].dst.local_shape(b.coordinates),
            _places_by_peer(b, step.moves[0]),
        )
        source = step.source or None
        segment.code.apply(join, [local], step.results, shape, *wheres, source=source)
        return
    if step.in_place:
        predicate, layout = b.predicate(), _layout(b, step)
        function = written_unless if predicate else written
        segment.code.apply(function, [step.operands, local, *predicate], (), layout=layout)
        segment.writes = step.operands
    else:
        layout = _layout(b, step)
        segment.code.apply(gathered, [local], step.results, layout=layout, is_list=True)
    b.close()  # so that the pieces are freed here


def _record(b: RankBuilder, step: Redistribute) -> None:
    for name, move in zip(step.results, step.moves):
        b.record(name, move.dst)


def _layout(b: RankBuilder, step: Redistribute) -> Layout:
    """Return the layout of the flat pieces of a gather or an exchange."""
    coordinates, peers = b.coordinates, _peers(b, step.axis)

    def blocks(move: Move, dst: TensorSpec) -> tuple[tuple[Shape, Where], ...]:
        places = [taken(move.src, dst, peer, coordinates) for peer in peers]
        return tuple((shape_of(where), where) for where in places)

    return tuple(
        (dst.local_shape(coordinates), blocks(move, dst))
        for move, dst in zip(step.moves, step.written_specs, strict=True)
    )


def _places_by_peer(b: RankBuilder, move: Move) -> list[Where]:
    """Return the place in the result of the piece from each peer."""
    return [taken(move.src, move.dst, peer, b.coordinates) for peer in _peers(b, move.axis)]


def _peers(b: RankBuilder, axis: str) -> list[dict[str, int]]:
    return [{**b.coordinates, axis: i} for i in range(b.plan.mesh.axis_size(axis))]


def _reduction_of(spec: TensorSpec, axis: str) -> ReduceOp | None:
    """Return the reduction of a spec that is partial on the axis, or None if it is not partial."""
    placement = spec.placement(axis)
    return placement.op if isinstance(placement, Partial) else None


# -- rows of experts, whose sizes are data ---------------------------------------------------------


def _start_counts(b: RankBuilder, step: Redistribute) -> Started:
    """Start the gather of the counts of all ranks of the axis, into host memory."""
    (move,), source = step.moves, step.source or None
    sent = b.named_buffer(step.operands[0], move.src)
    received = tuple(
        (f"{b.value(step.name)}.{i}", Buffer(move.src.local_shape(peer), move.src.dtype))
        for i, peer in enumerate(_peers(b, move.axis))
    )
    label = b.collective(
        "all_gather", move.axis, (sent,), received, step.label,
        source=source, wait=False, of=step, on_host=True,
    )  # fmt: skip
    b.nbytes.update((name, buffer.nbytes) for name, buffer in received)
    return Started(step, tuple(name for name, _ in received), label, source)


def _start_sized(b: RankBuilder, step: Redistribute) -> Started:
    """Emit the code that cuts the rows into a piece for each peer, and start their exchange."""
    (move,), source, name = step.moves, step.source or None, b.value(step.name)
    to_experts, parts = _direction(b, move)
    by_token, by_expert = (move.src, move.dst) if to_experts else (move.dst, move.src)
    own, of_members = _most_rows(b, by_token, move.axis, parts)
    segment = b.segment()
    local = [f"{step.name}_to{i}" for i in range(len(parts))]
    flat = [f"{name}.to{i}" for i in range(len(parts))]
    segment.table.update(zip(local, flat, strict=True))
    counts = _pieces_of_counts(b, step.counts, move.axis)
    budget = experts.budget_of_exchange(b, by_expert, move.axis, parts)
    if budget is not None and to_experts and step.phase == "forward":
        segment.code.apply(check_received, [counts], (), layout=budget, source=source)
    segment.code.apply(
        pieces_by_expert if to_experts else pieces_by_token,
        [step.operands[0], counts], local, b.coordinates[move.axis], parts,
        *([own] if to_experts else []), is_list=True, source=source,
    )  # fmt: skip
    rest = move.src.local_shape(b.coordinates)[1:]

    def bounded(names: Iterable[str], most: Sequence[int]) -> tuple[tuple[str, Buffer], ...]:
        rows = most if budget is None else [min(n, budget.rows) for n in most]
        buffers = (Buffer((n, *rest), move.src.dtype, bounded=True) for n in rows)
        return tuple(zip(names, buffers, strict=True))

    sent = bounded(flat, own if to_experts else of_members)
    received = bounded(
        (f"{name}.{i}" for i in range(len(parts))), of_members if to_experts else own
    )
    for pieces, spec in ((sent, move.src), (received, move.dst)):  # as long as if balanced
        each = b.shared.nbytes(spec, b.coordinates) // len(parts)
        b.nbytes.update((piece, each) for piece, _ in pieces)
    label = b.collective(
        "all_to_all", move.axis, sent, received, step.label, source=source, wait=False, of=step,
        sizes=Sizes(
            tuple(segment.table[piece] for piece in counts),
            parts,
            returned=not to_experts,
            limit=None if budget is None else budget.rows,
        ),
    )  # fmt: skip
    return Started(step, tuple(piece for piece, _ in received), label, source)


def _join_rows(b: RankBuilder, step: Redistribute, pieces: Sequence[str]) -> None:
    """Emit the code that puts the rows from all peers into their order."""
    (move,), segment, source = step.moves, b.segment(), step.source or None
    to_experts, parts = _direction(b, move)
    local = [f"{step.name}_from{i}" for i in range(len(pieces))]
    segment.table.update(zip(local, pieces, strict=True))
    operands = [local, _pieces_of_counts(b, step.counts, move.axis)]
    if to_experts:
        segment.code.apply(
            rows_by_expert, operands, step.results, b.coordinates[move.axis], parts, source=source
        )
    else:
        member, rows = b.coordinates[move.axis], move.dst.local_shape(b.coordinates)[0]
        length = None if move.dst.is_by_expert else rows
        segment.code.apply(
            rows_by_token, operands, step.results, member, parts, length, source=source
        )
    b.close()  # so that the pieces are freed here


def _direction(b: RankBuilder, move: Move) -> tuple[bool, tuple[tuple[int, ...], ...]]:
    """Return whether rows go to their experts, and the parts of `_parts`."""
    to_experts = cuts_experts(move.dst.placement(move.axis))
    by_expert = move.dst if to_experts else move.src
    return to_experts, _parts(b, experts.split_counts(by_expert), move.axis)


def _most_rows(
    b: RankBuilder, rows: TensorSpec, axis: str, parts: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the most rows of this rank's tokens for the experts of each member, and of the tokens
    of each member for this rank's experts, if no token names an expert twice. ``rows``: the spec of
    the rows by token; ``parts``: of each member, the positions of its experts."""
    assert rows.ragged is not None, "rows are split by token"
    slots, member = rows.ragged.slots, b.coordinates[axis]
    tokens = [rows.tokens_and_experts(peer)[0] for peer in _peers(b, axis)]
    own = tuple(tokens[member] * min(slots, len(part)) for part in parts)
    return own, tuple(n * min(slots, len(parts[member])) for n in tokens)


def _parts(b: RankBuilder, counts: TensorSpec, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank of the axis, the positions of its experts in the counts of one rank.
    ``counts``: the spec of the counts split over the axis."""
    whole = counts.with_placements(**{axis: REPLICATE})
    return tuple(
        tuple(i for lo, hi in given(whole, counts, b.coordinates, peer)[0] for i in range(lo, hi))
        for peer in _peers(b, axis)
    )


def _pieces_of_counts(b: RankBuilder, counts: str, axis: str) -> list[str]:
    """Return names in the open segment for the gathered counts of each rank of the axis."""
    segment = b.segment()
    local = [f"{counts}_of{i}" for i in range(len(_peers(b, axis)))]
    segment.table.update((name, f"{b.value(counts)}.{i}") for i, name in enumerate(local))
    return local


# -- between stages --------------------------------------------------------------------------------


def transfer(b: RankBuilder, step: Transfer, stage: int | None) -> tuple[int, str] | None:
    """Emit the send on a rank of the first stage, the receive on a rank of the second. For a send,
    return the schedule's step of the receive, and the sent value; else None. ``stage``: the stage
    of the action, or None outside actions."""
    spec = step.spec
    buffer = Buffer(spec.local_shape(b.coordinates), spec.dtype)
    channel = f"{step.phase} {step.stage}->{step.to_stage}" + (" once" if step.once else "")
    sends = step.stage in b.stages and (stage is None or stage == step.stage)
    receives = step.to_stage in b.stages and (stage is None or stage == step.to_stage)
    source = step.source or None
    what, way = step.operand, f"from stage {step.stage} to {step.to_stage}"
    same_rank = b.peer(step.stage) == b.peer(step.to_stage)
    sent_value: tuple[int, str] | None = None
    if same_rank:
        if sends:  # one rank hosts both stages
            b.assign(step.operand, step.result, source)
    elif sends:
        value = b.value(step.operand)
        to = b.peer(step.to_stage)
        label = b.label.doing("send", what, way)
        b.emit(Send(value, to, channel, buffer, label=label, source=source))
        sent_value = b.shared.actions.received_at(step, b.microbatch), value
    elif receives:
        value, label = b.value(step.result), b.label.doing("receive", what, way)
        receive = Recv(value, b.peer(step.stage), channel, buffer, label=label, source=source)
        # started during the action before, so that the value has arrived when this action begins
        if b.microbatch is None:
            b.emit(receive)
        else:
            b.emit_early(receive)
        b.emit(Wait((value,), label=label, source=source))
    if receives or same_rank:
        b.record(step.result, spec)
    return sent_value


# -- functions that generated code calls -----------------------------------------------------------


def packed(values: Sequence[torch.Tensor], wheres: Sequence[Sequence[Where]]) -> list[torch.Tensor]:
    """Return one flat tensor per peer: the blocks ``wheres[value][peer]`` of all values."""
    flat: list[torch.Tensor] = []
    for i in range(len(wheres[0])):
        blocks = [block(v, of[i]).reshape(-1) for v, of in zip(values, wheres, strict=True)]
        flat.append(torch.cat(blocks))
    return flat


def unpacked(flat: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Return the values that one flat tensor holds, as views of it."""
    parts = flat[0].split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def gathered(pieces: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """Return the full values, joined from the flat piece of each peer."""
    parts = [_blocks(piece, i, layout) for i, piece in enumerate(pieces)]
    return [
        join([of[v] for of in parts], shape, *(where for _, where in blocks))
        for v, (shape, blocks) in enumerate(layout)
    ]


def written(
    values: Sequence[torch.Tensor],
    pieces: Sequence[torch.Tensor],
    layout: Layout,
    skip: torch.Tensor | None = None,
) -> None:
    """Write the flat piece of each peer into its places in the values; not if ``skip``, a bool[],
    is True."""
    for i, piece in enumerate(pieces):
        for value, part, (_, blocks) in zip(values, _blocks(piece, i, layout), layout, strict=True):
            if part.numel():
                write(value, part, blocks[i][1], skip)


def written_unless(
    values: Sequence[torch.Tensor],
    pieces: Sequence[torch.Tensor],
    predicate: torch.Tensor,
    layout: Layout,
) -> None:
    """Do as `written`, but write nothing if the commit's ``predicate`` is 1."""
    written(values, pieces, layout, predicate == 1)


def _blocks(piece: torch.Tensor, peer: int, layout: Layout) -> list[torch.Tensor]:
    return unpacked([piece], [blocks[peer][0] for _, blocks in layout])
