"""Tests the run channel without Ray: a host in a thread serves it over a unix socket or TCP."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

from dtensor.daft.errors import HostError
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.channel import run_channel
from dtensor.daft.ray.channel.handshake import join
from dtensor.daft.ray.channel.host import Host, Later
from dtensor.daft.ray.channel.messages import (
    ONE_WAY,
    REQUEST,
    RESPONSE,
    Packed,
    encoded,
    incoming,
    send,
)
from dtensor.daft.ray.channel.run_channel import MAX_UNREAD, CallLost, NotYet, Reply, RunChannel

LARGE = 1 << 24
"""Bytes, many times what sockets hold."""
PATIENCE_S = 600.0
"""For what comes for certain, on a machine however busy."""


class Echo:
    """The object that the hosts of these tests host."""

    def __init__(self, counter: ProgramCounter) -> None:
        self.counter = counter
        self.kept: list[Any] = []
        self.go = threading.Event()

    def keep(self, value: Any) -> None:
        self.kept.append(value)

    def give(self, value: Any) -> Any:
        return value

    def make(self, size: int) -> bytes:
        return bytes(size)

    def all(self) -> list[Any]:
        return self.kept

    def wait(self) -> None:
        self.go.wait(PATIENCE_S)

    def later(self, value: Any) -> Later:
        def wait() -> Any:
            self.go.wait(PATIENCE_S)
            return self.fail("late") if value is None else value

        return Later(wait)

    def fail(self, reason: str) -> None:
        raise LookupError(reason)

    def fail_oddly(self) -> None:
        raise Odd(1, 2)

    def give_what_does_not_pickle(self) -> object:
        return threading.Lock()


class Odd(Exception):
    """A value that does not unpickle by itself."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@contextmanager
def channel_of(folder: Path, count: int = 1, address: str | None = None) -> Iterator[Any]:
    """Yield a channel and its hosts; check at the end that the hosts end."""
    channel = RunChannel(folder, count, address)
    hosts, threads = list[Host](), list[threading.Thread]()
    try:
        for index in range(count):
            ProgramCounter.make(folder / f"host{index}")
            hosts.append(Host(str(folder / f"host{index}"), Echo))
            credentials = channel.credentials(index)
            if address is not None:
                credentials = replace(credentials, path=str(folder / "nowhere"))
            threads.append(threading.Thread(target=hosts[-1].serve, args=(credentials,)))
            threads[-1].start()
        yield channel, [host._hosted for host in hosts]
    finally:
        channel.close()
        for host, thread in zip(hosts, threads, strict=True):
            cast(Echo, host._hosted).go.set()
            thread.join(PATIENCE_S)
            assert host._counter is not None
            host._counter.stop()
        assert not any(thread.is_alive() for thread in threads)


def ask(channel: RunChannel, what: Callable[..., Any], *given: object, host: int = 0) -> Any:
    return channel.send(host, REQUEST, (what,), given)


def joined(channel: RunChannel) -> None:
    """Wait until the host has joined and only this thread reads."""
    assert channel.get([ask(channel, Echo.give, 0)], PATIENCE_S) == [0]
    if (writer := channel._writer) is not None:  # it reads too
        writer.join()


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_run_channel_keeps_order_of_calls(tmp_path: Path, address: str | None) -> None:
    with channel_of(tmp_path, 2, address) as (channel, _):
        for value in range(100):
            channel.send(value % 2, ONE_WAY, (Echo.keep,), (value,))
        first, second = [ask(channel, Echo.all, host=host) for host in (0, 1)]
        assert channel.get([second], PATIENCE_S) == [list(range(1, 100, 2))]
        assert channel.get([first, second], PATIENCE_S) == [list(range(h, 100, 2)) for h in (0, 1)]
        assert channel.all_over([first, second])


SOME = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(float("nan")),
    torch.zeros(0, 3, dtype=torch.int64),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.randn(70_000),
    torch.randn(100, 2000)[:, ::2],
    *(torch.full((5_000,), float(i)) for i in range(600)),
]


def test_calls_are_executed_before_late_results_and_answered_after_them(tmp_path: Path) -> None:
    with channel_of(tmp_path) as (channel, hosts):
        (echo,) = hosts
        calls = [(Echo.later, 1), (Echo.give, 2), (Echo.later, None), (Echo.give, 4)]
        replies = [channel.send(0, REQUEST, (method,), (value,)) for method, value in calls]
        channel.send(0, ONE_WAY, (Echo.keep,), (5,))
        while not echo.kept:
            channel.listen(0.001)
        assert not channel.some_over(replies, 1, 0.02)
        echo.go.set()
        assert channel.get(replies[:2], PATIENCE_S) == [1, 2]
        with pytest.raises(LookupError, match="late"):
            channel.get(replies[2:3], PATIENCE_S)
        assert channel.get(replies[3:], PATIENCE_S) == [4]


def test_run_channel_copies_tensors_exactly(tmp_path: Path) -> None:
    with channel_of(tmp_path) as (channel, _):
        (found,) = channel.get([ask(channel, Echo.give, {"all": SOME})], PATIENCE_S)
        for given, came in zip(SOME, found["all"], strict=True):
            assert came.dtype == given.dtype and came.shape == given.shape
            assert torch.equal(came, given) or given.isnan().all()
            assert came.is_contiguous() and not came.requires_grad
            came.zero_()  # the received tensor shares no memory
        parameter = torch.nn.Parameter(torch.ones(2))
        (found,) = channel.get([ask(channel, Echo.give, parameter)], PATIENCE_S)
        assert isinstance(found, torch.nn.Parameter) and found.requires_grad


def test_run_channel_sends_large_messages_both_ways_without_deadlock(tmp_path: Path) -> None:
    """Each host receives much while it has much to send, and the controller reads nothing yet."""
    with channel_of(tmp_path, 2) as (channel, echoes):
        blocked = [ask(channel, Echo.wait, host=host) for host in (0, 1)]
        value = torch.arange(LARGE // 8)
        asked = [ask(channel, Echo.give, value + i, host=i % 2) for i in range(6)]
        value.zero_()
        for echo in echoes:
            echo.go.set()
        for i, reply in enumerate(asked):
            (found,) = channel.get([reply], PATIENCE_S)
            assert torch.equal(found, torch.arange(LARGE // 8) + i)
        channel.get(blocked, PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while any(thread.name == "run channel" for thread in threading.enumerate()):
            assert time.monotonic() < end, "the thread that writes is there with nothing to write"
            time.sleep(0.01)


def test_run_channel_reads_answers_while_sending(tmp_path: Path) -> None:
    """Otherwise unread results would block the host in its write."""
    with channel_of(tmp_path) as (channel, _):
        joined(channel)
        for _ in range(100):  # much more than the socket buffers hold
            channel.send(0, REQUEST, (Echo.make,), (1 << 16,))
        end = time.monotonic() + PATIENCE_S
        while len(channel._connections[0].expected) >= MAX_UNREAD and time.monotonic() < end:
            channel.send(0, ONE_WAY, (Echo.keep,), (1,))
            time.sleep(0.02)  # the socket must not fill
        assert len(channel._connections[0].expected) < MAX_UNREAD
        assert channel._writer is None  # a writer thread would read too


def test_run_channel_does_not_copy_lent_tensor_unless_changed_before_sent(tmp_path: Path) -> None:
    with channel_of(tmp_path) as (channel, (echo,)):
        channel.send(0, ONE_WAY, (Echo.wait,), ())
        lent, own = torch.zeros(LARGE // 4), torch.zeros(LARGE // 4)
        channel.send(0, ONE_WAY, (Echo.keep,), (lent,), lent=True)
        channel.send(0, ONE_WAY, (Echo.keep,), (own,))
        channel.copy_lent()
        lent[-1] = own[-1] = 1.0
        reply = channel.send(0, REQUEST, (Echo.keep,), (lent,), lent=True)
        lent[-1] = 2.0
        echo.go.set()
        channel.get([reply], PATIENCE_S)
        assert [kept[-1].item() for kept in echo.kept] == [0.0, 0.0, 2.0]
        assert not any(line.lent or line.unwritten for line in channel._connections)


def test_packed_value_is_sent_to_several_hosts(tmp_path: Path) -> None:
    with channel_of(tmp_path, 2) as (channel, echoes):
        once = Packed.of({"w": torch.arange(50_000)})
        assert len(once.data) < 8 * 50_000 // 3
        for host in (0, 1):
            channel.send(host, ONE_WAY, (Echo.keep,), (once,))
            channel.get([ask(channel, Echo.give, None, host=host)], PATIENCE_S)
        for echo in echoes:
            assert torch.equal(echo.kept[0].value()["w"], torch.arange(50_000))


def test_run_channel_raises_exception_of_call(tmp_path: Path) -> None:
    with channel_of(tmp_path) as (channel, _):
        with pytest.raises(LookupError, match="no such") as caught:
            channel.get([ask(channel, Echo.fail, "no such")], PATIENCE_S)
        assert "in fail" in str(caught.value.__cause__)
        with pytest.raises(HostError, match="Odd: 1 and 2") as odd:
            channel.get([ask(channel, Echo.fail_oddly)], PATIENCE_S)
        assert isinstance(odd.value.__cause__, Odd)
        with pytest.raises(HostError, match="TypeError: cannot pickle") as unpicklable:
            channel.get([ask(channel, Echo.give_what_does_not_pickle)], PATIENCE_S)
        assert isinstance(unpicklable.value.__cause__, TypeError)
        channel.send(0, ONE_WAY, (Echo.fail,), ("told",))
        with pytest.raises(LookupError, match="told"):
            channel.get([ask(channel, Echo.give, 1)], PATIENCE_S)
        assert channel.get([ask(channel, Echo.give, 1)], PATIENCE_S) == [1]


def test_answers_before_host_exit_arrive_and_later_calls_are_lost(tmp_path: Path) -> None:
    channel = RunChannel(tmp_path, 1, None)
    with join_in_thread(channel) as sock:
        before, after = ask(channel, Echo.give, 1), ask(channel, Echo.give, 2)
        host = incoming(sock)
        message = next(host)
        assert message is not None
        send(sock, encoded(message.number, RESPONSE, (), 1))
        sock.close()
        assert channel.get([before], PATIENCE_S) == [1]
        with pytest.raises(CallLost):
            channel.get([before, after], PATIENCE_S)
        with pytest.raises(CallLost):
            channel.get([ask(channel, Echo.give, 3)], PATIENCE_S)
        assert channel.broken() == [0]
    channel.close()
    channel.close()


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_unreachable_machine_ends_message_stream(number: int) -> None:
    """The reader sees EOFError, as if the connection was closed."""

    class Away(socket.socket):
        def recv_into(self, *_: object) -> int:  # type: ignore[override]
            raise OSError(number, os.strerror(number))

    with Away() as sock, pytest.raises(EOFError):
        next(incoming(sock))


@contextmanager
def join_in_thread(channel: RunChannel) -> Iterator[socket.socket]:
    """Join as the host of connection 0 in a thread; the controller has to read meanwhile."""
    found: list[socket.socket] = []
    thread = threading.Thread(target=lambda: found.append(join(channel.credentials(0), PATIENCE_S)))
    thread.start()
    read_while_alive(channel, thread)
    with found[0] as sock:
        yield sock


def read_while_alive(channel: RunChannel, thread: threading.Thread) -> None:
    while thread.is_alive():
        with pytest.raises(NotYet):
            channel.get([Reply(0)], 0.01)
    thread.join()


def test_run_channel_refuses_host_with_wrong_key(tmp_path: Path) -> None:
    channel = RunChannel(tmp_path, 1, "127.0.0.1")
    try:
        stranger = replace(channel.credentials(0), key=b"x" * 32)
        failed: list[Exception] = []

        def knock() -> None:
            try:
                join(stranger, PATIENCE_S)
            except ConnectionError as error:
                failed.append(error)

        thread = threading.Thread(target=knock)
        thread.start()
        read_while_alive(channel, thread)
        assert len(failed) == 1
        # a host under another number is refused too
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = other.getsockname()[:2]
            false = replace(channel.credentials(0), path=None, address=address)
            caller = threading.Thread(target=lambda: _answer_falsely(other))
            caller.start()
            with pytest.raises(ConnectionError, match="not the controller"):
                join(false, PATIENCE_S)
            caller.join()
        with join_in_thread(channel), socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(tmp_path / "runs"))  # a silent client blocks nobody
            assert channel.broken() == []
    finally:
        channel.close()


def _answer_falsely(server: socket.socket) -> None:
    with server.accept()[0] as sock:
        sock.sendall(os.urandom(32))
        sock.recv(1 << 16)
        sock.sendall(os.urandom(32))


def test_interrupt_while_reading_message_marks_call_lost(tmp_path: Path) -> None:
    """No later message is taken for the lost one."""
    with channel_of(tmp_path) as (channel, _):
        joined(channel)
        line = channel._connections[0]
        real = line.messages

        def half() -> Iterator[None]:
            next(real)
            raise KeyboardInterrupt
            yield

        line.messages = half()
        one, two = ask(channel, Echo.give, 1), ask(channel, Echo.give, 2)
        with pytest.raises(KeyboardInterrupt):
            channel.get([one, two], PATIENCE_S)
        assert channel.interrupted
        with pytest.raises(CallLost):
            channel.get([two], PATIENCE_S)


class Pressed(KeyboardInterrupt):
    """An exception for a simulated Ctrl-C, distinct from a real one."""


def interrupted_at(place: int, act: Callable[[], object]) -> bool:
    """Raise `Pressed` at the given place, counting the places where Python handles signals
    (function entry, and return from a C function) in the channel and its waits. Return whether
    that place exists."""
    files, seen = (run_channel.__file__, threading.__file__), 0

    def look(frame: FrameType, kind: str, _: object) -> None:
        nonlocal seen
        code = frame.f_code
        if kind in ("call", "c_return") and code.co_filename in files:
            seen += code.co_name != "<genexpr>"  # an exception raised at its end would be lost
            if seen == place + 1:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    before = sys.getprofile()
    try:
        sys.setprofile(look)
        act()
    except Pressed:
        pass
    finally:
        sys.setprofile(before)
    return seen > place


@pytest.fixture
def presses() -> Iterator[None]:
    def press(number: int, frame: FrameType | None) -> None:
        raise Pressed

    before = signal.signal(signal.SIGUSR1, press)
    yield
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def read_by_another(channel: RunChannel) -> Iterator[None]:
    """Let another thread read from the channel inside the block."""
    stop = threading.Event()
    thread = threading.Thread(target=channel._wait, args=(stop.is_set, 3600.0))
    thread.start()
    try:
        while channel._reader != thread.ident:
            time.sleep(0.001)
        yield
        assert channel._reader == thread.ident
    finally:
        stop.set()
        ask(channel, Echo.give, None)  # the other thread reads this answer
        thread.join()


@pytest.mark.parametrize("others", [nullcontext, read_by_another])
def test_interrupt_at_any_point_of_wait_loses_no_answer(
    tmp_path: Path, presses: None, others: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock stays held, and no other thread waits for the interrupted one."""
    monkeypatch.setattr(run_channel, "SIGNAL_POLL_S", 0.01)
    with channel_of(tmp_path) as (channel, _), ThreadPoolExecutor(1) as another:
        joined(channel)
        with others() if others is nullcontext else others(channel):
            reader, place, there = channel._reader, 0, True
            while there:
                reply = ask(channel, Echo.give, place)
                if others is nullcontext:
                    there = interrupted_at(place, partial(channel.get, [reply], PATIENCE_S))
                else:  # this thread waits for the other and looks again
                    looks = iter((False,) * 4)
                    done = partial(next, looks, True)
                    there = interrupted_at(place, partial(channel._wait, done, PATIENCE_S))
                assert another.submit(channel._lock.acquire, timeout=PATIENCE_S).result(), place
                another.submit(channel._lock.release).result()
                assert (channel._reader, channel._waiting) == (reader, 0), place
                assert channel.get([reply], PATIENCE_S) == [place]
                place += 1
            assert place > 20 and not channel.interrupted, place
