"""Each function of a program is called once before its first run, where GPUs communicate.

    use_once(program, built, table, {0: {"x": x}}, device)

Loading a kernel's module, as Triton does at its first launch, or making a handle of cuBLAS waits
for the device (CUDA C++ Programming Guide, "Lazy Loading"), which may be waiting for a message of
a peer whose host waits for a message of this one. So nothing is used for the first time between
two messages. The calls of a rank are made in its order, on its inputs and state, with zeros for
what it receives.

Invariants: no message is sent, and nothing is written: a function that writes to its arguments gets
copies. What one raises is left to the run, which raises it again, with its line. A custom op of
the user's runs once more than there are steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import Buffer, Call, Collective, Free, Recv, Vote
from dtensor.daft.ir.program import Built, RankProgram


def use_once(
    program: HostProgram,
    built: Mapping[str, Built],
    table: Mapping[tuple[int, str], object],
    inputs: Mapping[int, Mapping[str, object]],
    device: torch.device,
) -> None:
    for rank, given in inputs.items():
        own = program.ranks[rank]
        kept = {name: table[rank, name] for name in own.state if (rank, name) in table}
        _calls(own, built, {**kept, **given}, device)


def _calls(
    own: RankProgram, built: Mapping[str, Built], values: dict[str, object], device: torch.device
) -> None:
    def receive(names: tuple[str, ...], buffers: tuple[Buffer, ...]) -> None:
        for name, buffer in zip(names, buffers, strict=True):
            if not buffer.variable:
                values[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)

    for instruction in own.instructions:
        match instruction:
            case Call(fn=fn, inputs=names, outputs=outputs, writes=writes):
                if not all(name in values for name in names):
                    continue
                args = [_copied(values[n]) if n in writes else values[n] for n in names]
                try:
                    made = built[fn](*args)
                except torch.AcceleratorError:
                    raise
                except Exception:
                    continue
                values.update(zip(outputs, made, strict=False))
                del args, made
            case Recv(outputs=names, buffer=buffer):
                receive(names, (buffer,))
            case Collective(outputs=names, out_buffers=buffers):
                receive(names, buffers)
            case Vote(value=name):
                values[name] = torch.zeros((), device=device)
            case Free(values=names):
                for name in names:
                    values.pop(name, None)
            case _:
                pass


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
