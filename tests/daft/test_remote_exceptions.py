"""What a host raises is named by an error of daft's, whose cause it is, on both backends; nothing
of it acts on the controller. What is meant for the controller does."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from dtensor import daft, signals
from dtensor.daft import Call, Cluster, Label, Mode, TaskError, launch_cluster
from dtensor.daft.cluster.cluster import HostedCluster
from dtensor.daft.errors import Failure, HostError
from dtensor.daft.ir.program import Program
from dtensor.daft.remote_exceptions import RemoteException, interrupts
from dtensor.daft.undo.failed_run import UndoneRun
from tests.daft import raisers
from tests.daft.programs import ctrl_c_interrupts, function, program
from tests.daft.raisers import KINDS, NAMES, check

RAY = pytest.param("ray", marks=pytest.mark.ray)


@pytest.fixture(scope="module", params=["inprocess", RAY])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


# -- in programs -----------------------------------------------------------------------------------

ACT = function("act", "def forward(kind):\n    act(kind)\n    return (1,)", act=raisers.act)


@pytest.fixture(scope="module")
def cluster(backend: str) -> Iterator[Cluster]:
    with launch_cluster(2, backend=backend) as made:  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize("mode", ["compiled", "interpreted"])
def test_a_call_that_raises_anything(cluster: Cluster, mode: Mode) -> None:
    call = Call("act", ("kind",), ("y",), label=Label("F0"), source="net.py:2: act(kind)")
    made = program([], [call], functions=[ACT], inputs=[(), ("kind",)], outputs=[(), ("y",)])
    handle = cluster.load(made)
    for kind in NAMES:
        run = cluster.runs
        future = cluster.run(handle, [{}, {"kind": kind}], mode=mode)
        with pytest.raises(TaskError) as caught:
            future.get()
        text = str(caught.value)
        start = "rank 1 (stage 1), instruction 0 'y = call act(kind)' [F0]"
        assert text.startswith(f"{start}, run {run}: ") and "at net.py:2: act(kind)" in text
        check(caught.value, kind, carried=not cluster.immediate)
        assert cluster.failure is None
    cluster.unload(handle)


def test_what_is_read_after_a_run_that_raised(cluster: Cluster) -> None:
    """Its cause comes with what it was to keep, too."""
    made = program(
        [Call("act", ("kind",), ("y",))],
        [],
        functions=[ACT],
        inputs=[("kind",), ()],
        outputs=[("y",), ()],
    )
    handle = cluster.load(made)
    cluster.run(handle, [{"kind": "SystemExit"}, {}], keep={"y": "kept"})
    with pytest.raises(TaskError, match="SystemExit: 3") as caught:
        cluster.get([("kept",), ()]).get()
    check(caught.value, "SystemExit")
    cluster.delete([("kept",), ()])


def test_a_run_that_was_undone_for_no_known_reason(cluster: Cluster) -> None:
    """Hosts that have only heard of it are not all that there are; one may have forgotten."""
    assert isinstance(cluster, HostedCluster)
    made = program([], [Call("act", ("kind",), ())], functions=[ACT], inputs=[(), ("kind",)])
    with pytest.raises(TaskError, match="MemoryError"):
        cluster.run(cluster.load(made), [{}, {"kind": "MemoryError"}]).get()
    with pytest.raises(TaskError, match="rank 1 .*MemoryError: no room"):
        raise cluster.root([UndoneRun((), run=cluster.runs - 1)])
    with pytest.raises(TaskError, match="run 1000000: a run was undone, and no host says why"):
        raise cluster.root([UndoneRun((), run=1_000_000)])
    with pytest.raises(TaskError, match="no host says why"):
        raise cluster.root([UndoneRun(())])


def test_a_value_that_raises_as_a_host_takes_it(cluster: Cluster) -> None:
    """A put, which is no instruction: all goes on."""

    class Raises(torch.Tensor):
        def detach(self) -> NoReturn:  # type: ignore[override]
            sys.exit(3)

    value: object = torch.ones(2).as_subclass(Raises)
    if not cluster.immediate:
        value = raisers.Given("unpickled")
    with pytest.raises(HostError, match="SystemExit: 3") as caught:
        cluster.put([{"w": value}, {}])
        cluster.get([(), ()]).get()
    check(caught.value, "SystemExit")
    if not cluster.immediate:
        assert str(caught.value).startswith("rank 0: ")
    assert cluster.failure is None and cluster.get([(), ()]).get() == [(), ()]


# -- in tasks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(backend: str) -> Iterator[daft.Session]:
    with daft.launch(backend) as made:  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize("compiled", [False, True])
def test_a_task_that_raises_anything(session: daft.Session, compiled: bool) -> None:
    actor, other = daft.spawn(raisers.Actor), daft.spawn(raisers.Actor)
    x = torch.ones(2)
    for kind in NAMES:
        step = lambda x: (other.good(actor.fail(kind)), actor.good(x))  # noqa: E731, B023
        failed, good = (daft.compile(step) if compiled else step)(x)
        with pytest.raises(TaskError) as caught:
            failed.get()
        text = str(caught.value)
        assert text.splitlines()[0].startswith(f"actor {caught.value.failure.actor!r}, fail: ")
        assert "test_remote_exceptions.py" in text and "was not run" in caught.value.__notes__[-1]
        check(caught.value, kind)
        assert good.get().tolist() == [2.0, 2.0]


def test_other_places_of_an_actor(session: daft.Session) -> None:
    """Its `__init__`, its attributes, its results, on both sides."""
    exiting = daft.spawn(raisers.Actor, "SystemExit")
    actor = daft.spawn(raisers.Actor)
    futures = {
        "__init__": exiting.good(1),
        "through_property": actor.through_property(),
        "give": actor.give("pickled"),
    }
    unpickled = actor.give("unpickled")
    for name, future in futures.items():
        with pytest.raises(TaskError, match=f", {name}: SystemExit: 3") as caught:
            future.get()
        check(caught.value, "SystemExit")
    with pytest.raises(TaskError, match=", give: its result does not unpickle here: SystemExit: 3"):
        unpickled.get()
    with pytest.raises(TaskError, match=", good: SystemExit: 3"):
        actor.good(unpickled).get()
    assert actor.good(1).get() == 2


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
        while not signals.is_said():
            time.sleep(0.001)
        sigint()

    with launch_cluster(1) as cluster:
        loaded = cluster.load(calls(act))
        with ctrl_c_interrupts(), pytest.raises(KeyboardInterrupt):
            cluster.run(loaded, [{}])
        assert "interrupted" in str(cluster.failure)
    assert "SIGINT is held back" in capfd.readouterr().err
