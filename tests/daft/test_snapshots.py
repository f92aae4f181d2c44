"""Tests snapshots of hosts' tables: changes are undone, and snapshot files outlive processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor.daft import Call, Free, Function, TaskError, launch_cluster
from dtensor.daft.cluster.recovery_line import ChangeLog
from dtensor.daft.ir.host_program import HostProgram
from dtensor.daft.run.transport import LocalTransport
from dtensor.daft.run.worker import HostRun, Worker
from dtensor.daft.undo.failed_run import UndoneRun
from dtensor.daft.undo.rollback import TableChange
from dtensor.daft.undo.snapshot_file import SnapshotFile, nbytes_of
from dtensor.daft.undo.snapshots import MemorySnapshots, Snapshots
from dtensor.daft.verification.verifier import verify
from tests.daft.cuts import World, differs, drawn
from tests.daft.programs import program
from tests.daft.undo import AGREE, CHECKED


def _moved(w: Tensor, x: Tensor) -> tuple[()]:
    w += x
    if x.item() > 100:
        raise ArithmeticError("after the write")
    return ()


MOVED = Function.of(_moved, "moved")
ITEMS = (
    Call("checked", ("x",), ("y",)),
    *AGREE,
    Call("moved", ("w", "x"), (), ("w",)),
    Free(("y",)),
)


def test_failure_after_commit_point_is_undone_on_all_ranks() -> None:
    """Whether or not a rank had written by then; the cluster stays usable."""
    made = program(
        *(ITEMS,) * 2,
        functions=[CHECKED, MOVED],
        inputs=[("x",)] * 2,
        state=[("w",)] * 2,
    )
    with launch_cluster(2, snapshot_every=1) as cluster:
        cluster.put([{"w": torch.zeros(3)}, {"w": torch.zeros(2)}])
        handle = cluster.load(made)
        fed = [{"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}]
        cluster.run(handle, fed).get()
        for bad in (0, 1):
            wrong = list(fed)
            wrong[bad] = {"x": torch.tensor(101.0)}
            with pytest.raises(TaskError, match=f"rank {bad} .*ArithmeticError: after the write"):
                cluster.run(handle, wrong).get()
            assert cluster.failure is None
            (one,), (two,) = cluster.get([("w",)] * 2).get()
            assert one.tolist() == [1.0 + bad] * 3 and two.tolist() == [2.0 + 2 * bad] * 2
            cluster.run(handle, fed).get()
        assert cluster.get([("w",)] * 2).get()[0][0].tolist() == [3.0] * 3


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# -- hosts that lose each other --------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        [("copies", 1, False), ("file", 1, False), ("file", 1, True), ("file", 3, True)]
    ),
)
def test_changes_after_recovery_line_are_repeated_to_same_state(
    seed: int, how: tuple[Literal["copies", "file"], int, bool]
) -> None:
    """Each host can return to the state at the recovery line and ends as if nothing had happened.
    It keeps no more than it needs."""
    store, every, kills = how
    size = (2 if store == "copies" else 1) + seed % 3
    ops = drawn(random.Random(seed), size, 12)
    calm = World(size, 0).play(ops)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(size, seed, store=store, folder=Path(folder), every=every)
        world.play(ops, 0.03, kills=kills)
        for expected, found in zip(calm.tables(), world.tables(), strict=True):
            # a dead host's cache keeps the rows written since its last record
            assert differs(expected, found, lasting_only=kills) == ""
        assert world.left_over() == []


def test_change_log_frees_states_before_recovery_line() -> None:
    changes = ChangeLog(3)
    assert changes.add((0, 1, 2), together=False) == (1, [0, 0, 0], True)
    assert changes.add((0, 1, 2), commits=True) == (2, [1, 1, 1], True)
    assert changes.add((0, 1, 2)) == (3, [0, 0, 0], True)  # it has no commit point
    # hosts 0 and 1 have ended all changes before it; if host 2 is behind, they roll back with it
    assert changes.add((0, 1), commits=True) == (4, [1, 1], True)
    for host in range(3):
        changes.heard(host, 3)
    assert changes.base == [3, 3, 3]
    assert changes.recovery_line([4, 3, 3]) == {0: 3, 1: 3, 2: 3}
    assert changes.recovery_line([4, 4, 3]) == {0: 4, 1: 4, 2: 3}
    seldom = ChangeLog(2, every=2)
    assert [seldom.add((0, 1), commits=True)[2] for _ in range(4)] == [False, True, False, True]
    assert seldom.recovery_line([3, 4]) == {0: 2, 1: 2}


# -- files -----------------------------------------------------------------------------------------


def _steps(folder: str, lines: int) -> None:
    """Change n sets all values to n. The process is killed `lines` lines of dtensor after change
    3."""

    def traced(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if "/dtensor/daft/undo/" not in frame.f_code.co_filename:
            return None
        lines -= event == "line"
        if lines <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return traced

    table: dict[tuple[int, str], object] = {
        (0, f"w{i}"): torch.zeros(1000 * i + 3) for i in range(6)
    }
    snapshots = Snapshots(table, SnapshotFile.create(Path(folder), (0,)))
    keys = tuple(table)
    number = 0
    while True:
        number += 1
        if number == 4:
            sys.settrace(traced)
        snapshots.begin(keys)
        for value in table.values():
            assert isinstance(value, Tensor)
            value.fill_(number)
        if number % 7 == 0:  # and one comes and goes
            table[0, "text"] = f"after {number}" * 100
        elif number % 7 == 3:
            table.pop((0, "text"), None)
        snapshots.end(number, written=keys, alone=((0, "text"),), committed=number - 1)


@pytest.mark.parametrize("kill", range(12))
def test_killed_process_leaves_complete_recent_snapshot(kill: int) -> None:
    """Wherever the process was killed, the state is complete and not older than the last finished
    change."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        process = context.Process(target=_steps, args=(folder, 1 + 97 * kill))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        table: dict[tuple[int, str], object] = {}
        snapshots = Snapshots(table, SnapshotFile.open(Path(folder), (0,)))
        oldest = snapshots._states[0]  # the current change may already have committed this state
        assert snapshots.ended - 1 <= oldest <= snapshots.ended
        for state in (snapshots.ended, oldest):
            assert snapshots.roll_back(state) == state
            for i in range(6):
                value = table[0, f"w{i}"]
                assert isinstance(value, Tensor) and value.shape == (1000 * i + 3,)
                assert torch.equal(value, torch.full_like(value, state))
            last = state - state % 7
            there = f"after {last}" * 100 if state % 7 < 3 and last else None
            assert table.get((0, "text")) == there
        snapshots.begin(())
        snapshots.end(snapshots.ended + 1, committed=snapshots.ended)


def test_snapshot_file_size_is_bounded() -> None:
    """Covers values written twice by each step, values only put once, and the index pages."""
    table: dict[tuple[int, str], object] = {}
    page, sizes = 4096, (5000, 16, 70_000)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = SnapshotFile.create(Path(folder), (0,))
        snapshots = Snapshots(table, store)
        trained = tuple((0, f"w{size}") for size in sizes)
        frozen = (0, "frozen")
        table.update({(0, f"w{size}"): torch.zeros(size) for size in sizes})
        table[frozen] = torch.zeros(3 * page // 4)
        snapshots.begin((*trained, frozen))
        snapshots.end(1, alone=(*trained, frozen), committed=1)
        for number in range(2, 9):
            snapshots.begin(trained)
            snapshots.end(number, written=trained, committed=number - 1)
        step = -(-nbytes_of([table[key] for key in trained]) // page) * page  # type: ignore[misc]
        heads = 3 * page  # pages for states, entries and the value index
        assert store.nbytes == heads + 2 * step + 3 * page
        table.pop(frozen)
        snapshots.begin((frozen,))
        snapshots.end(9, alone=(frozen,), committed=9)
        wide = torch.zeros(100_000)
        table[0, "wide"] = wide
        snapshots.begin(((0, "wide"),))
        snapshots.end(10, alone=((0, "wide"),), committed=10)  # unused pages are freed
        assert store.nbytes <= heads + step + -(-wide.nbytes // page) * page


def test_existing_or_uninitialized_snapshot_file_is_refused(shm: Path) -> None:
    store = SnapshotFile.create(shm, (0, 1))
    store.close()
    with pytest.raises(FileExistsError):
        SnapshotFile.create(shm, (0, 1))
    with pytest.raises(FileNotFoundError):
        SnapshotFile.open(shm, (2, 3))
    path = SnapshotFile.path(shm, (0, 1))
    path.chmod(0o644)
    with pytest.raises(OSError, match="not a snapshot file that only this user can access"):
        SnapshotFile.open(shm, (0, 1))
    path.chmod(0o600)
    SnapshotFile.open(shm, (0, 1)).close()
    with open(path, "r+b") as file:
        file.write(b"elsewhat")
    with pytest.raises(OSError, match="not an initialized snapshot file"):
        SnapshotFile.open(shm, (0, 1))


@pytest.mark.parametrize("kind", ["copies", "file"])
def test_rollback_restores_tensors_in_place(kind: str, shm: Path) -> None:
    """Views of a value see the old value. A value whose shape changed becomes a new tensor; a
    value that is no tensor becomes a copy."""
    flat = torch.arange(6.0)
    table: dict[tuple[int, str], object] = {
        (0, "a"): flat[:2],
        (0, "b"): flat[2:].view(2, 2),
        (0, "n"): [1, 2],
    }
    store = MemorySnapshots() if kind == "copies" else SnapshotFile.create(shm, (0,))
    snapshots = Snapshots(table, store)
    keys = tuple(table)
    snapshots.begin(())
    snapshots.end(1, alone=keys, committed=0)
    snapshots.begin(keys)
    flat.fill_(-1)
    table[0, "b"] = torch.zeros(7)
    table[0, "n"].append(3)  # type: ignore[attr-defined]
    table[0, "new"] = 1
    assert snapshots.roll_back(1) == 1
    assert flat.tolist() == [0, 1, -1, -1, -1, -1]
    assert table[0, "b"].tolist() == [[2, 3], [4, 5]]  # type: ignore[attr-defined]
    assert table[0, "n"] == [1, 2]
    assert table[0, "a"] is not flat and table[0, "a"].data_ptr() == flat.data_ptr()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="No state of change -1 or before is kept: the oldest is"):
        snapshots.roll_back(-1)


def test_single_host_run_is_undone_after_runs_without_snapshot(shm: Path) -> None:
    made = program(
        [Call("moved", ("w", "x"), (), ("w",))],
        functions=[MOVED],
        inputs=[("x",)],
        state=[("w",)],
    )
    store = SnapshotFile.create(shm, (0,))
    worker = Worker((0,), torch.device("cpu"), LocalTransport(), snapshots=store)
    worker.load(0, HostProgram.whole(made, verify(made).lists[0]))
    worker.put({0: {"w": torch.zeros(2), "old": 1}}, {}, TableChange(1))

    def run(x: float, change: TableChange, drop: dict[int, list[str]]) -> object:
        return worker.run(HostRun(0, 0, {0: {"x": torch.tensor(x)}}, drop=drop, change=change))

    run(1.0, TableChange(2, taken=False), {})
    assert isinstance(run(200.0, TableChange(3), {0: ["old"]}), UndoneRun)
    assert worker.get({0: ["w"]})[0][0].tolist() == [1.0, 1.0]  # type: ignore[index]
    with pytest.raises(LookupError):
        worker.get({0: ["old"]})
    run(2.0, TableChange(4, taken=False), {})
    assert worker.ended() == 4 and worker.roll_back(4) == 3  # the snapshots that were taken
    assert worker.get({0: ["w"]})[0][0].tolist() == [1.0, 1.0]  # type: ignore[index]


def test_invalid_snapshot_every_is_refused() -> None:
    for wrong in (0, -1, True, 1.0, "1"):
        fault = "is not a whole number of at least 1.\nfix: snapshot_every=1"
        with pytest.raises(ValueError, match=fault):
            launch_cluster(1, snapshot_every=wrong)  # type: ignore[arg-type]
