"""The facts about an instruction that failed, and whether the GPU is lost.

describe(program, (1, 7), "a label is out of range")     # Failure(rank=1, index=7, ...)
lost_device(device, error)                               # None: the process can use its GPU
"""

from __future__ import annotations

import torch

from dtensor.daft.errors import Failure
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Collective, Recv, Send, Wait, key_of
from dtensor.daft.ir.program import Program
from dtensor.daft.ir.text import excerpt
from dtensor.daft.verification.pairing import Site, starts_of_waits


def lost_device(device: torch.device, error: BaseException) -> BaseException | None:
    """Return the error after which this process can no longer use the GPU, or None if it still can.
    cuBLAS and Triton raise a plain RuntimeError if the CUDA context is lost, so the stream is
    queried too: the query does not wait, and raises a permanent error again."""
    if isinstance(error, torch.AcceleratorError):
        return error
    if device.type == "cuda":
        try:
            torch.cuda.current_stream(device).query()
        except RuntimeError as cuda_error:
            return cuda_error
    return None


def describe(
    program: Program | HostProgram, site: Site, reason: str, line: str | None = None
) -> Failure:
    """Return the facts about a failed instruction. ``line``: the user's line; by default the line
    of the instruction or of the start it waits for."""
    rank, index = site
    instructions = program.ranks[rank].instructions
    instruction = instructions[index]
    concerned = [instruction]
    if isinstance(instruction, Wait):
        concerned += [instructions[s] for s in starts_of_waits(instructions)[index]]
    starts = [i for i in concerned if isinstance(i, Send | Recv | Collective)]
    peers = sorted({peer for start in starts for peer in key_of(rank, start)[0]} - {rank})
    return Failure(
        rank=rank,
        known_as=program.known_as[rank] if program.known_as else "",
        stage=program.stage_of[rank],
        index=index,
        text=excerpt(instruction),
        label=next((str(i.label) for i in concerned if i.label is not None), ""),
        line=line or next((i.source for i in concerned if i.source), None),
        peers=tuple(peers),
        reason=reason,
    )
