"""The report of a running part: lines of its table, and text below it.

    where.say(Line("ok", "rms_norm, cold", "cases 30, largest error 0.4 of its bound"))
    with where.line("a killed actor") as line:      # an exception gives a line with "wrong"
        line.found = "ActorLost after 0.4 s"

Lines are written at once, so the lines before a hang are in the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["ok", "left out", "wrong"]


@dataclass(slots=True)
class Line:
    """One line of a table. ``note``: what to compare ``found`` with."""

    state: State
    name: str
    found: str = ""
    note: str = ""

    @staticmethod
    def of_error(name: str, error: Exception) -> Line:
        text = next(iter(str(error).splitlines()), "")
        return Line("wrong", name, f"{type(error).__name__}: {text}")


@dataclass(frozen=True, slots=True)
class Where:
    """Where a part reports. ``folder``: for this part alone; ``simulated``: the number of
    simulated GPUs, 0 for real ones."""

    folder: Path
    simulated: int = 0

    @property
    def num(self) -> int:
        """The number of GPUs."""
        if self.simulated:
            return self.simulated
        import torch

        return torch.cuda.device_count()

    def say(self, item: Line | str) -> None:
        with (self.folder / "lines").open("a") as file:
            file.write(json.dumps(item if isinstance(item, str) else asdict(item)) + "\n")

    def leave_out(self, name: str, why: str) -> None:
        self.say(Line("left out", name, why))

    @contextmanager
    def line(self, name: str) -> Iterator[Line]:
        made = Line("ok", name)
        try:
            yield made
        except Exception as error:
            traceback.print_exc()
            made = Line.of_error(name, error)
        self.say(made)

    @contextmanager
    def gpus(self, num: int | None = None, *, kernels: bool = False) -> Iterator[Any]:
        """Simulate GPUs inside the block, and report their races at the end; real GPUs need
        nothing. Without ``kernels``, Triton's built-in kernels are left out, because the
        interpreter takes seconds for each."""
        if not self.simulated:
            yield None
            return
        from dtensor.testing import simulated_gpus
        from tests.testing.gpus.matrix import without_kernels

        without = nullcontext() if kernels else without_kernels()
        with without, simulated_gpus(num or self.simulated) as gpus:
            yield gpus
            report = gpus.report()
        if report.races or report.early_frees:
            self.say(Line("wrong", "races and early frees", str(report)))

    def command(
        self, name: str, command: Sequence[str], said: Callable[[str], object], **env: str
    ) -> int:
        """Run a command, passing each of its lines to ``said`` and to the log, and return its
        exit status. Report "wrong" if the status is not 0."""
        print("$", *command, flush=True)
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        last = ""
        for text in process.stdout:
            sys.stdout.write(text)
            last = text.strip() or last
            said(text.rstrip("\n"))
        if status := process.wait():
            self.say(Line("wrong", name, f"exit status {status}: {last}"))
        return status


def read_lines(file: Path) -> Iterator[Line | str]:
    for text in file.read_text().splitlines():
        item = json.loads(text)
        yield item if isinstance(item, str) else Line(**item)
