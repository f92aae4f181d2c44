"""Tests the folders by which other processes of the user find a launch, and the warning about a
slow run.

No Ray: this process plays the hosts.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.__main__ import main
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.ray.bootstrap import launch_folder, progress
from dtensor.daft.ray.bootstrap import user_folder as own_folder
from dtensor.daft.ray.bootstrap.launch_folder import LaunchFolder, launches
from dtensor.daft.ray.bootstrap.progress import ProgramCounter
from dtensor.daft.ray.bootstrap.user_folder import OwnFolder, own_directory, sweep
from dtensor.daft.ray.diagnosis.stragglers import StragglerWarnings
from dtensor.daft.verification.verifier import verify
from tests.daft.backends import context
from tests.daft.programs import function
from tests.daft.test_status import ALL


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for temporary files, so that /tmp is not searched."""
    (own := tmp_path / "t").mkdir()  # a short path, because multiprocessing puts a socket below it
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setattr(launch_folder, "ALSO", str(own))
    return own


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock of counters with one that only the test advances."""
    now = time.monotonic_ns()
    made = SimpleNamespace(monotonic_ns=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(progress, "time", made)
    return made


@contextmanager
def launched() -> Iterator[tuple[LaunchFolder, list[ProgramCounter]]]:
    """Three hosts, all threads of this process: 0 and 1 wait for 2, which is in a call."""
    folder = LaunchFolder.make()
    counters = [ProgramCounter.make(folder.path / f"host{h}") for h in range(3)]
    done = threading.Event()
    threads = [threading.Thread(target=_host, args=(counter, done)) for counter in counters]
    try:
        folder.write_facts("ranks", {f"host{h}": (h,) for h in range(3)})
        folder.write_lines(0, ProgramLines.of(ALL, verify(ALL).lists))
        for counter, thread in zip(counters, threads, strict=True):
            thread.start()
            while not counter.pid or not waits_in(thread, _host):
                time.sleep(0.001)
            counter.asks(4)
            counter.begin(0, 4)
        counters[0].view[0] = counters[1].view[0] = 2
        yield folder, counters
    finally:
        done.set()
        for counter, thread in zip(counters, threads, strict=True):
            thread.join()
            counter.stop()
        folder.close()


def waits_in(thread: threading.Thread, function: Callable[..., object]) -> bool:
    """Return whether the thread waits in a call made by this function through one more frame."""
    at = sys._current_frames().get(thread.ident or 0)
    for _ in range(2):
        at = at and at.f_back
    return at is not None and at.f_code is function.__code__


def _host(counter: ProgramCounter, done: threading.Event) -> None:
    counter.start()
    done.wait()


def running_for(counters: list[ProgramCounter], seconds: float, usual: float = 0.0) -> None:
    for counter in counters:
        counter.view[6] = progress.time.monotonic_ns() - int(seconds * 1e9)
        counter.view[7] = int(usual * 1e9)


# -- the folder ------------------------------------------------------------------------------------


def test_launch_folder_is_listed_while_launch_runs(scratch: Path, clock: SimpleNamespace) -> None:
    assert launches() == []
    with launched() as (folder, _):
        assert folder.path.parent == own_directory() == scratch / f"dtensor-{os.geteuid()}"
        assert own_directory().stat().st_mode & 0o777 == 0o700
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (found,) = launches()
        assert (found.pid, found.kind) == (os.getpid(), "ranks")
        assert found.hosts == (("host0", (0,)), ("host1", (1,)), ("host2", (2,)))
        assert found.status(0.05).waited_for == 2
        folder.forget_lines(0)
        assert launches()[0].lines(0) is None
    assert launches() == [] and os.listdir(own_directory()) == []
    folder.close()


def test_launch_folder_of_dead_process_is_removed(scratch: Path) -> None:
    pipe, its = context.Pipe()
    child = context.Process(target=_launches, args=(str(scratch), its), daemon=True)
    child.start()
    left = Path(pipe.recv())
    assert left.parent == own_directory() and left.exists()
    assert [each.pid for each in launches()] == [child.pid]
    child.kill()
    child.join()
    mine = LaunchFolder.make()
    assert not left.exists() and mine.path.exists()
    mine.close()


def _launches(scratch: str, pipe: Connection) -> None:
    tempfile.tempdir = scratch
    folder = LaunchFolder.make()
    folder.write_facts("ranks", {"host0": (0,)})
    pipe.send(str(folder.path))
    pipe.recv()


def test_unlocked_launch_folder_is_not_listed(scratch: Path) -> None:
    own_directory().mkdir(mode=0o700)
    for name in ("1-left", "ray"):  # the second is no launch
        (own_directory() / name).mkdir()
    assert launches() == []
    assert os.listdir(own_directory()) == ["ray"]


def test_folder_removed_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def swept(**given: Any) -> str:
        made.append(make(**given))
        if len(made) < 3:
            sweep(tmp_path, "*")
        return made[-1]

    monkeypatch.setattr(own_folder.tempfile, "mkdtemp", swept)
    with OwnFolder(tmp_path, "1-") as folder:
        sweep(tmp_path, "*")  # a locked folder is not removed
        assert os.listdir(tmp_path) == [folder.path.name] and str(folder.path) == made[2]
    assert os.listdir(tmp_path) == []


def test_launch_directory_open_to_other_users_is_refused(scratch: Path) -> None:
    own_directory().mkdir(mode=0o700)
    own_directory().chmod(0o750)
    with pytest.raises(PermissionError, match=r"is open to others \(mode 0750\).*\n.*chmod 700"):
        launches()
    assert main(["status"]) == 2
    with pytest.warns(RuntimeWarning, match="will not find this launch"):
        folder = LaunchFolder.make()
    assert folder.path.parent == scratch and folder.path.stat().st_mode & 0o777 == 0o700
    (scratch / "some-thing").mkdir()
    folder.close()
    assert sorted(os.listdir(scratch)) == [own_directory().name, "some-thing"]


def test_launch_directory_that_is_symlink_or_of_other_user_is_refused(
    scratch: Path, tmp_path: Path
) -> None:
    own_directory().symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is no directory"):
        launches()
    own_directory().unlink()
    if os.geteuid() == 0:  # only root may change the owner of a directory
        own_directory().mkdir(mode=0o700)
        os.chown(own_directory(), 4321, -1)
        with pytest.raises(PermissionError, match="belongs to user 4321, and this is user 0"):
            launches()


def test_program_runs_if_its_lines_cannot_be_written(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with launched() as (folder, _):
        folder.forget_lines(0)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            with pytest.warns(RuntimeWarning, match="lines of program 'test' could not be written"):
                folder.write_lines(0, ProgramLines.of(ALL, verify(ALL).lists))
        status = launches()[0].status(0.05)
        assert [each.does for each in status.ranks] == ["sleeps"] * 3
        assert (status.waited_for, status.ranks[0].instruction) == (None, "")
        assert "the lines of its program are missing" in status.reason


# -- the command -----------------------------------------------------------------------------------


def test_status_command_prints_status_and_refuses_bad_arguments(
    scratch: Path, capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    assert main(["status"]) == 2
    assert "No launch of yours runs on Ray on this machine" in capsys.readouterr().err
    with launched() as (_, counters):
        assert main(["status", "--seconds", "0.05"]) == 0
        text = capsys.readouterr().out
        assert f"Launch of process {os.getpid()}: 3 ranks on ray; run 4 of 'test'" in text
        assert "Rank 2 sleeps in a call; ranks 0 and 1 wait for it.\n" in text
        assert "net.py:3: y = f(x)" in text
        running_for(counters, 6.0, usual=0.1)
        assert main(["status", "--json", str(os.getpid()), "--seconds", "0.05"]) == 1
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["waited_for"], found["hangs"]) == (2, True)
        assert found["ranks"][0]["peers"] == [2]
        assert main(["status", "12"]) == 2
        error = capsys.readouterr().err
        assert "is of process 12: those are of " in error
    for wrong in ([], ["stat"], ["status", "--seconds", "0"], ["status", "--seconds", "x"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2


# -- counters --------------------------------------------------------------------------------------


def test_program_counter_reports_position_duration_and_usual_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, beats = 1_000_000_000, threading.Semaphore(0)

    def beat(seconds: float) -> None:
        beats.release()
        time.sleep(0.001)

    clock = SimpleNamespace(monotonic_ns=lambda: now, sleep=beat)
    monkeypatch.setattr(progress, "time", clock)
    counter = ProgramCounter.make(tmp_path / "host0")
    assert counter.read().moving == (-1, -1, -1, None) and counter.read().beat_s is None
    counter.start()
    for run, seconds in enumerate((0.0, 0.02, 0.04)):
        begun = counter.begin(3, run)
        assert counter.read().usual_s == (None, None, 0.02)[run]
        now += int(seconds * 1e9)
        counter.end(begun)
    earlier = counter.begin(3, 3)
    assert counter.read().usual_s == 0.02
    later = counter.begin(3, 4)  # before the end of run 3 on its GPU
    counter.end(earlier)
    assert counter.read().run == 4 and counter.read().position == 0
    counter.end(later)
    assert counter.read().position == -1
    counter.begin(5, 5)
    assert counter.read().usual_s is None and counter.read().run == 5
    counter.view[0] = 9
    for _ in range(int(beats._value) + 2):
        beats.acquire()  # one beat in progress, and one that has seen the position
    now += 600_000_000
    at = counter.read()
    assert at.standing_s == pytest.approx(0.6) and at.peer is None
    assert (at.pid, at.thread) == (os.getpid(), threading.get_native_id())
    counter.record_wait(2)
    assert counter.read().peer == 2
    counter.view[0] = 10
    assert counter.read().peer is None
    counter.stop()
    counter.close()
    assert not counter.path.exists()


# -- what takes too long ---------------------------------------------------------------------------


def told(late: StragglerWarnings, waited_s: float, times: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            time.sleep(0.02)
            late.look(waited_s)
    return [str(each.message) for each in caught]


def test_straggler_warning_names_run_much_slower_than_usual(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    with launched() as (folder, counters):
        late = StragglerWarnings(folder.path)
        assert told(late, 1.0) == []
        running_for(counters, 6.0, usual=0.1)
        assert told(late, 1.0) == []  # warnings are turned off
        monkeypatch.delenv("DTENSOR_LATE_WARNINGS")
        running_for(counters, 6.0, usual=0.1)
        (text,) = told(late, 1.0)
        assert text.startswith("Rank 2 sleeps in a call; ranks 0 and 1 wait for it. This takes too")
        assert f"python -m dtensor status {os.getpid()}" in text and "usually 0.10 s" in text
        assert told(late, 1.0) == []
        running_for(counters, 11.0, usual=0.1)
        assert told(late, 1.0) == []
        running_for(counters, 12.5, usual=0.1)
        assert len(told(late, 1.0)) == 1
        running_for(counters, 20.0, usual=0.1)
        assert told(late, 1.0) == []
        for counter in counters:  # another run, which is not late
            counter.begin(0, 5)
        assert told(late, 1.0) == []
        running_for(counters, 6.0, usual=0.1)
        assert len(told(late, 1.0)) == 1
        running_for(counters, 6.0, usual=2.0)  # the run usually takes this long
        assert told(late, 30.0) == []


# -- in one process --------------------------------------------------------------------------------


def test_status_reports_ranks_in_this_process() -> None:
    with pytest.raises(dt.PlanningError, match="no launch is running in this process"):
        dt.status()
    with pytest.raises(dt.PlanningError, match="seconds=0 is not a number above 0"):
        dt.status(0)
    found: list[dt.Status] = []

    def ask(x: torch.Tensor) -> tuple[torch.Tensor]:
        """Ask for the status from another thread while this thread is in the call."""
        caller = threading.current_thread()

        def look() -> None:
            while not waits_in(caller, ask):
                time.sleep(0.001)
            found.append(dt.status(0.05))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return (x,)

    with dt.launch(dt.Mesh(tp=3)) as session:
        assert dt.status(0.05).waited_for is None
        cluster = session.launch.cluster
        handle = cluster.load(_calling(ask))
        cluster.run(handle, [{"x": torch.ones(1)}] * 3).get()
        assert dt.status(0.05).waited_for is None
    assert [status.waited_for for status in found] == [0, 1, 2]
    assert found[1].ranks[1].text == "sleeps in a call"
    assert found[1].ranks[1].line == "net.py:3: y = f(x)"
    assert found[1].ranks[0].text == "shares the process of rank 1"


def _calling(fn: object) -> dt.daft.Program:
    f = function("f", "def forward(x):\n    return fn(x)", fn=fn)
    return replace(ALL, functions=(("f", f),))
