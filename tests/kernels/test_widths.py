"""Whole numbers of 32 bits in Triton's IR: none that an address follows from overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dtensor.kernels.launches import LAUNCHES
from tests.kernels import ahead, widths


@triton.jit
def _narrow(X, Y, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Y + row.to(tl.int64) * BLOCK + c, tl.load(X + (row * stride + c)))


@triton.jit
def _masked(X, Y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + tl.arange(0, BLOCK), tl.load(X + tl.arange(0, BLOCK), mask=c < count))


@triton.jit
def _value(X, Y, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its product wraps, and is stored: no address follows from it."""
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c) * factor)


@triton.jit
def _loop(X, Y, num_rows, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(0, num_rows):
        total += tl.load(X + row * stride + c)
    tl.store(Y + c, total)


def found(kernel: Any, grid: int, *numbers: int, dtype: torch.dtype = torch.float32) -> list[str]:
    x, y = (torch.empty(16, dtype=dtype, device="meta") for _ in range(2))
    options = {"BLOCK": 16, "enable_fp_fusion": False}
    (launch,) = ahead.launches(lambda: kernel[(grid,)](x, y, *numbers, **options))
    return widths.overflows(launch, "sm_90")


def test_an_overflow_that_an_address_follows_from_is_found() -> None:
    assert not found(_narrow, 2**16, 2**15)
    line, *_ = found(_narrow, 2**16 + 1, 2**15)
    assert "arith.muli" in line and f"0 to {2**31}" in line
    (line,) = found(_narrow, 2, 2**31 - 2)  # the sum of the row's offset and a column
    assert "arith.addi" in line
    assert found(_loop, 1, 2**16 + 1, 2**15) and not found(_loop, 1, 2**16, 2**15)


def test_an_overflow_that_a_mask_follows_from_is_found() -> None:
    assert not found(_masked, 2**27, 100)
    assert found(_masked, 2**27 + 1, 100)


def test_a_product_that_may_wrap_is_none() -> None:
    assert not found(_value, 1, 2**31 - 2, dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_largest_tensors_that_launchers_take(target: str) -> None:
    seen: set[str] = set()
    for _, launch, lines in widths.found(target):
        seen.add(launch.function.__name__)
        assert not lines, (launch.name, launch.grid, lines)
    assert seen == set(LAUNCHES)
