"""The four pictures of docs/concepts.md: each from values of dtensor, no line of them written here.

    python docs/pictures/draw.py concept_mesh concept_placement concept_plan concept_program

The plan and the program are those of one MLP of 4 x 8 x 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from sheet import FAINT, FIRST, GROUND, RANKS, SECOND, STARRED, THIRD, WAITING, Sheet
from torch import nn

import dtensor as dt
from dtensor.daft import Call, Collective, Recv, Send, Wait
from dtensor.daft.ir.text import format_instruction
from dtensor.runtime.lower.program import lower


def mesh() -> str:
    """Ranks in a grid, and the groups of one of them."""
    grid, marked = dt.Mesh(dp=2, tp=4), 5
    sheet = Sheet(760, 236, f"{grid}: eight ranks, and the groups of rank {marked}")
    wide, high, left, top = 130, 62, 110, 56
    sheet.text(left + 2 * wide, 24, f"dt.{grid!r}: {grid.size} ranks", code=True)
    groups = {axis: grid.group(marked, axis) for axis in grid.axes}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        x, y = left + at["tp"] * wide, top + at["dp"] * high
        both = [axis for axis, group in groups.items() if rank in group]
        fill = (
            GROUND if not both else THIRD if len(both) == 2 else FIRST if "tp" in both else SECOND
        )
        sheet.box(x, y, wide - 10, high - 10, fill)
        sheet.text(x + wide / 2 - 5, y + 22, f"rank {rank}", bold=rank == marked)
        words = ", ".join(f"{axis}={index}" for axis, index in at.items())
        sheet.text(x + wide / 2 - 5, y + 40, words, size=12, fill=FAINT, code=True)
    for index in range(2):
        sheet.text(left - 14, top + index * high + 30, f"dp={index}", anchor="end", code=True)
    bottom = top + 2 * high + 14
    for axis, fill, x in (("tp", FIRST, left), ("dp", SECOND, left + 270)):
        sheet.box(x, bottom, 16, 16, fill)
        group = ", ".join(str(rank) for rank in groups[axis])
        sheet.text(
            x + 24, bottom + 13, f"rank {marked}'s group along {axis}: {group}", anchor="start"
        )
    return sheet.svg()


def placement() -> str:
    """Which elements each rank holds under six placements."""
    tp, both = dt.Mesh(tp=2), dt.Mesh(dp=2, tp=2)
    panels = (
        ("f32[8,4]", tp, "tp=dt.Replicate()"),
        ("f32[8@tp,4]", tp, "tp=dt.Row()"),
        ("f32[8,4@tp]", tp, "tp=dt.Column()"),
        ("f32[2*4@tp,4]", tp, "tp=dt.Row(blocks=2)"),
        ("f32[8,4]{sum@tp}", tp, 'tp=dt.Partial("sum")'),
        ("f32[8@dp,4@tp]", both, "dp=dt.Row(), tp=dt.Column()"),
    )
    sheet = Sheet(760, 420, "One tensor of 8 rows and 4 columns under six placements")
    for number, (text, grid, stated) in enumerate(panels):
        middle, top = 130 + 250 * (number % 3), 14 + 214 * (number // 3)
        spec = dt.spec(text, grid)
        sheet.text(middle, top + 10, stated, code=True, size=12)
        sheet.text(middle, top + 28, str(spec), code=True, size=12, fill=FAINT)
        pending = any(isinstance(p, dt.Partial) for p in spec.sharding.values())
        cell = 13 if grid.size == 2 else 11
        gap = 22 if grid.size == 2 else 14
        wide = grid.size * 4 * cell + (grid.size - 1) * gap
        for rank in range(grid.size):
            left = middle - wide / 2 + rank * (4 * cell + gap)
            at = grid.coordinates(rank)
            rows, columns = (_indices(spec.intervals(dim, at)) for dim in (0, 1))
            for row in range(8):
                for column in range(4):
                    here = row in rows and column in columns
                    fill = RANKS[rank] if here else GROUND
                    x, y = left + column * cell, top + 40 + row * cell
                    sheet.box(x, y, cell, cell, fill, round_by=0)
            if pending:
                sheet.text(left + 2 * cell, top + 40 + 4.4 * cell, "addend", size=12, bold=True)
            sheet.text(left + 2 * cell, top + 56 + 8 * cell, f"rank {rank}", size=12)
        if pending:
            sheet.text(middle, top + 40 + 4.4 * cell, "+", size=16, bold=True)
    return sheet.svg()


def _indices(intervals: Iterable[tuple[int, int]]) -> set[int]:
    return {index for begin, end in intervals for index in range(begin, end)}


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _planned(grid: dt.Mesh, placements: dict[str, Any], **options: Any) -> dt.Plan:
    model = dt.parallelize(_MLP(), grid, placements, **options)
    return dt.compile(lambda model, x: model(x), grid).plan(model, torch.empty(6, 4))


def plan() -> str:
    """The plan of an MLP over two ranks: lines, types, and what each rank holds, to scale."""
    grid = dt.Mesh(tp=2)
    found = _planned(grid, {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())})
    stars = {collective.name for collective in found.collectives}
    lines = re.findall(r"^[* ] (\w+) += (.+?)  +(\S+@?\S*)", found.text(), re.MULTILINE)
    high = 62
    sheet = Sheet(
        760, 44 + high * len(lines), "A plan's lines, and what each rank holds after each"
    )
    sheet.text(14, 24, "line of the plan", anchor="start", fill=FAINT)
    sheet.text(390, 24, "type", anchor="start", fill=FAINT)
    for rank in range(grid.size):
        sheet.text(600 + 110 * rank, 24, f"rank {rank}", fill=FAINT)
    for number, (name, does, text) in enumerate(lines):
        spec, top = dt.spec(text, grid), 38 + high * number
        if name in stars:
            sheet.box(6, top, 748, high - 4, STARRED)
        words = f"{'*' if name in stars else ' '} {name} = {does}"
        sheet.text(14, top + 33, words, anchor="start", code=True, size=12, bold=name in stars)
        sheet.text(390, top + 33, text, anchor="start", code=True, size=12)
        for rank in range(grid.size):
            rows, columns = spec.local_shape(grid.coordinates(rank))
            middle, pending = 600 + 110 * rank, "{" in text
            x, y = middle - 3.5 * columns, top + 29 - 3.5 * rows
            dashed = "3 3" if pending else ""
            fill = RANKS[rank] if pending or "@" in text else THIRD
            sheet.box(x, y, 7 * columns, 7 * rows, fill, dashed)
            if pending:
                sheet.text(middle, top + 34, "+", bold=True)
        if name in stars:
            sheet.arrow((625, top + 21), (685, top + 21))
            sheet.arrow((685, top + 37), (625, top + 37))
    return sheet.svg()


def program() -> str:
    """What two ranks do, one after the other, and what goes between them."""
    found = lower(_planned(dt.Mesh(pp=2), {}, stages={"pp": [["up.*"], ["down.*"]]}), None)
    lists = [rank.instructions for rank in found.ranks]
    high, top, left, wide = 27, 62, 16, 350
    longest = max(len(instructions) for instructions in lists)
    sheet = Sheet(760, top + high * longest + 8, "The lists of two ranks of a pipeline")
    places: dict[tuple[int, str], float] = {}
    for rank, instructions in enumerate(lists):
        x = left + rank * (wide + 28)
        sheet.text(x + wide / 2, 24, f"rank {rank}", bold=True)
        held = ", ".join(found.ranks[rank].state)
        sheet.text(x + wide / 2, 44, f"holds {held}", size=12, fill=FAINT)
        for number, instruction in enumerate(instructions):
            y = top + number * high
            match instruction:
                case Call():
                    fill = FIRST
                case Send() | Recv() | Collective():
                    fill = SECOND
                case Wait():
                    fill = WAITING
                case _:
                    fill = GROUND
            sheet.box(x, y, wide, high - 4, fill)
            words = format_instruction(instruction, brief=True).replace("lambda_", "")
            sheet.text(x + 10, y + 16, words, anchor="start", code=True, size=12)
            if isinstance(instruction, Send | Recv | Collective):
                places[rank, type(instruction).__name__] = y + (high - 4) / 2
    middle = left + wide
    sheet.arrow((middle, places[0, "Send"]), (middle + 28, places[1, "Recv"]))
    ends = ((middle, places[0, "Collective"]), (middle + 28, places[1, "Collective"]))
    sheet.arrow(*ends)
    sheet.arrow(*reversed(ends))
    return sheet.svg()
