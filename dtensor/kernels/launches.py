"""The launch of each kernel, as one table: grid, blocks, warps, stages, and bytes moved.

    at = NORM_ROW.at(8192, 4096, True)        # x[8192, 4096], whose rows begin on whole groups
    _rms_norm_row[at.grid](..., **at.options)      # (8192,); BLOCK=4096, num_warps=8, ...
    NORM_ROW.moved(arguments)                      # (bytes read, bytes written)

Nothing is autotuned: a tuner may choose differently on two ranks, and then the order of sums and
the last bits of replicas differ.

Invariants: grids and blocks depend only on shapes and strides; each element is in one program; a
grid respects CUDA's limits of 2**31 - 1 programs on its first axis and 65,535 on its second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

GROUP = 8
"""Elements that have one mask: 16 bytes of a 16-bit dtype."""
WARP = 64 if torch.version.hip else 32
"""Threads of a warp."""
MAX_THREADS = 1024
NUM_STAGES = 1
"""Stages of Triton's pipeline for loads of products (`tl.dot`), which these kernels do not have."""

ROW_PER_THREAD = 16
"""Elements of a row per thread; half as many if rows are not aligned."""
NUM_PARTS = 512
"""The greatest number of programs that share a sum over rows."""
KEPT_BLOCK = 8192
"""The longest row with which the backward of a norm also keeps the weight in registers."""

MAX_PROGRAMS = 2**31 - 1
MAX_COLUMNS = 65_535 * 1024
"""The limit of kernels that count columns in 32 bits or on the second axis of a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """The shape of a launch. ``blocks``: programs per row; ``options``: keyword arguments of the
    launch: block sizes, warps, stages, and whether products and sums are fused."""

    grid: tuple[int, ...]
    options: Mapping[str, Any]
    blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRule:
    """The rule for launches of a kernel.

    ``kernel``: the name of its function. ``shape``: returns the launch shape for sizes.
    ``programs``, ``block``, ``warps``, ``why``: the rule in words. ``reads``, ``writes``: the
    pointers that the kernel loads and stores: "X"; "X[start:stop]" or "X[0:2]" if a launch accesses
    only these columns; "X if FLAG" if it accesses X only if the constant FLAG is true.
    """

    kernel: str
    shape: Callable[..., LaunchShape]
    programs: str
    block: str
    warps: str
    why: str
    reads: Sequence[str]
    writes: Sequence[str]

    def at(self, *sizes: int) -> LaunchShape:
        """Return the launch shape for these sizes, from a cache."""
        return _cached_shape(self.shape, WARP, *sizes)

    def moved(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Return (bytes read, bytes written) of a launch; ``arguments``: by the kernel's names.

        Each element counts once, even if several programs read it. Elements between strided rows do
        not count.
        """
        read = sum(_nbytes(operand, arguments) for operand in self.reads)
        return read, sum(_nbytes(operand, arguments) for operand in self.writes)


def _nbytes(operand: str, arguments: Mapping[str, Any]) -> int:
    """Return the bytes of an operand's distinct elements: a dim of stride 0 counts as size 1."""
    text, _, flag = operand.partition(" if ")
    if flag and not arguments[flag]:
        return 0
    name, _, columns = text.rstrip("]").partition("[")
    x: Tensor = arguments[name]
    sizes = list(x.shape)
    if columns:
        start, stop = (int(arguments.get(end, end)) for end in columns.split(":"))
        sizes[-1:] = [stop - start]
    kept = (size if stride else 1 for size, stride in zip(sizes, x.stride(), strict=True))
    return x.element_size() * math.prod(kept) if x.numel() else 0


def in_groups(*lengths: int) -> bool:
    """Return whether all lengths and strides, in elements, are multiples of GROUP."""
    return all(length % GROUP == 0 for length in lengths)


def max_row(grouped: bool) -> int:
    """Return the greatest number of elements of a row that a program can hold."""
    return MAX_THREADS * (ROW_PER_THREAD if grouped else ROW_PER_THREAD // 2)


def parts_of(num_rows: int) -> tuple[int, int]:
    """Return (programs, rows per program) for a sum over rows."""
    each = max(1, -(-num_rows // NUM_PARTS))
    return -(-num_rows // each), each


def within(num_programs: int, columns: int = 1) -> bool:
    """Return whether the programs on a grid's first axis and the columns of a row are within the
    limits."""
    return num_programs <= MAX_PROGRAMS and columns <= MAX_COLUMNS


# -- from shapes to launches -----------------------------------------------------------------------


@lru_cache(1 << 12)
def _cached_shape(shape: Callable[..., LaunchShape], warp: int, *sizes: int) -> LaunchShape:
    """Return ``shape(*sizes)``, cached also by ``warp``, on which shapes depend."""
    return shape(*sizes)


def _launch(
    grid: tuple[int, ...], warps: int, *, fused: bool = False, blocks: int = 1, **block: int | bool
) -> LaunchShape:
    options = {
        **block,
        "num_warps": warps,
        "num_stages": NUM_STAGES,
        "enable_fp_fusion": fused,
    }
    return LaunchShape(grid=grid, options=options, blocks=blocks)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """Return the least power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _row_block(length: int, grouped: bool) -> tuple[int, int]:
    """Return (lanes, warps) of a program that holds a row."""
    lanes = max(WARP, _power(length))
    threads = lanes // (ROW_PER_THREAD if grouped else ROW_PER_THREAD // 2)
    return lanes, min(max(threads, WARP), MAX_THREADS) // WARP


def _norm_row(num_rows: int, length: int, grouped: bool) -> LaunchShape:
    lanes, warps = _row_block(length, grouped)
    return _launch((num_rows,), warps, fused=True, BLOCK=lanes)


def _norm_rows(num_rows: int, length: int, grouped: bool) -> LaunchShape:
    lanes, warps = _row_block(length, grouped)
    kept = lanes <= KEPT_BLOCK
    return _launch((parts_of(num_rows)[0],), warps, fused=True, BLOCK=lanes, KEPT=kept)


def _sum_of_rows(num_columns: int) -> LaunchShape:
    return _launch((_ceil(num_columns, 64),), 4, ROWS=32, COLUMNS=64)


def _gate(num_rows: int, columns: int) -> LaunchShape:
    block = 16 * 4 * 32
    blocks = _ceil(columns, block)
    return _launch((num_rows * blocks,), 4, blocks=blocks, GROUP=GROUP, BLOCK=block)


def _bias(num_rows: int, columns: int) -> LaunchShape:
    blocks = _ceil(columns, 1024)
    return _launch((num_rows * blocks,), 4, blocks=blocks, BLOCK=1024)


def _bias_backward(num_rows: int, columns: int) -> LaunchShape:
    return _launch((parts_of(num_rows)[0], _ceil(columns, 1024)), 4, BLOCK=1024)


def _rope(num_rows: int, half: int, grouped: bool) -> LaunchShape:
    lanes = _power(half)
    each = GROUP if grouped else GROUP // 2
    rows = max(1, each * 4 * WARP // lanes)
    return _launch((_ceil(num_rows, rows),), 4, ROWS=rows, LANES=lanes)


def _ce_row(num_rows: int) -> LaunchShape:
    return _launch((num_rows,), 8, GROUP=GROUP, BLOCK=4096)


def _ce_blocks(num_rows: int, columns: int) -> LaunchShape:
    """Return the launch of the backward. A row may begin up to GROUP - 1 elements after the
    boundary from which its lanes count."""
    blocks = _ceil(columns + GROUP, 4096)
    return _launch((num_rows * blocks,), 8, blocks=blocks, GROUP=GROUP, BLOCK=4096)


def _dropout_row(num_rows: int, start: int, stop: int) -> LaunchShape:
    """Return the launch for global columns start:stop; lanes count from the boundary before
    ``start``."""
    block = GROUP * 4 * WARP
    blocks = _ceil(stop - start // GROUP * GROUP, block)
    return _launch((num_rows * blocks,), 4, blocks=blocks, GROUP=GROUP, BLOCK=block)


def _dropout_flat(count: int) -> LaunchShape:
    block = GROUP * 4 * WARP
    return _launch((_ceil(count, block),), 4, GROUP=GROUP, BLOCK=block)


# -- the table -------------------------------------------------------------------------------------

_ROW_BLOCK = "the row, to a power of 2"
_ROW_WARPS = "1 to 32: 16 elements a thread, 8 where rows begin anywhere"

NORM_ROW = LaunchRule(
    kernel="_rms_norm_row",
    shape=_norm_row,
    programs="rows",
    block=_ROW_BLOCK,
    warps=_ROW_WARPS,
    why="a row is in registers between its sum and its scaling, so it is read once",
    reads=("X", "RESIDUAL if HAS_RESIDUAL", "WEIGHT"),
    writes=("TOTAL if HAS_RESIDUAL", "Y", "RSTD"),
)
NORM_ROWS_BACKWARD = LaunchRule(
    kernel="_rms_norm_backward_rows",
    shape=_norm_rows,
    programs="up to 512, of some rows each",
    block=_ROW_BLOCK,
    warps=_ROW_WARPS,
    why="512 programs are about 4 on each of an H100's 132 SMs, and bound the partial sums of "
    "dweight; up to 8,192 elements the weight stays in registers too",
    reads=("GRAD", "X", "RSTD", "WEIGHT"),
    writes=("DX", "PARTS"),
)
LAYER_NORM_ROW = LaunchRule(
    kernel="_layer_norm_row",
    shape=_norm_row,
    programs="rows",
    block=_ROW_BLOCK,
    warps=_ROW_WARPS,
    why="as `_rms_norm_row`",
    reads=("X", "RESIDUAL", "WEIGHT", "BIAS"),
    writes=("TOTAL", "Y", "MEAN", "RSTD"),
)
SUM_ROWS = LaunchRule(
    kernel="_sum_rows",
    shape=_sum_of_rows,
    programs="columns / 64",
    block="32 rows x 64 columns",
    warps="4",
    why="64 adjacent floats of a row are two cache lines; all rows in one program, so that the "
    "order of a sum follows from their number",
    reads=("X",),
    writes=("TOTAL",),
)
GATED = LaunchRule(
    kernel="_gated",
    shape=_gate,
    programs="rows x (columns / 2,048); what is contiguous is one row",
    block="2,048 elements",
    warps="4",
    why="16 elements a thread: two groups of each operand in flight",
    reads=("A", "B"),
    writes=("Y",),
)
GATED_BACKWARD = LaunchRule(
    kernel="_gated_backward",
    shape=_gate,
    programs="as `_gated`",
    block="2,048 elements",
    warps="4",
    why="as `_gated`",
    reads=("G", "A", "B"),
    writes=("DA", "DB"),
)
BIAS_GELU = LaunchRule(
    kernel="_bias_gelu",
    shape=_bias,
    programs="rows x (columns / 1,024)",
    block="1,024 columns",
    warps="4",
    why="8 elements a thread: a group of x and one of the bias",
    reads=("X", "BIAS"),
    writes=("Y",),
)
BIAS_GELU_BACKWARD = LaunchRule(
    kernel="_bias_gelu_backward",
    shape=_bias_backward,
    programs="up to 512, of some rows each, x (columns / 1,024)",
    block="1,024 columns",
    warps="4",
    why="as `_bias_gelu`; the partial sums of dbias are as of a norm's dweight",
    reads=("G", "X", "BIAS"),
    writes=("DX", "PARTS"),
)
ROPE = LaunchRule(
    kernel="_rope",
    shape=_rope,
    programs="rows / (rows of a block)",
    block="half a row, to a power of 2, x as many rows as 8 elements a thread make, 4 where rows "
    "begin anywhere",
    warps="4",
    why="6 loads of 16 bytes a thread in flight: both halves of x, cos and sin; of 32 elements a "
    "thread the backward takes 140 registers on sm_90",
    reads=("X", "COS", "SIN"),
    writes=("Y",),
)
CE_STATS = LaunchRule(
    kernel="_ce_stats",
    shape=_ce_row,
    programs="rows",
    block="4,096 logits, in a loop over the row",
    warps="8",
    why="16 logits a thread; a row of a vocabulary is too long for registers, so each group of "
    "lanes keeps a maximum and a sum of its own, and the row is read once",
    reads=("LOGITS", "TARGET"),
    writes=("STATS",),
)
CE_BACKWARD = LaunchRule(
    kernel="_ce_backward",
    shape=_ce_blocks,
    programs="rows x ((columns + 8) / 4,096)",
    block="4,096 logits",
    warps="8",
    why="16 logits a thread; with the statistics known, the parts of a row are independent",
    reads=("GRAD", "LOGITS", "STATS[0:2]", "TARGET"),
    writes=("D",),
)
DROPOUT = LaunchRule(
    kernel="_dropout",
    shape=_dropout_row,
    programs="rows x (columns / block)",
    block="8 columns a thread: 1,024, or 2,048 with warps of 64",
    warps="4",
    why="a thread has two Philox counters, each of 4 words, so that no word is computed twice",
    reads=(
        *("X[start:stop]", "RESIDUAL[start:stop] if HAS_RESIDUAL", "ROWS if HAS_TABLE"),
        *("SEED", "STEP"),
    ),
    writes=("Y[start:stop]", "KEPT[start:stop]"),
)
DROPOUT_BACKWARD = LaunchRule(
    kernel="_dropout_backward",
    shape=_dropout_flat,
    programs="elements / block",
    block="8 elements a thread: 1,024, or 2,048 with warps of 64",
    warps="4",
    why="8 flags are one load of 8 bytes",
    reads=("GRAD", "KEPT"),
    writes=("DX",),
)

LAUNCHES: Mapping[str, LaunchRule] = {
    rule.kernel: rule
    for rule in (
        NORM_ROW, NORM_ROWS_BACKWARD, LAYER_NORM_ROW, SUM_ROWS, GATED, GATED_BACKWARD, BIAS_GELU,
        BIAS_GELU_BACKWARD, ROPE, CE_STATS, CE_BACKWARD, DROPOUT, DROPOUT_BACKWARD,
    )
}  # fmt: skip
"""The rules of all Triton kernels, by the name of the kernel function."""


def table() -> list[str]:
    """Return the rules as rows of the Markdown table in docs/kernels.md."""
    rows = ["| kernel | programs | block | warps | why |", "|---|---|---|---|---|"]
    for rule in LAUNCHES.values():
        cells = (f"`{rule.kernel}`", rule.programs, rule.block, rule.warps, rule.why)
        rows.append(f"| {' | '.join(cells)} |")
    return rows
