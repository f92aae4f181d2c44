"""Which function runs for an op on a device: the user's, else one in Triton of ours, else the op's.

    kernel_of(torch.ops.dt.rms_norm.default, torch.device("cuda"))     # Kernel("triton rms_norm")

A kernel takes an op's arguments and returns its results, on local tensors, under `no_grad`. It is
looked up where a plan is lowered, by the device of the launch, and bound in the generated code,
whose line names it; so does the label of the call in programs and traces. Plans do not change.
Where a rule has a rank run something else than the op (a mean of a shard), that is what runs.

Invariants: an op has at most one kernel a device; a program lowered before another kernel was
registered is lowered again at its next call. Triton is imported where a program for CUDA is
lowered; where it is not installed, there are no kernels of ours. Not here: how one is registered
(register.py), the kernels (built_in.py), whether one is right (tests compare ours with the op).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dtensor.private_torch import OpOverload


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What runs for an op. ``name``: as programs and traces have it; ``ours``: a built-in one."""

    function: Callable[..., Any]
    name: str
    ours: bool


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """What users registered; None: the op itself. Replaced as a whole, so it tells itself apart."""

    kernels: Mapping[tuple[OpOverload, str], Kernel | None]


_registered = Registered({})


def current() -> Registered:
    """What is registered: the same object until that changes, so a part of a program's key."""
    return _registered


def kernel_of(op: object, device: torch.device) -> Kernel | None:
    """What runs for an op on a device instead of the op; None: nothing does."""
    if not isinstance(op, OpOverload):
        return None
    key, users = (op, device.type), _registered.kernels
    return users[key] if key in users else _built_in(op, device.type)


Made = Sequence[tuple[Sequence[int], torch.dtype]]


def versions(given: Sequence[Tensor]) -> tuple[int, ...]:
    """Of what a kernel is given: the counts of writes to it."""
    return tuple(x._version for x in given)


def check_kept(given: Sequence[Tensor], before: tuple[int, ...], name: str) -> None:
    """RuntimeError where a kernel has written to what it was given."""
    if versions(given) != before:
        at = next(i for i, x in enumerate(given) if x._version != before[i])
        raise RuntimeError(
            f"the kernel {name} changed the tensor {at} of those that it was given, which others "
            f"read.\nfix: write to a new tensor, such as torch.empty_like of it"
        )


def check_made(made: Sequence[object], name: str, wanted: Made) -> None:
    """RuntimeError unless a kernel's results have the op's shapes and dtypes."""
    for number, (x, (shape, dtype)) in enumerate(zip(made, wanted, strict=True)):
        if not isinstance(x, Tensor) or list(x.shape) != list(shape) or x.dtype != dtype:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise RuntimeError(
                f"the kernel {name} returned {got} as result {number}, and its op has "
                f"{dtype} {list(shape)} there.\nfix: return what the op returns"
            )


def check_apart(made: Sequence[Tensor], given: Sequence[Tensor], name: str) -> None:
    """RuntimeError where what a kernel returns is in the memory of what it was given: the program
    may write to that again."""
    places = {x.untyped_storage().data_ptr() for x in given} - {0}
    for number, x in enumerate(made):
        if x.untyped_storage().data_ptr() in places:
            raise RuntimeError(
                f"the kernel {name} returned as result {number} a tensor that shares the memory of "
                f"one that it was given.\nfix: return a new tensor, such as a clone() of it"
            )


def use(registered: Registered) -> None:
    global _registered
    _registered = registered


@cache
def _built_in(op: OpOverload, device: str) -> Kernel | None:
    if device != "cuda" or find_spec("triton") is None:
        return None
    from dtensor.kernels.built_in import TORCH, TRITON  # which imports Triton

    for word, table in (("triton", TRITON), ("torch", TORCH)):
        function = table.get(op.name())
        if function is not None:
            return Kernel(function=function, name=f"{word} {function.__name__}", ours=True)
    return None
