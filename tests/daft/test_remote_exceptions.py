"""Tests that an exception on a host is the cause of an error of daft on both backends and never
acts on the controller, while an interrupt meant for the controller does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from dtensor import signals
from dtensor.daft import Call, TaskError, launch_cluster
from dtensor.daft.errors import Failure
from dtensor.daft.ir.program import Program
from dtensor.daft.remote_exceptions import RemoteException, interrupts
from tests.daft import raisers
from tests.daft.programs import ctrl_c_interrupts, function, program
from tests.daft.raisers import KINDS, NAMES, check

# -- in programs -----------------------------------------------------------------------------------


# -- in tasks --------------------------------------------------------------------------------------


# -- on its way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
def test_remote_exception_survives_pickling_twice(kind: str) -> None:
    failure = Failure(
        rank=1, reason=f"{type(KINDS[kind]()).__name__}", raised=RemoteException(raised(kind))
    )
    once = pickle.loads(pickle.dumps(TaskError(failure)))
    check(once, kind)
    check(pickle.loads(pickle.dumps(once)), kind)
    check(pickle.loads(pickle.dumps(replace_cause(failure))), kind)


def raised(kind: str) -> BaseException:
    try:
        raisers.act(kind)
    except BaseException as error:
        return error


def replace_cause(failure: Failure) -> TaskError:
    assert failure.raised is not None
    try:
        raise TaskError(replace(failure, raised=None)) from failure.raised.error
    except TaskError as error:
        return error


def test_remote_exception_of_missing_class_arrives_as_text() -> None:
    data = pickle.dumps(RemoteException(raised("HostsOwn")))
    name = f"only_of_{os.getpid()}"
    own = sys.modules.pop(name)
    try:
        assert "Own: of a module" in str(pickle.loads(data).error)
    finally:
        sys.modules[name] = own


# -- what is meant for the controller --------------------------------------------------------------


def interrupted_by(act: Callable[[], object]) -> bool:
    try:
        act()
    except BaseException as error:
        return interrupts(error)
    return False


def send(number: int) -> None:
    """Send the signal, to be handled while Python code runs."""
    os.kill(os.getpid(), number)
    while True:  # until it is delivered
        pass


def handler_that(act: Callable[[], object]) -> Callable[..., object]:
    def handler(number: int, frame: object) -> None:
        act()

    return handler


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise error

    return act


def after(first: Callable[[], object], error: BaseException | None) -> Callable[[], None]:
    """Return code that catches an exception and raises another one, or the same."""

    def act() -> None:
        try:
            first()
        except BaseException:
            if error is None:
                raise
            raise error  # noqa: B904

    return act


def sigint() -> None:
    send(signal.SIGINT)


def in_asyncio() -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600.0)

    asyncio.run(main())


SIGNALS: dict[str, Callable[[], object]] = {
    "in Python": sigint,
    "in a sleep": lambda: (signal.raise_signal(signal.SIGINT), time.sleep(3600.0)),
    "reraised": after(sigint, None),
    "caught, another raised": after(sigint, KeyboardInterrupt("bye")),
    "caught, an exit raised": after(sigint, SystemExit(1)),
    "in asyncio": in_asyncio,
}


@pytest.mark.parametrize("name", SIGNALS)
def test_interrupt_is_attributed_to_controller(name: str) -> None:
    with ctrl_c_interrupts():
        assert interrupted_by(SIGNALS[name])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_exception_of_signal_handler_is_attributed_to_controller(error: BaseException) -> None:
    before = signal.signal(signal.SIGTERM, handler_that(raising(error)))
    try:
        assert interrupted_by(lambda: send(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_exception_of_host_code_is_not_attributed_to_controller() -> None:
    for kind in NAMES:
        assert not interrupted_by(lambda: raisers.act(kind))  # noqa: B023
    assert not interrupted_by(after(raising(KeyboardInterrupt()), SystemExit(1)))
    with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
        try:
            sigint()
        except KeyboardInterrupt:  # the controller handles it around a call of a host
            assert not interrupted_by(raising(SystemExit(3)))
            raise


def calls(act: Callable[[], object]) -> Program:
    made = function("act", "def forward():\n    act()\n    return (1,)", act=act)
    return program([Call("act", (), ("y",))], functions=[made], outputs=[("y",)])


def test_ctrl_c_waits_for_end_of_instruction_and_fails_no_rank() -> None:
    ended: list[int] = []

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(1)

    with launch_cluster(1) as cluster:
        loaded = cluster.load(calls(act))
        with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
            cluster.run(loaded, [{}])
        assert ended and cluster.failure is None


def test_second_ctrl_c_interrupts_instruction(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "SAY_AFTER_S", 0.0)

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        while not signals.was_announced():
            time.sleep(0.001)
        sigint()

    with launch_cluster(1) as cluster:
        loaded = cluster.load(calls(act))
        with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
            cluster.run(loaded, [{}])
        assert "interrupted" in str(cluster.failure)
    assert "SIGINT is held back" in capfd.readouterr().err
