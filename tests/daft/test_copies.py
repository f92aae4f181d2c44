"""Tests copies of a host's snapshots on another machine: which state of a copy is complete, and
who may send one.
"""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.extras import missing

pytest.importorskip("ray", reason=missing("ray"))

from dtensor.daft.ray.bootstrap.user_folder import elsewhere, shared
from dtensor.daft.ray.ranks import replicas as copies
from dtensor.daft.ray.ranks.replicas import PeerCopy, ReplicaServer, ReplicatedFile, hold
from dtensor.daft.ray.recovery.membership import ring
from dtensor.daft.undo.snapshot_file import SnapshotFile
from dtensor.daft.undo.snapshots import Key, Snapshots
from tests.machines import can_make

SECRET = b"s" * 32
RANKS = (0, 1)


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Return the folder of the owner and the folder of the keeper."""
    with TemporaryDirectory(dir="/dev/shm") as one, TemporaryDirectory(dir="/dev/shm") as two:
        yield Path(one), Path(two)


class Owner:
    """The owner of a table whose change n sets all values to n; changes 3, 6, ... also put a new
    value."""

    def __init__(self, folder: Path) -> None:
        self.table: dict[Key, object] = {}
        self.store = ReplicatedFile(SnapshotFile.create(folder, RANKS))
        self.snapshots = Snapshots(self.table, self.store)
        self.last = 0

    def change(self) -> None:
        self.last += 1
        keys: tuple[Key, ...] = ((0, "w"), (1, "w"), (1, "n"))
        self.snapshots.begin(keys)
        for key in keys:
            self.table[key] = torch.full((5000,), float(self.last))
        self.table[1, "n"] = self.last
        alone: tuple[Key, ...] = ((0, f"p{self.last}"),) if self.last % 3 == 0 else ()
        for key in alone:
            self.table[key] = torch.arange(self.last)
        self.snapshots.end(self.last, written=keys, alone=alone, committed=self.last - 1)


@pytest.fixture
def owner(folders: tuple[Path, Path]) -> Iterator[Owner]:
    owner = Owner(folders[0])
    yield owner
    owner.snapshots.close()


@pytest.fixture
def keeper(folders: tuple[Path, Path]) -> ReplicaServer:
    return ReplicaServer(folders[1], SECRET, "127.0.0.1")


def left(folder: Path) -> Snapshots:
    return Snapshots({}, SnapshotFile.open(folder, RANKS))


def check(folder: Path, state: int) -> None:
    """Check that opening the file gives this state, and no later one."""
    found = left(folder)
    assert found.roll_back(state) == state
    table = found._table
    assert table[1, "n"] == state
    for rank in range(2):
        assert torch.equal(table[rank, "w"], torch.full((5000,), float(state)))  # type: ignore[arg-type]
    assert {name for _, name in table} - {"w", "n"} == {f"p{i}" for i in range(3, state + 1, 3)}


def test_peer_copy_has_last_and_previous_committed_state(
    folders: tuple[Path, Path], owner: Owner, keeper: ReplicaServer
) -> None:
    other = folders[1]
    for _ in range(4):  # earlier changes
        owner.change()
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)
    check(other, 4)
    for _ in range(5):
        owner.change()
    owner.snapshots.roll_back(8)
    owner.last = 8
    owner.change()
    owner.store.check()
    keeper.end([RANKS])
    check(other, 9)
    check(other, 8)
    owner.change()  # a failed copy does not fail the change
    assert owner.snapshots.ended == 10
    with pytest.raises(ConnectionError, match="another machine broke off"):
        owner.store.check()


@pytest.mark.parametrize("seed", range(8))
def test_broken_copy_stream_leaves_complete_state(
    folders: tuple[Path, Path],
    owner: Owner,
    keeper: ReplicaServer,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    other = folders[1]
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)
    left_over = 95_000 + 23_457 * seed
    send = copies.send

    def cut(sock: Any, pieces: Sequence[Any]) -> None:
        nonlocal left_over
        data = b"".join(map(bytes, pieces))
        if "keeper" not in str(sock) and len(data) > left_over:
            send(sock, [data[:left_over]])
            raise BrokenPipeError(errno.EPIPE, "cut")
        left_over -= len(data)
        send(sock, pieces)

    monkeypatch.setattr(copies, "send", cut)
    kept = 0
    while not owner.store._broken:
        owner.change()
        kept = kept if owner.store._broken else owner.last
    keeper.end([RANKS])
    assert kept > 0
    assert left(other).ended in (kept, kept + 1)
    check(other, kept)


def test_copy_without_secret_is_refused(
    folders: tuple[Path, Path], owner: Owner, keeper: ReplicaServer
) -> None:
    with pytest.raises(ConnectionError):
        owner.store.copy_to(keeper.endpoint, b"t" * 32, RANKS)
    assert not list(folders[1].iterdir())


def test_full_memory_on_peer_is_reported(
    owner: Owner, keeper: ReplicaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PeerCopy, "keep", full)
    owner.change()
    with pytest.raises(ConnectionError, match="No space left on device"):
        owner.store.check()


def test_restarted_copy_replaces_old_copy_only_when_complete(
    folders: tuple[Path, Path], owner: Owner, keeper: ReplicaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folders[1]
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)
    owner.change()
    keeper.end([RANKS])
    owner.change()
    monkeypatch.setattr(PeerCopy, "complete", lambda kept: None)  # it is not
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)
    check(other, 1)
    monkeypatch.undo()
    owner.store.copy_to(keeper.endpoint, SECRET, RANKS)
    keeper.end([RANKS])
    check(other, 2)


HOLDS = """
import sys
from pathlib import Path
from dtensor.daft.ray.ranks.replicas import hold
hold(Path(sys.argv[1]), (0, 1))
print("held", flush=True)
sys.stdin.read()
"""


def test_stopped_holder_of_snapshot_is_killed_by_next_holder(folders: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", HOLDS, str(folders[0])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        os.close(hold(folders[0], RANKS))
        assert holder.wait() == -signal.SIGKILL


def test_snapshot_folder_open_to_other_users_is_refused(folders: tuple[Path, Path]) -> None:
    path = elsewhere(folders[0], "3f" * 14)
    try:
        lock = shared(path)
        assert path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(BlockingIOError):
            other = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(other)
        os.close(lock)
        path.chmod(0o755)
        with pytest.raises(PermissionError, match="is open to others"):
            shared(path)
    finally:
        path.rmdir()


def test_copies_are_assigned_to_rank_on_next_machine() -> None:
    assert ring(["a"]) == [None]
    assert ring(["a", "a"]) == [None, None]
    assert ring(["a", "a", "b"]) == [2, 2, 0]
    assert ring(["a", "b", "c"]) == [1, 2, 0]
    assert ring(["a", "b", "b", "b", "a"]) == [1, 0, 4, 0, 2]


@pytest.mark.ray
@pytest.mark.slow
def test_ranks_of_lost_machine_are_replaced_with_same_losses_and_state() -> None:
    """Its two ranks are replaced on the other machine; losses and state equal those of an
    undisturbed launch."""
    if not can_make():
        pytest.skip("namespaces, for machines of their own, cannot be made here")
    command = [sys.executable, "-m", "tests.daft.two_machines"]
    there = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=900)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"undisturbed"')]
    assert ran.returncode == 0 and lines, f"{ran.stdout}\n{ran.stderr}"[-4000:]
    found = json.loads(lines[0])
    assert found["machines"] == 2 and found["copies"] == 4 and not found["left on the first"]
    assert found["disturbed"] == found["undisturbed"]
    process, machine = found["recoveries"]
    # a running spare, or one that has not started yet
    assert re.search("a spare (that started )?on another machine", process)
    assert "rank 3: the process died" in process
    # by new processes, or by a spare if it has taken the place already
    assert "on another machine" in machine
    # noticed by its connection or by Ray's error, whichever is first
    assert re.search("rank 2: (its connection broke|the process died)", machine)
    assert "Machine 10.77.0.2 (two) has ended or cannot be reached." in machine
    error, *notes = found["all lost"]
    assert "rank 0" in error and "its state was lost with it" in notes[0]
    assert "/tmp/kept has the last save, of step 8, 1 before this one" in notes[1]
