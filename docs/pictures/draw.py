"""The pictures of docs/, drawn from what dtensor says, so that they stay true.

    python docs/pictures/draw.py              # writes docs/pictures/*.svg
    python docs/pictures/draw.py state_moves  # that one

`tests/test_docs.py` draws them again and compares. Those of docs/concepts.md are in concepts.py;
what a page itself draws is compared where it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import concepts
from sheet import FAINT, FIRST, RANKS, SECOND, THIRD, Sheet

import dtensor as dt
from dtensor import Plan, TensorSpec

HERE = Path(__file__).resolve().parent


def state() -> str:
    """Where parameters are, and when they move."""
    sheet = Sheet(760, 164, "State moves to the ranks at a launch's first use, and comes home")
    sheet.box(16, 28, 210, 120, FIRST)
    sheet.text(121, 50, "controller: your program", bold=True)
    sheet.lines(121, 86, "module's parameters\nand buffers,\noptimizer.state")
    sheet.box(534, 28, 210, 120, SECOND)
    sheet.text(639, 50, "ranks: here, or Ray's actors", bold=True)
    sheet.lines(639, 86, "shards of each,\nas the plan\nstores them")
    for y, words, out in (
        (56, "first use in a launch; then what was written", True),
        (96, "the first touch of a tensor: it alone, in place", False),
        (136, "the end of the launch: everything, in place", False),
    ):
        sheet.text(380, y - 7, words, size=12)
        ends = ((230.0, float(y)), (530.0, float(y)))
        sheet.arrow(*(ends if out else reversed(ends)))
    return sheet.svg()


def plan() -> str:
    """The README's plan, its forward: which part of each tensor each of two ranks holds."""
    planned = _plan_of_the_readme()
    specs: dict[str, TensorSpec] = {one.name: one.spec for one in planned.inputs}
    for step in planned.steps:
        specs.update((name, spec) for _, name, spec in step.gives_as())
    (sent,) = (one for one in planned.collectives if one.phase == "forward")

    # a value of the plan, what it is called here, and the sign before it
    shown = [
        ("x", "x", ""), ("permute", "up.weight.T", "@"), ("gelu", "gelu", "→"),
        ("permute_1", "down.weight.T", "@"), ("mm_1", "mm_1", "="),
        ("mm_1_reduced", "mm_1_reduced", ""),
    ]  # fmt: skip
    sheet = Sheet(0, 286, f"What each rank holds in the forward of {planned.mesh}")
    middles = (92.0, 186.0)
    words = (THIRD, "all of it"), (FIRST, "its part"), (SECOND, "all of it, as a part of a sum")
    for (fill, what), x in zip(words, (14, 96, 172), strict=True):
        sheet.box(x, 12, 12, 12, fill)
        sheet.text(x + 18, 22, what, anchor="start", size=11)
    for rank, y in enumerate(middles):
        sheet.text(14, y + 4, f"rank {rank}", anchor="start", bold=True)
    x = 76.0
    for name, called, sign in shown:
        spec = specs[name]
        height, width = (1.35 * size**0.5 for size in spec.shape)
        room = max(width, 0.61 * 11 * len(str(spec)), 0.61 * 13 * len(called))
        if name == sent.name:
            sheet.text(x + 42, 30, f"{sent.kind} over {sent.axis}", bold=True)
            sheet.text(x + 42, 48, f"{sent.bytes_sent / 2**20:.1f} MiB sent by each rank", size=11)
            for y, other in (middles, middles[::-1]):
                sheet.arrow((x + 2, y), (x + 82, y))
                sheet.arrow((x + 8, y), (x + 80, other + (6 if other < y else -6)))
            x += 92
        elif sign:
            for y in middles:
                sheet.text(x + 10, y + 6, sign, size=18, fill=FAINT)
            x += 24
        left = x + (room - width) / 2
        for rank, y in enumerate(middles):
            _shard(sheet, spec, rank, left, y - height / 2, width, height)
        sheet.text(x + room / 2, 258, called, code=True, bold=True)
        sheet.text(x + room / 2, 275, str(spec), code=True, size=11, fill=FAINT)
        x += room + 6
    sheet.width = round(x)
    return sheet.svg()


def zigzag() -> str:
    """The keys that each query of a causal sequence sees, by the rank that has the query."""
    length, ranks, cell = 16, 4, 14
    mesh = dt.Mesh(cp=ranks)
    width = length * cell
    sheet = Sheet(2 * width + 240, width + 88, "Causal attention over four ranks, in two layouts")
    for rank in range(ranks):
        sheet.box(16 + 74 * rank, 10, 12, 12, RANKS[rank])
        sheet.text(34 + 74 * rank, 20, f"rank {rank}", anchor="start", size=11)
    for number, text in enumerate((f"i64[1,{length}@cp]", f"i64[1,{length}@cp:zigzag]")):
        spec = dt.spec(text, mesh)
        name = f"dt.{spec.placement('cp')!r}"
        x, y = 24.0 + number * (width + 130), 60.0
        sheet.text(x + width / 2, y - 12, name, code=True, bold=True)
        sheet.box(x, y, width, width, dashed="3 3")
        for rank in range(ranks):
            held = spec.intervals(1, {"cp": rank})
            queries = [query for first, last in held for query in range(first, last)]
            for query in queries:
                sheet.box(x, y + query * cell, (query + 1) * cell, cell, RANKS[rank], round_by=0)
            share = sum(query + 1 for query in queries) / (length * (length + 1) / 2)
            at = y + 20 * rank + 62
            sheet.text(x + width + 10, at, f"rank {rank}: {share:.0%}", anchor="start", size=12)
        sheet.text(x + width + 10, y + 40, "work", anchor="start", size=12, fill=FAINT)
        sheet.text(x + width / 2, y + width + 18, "keys", size=12, fill=FAINT)
        sheet.text(x - 4, y + width + 18, "queries ↓", anchor="start", size=12, fill=FAINT)
    return sheet.svg()


def _plan_of_the_readme() -> Plan:
    """Of its first example, up to where it prints the plan."""
    text = (HERE.parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "mlp"}
    exec(compile(code.split("print(step.plan")[0], "mlp.py", "exec"), names)
    return names["step"].plan(names["x"], names["y"])


def _shard(
    sheet: Sheet, spec: TensorSpec, rank: int, x: float, y: float, width: float, height: float
) -> None:
    """The whole of a matrix, dashed, and in it what the rank holds: a part of its elements, or,
    in another colour, of each element's sum."""
    sheet.box(x, y, width, height, dashed="3 3")
    (axis,) = spec.mesh.axes
    rows, columns = (spec.intervals(dim, {axis: rank}) for dim in (0, 1))
    split = any(isinstance(placement, dt.Shard) for placement in spec.placements)
    pending = any(isinstance(placement, dt.Partial) for placement in spec.placements)
    fill = SECOND if pending else FIRST if split else THIRD
    for top, bottom in rows:
        for first, last in columns:
            down, across = height / spec.shape[0], width / spec.shape[1]
            at = (x + first * across, y + top * down)
            sheet.box(*at, (last - first) * across, (bottom - top) * down, fill)


PICTURES: dict[str, Callable[[], str]] = {
    "state_moves": state,
    "plan": plan,
    "zigzag": zigzag,
    "concept_mesh": concepts.mesh,
    "concept_placement": concepts.placement,
    "concept_plan": concepts.plan,
    "concept_program": concepts.program,
}


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        (HERE / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
