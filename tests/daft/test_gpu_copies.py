"""Tests that inputs reach a GPU, and results the host, without a wait of the host in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.daft import (
    Call,
    Cluster,
    Collective,
    Commit,
    Free,
    Handle,
    TaskError,
    Vote,
    Wait,
    launch_cluster,
)
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.ir.instructions import WORD
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.channel.host import Later
from dtensor.daft.ray.channel.messages import HostFailed
from dtensor.daft.ray.ranks.ranks import Ranks
from dtensor.daft.ray.transports.connect import HostConnections
from dtensor.daft.run import worker
from dtensor.daft.run.input_copies import InputCopies
from dtensor.daft.run.transport import TRANSPORTS, Meeting
from dtensor.daft.run.worker import HostRun, Worker
from dtensor.daft.verification.pairing import merge_sites
from dtensor.testing.gpus import SimulatedGpus
from tests.daft.programs import function, program
from tests.testing.gpus.needed import skip_without_compiler

skip_without_compiler()

CUDA = torch.device("cuda")


@pytest.mark.parametrize("num_queues", [1, 32])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_are_copied_without_wait_and_may_change_at_once(seed: int, num_queues: int) -> None:
    """Small, large, strided and empty inputs of several runs, whose copies overlap."""

    def inputs(run: int) -> dict[str, Tensor]:
        return {
            "number": torch.tensor(run),
            "half": torch.tensor(0.5 * run, dtype=torch.bfloat16),
            "mask": torch.tensor([True, False, run > 1]),
            "strided": torch.arange(20_000.0).view(2, -1).t() + run,
            "small": torch.arange(6.0).view(2, 3).t() * run,
            "empty": torch.zeros(0, 4),
        }

    with dt.testing.simulated_gpus(seed=seed, num_queues=num_queues) as gpus:
        copies, results = InputCopies(CUDA), list[dict[str, Tensor]]()
        for run in range(3):
            values = inputs(run)
            on_gpu = copies.of({0: values, 1: {"plain": 3}})
            results.append({name: x.clone() for (_, name), x in on_gpu.items()})
            del on_gpu
            for value in values.values():
                value.zero_()
        assert not gpus.report().host_waits
        for run, found in enumerate(results):
            for name, value in inputs(run).items():
                assert torch.equal(found[name].cpu(), value), name
        assert not gpus.report().races and not gpus.report().early_frees


@dataclass(frozen=True, slots=True)
class Below:
    """The check that numbers are below 10."""

    source: str | None = "net.py:7: y = table[x]"

    def error(self, value: int, count: int) -> Exception:
        return IndexError(f"{value} is not below 10")


def checked(x: Tensor, row: Tensor) -> Tensor:
    """Return x, clamped; record in the row whether a number was wrong. The host does not wait."""
    if x.shape == (3,):
        raise ValueError("three numbers")
    wrong = x >= 10
    row.copy_(torch.stack((wrong.any().long(), x.max(), wrong.sum())))
    return x.clamp(max=9)


def new_rows() -> tuple[Tensor, ...]:
    return torch.zeros(1, 3, dtype=torch.int64, device="cuda").unbind()


def add(w: Tensor, y: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    w.copy_(torch.where(skip == 1, w, w + y.sum()))
    return w.clone(), w.expand(20_000).clone()


LIST = (
    Call("rows", (), ("faults",)),
    Call("checked", ("x", "faults"), ("y",)),
    Vote("v", ("faults",)),
    Collective("all_reduce", (0, 1), ("v",), ("s",), (WORD,), (WORD,), "sum", "votes"),
    *(Wait(("s",)), Commit("s", "skip")),
    Call("add", ("w", "y", "skip"), ("out", "large"), ("w",)),
    Free(("v", "s", "y", "skip", "faults")),
)
NAMES = {"inputs": [("x",)] * 2, "outputs": [("out", "large")] * 2, "state": [("w",)] * 2}
FUNCTIONS = [
    function("rows", "def forward():\n    return new_rows()", new_rows=new_rows),
    replace(
        function("checked", "def forward(x, f):\n    return (checked(x, f),)", checked=checked),
        checks=(Below(),),
    ),
    function("add", "def forward(w, y, skip):\n    return add(w, y, skip)", add=add),
]


@contextmanager
def loaded(backend: Any, seed: int = 0) -> Iterator[tuple[Cluster, Handle, SimulatedGpus]]:
    """Yield two ranks on one simulated GPU in this process, or on two, with the program `LIST`."""
    with (
        dt.testing.simulated_gpus(2, seed) as gpus,
        launch_cluster(2, backend=backend, device="cuda") as cluster,
    ):
        cluster.put([{"w": torch.zeros(())}] * 2)
        handle = cluster.load(program(LIST, LIST, functions=FUNCTIONS, **NAMES))
        cluster.run(handle, [{"x": torch.zeros(2).long()}] * 2).get()  # first uses wait
        yield cluster, handle, gpus
        assert not gpus.report().races and not gpus.report().early_frees


RUNS = [[1, 2], [30, 4], [5, 6], [7, 8], [1, 1, 1], [2, 3]]
ERRORS = {1: "rank 1 .*IndexError: 30 is not below 10", 4: "rank 1 .*ValueError: three numbers"}


@pytest.mark.parametrize("backend", ["inprocess", "ray"])
@pytest.mark.parametrize("seed", range(3))
def test_runs_behind_failed_ones_are_launched_before_any_outcome_is_known(
    backend: str, seed: int
) -> None:
    with loaded(backend, seed) as (cluster, handle, gpus):
        before = sum(gpus.report().host_waits.values())
        futures: list[Any] = []
        for run, x in enumerate(RUNS):
            futures.append(
                cluster.run(handle, [{"x": torch.tensor([0, 0])}, {"x": torch.tensor(x)}])
            )
            if backend == "inprocess" and run < 4:  # the host raises in run 4, which ends them
                assert not any(future.done() for future in futures)
                assert sum(gpus.report().host_waits.values()) == before
        total = 0
        for run, (x, future) in enumerate(zip(RUNS, futures, strict=True)):
            if run in ERRORS:
                with pytest.raises(TaskError, match=ERRORS[run]) as caught:
                    future.get()
                assert f"run {run + 1}" in str(caught.value)
            else:
                total += sum(x)
                _, second = future.get()
                assert (
                    float(second["out"]) == total and second["large"].tolist() == [total] * 20_000
                )
        assert all(future.done() for future in futures)
        waits = sum(gpus.report().host_waits.values()) - before
        assert waits <= len(RUNS) * (1 if backend == "inprocess" else 2)
        assert [float(w) for (w,) in cluster.get([("w",)] * 2).get()] == [0, total]
        cluster.check_undone()  # both failures were raised


def test_host_is_at_most_some_runs_ahead_and_unread_failures_are_raised_at_the_end() -> None:
    with loaded("inprocess") as (cluster, handle, gpus):
        for number in range(2 * worker.MAX_PENDING):
            before = sum(gpus.report().host_waits.values())
            x = torch.tensor([10 if number == 3 else 1])
            cluster.run(handle, [{"x": x}] * 2)
            waits = sum(gpus.report().host_waits.values()) - before
            assert waits == (number >= worker.MAX_PENDING)
        with pytest.raises(TaskError, match="IndexError: 10 is not below 10"):
            cluster.check_undone()


def test_interrupted_wait_for_results_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("inprocess") as (cluster, handle, _):
        futures = [cluster.run(handle, [{"x": torch.tensor([1])}] * 2) for _ in range(2)]
        with monkeypatch.context() as pressed, pytest.raises(KeyboardInterrupt):
            pressed.setattr(torch.cuda.Event, "synchronize", Mock(side_effect=KeyboardInterrupt))
            futures[1].get()
        with pytest.raises(TimeoutError):
            futures[1].get(timeout=0.01)
        assert [float(future.get()[1]["out"]) for future in futures] == [1.0, 2.0]


def test_host_on_ray_is_in_a_run_until_its_event_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost GPU fails the run whose event it raises from, and all later calls."""
    made = program(LIST, LIST, functions=FUNCTIONS, **NAMES)
    meeting = Meeting(ranks=(0, 1))
    with dt.testing.simulated_gpus():
        counter = ProgramCounter.make(tmp_path / "host0")
        ranks = Ranks(counter, (0, 1), "cuda")
        rendezvous: Any = SimpleNamespace(hosts=(0,))
        connections = HostConnections(TRANSPORTS["cpu", "process"](meeting), rendezvous, (0, 1))
        ranks._connections = connections
        host = ranks._worker = Worker((0, 1), CUDA, connections.transport, counter.view)
        host.put({rank: {"w": torch.zeros((), device="cuda")} for rank in (0, 1)})
        host.load(0, HostProgram.whole(made, merge_sites(made, ((0, 1),))[0]))
        x = torch.tensor([1, 2])
        runs = [HostRun(0, number, {0: {"x": x}, 1: {"x": x}}) for number in range(3)]
        first, second, third = (ranks.run_program(run.plain(), {}) for run in runs)
        assert all(isinstance(result, Later) for result in (first, second, third))
        assert [float(result["out"]) for result in first.wait().values()] == [3.0, 3.0]
        assert counter.read().run == 2 and counter.read().position >= 0
        with monkeypatch.context() as lost:
            error = torch.AcceleratorError("CUDA error: an illegal memory access")
            lost.setattr(torch.cuda.Event, "synchronize", Mock(side_effect=error))
            with pytest.raises(HostFailed, match="cuda was lost: .*illegal memory access"):
                second.wait()
        for call in (third.wait, lambda: ranks.run_program(runs[0].plain(), {})):
            with pytest.raises(HostFailed, match="run 1.*illegal memory access"):
                call()
