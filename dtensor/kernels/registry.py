"""The function that runs for an op on a device: the user's, else our Triton kernel, else the op's.

    kernel_of(torch.ops.dt.rms_norm.default, torch.device("cuda"))     # Kernel("triton rms_norm")

A kernel takes an op's arguments and returns its results, on local tensors, under `no_grad`. It is
looked up when a plan is lowered, by the device of the launch, and bound in the generated code,
whose line names it; so does the label of the call in programs and traces. Plans do not change. If a
rule makes a rank run another function than the op (a mean of a shard), that function runs.

Invariants: an op has at most one kernel a device; a program lowered before another kernel was
registered is lowered again at its next call. Triton is imported when a program for CUDA is lowered;
if the process that lowers it has none, the op runs, and a warning says so. Not here: registration
(register.py), the kernels (built_in.py), their correctness (tests compare ours with the op).
"""

from __future__ import annotations

import sys
import warnings
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
    """The function that runs for an op. ``name``: in programs and traces; ``ours``: a built-in
    one."""

    function: Callable[..., Any]
    name: str
    ours: bool


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """The users' registrations; None: the op itself. Replaced as a whole, so its identity is a
    version."""

    kernels: Mapping[tuple[OpOverload, str], Kernel | None]


_registered = Registered({})


def current() -> Registered:
    """The present registrations: the same object until they change, so a part of a program's
    key."""
    return _registered


def kernel_of(op: object, device: torch.device) -> Kernel | None:
    """The function that runs on a device instead of the op; None: the op itself."""
    if not isinstance(op, OpOverload):
        return None
    key, users = (op, device.type), _registered.kernels
    return users[key] if key in users else _built_in(op, device.type)


Made = Sequence[tuple[Sequence[int], torch.dtype]]


def versions(given: Sequence[Tensor]) -> tuple[int, ...]:
    """The counts of writes to a kernel's arguments."""
    return tuple(x._version for x in given)


def check_kept(given: Sequence[Tensor], before: tuple[int, ...], name: str) -> None:
    """RuntimeError if a kernel has written to its arguments."""
    if versions(given) != before:
        at = next(i for i, x in enumerate(given) if x._version != before[i])
        raise RuntimeError(
            f"the kernel {name} changed its argument {at}, which others "
            f"read.\nfix: write to a new tensor, such as torch.empty_like of it"
        )


def check_made(results: Sequence[object], name: str, wanted: Made) -> None:
    """RuntimeError unless a kernel's results have the op's shapes and dtypes."""
    for number, (x, (shape, dtype)) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(x, Tensor) or list(x.shape) != list(shape) or x.dtype != dtype:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise RuntimeError(
                f"the kernel {name} returned {got} as result {number}, and its op has "
                f"{dtype} {list(shape)} there.\nfix: return the op's results"
            )


def check_apart(results: Sequence[Tensor], given: Sequence[Tensor], name: str) -> None:
    """RuntimeError if a kernel's result is in the memory of an argument: the program may write to
    that again."""
    places = {x.untyped_storage().data_ptr() for x in given} - {0}
    for number, x in enumerate(results):
        if x.untyped_storage().data_ptr() in places:
            raise RuntimeError(
                f"the kernel {name} returned as result {number} a tensor that shares the memory of "
                f"an argument.\nfix: return a new tensor, such as a clone() of it"
            )


def use(registered: Registered) -> None:
    global _registered
    _registered = registered


@cache
def _built_in(op: OpOverload, device: str) -> Kernel | None:
    if device != "cuda":
        return None
    from dtensor.kernels.built_in import TRITON, torch_kernels, triton_kernels

    word, function = "torch", torch_kernels().get(op.name())
    if function is None and op.name() in TRITON:
        if find_spec("triton") is None:
            _warn_once(device)
            return None
        word, function = "triton", triton_kernels()[op.name()]
    if function is None:
        return None
    return Kernel(function=function, name=f"{word} {function.__name__}", ours=True)


@cache
def _warn_once(device: str) -> None:
    warnings.warn(
        f"Triton is not installed in this Python ({sys.executable}): the programs that it makes "
        f"for {device}, also those of actors that have Triton, run torch's ops instead of the "
        f"built-in kernels.\nfix: pip install 'dtensor[kernels]', here and on the actors",
        UserWarning,
        stacklevel=2,
    )
