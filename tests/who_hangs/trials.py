"""Makes ranks of a training step hang in four ways and checks whether the right one is named.

    with training(folder) as trials:                    # tp2pp2 on Ray, one launch for all
        trials.hang("spin", rank=2, after=11)           # Trial(how="spin", rank=2, named=2, ...)

A trial submits steps, makes a rank hang at a random instruction of one of them, calls
`dt.status()` when the other ranks wait for it, releases it, and waits until the steps have
ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.daft.cluster.cluster import Handle, HostedCluster
from dtensor.daft.ir.program import Function, Program
from tests.chaos.actors import wait_for_file
from tests.who_hangs.actors import obey

How: TypeAlias = Literal["stop", "spin", "sleep", "hold"]
HOW: tuple[How, ...] = ("stop", "spin", "sleep", "hold")
SETTLE_S = 0.7
"""After a rank has begun to hang nobody moves for so long: the others have come to wait for it."""
SAYS = {
    "stop": ("is stopped",),
    "spin": ("computes",),
    "sleep": ("sleeps",),
    "hold": ("held back",),
}


class Blocks(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one trial. `named`: the rank that `status` named, in `seconds`."""

    how: How
    rank: int
    named: int | None
    seconds: float
    status: dt.Status

    @property
    def right(self) -> bool:
        said = any(word in self.status.reason for word in SAYS[self.how])
        return self.named == self.rank and said


class Trials:
    def __init__(self, cluster: Any, folder: Path, step: dt.TrainStep) -> None:
        self.cluster = cluster
        self.pids = [process.counter.pid for process in cluster._launch.processes]
        self.folder = folder
        self.step = step
        self.x = torch.randn(8, 16)

    def hang(self, how: How, rank: int, after: int) -> Trial:
        with self.hanging(how, rank, after):
            return self.ask(how, rank)

    def ask(self, how: How, rank: int) -> Trial:
        """Ask for the status while the rank hangs."""
        began = time.monotonic()
        status = dt.status()
        seconds = time.monotonic() - began
        return Trial(how=how, rank=rank, named=status.waited_for, seconds=seconds, status=status)

    def _settle(self) -> None:
        """Wait until all ranks are in a run and have not moved for `SETTLE_S`."""
        before: list[tuple[int, ...]] = []
        while True:
            now = [process.counter.read() for process in self.cluster.membership.processes]
            where = [at.moving for at in now]
            if where == before and any(at.position >= 0 for at in now):
                return
            before = where
            time.sleep(SETTLE_S)

    @contextmanager
    def hanging(self, how: How, rank: int, after: int) -> Iterator[None]:
        """Make a rank hang inside the block, from its `after`-th call on, or after that many
        milliseconds."""
        pid, begun = self.pids[rank], self.folder / "begun"
        order = self.folder / str(pid)
        if how != "stop":
            order.write_text(f"{how} {after} {time.monotonic_ns()}")
        losses = [self.step(self.x)]
        try:
            if how == "stop":
                time.sleep(after / 1000)
                os.kill(pid, signal.SIGSTOP)
            losses.append(self.step(self.x))
            if how != "stop":
                wait_for_file(str(begun))
            self._settle()
            yield
        finally:
            order.unlink(missing_ok=True)
            begun.unlink(missing_ok=True)
            if how == "stop":
                os.kill(pid, signal.SIGCONT)
            assert all(float(loss) > 0 for loss in losses)


@contextmanager
def training(folder: Path, **launch: Any) -> Iterator[Trials]:
    """Yield trials at tp=2, pp=2 on Ray, after some warm-up steps."""
    mesh = dt.Mesh(pp=2, tp=2)
    torch.manual_seed(0)
    pins = {"*.up.weight": dict(tp=dt.Row()), "*.down.weight": dict(tp=dt.Column())}
    model = dt.parallelize(Blocks(), mesh, pins, stages={"pp": [["first*"], ["second*"]]})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = dt.OneFOneB(microbatches=4)
    with obeying(folder), dt.launch(mesh, backend="ray", **launch) as session:
        step = dt.train_step(model, squares, optimizer, schedule=schedule)
        trials = Trials(session.launch.cluster, folder, step)
        for _ in range(5):
            float(step(trials.x))
        yield trials


@contextmanager
def obeying(folder: Path) -> Iterator[None]:
    """Make the calls of programs loaded inside the block look for orders first."""
    load = HostedCluster.load

    def load_obeying(cluster: HostedCluster, program: Program) -> Handle:
        functions = tuple((name, _obeying(f, folder)) for name, f in program.functions)
        return load(cluster, replace(program, functions=functions))

    HostedCluster.load = load_obeying  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostedCluster.load = load  # type: ignore[method-assign]


def _obeying(function: Function, folder: Path) -> Function:
    wrapped = "\n\n_ordered = forward\n\n\ndef forward(*values):\n    _obey(_orders)\n"
    wrapped += "    return _ordered(*values)\n"
    bindings = (*function.bindings, ("_obey", obey), ("_orders", str(folder)))
    return replace(function, source=function.source + wrapped, bindings=bindings, body=None)


def asked_elsewhere(*words: str) -> tuple[int, str]:
    """Return the exit status and output of `python -m dtensor status`."""
    path = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dtensor", "status", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout or done.stderr


def named_elsewhere() -> tuple[int, int | None]:
    """Return the exit status, and the rank that the status of the only launch names."""
    code, text = asked_elsewhere("--json", str(os.getpid()))
    (found,) = [one for one in json.loads(text) if one["ranks"][0]["run"] is not None]
    return code, found["waited_for"]
