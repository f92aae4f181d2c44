"""What the kernels share: how a tensor is cut into rows and blocks, and sums of partial results.

    matrix, stride = rows_of(x)            # x[4,512,1024] -> [2048,1024], its rows 1024 apart
    block, warps = row_block(1024, True)   # one program a row: 1024 lanes, 2 warps
    total = sum_rows(partial)              # f32[512,1024] -> f32[1024]

A lane of a GPU reads 16 bytes at once where the compiler can prove that they are adjacent, on a
boundary, and wanted or not as one. Row kernels leave that proof to strides that 16 divides, which
Triton is told of by itself. Elementwise ones, and those of the logits, whose row lengths may be odd
(a vocabulary of 50,257), lay their lanes out in groups of GROUP elements, [BLOCK // GROUP, GROUP],
masked by whole groups; what is left at the edges, fewer than GROUP elements, is a second, masked
load of a few lanes.

Invariants: grids and blocks follow from shapes alone and nothing is added by atomics, so that the
bits of a result do not depend on the device's size or on time; nor on Triton's version, as every
launch says whether a product and a sum may be fused into one rounding. Not here: any op.
"""

# A launch takes options that the kernel does not name.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8
"""Elements that are masked as one: 16 bytes of a 16-bit dtype."""
MAX_THREADS = 1024
PER_THREAD = 16
"""Elements of a row that a thread holds, half as many where each has an address of its own."""
NUM_PARTS = 512
"""Programs that a sum over rows is split into, at most."""

WARP = 64 if torch.version.hip else 32
"""Threads of a warp."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute these: floats of at most 32 bits, for they do so in float32."""
    return all(x.dtype in _TYPES for x in tensors)


def triton_type(dtype: torch.dtype) -> tl.dtype:
    return _TYPES[dtype]


def laid_as(like: Tensor, made: Tensor) -> Tensor:
    """The values of `made` with the strides of `empty_like(like)`; itself where it has them."""
    wanted = torch.empty_like(like, dtype=made.dtype)
    return made if made.stride() == wanted.stride() else wanted.copy_(made)


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x[... k] as a matrix [rows, k] with adjacent columns, and elements from row to row.

    A copy where x has no such view.
    """
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] != 1:
        matrix = matrix.contiguous()
    return matrix, matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def in_groups(*lengths: int) -> bool:
    """Whether lengths and distances, in elements, are whole groups."""
    return all(length % GROUP == 0 for length in lengths)


def row_block(length: int, grouped: bool) -> tuple[int, int]:
    """(lanes, warps) of a program that holds a row."""
    lanes = max(WARP, triton.next_power_of_2(length))
    threads = lanes // (PER_THREAD if grouped else PER_THREAD // 2)
    return lanes, min(max(threads, WARP), MAX_THREADS) // WARP


def max_row(grouped: bool) -> int:
    """Elements of a row that a program can hold."""
    return MAX_THREADS * (PER_THREAD if grouped else PER_THREAD // 2)


def parts_of(num_rows: int) -> tuple[int, int]:
    """(programs, rows of each) for a sum over rows."""
    each = max(1, -(-num_rows // NUM_PARTS))
    return -(-num_rows // each), each


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """f32[p, k] -> [k]: the sum over p in an order that follows from p alone."""
    total = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    grid = (triton.cdiv(x.shape[1], 64),)
    _sum_rows[grid](
        x, total, x.shape[0], x.shape[1], ROWS=32, COLUMNS=64, num_warps=4, enable_fp_fusion=False
    )
    return total


@triton.jit
def _sum_rows(X, TOTAL, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, num_rows, ROWS):
        inside = ((first + r) < num_rows)[:, None] & (c < num_columns)[None, :]
        at = (first + r).to(tl.int64)[:, None] * num_columns + c[None, :]
        total += tl.sum(tl.load(X + at, mask=inside, other=0.0), 0)
    tl.store(TOTAL + c, total.to(TOTAL.dtype.element_ty), mask=c < num_columns)
