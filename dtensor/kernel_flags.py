"""The settings of a process that torch's kernels follow: determinism, precisions, backends.

    flags = kernel_flags()                 # (("deterministic algorithms", (False, False)), ...)
    set_kernel_flags(flags)                # in another process: set them there

The controller's settings count: they are sent with a run to the ranks in other processes
(`daft/ray`), and a program that reads a setting is captured again after it has changed
(`frontend/guards`). Flags are plain data, always in the same order.

Three settings are left out: the BLAS library, whose default depends on the GPU; the number of
threads, which each process chooses; and flushing of denormals, which torch cannot report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

Flags: TypeAlias = tuple[tuple[str, Any], ...]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage] - public names load torch's compiler
_cuda: Any = torch.backends.cuda
_OPS = ("all", "matmul", "conv", "rnn")
_PRECISIONS = (("generic", "all"), *((b, op) for b in ("mkldnn", "cuda") for op in _OPS))


def _matmul_precision() -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # it differs between backends, whose flags are read below
        return ""


def _set_matmul(precision: str) -> None:
    if precision:
        torch.set_float32_matmul_precision(precision)


def _cudnn_tf32() -> bool | None:
    try:
        return bool(_C._get_cudnn_allow_tf32())
    except RuntimeError:  # it differs between kinds of kernels, whose flags are read below
        return None


def _set_cudnn(tf32: bool | None) -> None:
    if tf32 is not None:
        _C._set_cudnn_allow_tf32(tf32)


def _set_linalg(library: int) -> None:
    _C._set_linalg_preferred_backend(_C._LinalgBackend(library))


def _deterministic() -> tuple[bool, bool]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_fp16_sums(allowed: tuple[bool, bool]) -> None:
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*allowed)


def _set_bf16_sums(allowed: tuple[bool, bool]) -> None:
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*allowed)


_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "fill of uninitialized memory": (
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    "float32 matmul precision": (_matmul_precision, _set_matmul),
    "tf32 of cudnn": (_cudnn_tf32, _set_cudnn),
    **{  # after the two flags above, which set some of these
        f"float32 precision of {op}, {backend}": (
            partial(_C._get_fp32_precision_getter, backend, op),
            partial(_C._set_fp32_precision_setter, backend, op),
        )
        for backend, op in _PRECISIONS
    },
    "mkldnn": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "mkldnn deterministic": (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    "nnpack": (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    "cudnn": (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "cudnn benchmark": (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "cudnn deterministic": (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    "sums of float16, and in parts": (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _set_fp16_sums,
    ),
    "sums of bfloat16, and in parts": (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _set_bf16_sums,
    ),
    "float16 sums of products": (
        _C._get_cublas_allow_fp16_accumulation,
        _C._set_cublas_allow_fp16_accumulation,
    ),
    "float16 sums on the CPU": (
        _C._get_cpu_allow_fp16_reduced_precision_reduction,
        _C._set_cpu_allow_fp16_reduced_precision_reduction,
    ),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "memory-efficient attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "attention by its formula": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "sums of attention by its formula": (
        _cuda.fp16_bf16_reduction_math_sdp_allowed,
        _cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "library of linear algebra": (lambda: int(_C._get_linalg_preferred_backend()), _set_linalg),
}
if hasattr(_C, "_get_cudnn_depthwise_kernel"):  # from torch 2.13 on
    _FLAGS["cudnn depthwise kernel"] = (
        _C._get_cudnn_depthwise_kernel,
        _C._set_cudnn_depthwise_kernel,
    )


def kernel_flags() -> Flags:
    """Return the present settings of this process."""
    # A list, because this runs for each run: a generator is slower.
    return tuple([(name, get()) for name, (get, _) in _FLAGS.items()])


def set_kernel_flags(flags: Flags) -> None:
    """Set the settings of this process."""
    for (name, value), (_, before) in zip(flags, kernel_flags(), strict=True):
        if value != before or name.startswith("float32"):  # setting a precision changes others
            _FLAGS[name][1](value)
