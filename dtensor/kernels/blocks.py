"""What the kernels share: how a tensor is cut into rows, and sums of partial results.

    matrix, stride = rows_of(x)            # x[4,512,1024] -> [2048,1024], its rows 1024 apart
    total = sum_rows(partial)              # f32[512,1024] -> f32[1024]

A lane of a GPU reads 16 bytes at once where the compiler can prove that they are adjacent, on a
boundary, and wanted or not as one. Row kernels leave that proof to strides that 16 divides, which
Triton is told of by itself. Elementwise ones, and those of the logits, whose row lengths may be odd
(a vocabulary of 50,257), lay their lanes out in groups of GROUP elements, [BLOCK // GROUP, GROUP],
masked by whole groups; what is left at the edges, fewer than GROUP elements, is a second, masked
load of a few lanes.

Invariants: grids and blocks follow from shapes alone and nothing is added by atomics, so that the
bits of a result do not depend on the device's size or on time; nor on Triton's version, as every
launch says whether a product and a sum may be fused into one rounding. Rows and offsets are 64
bits; where a column is 32, the op computes longer rows (`launches.within`). Not here: any op; how a
kernel is launched (launches.py).
"""

# A launch takes numbers for the constants of a kernel.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor.kernels.launches import SUM_ROWS

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute these: floats of at most 32 bits, for they do so in float32."""
    return all(x.dtype in _TYPES for x in tensors)


def triton_type(dtype: torch.dtype) -> tl.dtype:
    return _TYPES[dtype]


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x[... k] as a matrix [rows, k] with adjacent columns, and elements from row to row.

    A copy where x has no such view.
    """
    matrix = x.reshape(-1, x.shape[-1])
    if matrix.stride(1) != 1 and matrix.shape[1] != 1:
        matrix = matrix.contiguous()
    return matrix, matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """f32[p, k] -> [k]: the sum over p in an order that follows from p alone."""
    total = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    at = SUM_ROWS.at(x.shape[1])
    _sum_rows[at.grid](x, total, x.shape[0], x.shape[1], **at.options)
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
