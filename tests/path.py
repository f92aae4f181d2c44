"""Count the code that the README's MLP executes: `python -m tests.path [-v]`.

    $ python -m tests.path
    84 files of 18,743 lines; the functions that ran: 8,351 lines

Counts the files of dtensor whose functions run, in any thread, for the plan at tp=2 and two
in-process steps; imports do not count. `-v` lists the lines of each file and of its executed
functions.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import dtensor as dt
from tests.models import MLP

ROOT = Path(dt.__file__).parent


@dataclass(frozen=True, slots=True)
class Read:
    """The number of lines of a file, and of its executed functions."""

    file: str
    lines: int
    ran: int


def two_steps() -> None:
    mesh = dt.Mesh(tp=2)
    placements = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=dt.Column())}
    model = dt.parallelize(MLP(), mesh, placements)
    step = dt.train_step(model, _loss, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    str(step.plan(x, y))
    with dt.launch(mesh):
        for _ in range(2):
            float(step(x, y))


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def path() -> list[Read]:
    """Return the files of dtensor whose functions `two_steps` runs, by name."""
    ran: dict[Path, set[int]] = defaultdict(set)
    for name in dt.__all__:
        getattr(dt, name)  # imports do not count

    def note(frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            ran[Path(code.co_filename)].add(code.co_firstlineno)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        two_steps()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [_read(file, starts) for file, starts in sorted(ran.items())]


def _read(file: Path, starts: set[int]) -> Read:
    text = file.read_text()
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            decorated = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            first = min([node.lineno, *(d.lineno for d in decorated)])
            if first in starts:
                lines |= {*range(first, (node.end_lineno or first) + 1)}
    return Read(str(file.relative_to(ROOT)), len(text.splitlines()), len(lines))


if __name__ == "__main__":
    found = path()
    if "-v" in sys.argv:
        for read in found:
            print(f"{read.file:<48}{read.lines:>6}{read.ran:>6}")
    total, ran_lines = sum(r.lines for r in found), sum(r.ran for r in found)
    print(f"{len(found)} files of {total:,} lines; the functions that ran: {ran_lines:,} lines")
