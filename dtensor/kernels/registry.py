"""Choose the function that runs for an op on a device: the user's, a built-in kernel, or the op.

    kernel_of(torch.ops.dt.rms_norm.default, torch.device("cuda"))     # Kernel("triton rms_norm")

A kernel takes an op's arguments and returns its results, on local tensors, under `no_grad`. It is
looked up when a plan is lowered and bound in the generated code; plans do not depend on it.

Invariants: an op has at most one kernel per device. A program that was lowered before a
registration changed is lowered again at its next call. Triton is imported when a program for CUDA
is lowered; if it is not installed, the op runs and a warning is given."""

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
    """The function that runs for an op. ``name``: its name in programs and traces; ``ours``:
    whether it is built in."""

    function: Callable[..., Any]
    name: str
    ours: bool


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """The user's registrations; None stands for the op itself. Each change makes a new object, so
    the identity of the object is a version."""

    kernels: Mapping[tuple[OpOverload, str], Kernel | None]


_registered = Registered({})


def current() -> Registered:
    """Return the present registrations, the same object until they change. It is a part of the key
    of a program."""
    return _registered


COMPILED_INSTEAD = frozenset(
    """dt::add_layer_norm dt::add_rms_norm dt::bias_gelu dt::bias_gelu_backward dt::gated
    dt::gated_backward dt::rms_norm dt::rms_norm_backward dt::rope""".split()  # noqa: SIM905
)
"""The ops that torch's compiler compiles within local code, instead of their built-in kernel: alone
they take less than 1.05 of the kernel's time (benchmarks/results/kernels.md), and they fuse with
their neighbours."""


def kernel_of(op: object, device: torch.device, *, compiled: bool = False) -> Kernel | None:
    """Return the kernel that runs on a device instead of the op; None if the op itself runs.
    ``compiled``: within code that torch's compiler compiles."""
    if not isinstance(op, OpOverload):
        return None
    key, users = (op, device.type), _registered.kernels
    if key in users:
        return users[key]
    return None if compiled and op.name() in COMPILED_INSTEAD else _built_in(op, device.type)


def op_of_kernel(function: object) -> OpOverload | None:
    """Return the op whose kernel on CUDA is this function; None if it is no kernel."""
    for (op, _), kernel in _registered.kernels.items():
        if kernel is not None and kernel.function is function:
            return op
    if not getattr(function, "__module__", "").startswith("dtensor.kernels."):
        return None
    from dtensor.kernels.built_in import TRITON, torch_kernels

    for name in (*TRITON, *torch_kernels()):
        namespace, _, op_name = name.partition("::")
        op: OpOverload = getattr(getattr(torch.ops, namespace), op_name).default
        kernel = _built_in(op, "cuda")
        if kernel is not None and kernel.function is function:
            return op
    return None


Made = Sequence[tuple[Sequence[int], torch.dtype]]


def versions(given: Sequence[Tensor]) -> tuple[int, ...]:
    """Return torch's version counter of each argument of a kernel, which counts writes."""
    return tuple(x._version for x in given)


def check_kept(given: Sequence[Tensor], before: tuple[int, ...], name: str) -> None:
    """Raise RuntimeError if a kernel has written to its arguments since ``before``."""
    if versions(given) != before:
        at = next(i for i, x in enumerate(given) if x._version != before[i])
        raise RuntimeError(
            f"the kernel {name} changed its argument {at}, which other ops "
            f"read.\nfix: write to a new tensor, such as torch.empty_like of it"
        )


def check_made(results: Sequence[object], name: str, wanted: Made) -> None:
    """Raise RuntimeError unless a kernel's results have the op's shapes and dtypes."""
    for number, (x, (shape, dtype)) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(x, Tensor) or list(x.shape) != list(shape) or x.dtype != dtype:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise RuntimeError(
                f"the kernel {name} returned {got} as result {number}, but its op returns "
                f"{dtype} {list(shape)}.\nfix: return the op's results"
            )


def check_apart(results: Sequence[Tensor], given: Sequence[Tensor], name: str) -> None:
    """Raise RuntimeError if a kernel's result shares the memory of an argument, because the program
    may reuse that memory."""
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
    """Return the built-in kernel of an op on a device; None if there is none."""
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
