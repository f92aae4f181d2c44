"""What is kept of values and streams that nobody has any more, and what an interrupt leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from dtensor import daft
from dtensor.daft.ray.actors.object_store import ObjectStore
from dtensor.daft.tasks.task import HostedObject
from tests.chaos.actors import wait_for_file
from tests.daft.actor_classes import Model

MANY = 1 << 20


class Keeper:
    kept: Any = None

    def ones(self, number: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((number,), value)

    def same(self, x: Any) -> Any:
        return x

    def later(self, x: Any) -> Any:
        time.sleep(0.6)
        return x

    def keep(self, x: Any) -> None:
        self.kept = x

    def total(self) -> float:
        return self.kept.sum().item()

    def forks(self) -> None:
        if not (child := os.fork()):
            self.kept = None
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)

    def count(self, number: int) -> Iterator[int]:
        try:
            yield from range(number)
            raise ValueError("no more")
        finally:
            self.kept = number

    def streams(self) -> int:
        return sum(len(o.streams) for o in gc.get_objects() if type(o) is HostedObject)

    def wanted(self) -> int:
        return sum(len(o._wanted) for o in gc.get_objects() if type(o) is ObjectStore)

    def writes(self, path: str) -> None:
        Path(path).write_text("begun")

    def get_kept(self) -> Any:
        return self.kept


def test_streams_that_nobody_has_are_closed():
    with daft.launch():
        a = daft.spawn(Keeper)
        for _ in a.count(5):
            break
        a.count(6)
        assert a.streams().get() == 0 and a.get_kept().get() == 5
        with pytest.raises(daft.TaskError, match="no more"):
            list(a.count(1))
        assert a.streams().get() == 0
        with pytest.raises(TypeError, match="stream of Keeper-0.count> belongs to the controller"):
            a.same(a.count(2))
        group = daft.WorkerGroup(Keeper, 2, name="g")
        assert [next(stream).get() for stream in group.count(2)] == [0, 0]

        def ends(x: Any) -> Any:
            daft.end(a)
            return a.same(x)

        with pytest.raises(daft.ProgramError, match="ended while a function is recorded"):
            daft.compile(ends)(1)


def test_a_compiled_function_keeps_no_values():
    with daft.launch():
        a = daft.spawn(Model)
        step = daft.compile(lambda x: [a.execute(x)])
        step(torch.ones(2, 4))
        gc.disable()
        try:
            x = torch.ones(2, 4)
            made, given = weakref.ref(step(x)[0]), weakref.ref(x)
            del x
            assert made() is None and given() is None
        finally:
            gc.enable()


def test_large_copies_go_on_in_a_fork():
    value = torch.ones(1 << 21)
    with daft.launch():
        daft.spawn(Keeper).same(value).get()
    if not (child := os.fork()):
        signal.alarm(600)  # it would wait for ever
        with daft.launch():
            daft.spawn(Keeper).same(value).get()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class NeverBegun(Keeper):
    def __init__(self) -> None:
        threading.Event().wait(600.0)


def memories(process: int | str) -> int:
    """The segments that it has open."""
    found = 0
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:dtensor" in os.readlink(each)
    return found


@pytest.mark.ray
def test_values_of_actors_on_ray(ray_session: None):
    with daft.launch("ray", deadline_s=120.0):
        a, b, c = (daft.spawn(Keeper, name=name) for name in "abc")
        step = daft.compile(lambda x: b.same(a.later(x)))
        assert [step(i).get() for i in range(2)] == [0, 1]
        assert a.wanted().get() == 0  # the receiver had to wait, and has asked for nothing
        b.keep(a.ones(MANY)).get()
        b.forks().get()
        for i in range(3):
            assert a.ones(MANY, i + 2.0).get().sum() == MANY * (i + 2.0)
        assert b.total().get() == MANY
        c.ones(MANY).get()
        before = memories("self")
        daft.end(c)
        with pytest.raises(daft.ActorLost):
            c.ones(1).get()
        a.ones(MANY).get()
        end = time.monotonic() + 600.0
        while memories("self") >= before:  # a thread notices that c's connection has ended
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.ray
def test_an_actor_that_ends_before_it_has_started(ray_session: None):
    with daft.launch("ray", deadline_s=120.0):
        a = daft.spawn(NeverBegun)
        early = a.same(1)
        daft.end(a)
        for future in (early, a.same(torch.ones(MANY))):
            with pytest.raises(daft.ActorLost, match="it was ended by daft.end, at"):
                future.get(timeout=600.0)


@pytest.mark.ray
def test_an_interrupt_loses_no_value(ray_session: None):
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # a collection calls what an exception is lost in, and warned of
    try:
        with daft.launch("ray", deadline_s=120.0):
            a = daft.spawn(Keeper)
            for i in range(150):
                future = a.ones(10_000)
                daft.wait([future])
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5 + i * 5e-6)
                    future.get()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
                assert future.get(timeout=600.0).numel() == 10_000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def test_a_class_that_does_not_pickle_is_refused_before_anything_starts():
    lock = threading.Lock()

    class Locked:
        def locked(self) -> bool:
            return lock.locked()

    with daft.launch() as session:
        with pytest.raises(TypeError, match=r"Locked cannot go to another process[^$]*__init__"):
            daft.spawn(Locked)
        assert not session.actors


@pytest.mark.ray
def test_a_task_begins_though_the_controller_waits_for_nothing(ray_session: None, tmp_path: Path):
    with daft.launch("ray", deadline_s=120.0):
        daft.spawn(Keeper).writes(str(tmp_path / "begun"))
        wait_for_file(str(tmp_path / "begun"))
