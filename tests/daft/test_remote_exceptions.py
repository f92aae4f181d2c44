"""What a host raises is named by an error of daft's, whose cause it is, on both backends; nothing
of it acts on the controller. What is meant for the controller does."""

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
def test_an_exception_in_another_process(kind: str) -> None:
    """As pickle has it there and back; and a second time."""
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


def test_a_class_that_is_gone_arrives_as_text() -> None:
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
    """The signal, as one that comes while Python's code runs."""
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
    """Code that catches what comes, and raises another, or the same."""

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
def test_an_interrupt_is_the_controllers(name: str) -> None:
    with ctrl_c_interrupts():
        assert interrupted_by(SIGNALS[name])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_a_handler_raises_is_the_controllers(error: BaseException) -> None:
    before = signal.signal(signal.SIGTERM, handler_that(raising(error)))
    try:
        assert interrupted_by(lambda: send(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_code_raises_is_its_own() -> None:
    for kind in NAMES:
        assert not interrupted_by(lambda: raisers.act(kind))  # noqa: B023
    assert not interrupted_by(after(raising(KeyboardInterrupt()), SystemExit(1)))
    with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
        try:
            sigint()
        except KeyboardInterrupt:  # handled by the controller, around what it asks of a host
            assert not interrupted_by(raising(SystemExit(3)))
            raise


def calls(act: Callable[[], object]) -> Program:
    made = function("act", "def forward():\n    act()\n    return (1,)", act=act)
    return program([Call("act", (), ("y",))], functions=[made], outputs=[("y",)])


def test_ctrl_c_while_a_rank_computes() -> None:
    """It waits for the end of the instruction, and is no failure of the rank's."""
    ended: list[int] = []

    def act() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(1)

    with launch_cluster(1) as cluster:
        loaded = cluster.load(calls(act))
        with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
            cluster.run(loaded, [{}])
        assert ended and cluster.failure is None


def test_a_second_ctrl_c_ends_an_instruction(
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
