"""A transfer between two meshes as a program: every rank sends, receives and joins blocks.

    program = transfer_program(plan_transfer(source, target), 4, "x", device)
    cluster.run(cluster.load(program), fed)       # rank r's shard is fed as "x", comes out as "y"

Each rank starts all its sends and receives, then waits, then puts its shard together, and then
agrees with the others that all have theirs; so it cannot hang whatever the pattern, which daft's
verifier proves again when it loads the program. All blocks of one (source, target) pair are
separate messages on a channel of their own.

Where source and target do not share a cluster there is no program: `pieces_of` and `shard_from`
are the same cutting and joining for a controller that carries the blocks itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dtensor.daft import (
    Buffer,
    Call,
    Collective,
    Commit,
    Free,
    Function,
    Instruction,
    Program,
    RankProgram,
    Recv,
    Send,
    Vote,
    Wait,
)
from dtensor.daft.ir.instructions import WORD
from dtensor.numerics import ReduceOp, rest_of
from dtensor.sharding.redistribute.between_meshes import (
    Piece,
    TransferPlan,
    box_of,
    holders_of,
)
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.shards import Where, block, join, positions, shape_of


def transfer_program(plan: TransferPlan, size: int, device: torch.device) -> Program:
    """The program for a cluster of ``size`` ranks; its input is "x", its output "y"."""
    functions: dict[str, Function] = {}
    ranks = tuple(_rank(plan, rank, device, functions) for rank in range(size))
    if any(piece.source_rank != piece.target_rank for piece in plan.pieces):
        active = tuple(rank for rank, own in enumerate(ranks) if own.instructions)
        ranks = tuple(_agreed(own, active) if own.instructions else own for own in ranks)
    return Program(
        name="transfer",
        ranks=ranks,
        functions=tuple(functions.items()),
        stage_of=(0,) * size,
    )


def pieces_of(plan: TransferPlan, index: int, shard: torch.Tensor) -> list[torch.Tensor]:
    """The blocks that rank ``index`` of the source's mesh gives, in the plan's order of pieces."""
    rank = plan.source_ranks[index]
    return [
        block(shard, positions(box_of(plan.source, index), piece.ranges))
        for piece in plan.pieces
        if piece.source_rank == rank
    ]


def shard_from(
    plan: TransferPlan, index: int, blocks: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """The shard of rank ``index`` of the target's mesh, from its pieces in the plan's order."""
    box = box_of(plan.target, index)
    op = _pending_op(plan)
    mine = [p for p in plan.pieces if p.target_rank == plan.target_ranks[index]]
    wheres = tuple(positions(box, piece.ranges) for piece in mine)
    return joined(shape_of(box), wheres, plan.target.dtype, device, op, *blocks)[0]


def cut(wheres: Sequence[Where], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Blocks of a shard."""
    return tuple(block(x, where) for where in wheres)


def joined(
    shape: tuple[int, ...],
    wheres: Sequence[Where],
    dtype: torch.dtype,
    device: torch.device,
    op: ReduceOp,
    *blocks: torch.Tensor,
) -> tuple[torch.Tensor]:
    """A tensor of ``shape`` made of blocks; without any, what adds nothing under ``op``."""
    if not blocks:
        return (rest_of(torch.zeros(shape, dtype=dtype, device=device), op),)
    return (join(blocks, shape, *wheres),)


def _rank(
    plan: TransferPlan, rank: int, device: torch.device, functions: dict[str, Function]
) -> RankProgram:
    source = {plan.source_ranks[i]: i for i in holders_of(plan.source)}
    target = {plan.target_ranks[i]: i for i in holders_of(plan.target)}
    given = [(i, p) for i, p in enumerate(plan.pieces) if p.source_rank == rank]
    taken = [(i, p) for i, p in enumerate(plan.pieces) if p.target_rank == rank]
    sent = [(i, p) for i, p in given if p.target_rank != rank]
    received = [(i, p) for i, p in taken if p.source_rank != rank]
    dtype = plan.source.dtype
    items: list[Instruction] = []
    nbytes: dict[str, int] = {}
    if given:
        box = box_of(plan.source, source[rank])
        name = f"cut {rank}"
        wheres = tuple(positions(box, p.ranges) for _, p in given)
        functions[name] = Function.of(partial(cut, wheres), name)
        items.append(Call(name, ("x",), tuple(_block(i) for i, _ in given), label="transfer"))
        nbytes |= {_block(i): _buffer(p, dtype).nbytes for i, p in given}
    for i, p in sent:
        channel = f"transfer {rank}->{p.target_rank}"
        items.append(Send(_block(i), p.target_rank, channel, _buffer(p, dtype), label="transfer"))
    for i, p in received:
        channel = f"transfer {p.source_rank}->{rank}"
        items.append(Recv(_block(i), p.source_rank, channel, _buffer(p, dtype), label="transfer"))
    if received:
        items.append(Wait(tuple(_block(i) for i, _ in received), label="transfer"))
    outputs: tuple[str, ...] = ()
    if rank in target:
        box = box_of(plan.target, target[rank])
        name = f"join {rank}"
        wheres = tuple(positions(box, p.ranges) for _, p in taken)
        make = partial(joined, shape_of(box), wheres, dtype, device, _pending_op(plan))
        functions[name] = Function.of(make, name)
        items.append(Call(name, tuple(_block(i) for i, _ in taken), ("y",), label="transfer"))
        nbytes["y"] = plan.target.local_nbytes(plan.target.mesh.coordinates(target[rank]))
        outputs = ("y",)
    if sent:
        items.append(Wait(tuple(_block(i) for i, _ in sent), label="transfer"))
    # a kept block is in both lists
    blocks = sorted({i for i, _ in (*given, *taken)})
    if blocks:
        items.append(Free(tuple(_block(i) for i in blocks), label="transfer"))
    inputs = ("x",) if rank in source else ()
    return RankProgram(
        instructions=tuple(items), inputs=inputs, outputs=outputs, nbytes=tuple(nbytes.items())
    )


def _agreed(own: RankProgram, active: tuple[int, ...]) -> RankProgram:
    """With a commit point at the end."""
    words = (("vote",), ("votes",), (WORD,), (WORD,))
    end = (
        Vote("vote", label="transfer"),
        Collective("all_reduce", active, *words, "sum", "transfer agreed", label="transfer"),
        Wait(("votes",), label="transfer"),
        Commit("votes", label="transfer"),
        Free(("vote", "votes"), label="transfer"),
    )
    return replace(own, instructions=(*own.instructions, *end))


def _pending_op(plan: TransferPlan) -> ReduceOp:
    """How the target is pending; "sum" where it is not."""
    ops: list[ReduceOp] = [p.op for p in plan.target.placements if isinstance(p, Partial)]
    return ops[0] if ops else "sum"


def _block(index: int) -> str:
    return f"b{index}"


def _buffer(piece: Piece, dtype: torch.dtype) -> Buffer:
    return Buffer(shape_of(piece.ranges), dtype)
