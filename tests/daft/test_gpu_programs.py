"""Tests a sample of the programs of gpu_programs.py over the mock of NCCL, and what a host
reports while its GPU waits for a peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.daft import Buffer, Call, Collective, Instruction, Program, Wait
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.transports.communicators import Communicators
from dtensor.daft.ray.transports.connect import check_routes
from dtensor.daft.ray.transports.exchange import ExchangeTransport
from dtensor.daft.ray.transports.nccl import NcclWire
from dtensor.daft.run.device_waits import DeviceWaits
from dtensor.daft.run.worker import HostRun, Worker
from dtensor.testing.gpus.tensors import Simulated
from tests.daft.explore import exhaustive
from tests.daft.gpu_programs import disagreement, hangs, of_messages, training_step
from tests.daft.programs import function, parts_of, program
from tests.testing.gpus.exchanges import BUFFER
from tests.testing.gpus.needed import skip_without_compiler

skip_without_compiler()


def test_verifier_agrees_with_mock_nccl() -> None:
    programs = list(exhaustive(2, 2, "c"))[::20]
    assert [d for made in programs if (d := disagreement(made, (0, 1))) is not None] == []


@pytest.mark.default("OneFOneB-1-3")
@pytest.mark.parametrize(
    ("schedule", "v", "p"), [(dt.GPipe, 1, 2), (dt.LoopedBFS, 2, 2), (dt.OneFOneB, 1, 3)]
)
def test_messages_of_training_step_complete_under_mock_nccl(
    schedule: Callable[[int], dt.Schedule], v: int, p: int
) -> None:
    program = training_step(schedule, v, p)
    assert [seed for seed in range(4) if hangs(of_messages(program, seed), seed)] == []


def test_step_hangs_if_nccl_connects_at_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the connecting messages that `NcclWire.open` sends."""
    program = training_step(dt.GPipe, 1, 2)
    monkeypatch.setattr(NcclWire, "_connect", lambda *_: None)
    assert [seed for seed in range(4) if hangs(of_messages(program, seed), seed)] != []


@pytest.mark.parametrize(
    ("channels", "is_shared", "problem"),
    [("ab", True, "start different collectives"), ("abcdefgh", False, "wait at the same time")],
)
def test_mock_nccl_finds_two_orders_on_one_communicator_and_too_many_ctas(
    channels: str, is_shared: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the orders and the overlaps that `Communicators` reads in the programs."""
    lists: list[list[Instruction]] = []
    for own in (channels, channels[::-1]):
        buffers = [(Buffer((ord(each),), torch.float32),) for each in own]
        words = [((0, 1), (f"x{each}",), (f"y{each}",)) for each in own]
        starts = [
            Collective("all_reduce", *names, buffer, buffer, "sum", each)
            for names, buffer, each in zip(words, buffers, own, strict=True)
        ]
        lists.append([*starts, *(Wait((f"y{each}",)) for each in own)])
    made = program(*lists, inputs=[tuple(f"x{each}" for each in channels)] * 2)
    assert not hangs(made, 0)
    plain = Communicators.number

    def number(self: Communicators, program: Program, keys: Any, host_of: Any) -> Any:
        numbers = plain(self, program, keys, host_of)
        return {key: 2 if is_shared else 3 * i + 1 for i, key in enumerate(numbers)}

    monkeypatch.setattr(Communicators, "number", number)
    with pytest.raises(RuntimeError, match=problem):
        assert [seed for seed in range(4) if hangs(made, seed)] == []


# -- where a GPU waits for a peer, as its host's counter tells it ----------------------------------

CUDA = torch.device("cuda", 0)


def summed() -> Program:
    """Return a program in which rank 0 reads a value of its GPU, which waits for the sum; rank 1
    observes rank 0 before it sends."""
    sums = Collective("all_reduce", (0, 1), ("x",), ("y",), (BUFFER,), (BUFFER,), "sum", "c")
    read = function("read", "def forward(y):\n    return (read(y),)", read=_read)
    look = function("look", "def forward():\n    return (look(),)", look=_look)
    return program(
        [sums, Wait(("y",)), Call("read", ("y",), ("n",))],
        [Call("look", (), ("m",)), sums, Wait(("y",)), Call("read", ("y",), ("n",))],
        functions=[read, look],
        inputs=[("x",)] * 2,
        outputs=[("y", "n"), ("y", "n", "m")],
    )


def _read(y: Any) -> float:
    READS.set()
    return y.sum().item()


def _look() -> Any:
    """Record where rank 0's GPU is once its host is in the call."""
    if not RUNS.is_set():  # skip its first use
        return 0
    assert READS.wait(60.0)
    end = time.monotonic() + 60.0  # the GPU computes something first
    while (found := WORKERS[0].device_waits.current_wait()) is None and time.monotonic() < end:
        time.sleep(0.01)
    FOUND.append(found)
    return 0


READS, RUNS = threading.Event(), threading.Event()
FOUND: list[Any] = []
WORKERS: list[Any] = [None, None]


def test_status_separates_call_of_host_from_wait_of_its_gpu() -> None:
    made = summed()
    parts = parts_of(made, ((0,), (1,)))
    ready = threading.Barrier(2)
    READS.clear(), RUNS.clear(), FOUND.clear()
    with dt.testing.simulated_gpus(2, 0) as gpus, ThreadPoolExecutor(2) as threads:

        def act(rank: int) -> Any:
            host = gpus.host(1 + rank, range(rank, rank + 1))
            with host.expected(), Simulated(), torch.no_grad():
                wire = NcclWire((rank,), CUDA, gpus.fabric.group)
                transport = ExchangeTransport(wire, (0, 1))
                transport.open({key: 0 for key in check_routes(made, (0, 1))})
                worker = WORKERS[rank] = Worker((rank,), CUDA, transport)
                worker.load(4, parts[rank])
                x = {"x": torch.ones(BUFFER.shape)}
                worker.run(HostRun(4, 0, {rank: dict(x)}))
                ready.wait(60.0)
                READS.clear()
                ready.wait(60.0)
                RUNS.set()
                results = worker.run(HostRun(4, 1, {rank: dict(x)}))
                assert isinstance(results, dict)
                return results[rank]["n"], worker.device_waits

        for rank in range(2):
            gpus.expect(1 + rank)
        asked = [threads.submit(act, rank) for rank in range(2)]
        with gpus.waiting_for_hosts():
            results = [each.result(120.0) for each in asked]
        for number, waits in results:
            assert number == 24.0 and waits is not None and waits.current_wait() is None
    assert FOUND == [(4, 1, 1)]  # program, run, and the Wait, not the Call


class Stream:
    """A stream whose events up to number `done` have completed."""

    def __init__(self) -> None:
        self.recorded = self.done = 0

    def event(self) -> Any:
        stream = self

        class Event:
            def record(self) -> None:
                stream.recorded += 1
                self.at = stream.recorded

            def query(self) -> bool:
                return self.at <= stream.done

        return Event()


def test_device_waits_record_current_wait_of_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    waits, counter = DeviceWaits(), ProgramCounter.make(tmp_path / "host0")
    assert waits.current_wait() is None and counter.read().device is None
    waits.begin(3, 9)
    for position in (5, 8):
        waits.recorded(position, lambda: None)()
    told = []
    for stream.done in range(5):
        told.append(waits.current_wait())
        counter.device_waits(told[-1])
        assert counter.read().device == told[-1]
    assert told == [None, (3, 9, 5), None, (3, 9, 8), None]
    at = counter.read()
    assert at.of_device == at
    counter.device_waits((3, 9, 8))
    at = counter.read()
    assert (at.of_device.program, at.of_device.run, at.of_device.position) == (3, 9, 8)
    assert at.moving != at.of_device.moving


def test_device_wait_watch_ends_if_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def record(self) -> None: ...

        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "Event", Lost)
    waits, told, over = DeviceWaits(), [], threading.Event()
    waits.recorded(5, lambda: None)()

    def tell(place: Any) -> None:
        told.append(place)
        over.set()

    waits.watch(tell)
    assert over.wait(60.0) and told == [None]
