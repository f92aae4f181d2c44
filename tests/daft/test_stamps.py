"""Tests that code with time stamps gives the same results, fails at the same lines, and records
the time of each line.
"""

from __future__ import annotations

import threading
from queue import Queue

import pytest
import torch

from dtensor.daft import Function
from dtensor.daft.ir.code import Body, CodeLine
from dtensor.daft.run.timestamps import TIMES, Stamps, with_line_stamps

LINES = (
    CodeLine("a = x + y", ("a",), ("x", "y"), source="net.py:1: a"),
    CodeLine("b = a / y", ("b",), ("a", "y"), drops=("a",), comment="of a", source="net.py:2: b"),
)
BODY = Body(("x", "y"), LINES, ("b", "x"))


def clock() -> float:
    clock.now += 1.0  # type: ignore[attr-defined]
    return clock.now  # type: ignore[attr-defined]


def test_stamped_code_records_time_after_each_line():
    clock.now = 0.0  # type: ignore[attr-defined]
    function, noted = Function.straight("f", BODY, {}), list[float]()
    assert (
        function.source
        == """\
def forward(x, y):
    a = x + y
    b = a / y; del a  # of a
    return (b, x, )
"""
    )
    built = with_line_stamps(function, clock, noted.extend)
    assert built(1, 2) == function.build()(1, 2) == (1.5, 1)
    assert noted == [1.0, 2.0, 3.0]


def test_stamped_code_names_same_line_in_error():
    function = Function.straight("f", BODY, {})
    for built in (function.build(), with_line_stamps(function, lambda: 0.0, list[float]().extend)):
        try:
            built(1, 0)
        except ZeroDivisionError as error:
            assert function.user_line(error) == "net.py:2: b"
        else:
            raise AssertionError("it divides by zero")


def test_code_without_line_table_runs_without_stamps():
    wrapped = Function.of(divmod)
    branch = Function(name="f", source="def forward(x):\n    if x: x = 2\n    return (x,)\n")
    nothing = Function.straight("f", Body(("x",), (), ("x",)), {})
    noted = list[float]()
    assert with_line_stamps(wrapped, clock, noted.extend)(7, 2) == (3, 1)
    assert with_line_stamps(branch, clock, noted.extend)(7) == (2,)
    assert with_line_stamps(nothing, clock, noted.extend)(7) == (7,)
    assert noted == []


class Streams:
    """Streams of a GPU with which two hosts exchange messages: a send ends when the other host has
    started to receive, so a host that waits for all streams after a send waits for the other host.
    """

    def __init__(self, here: Queue[str], there: Queue[str]) -> None:
        self.here, self.there = here, there
        self.sending = False
        self.waited: list[torch.device] = []

    def current_stream(self, device: torch.device) -> Streams:
        self.waited.append(device)
        return self

    def synchronize(self) -> None:
        """Synchronize the current stream, which has no message."""

    def send(self) -> None:
        self.sending = True

    def receive(self) -> None:
        self.there.put("begun")

    def synchronize_all(self) -> None:
        if self.sending:
            assert self.here.get(timeout=5) == "begun"


def test_stamp_on_gpu_does_not_wait_for_messages_of_other_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both hosts send first and then receive."""
    queues = Queue[str](), Queue[str]()
    local = threading.local()
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: local.of.current_stream(device)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: local.of.synchronize_all())
    hosts = [Streams(*queues), Streams(*queues[::-1])]
    taken: list[int] = []

    def run(rank: int) -> None:
        own = local.of = hosts[rank]
        stamps = Stamps({}, gpu)
        steps = [stamps.timed((rank, 0), own.send), stamps.timed((rank, 1), own.receive)]
        for step in steps:
            step()
        times = stamps.outputs_of(rank)[TIMES]
        assert isinstance(times, torch.Tensor)
        taken.append(times.numel())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [6, 6]
    assert all(host.waited == [gpu] * 4 for host in hosts)
