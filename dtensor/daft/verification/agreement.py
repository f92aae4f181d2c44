"""Do the partners of every transfer and collective agree on kind, op, shapes and dtypes?

Example: rank 0 starts `all_reduce.sum` of f32[4] where rank 1 starts one of f32[3]: refused, with
both instructions. What may differ by rank: the input of an all_gather, the pieces of an
all_to_all and reduce_scatter; then each piece must be what the other side expects. A sum of bf16
may come out in bf16, or in f32 on all ranks.

It looks at declared buffers only; the engine compares them with the values when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch

from dtensor.daft.errors import ProgramError
from dtensor.daft.ir.instructions import Buffer, Call, Collective, Free, Op, Recv, Send, Wait
from dtensor.daft.ir.program import Program, format_instruction
from dtensor.daft.verification.pairing import Edges, Site, instruction_at


def check_agreement(program: Program, partners: Edges) -> None:
    """Raises `ProgramError` for the first operation whose partners disagree."""
    for site in sorted(partners):
        start = instruction_at(program, site)
        match start:
            case Send():
                (other,) = partners[site]
                recv = instruction_at(program, other)
                assert isinstance(recv, Recv)
                if recv.buffer != start.buffer:
                    raise _disagree(program, [site, other], "send and receive other buffers")
            case Collective():
                if site[0] == start.group[0]:
                    sites = {rank: index for rank, index in (site, *partners[site])}
                    _check_collective(program, [(rank, sites[rank]) for rank in start.group])
            case Recv() | Call() | Wait() | Free():
                pass
            case _:
                assert_never(start)


def _check_collective(program: Program, sites: Sequence[Site]) -> None:
    members: list[Collective] = []
    for site in sites:
        member = instruction_at(program, site)
        assert isinstance(member, Collective)
        members.append(member)
    if len({(member.kind, member.op) for member in members}) != 1:
        raise _disagree(program, sites, "differ in kind or op")
    first, size = members[0], len(members)
    ins = [member.in_buffers for member in members]
    outs = [member.out_buffers for member in members]
    match first.kind:
        case "all_reduce":
            fits = bool(ins[0]) and _reduced(ins[0], outs[0], first.op)
            fits = fits and all(b == ins[0] for b in ins) and all(b == outs[0] for b in outs)
        case "all_gather":
            gathered = tuple(b[0] for b in ins if len(b) == 1)
            fits = all(b == gathered for b in outs) and _one_dtype(gathered)
        case "reduce_scatter":
            fits = all(len(b) == size for b in ins) and all(
                _reduced((ins[0][m],), outs[m], first.op) and all(b[m] == ins[0][m] for b in ins)
                for m in range(size)
            )
            fits = fits and _one_dtype(ins[0]) and _one_dtype([b for row in outs for b in row])
        case "all_to_all":
            fits = all(len(b) == size for b in (*ins, *outs)) and all(
                outs[to][source] == ins[source][to] for to in range(size) for source in range(size)
            )
            fits = fits and _one_dtype([b for row in ins for b in row])
        case "broadcast":
            fits = len(ins[0]) == 1 and all(b == ins[0] for b in outs) and not any(ins[1:])
        case _:
            assert_never(first.kind)
    if not fits:
        raise _disagree(program, sites, "do not fit together")


def _reduced(ins: Sequence[Buffer], outs: Sequence[Buffer], op: Op | None) -> bool:
    """Whether a reduction gives these: of one shape each, and of one dtype, or a sum of narrow
    floats left in the float32 that it is accumulated in."""
    return len(ins) == len(outs) and all(
        a.shape == b.shape and (a.dtype == b.dtype or (op == "sum" and _widens(a.dtype, b.dtype)))
        for a, b in zip(ins, outs, strict=True)
    )


def _widens(given: torch.dtype, made: torch.dtype) -> bool:
    return given.is_floating_point and given.itemsize < 4 and made == torch.float32


def _one_dtype(buffers: Sequence[Buffer]) -> bool:
    return len({buffer.dtype for buffer in buffers}) <= 1


def _disagree(program: Program, sites: Sequence[Site], fact: str) -> ProgramError:
    lines: list[str] = []
    for site in sites:
        instruction = instruction_at(program, site)
        text = format_instruction(instruction)
        lines.append(f"  rank {site[0]}, instr {site[1]}: {text}")
    return ProgramError(
        f"Program {program.name!r}: operations that meet {fact}.\n"
        + "\n".join(lines)
        + "\n  Fix: give all members one kind and op, and buffers that match piece by piece."
    )
