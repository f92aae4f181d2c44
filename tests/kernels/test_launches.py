"""Tests kernel launches: only launches.py states them, each element is in one program, the docs
have their table, and no 32-bit number that an address depends on overflows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import dtensor.kernels
import dtensor.sharding.ops.registered
from benchmarks import predicted_kernels
from dtensor.kernels import cross_entropy, dropout, gates, norms, rope
from dtensor.kernels import launches as rules
from dtensor.kernels.launches import LAUNCHES
from tests.kernels import ahead, widths

ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 7, 8, 9, 31, 64, 1000, 1024, 1025, 2048, 4088, 4089, 4096, 11008, 16384, 128256)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_every_kernel_launch_follows_rule_in_launches_file() -> None:
    seen: set[str] = set()
    for calls in ahead.CALLS.values():
        for name, call in calls.items():
            for launch in ahead.launches(call):
                seen.add(launch.function.__name__)
                assert launch.options == {
                    "num_warps": launch.options["num_warps"],
                    "num_stages": rules.NUM_STAGES,
                    "enable_fp_fusion": "norm" in launch.name,
                }, name
    assert seen == set(LAUNCHES)
    files = [path for path in Path(dtensor.kernels.__path__[0]).glob("*.py")]
    stated = [path.name for path in files if "num_warps" in path.read_text()]
    assert stated == ["launches.py"]


def test_kernels_page_contains_launch_table() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert "\n".join(rules.table()) in page


def test_recorded_predictions_are_up_to_date() -> None:
    """If this fails: python -m benchmarks.predicted_kernels --write."""
    written = predicted_kernels.RESULTS.read_text()
    assert written == "\n".join(predicted_kernels.lines()) + "\n"
    assert "predicted, never measured" in written.splitlines()[0]


def test_predicted_bytes_are_minimum_plus_partial_sums() -> None:
    """Each operand is counted once, float32 partial sums of 512 rows twice, and the seed and the
    step of a dropout once."""
    _, d, ff, v, heads = next(iter(predicted_kernels.MODELS.values()))
    for call in predicted_kernels.calls(8192, d, ff, v, heads, torch.bfloat16):
        found = predicted_kernels.predict(call)
        parts = {"rms_norm_backward": d, "bias_gelu_backward": ff}.get(call.name.split()[0], 0)
        numbers = {"dropout": 16, "dropout_add": 16}.get(call.name.split()[0], 0)
        assert found.read + found.written == found.least + 2 * 512 * parts * 4 + numbers, call.name


def test_prediction_refuses_call_that_copies_operand() -> None:
    odd = meta(4096, 4096).t()
    call = predicted_kernels.Call(
        name="copied", call=lambda: gates.gated(odd, meta(4096, 4096), "silu"), operands=(odd,)
    )
    with pytest.raises(AssertionError, match="clone"):
        predicted_kernels.predict(call)


def test_blocks_of_launch_cover_row() -> None:
    for columns in SIZES:
        for rule in (rules.GATED, rules.GATED_BACKWARD, rules.BIAS_GELU):
            at = rule.at(5, columns)
            block = at.options["BLOCK"]
            assert at.grid == (5 * at.blocks,)
            assert (at.blocks - 1) * block < columns <= at.blocks * block
        for before in range(rules.GROUP):  # a row may start there
            at = rules.CE_BACKWARD.at(5, columns)
            assert at.grid == (5 * at.blocks,)
            assert before + columns <= at.blocks * at.options["BLOCK"]
            at = rules.DROPOUT.at(5, 64 + before, 64 + before + columns)
            block = at.options["BLOCK"]
            assert (at.blocks - 1) * block < before + columns <= at.blocks * block
        at = rules.DROPOUT_BACKWARD.at(columns)
        assert (at.grid[0] - 1) * at.options["BLOCK"] < columns
        assert columns <= at.grid[0] * at.options["BLOCK"]
        at = rules.SUM_ROWS.at(columns)
        assert (at.grid[0] - 1) * at.options["COLUMNS"] < columns
        assert columns <= at.grid[0] * at.options["COLUMNS"]


def test_rows_are_divided_between_programs_without_overlap() -> None:
    for num_rows in (*SIZES, 511, 512, 513, 2**31 + 1):
        programs, each = rules.parts_of(num_rows)
        assert programs <= rules.NUM_PARTS
        assert (programs - 1) * each < num_rows <= programs * each
        assert rules.NORM_ROWS_BACKWARD.at(num_rows, 64, True).grid == (programs,)
        assert rules.BIAS_GELU_BACKWARD.at(num_rows, 64).grid == (programs, 1)
        for half in (1, 3, 32, 63, 64, 128):
            for grouped in (False, True):
                at = rules.ROPE.at(num_rows, half, grouped)
                assert half <= at.options["LANES"] == triton.next_power_of_2(half)
                assert (at.grid[0] - 1) * at.options["ROWS"] < num_rows
                assert num_rows <= at.grid[0] * at.options["ROWS"]


def test_norm_launch_has_enough_threads_for_row() -> None:
    for length in SIZES:
        for grouped in (False, True):
            if length > rules.max_row(grouped):
                continue
            options = rules.NORM_ROW.at(3, length, grouped).options
            assert options["BLOCK"] == max(rules.WARP, triton.next_power_of_2(length))
            threads = options["num_warps"] * rules.WARP
            assert threads <= rules.MAX_THREADS
            assert options["BLOCK"] <= threads * (16 if grouped else 8)


def test_launches_do_not_depend_on_dtype() -> None:
    def shapes(dtype: torch.dtype) -> list[object]:
        x, weight = meta(64, 4096, dtype=dtype), meta(4096, dtype=dtype)
        logits, target = meta(64, 50257, dtype=dtype), meta(64, dtype=torch.int64)

        def call() -> None:
            norms.rms_norm(x, weight, 1e-6, 0.0, dtype, dtype)
            norms.rms_norm_backward(x, x, meta(64, 1, dtype=torch.float32), weight, 0.0)
            gates.gated(x, x, "silu")
            gates.bias_gelu_backward(x, x, weight, "gelu")
            rope.rope(x, x, x)
            cross_entropy.ce_stats(logits, target, -100)
            dropout.dropout(x, 0.1, at_seed=1, at_step=0, op=0)

        return [(launch.name, launch.grid, launch.options) for launch in ahead.launches(call)]

    assert shapes(torch.float32) == shapes(torch.bfloat16) == shapes(torch.float16)


LONG, ROWS = rules.MAX_COLUMNS + 1, 2**31


@pytest.mark.parametrize(
    "call",
    {
        "a long row of bias_gelu": lambda: gates.bias_gelu(meta(1, LONG), meta(LONG), "gelu"),
        "a long row of bias_gelu_backward": lambda: gates.bias_gelu_backward(
            meta(1, LONG), meta(1, LONG), meta(LONG), "gelu"
        ),
        "a long row of logits": lambda: cross_entropy.ce_stats(
            meta(1, LONG), meta(1, dtype=torch.int64), -100
        ),
        "a long row of logits, backward": lambda: cross_entropy.ce_backward(
            meta(1), meta(1, LONG), meta(1, 3), meta(1, dtype=torch.int64), -100
        ),
        "rows of a norm": lambda: norms.rms_norm(
            meta(ROWS, 1), meta(1), 1e-6, 0.0, torch.bfloat16, torch.bfloat16
        ),
        "rows of dropout": lambda: dropout.dropout(
            meta(ROWS, 1), 0.1, at_seed=1, at_step=0, op=0
        ),
        "rows of a gate": lambda: gates.gated(meta(ROWS, 2)[:, :1], meta(ROWS, 2)[:, 1:], "silu"),
        "rows of rope": lambda: rope.rope(meta(ROWS, 2), meta(ROWS, 2), meta(ROWS, 2)),
    }.items(),
    ids=lambda pair: pair[0],
)  # fmt: skip
def test_call_too_large_for_grid_launches_no_kernel(call: tuple[str, Callable[[], object]]) -> None:
    assert not ahead.launches(call[1])


@pytest.mark.parametrize("name", ["rms_norm", "gated silu", "ce_backward"])
def test_tensors_of_more_than_2_31_elements_launch_kernel(name: str) -> None:
    (launch,) = ahead.launches(ahead.CALLS["large"][name])
    assert max(x.numel() for x in launch.arguments.values() if isinstance(x, Tensor)) > 2**31
    assert launch.grid[0] <= rules.MAX_PROGRAMS


@pytest.mark.slow
def test_num_stages_does_not_change_machine_code() -> None:
    """Checks kernels that loop. None has a matrix product whose loads could be pipelined."""
    for name in ("rms_norm_backward", "bias_gelu_backward", "ce_stats"):
        for launch in ahead.launches(ahead.CALLS["aligned"][name]):
            staged = dataclasses.replace(launch, options={**launch.options, "num_stages": 3})
            assert ahead.code_for(launch, "sm_90") == ahead.code_for(staged, "sm_90"), launch.name


# -- numbers of 32 bits: none that an address follows from overflows -------------------------------


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
    """Compute a product that wraps and is only stored: no address depends on it."""
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


def test_overflow_in_address_computation_is_reported() -> None:
    assert not found(_narrow, 2**16, 2**15)
    line, *_ = found(_narrow, 2**16 + 1, 2**15)
    assert "arith.muli" in line and f"0 to {2**31}" in line
    (line,) = found(_narrow, 2, 2**31 - 2)  # the sum of the row's offset and a column
    assert "arith.addi" in line
    assert found(_loop, 1, 2**16 + 1, 2**15) and not found(_loop, 1, 2**16, 2**15)


def test_overflow_in_mask_computation_is_reported() -> None:
    assert not found(_masked, 2**27, 100)
    assert found(_masked, 2**27 + 1, 100)


def test_wrapping_product_that_is_only_stored_is_not_reported() -> None:
    assert not found(_value, 1, 2**31 - 2, dtype=torch.int32)


@pytest.mark.default("sm_80")
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_largest_accepted_tensors_overflow_no_32_bit_number(target: str) -> None:
    seen: set[str] = set()
    for _, launch, lines in widths.found(target):
        seen.add(launch.function.__name__)
        assert not lines, (launch.name, launch.grid, lines)
    assert seen == set(LAUNCHES)
