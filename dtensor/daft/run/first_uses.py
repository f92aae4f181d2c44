"""Call each function of a program once before its first run, if GPUs of several hosts communicate.

    use_once(program, built, table, {0: {"x": x}}, device)

The first use of a kernel or of cuBLAS waits for the device (CUDA C++ Programming Guide, "Lazy
Loading"). Within a run the device may be waiting for a peer that waits for this host: a deadlock.
So all functions are called first, on the rank's inputs and state and with zeros for received
values. No message is sent and no state is written: written arguments and optimizers are copied.
Exceptions are ignored here, since the run raises them again. A user's custom op therefore runs one
extra time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from copy import copy

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer, Call, Collective, Commit, Free, Recv, Vote
from dtensor.daft.ir.program import Built, RankProgram


def use_once(
    program: HostProgram,
    built: Mapping[str, Built],
    table: Mapping[tuple[int, str], object],
    inputs: Mapping[int, Mapping[str, object]],
    device: torch.device,
) -> None:
    """Call the functions of all ranks. ``inputs``: the inputs of each rank, for the coming run."""
    for rank, rank_inputs in inputs.items():
        rank_program = program.ranks[rank]
        state = {name: table[rank, name] for name in rank_program.state if (rank, name) in table}
        _call_all(rank_program, built, {**state, **rank_inputs}, device)


def _call_all(
    rank_program: RankProgram,
    built: Mapping[str, Built],
    values: dict[str, object],
    device: torch.device,
) -> None:
    """Call the functions of one rank in the order of its list. ``values``: its inputs and state."""

    def receive(
        names: tuple[str, ...], buffers: tuple[Buffer, ...], to: torch.device = device
    ) -> None:
        for name, buffer in zip(names, buffers, strict=True):
            if not buffer.variable:
                # a run may need fewer rows than a bounded buffer, and less memory
                with suppress(torch.OutOfMemoryError) if buffer.bounded else nullcontext():
                    values[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=to)

    for instruction in rank_program.instructions:
        match instruction:
            case Call(fn=fn, inputs=names, outputs=outputs, writes=writes):
                if not all(name in values for name in names):
                    continue
                try:
                    results = built[fn](*[_given(values[n], n in writes) for n in names])
                except torch.AcceleratorError:
                    raise
                except Exception:
                    continue
                values.update(zip(outputs, results, strict=False))
                del results
            case Recv(outputs=names, buffer=buffer):
                receive(names, (buffer,))
            case Collective(outputs=names, out_buffers=buffers, on_host=on_host):
                receive(names, buffers, torch.device("cpu") if on_host else device)
            case Vote(outputs=names) | Commit(outputs=names):
                values.update((name, torch.zeros((), device=device)) for name in names)
            case Free(values=names):
                for name in names:
                    values.pop(name, None)
            case _:
                pass


def _given(value: object, is_written: bool) -> object:
    """Return the argument of a call: a copy if the call may write it. An optimizer is copied
    without its buffers, which share their memory with the parameters."""
    if isinstance(value, Tensor):
        return value.clone() if is_written else value
    return copy(value)
