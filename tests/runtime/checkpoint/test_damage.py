"""Tests damage to checkpoints: after a kill at any byte or a full disk the previous checkpoint
loads, an incomplete checkpoint is never read as complete, and errors name the damaged file.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorPiece,
    Writing,
    atomic_folder,
    latest,
    parts,
    read_part,
    write_part,
)
from dtensor.runtime.checkpoint.saving import (
    Saving,
    _write,  # pyright: ignore[reportPrivateUsage]
    hand_over,
    state_of,
)
from tests.runtime.checkpoint.saving import block, check_equal, pieces, save, state

# The fork() child only writes files and is then killed.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process, which ends afterwards. Return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


CHANGES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"}


def count_down(ticks: int, at_end: Callable[[int], None]) -> None:
    """Call ``at_end(0)`` before the disk change that follows `ticks` bytes and changes; during a
    write, call it after the last counted byte. The process must then end."""
    left = [ticks]

    def tick(event: str, _: tuple[object, ...]) -> None:
        if event in CHANGES:
            left[0] -= 1
            if left[0] < 0:
                at_end(0)

    def write_all(file: io.FileIO, data: memoryview) -> None:
        file.write(data[: max(left[0], 0)])
        left[0] -= len(data)
        if left[0] < 0:
            at_end(0)

    sys.addaudithook(tick)
    atomic_folder.write_all = parts.write_all = write_all


@pytest.mark.slow
def test_save_killed_at_any_byte_leaves_complete_or_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A killed process loses nothing that it has written; another test checks the order of syncs.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    before, after = state(1), state(2)
    first, tmp_path = tmp_path / "first", tmp_path / "now"
    save(first / "1", before)
    save(first / "2", before)
    shutil.copytree(first, tmp_path)
    reader, writer = os.pipe()

    def measured() -> None:
        total = 1 << 40
        seen: list[int] = []

        def never(_: int) -> None:
            seen.append(0)

        count_down(total, never)
        save(tmp_path / "3", after, keep=2)
        closure = atomic_folder.write_all.__closure__
        assert closure is not None
        left = next(c.cell_contents for c in closure if isinstance(c.cell_contents, list))
        os.write(writer, str(total - left[0]).encode())

    assert os.waitpid(in_child(measured), 0)[1] == 0
    total = int(os.read(reader, 100))
    assert total > 30_000
    drawn = random.Random(0)
    published = 0
    for _ in range(100):
        shutil.rmtree(tmp_path)
        shutil.copytree(first, tmp_path)
        ticks = drawn.randrange(total)
        if drawn.random() < 0.5:  # among the last changes, the renames and removals
            ticks = total - ticks % 40

        def work(ticks: int = ticks) -> None:
            count_down(ticks, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            save(tmp_path / "3", after, keep=2)

        os.waitpid(in_child(work), 0)
        check_equal(Checkpoint.open(tmp_path / "2"), before)
        newest = latest(tmp_path)
        if newest == str(tmp_path / "3"):
            published += 1
            check_equal(Checkpoint.open(tmp_path / "3"), after)
        else:
            assert newest == str(tmp_path / "2")
            check_equal(Checkpoint.open(tmp_path / "1"), before)
            with pytest.raises(PlanningError, match="does not exist"):
                Checkpoint.open(tmp_path / "3")
        save(tmp_path / "4", after)
        check_equal(Checkpoint.open(tmp_path / "4"), after)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert 0 < published < 60


@pytest.mark.default("hf")
@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_part_left_incomplete_by_killed_process_is_rewritten(tmp_path: Path, kind: str):
    save(tmp_path / "1", state(1))
    save(tmp_path / "2", state(1))
    values = state(2) | {path: state(1)[path] for path in list(state(1))[:2]}  # some are linked
    if kind == "hf":
        values = {("w",): torch.randn(10, 20), ("b",): torch.randn(7)}
    drawn = random.Random(0)
    for _ in range(12):
        ticks = drawn.randrange(drawn.choice((20, 400, 30_000)))
        if kind == "dcp":
            writing = Writing.begin(tmp_path / "3", step=3)
        else:
            tensors = {n: (t.dtype, tuple(t.shape)) for (n,), t in values.items()}
            writing = Writing.begin_hf(tmp_path / "3", tensors)
        own = [p for rank in (0, 1) for p in pieces(values, rank)]
        saving = Saving(folder=writing.folder, previous=writing.previous, format=kind)

        def work(
            ticks: int = ticks, saving: Saving = saving, own: Sequence[TensorPiece] = own
        ) -> None:
            count_down(ticks, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            _write(saving, 0, own)

        os.waitpid(in_child(work), 0)
        hand_over(saving, 0, own)
        hand_over(saving, 0, own)  # repeated on a rank that was not lost
        while state_of(writing.folder, 0) == "writing":
            time.sleep(0.001)
        part = read_part(writing.folder, 0)
        assert part is not None, state_of(writing.folder, 0)
        writing.finish([part])
        hand_over(saving, 0, own)  # and again after the save
        found = Checkpoint.open(tmp_path / "3")
        for path, value in values.items():
            assert torch.equal(found.read(".".join(path)), value)
        assert not {n for n in os.listdir(tmp_path / "3") if n.startswith("__0_")} - {
            piece.file for record in found.tensors.values() for piece in record.pieces
        }
        shutil.rmtree(tmp_path / "3")


def test_checkpoint_files_are_synced_before_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: set[int] = set()
    unsynced: list[str] = []
    renamed: list[bool] = []
    fsync, rename = os.fsync, Path.rename

    def keeping(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checking(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp-1-"):
            there = [path, *path.iterdir()]
            unsynced.extend(p.name for p in there if p.stat().st_ino not in synced)
            synced.discard(tmp_path.stat().st_ino)
            renamed.append(True)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", keeping)
    monkeypatch.setattr(Path, "rename", checking)
    save(tmp_path / "1", state(), extra={"rng": torch.get_rng_state()})
    assert renamed == [True] and unsynced == []
    assert tmp_path.stat().st_ino in synced


def test_flipped_bit_is_reported_or_harmless(tmp_path: Path):
    values = state()
    save(tmp_path / "1", values, extra={"rng": torch.get_rng_state()})
    drawn = random.Random(0)
    noticed = harmless = 0
    for file in sorted((tmp_path / "1").iterdir()):
        content = file.read_bytes()
        for _ in range(120):
            changed = bytearray(content)
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
            file.write_bytes(changed)
            try:
                saved = Checkpoint.open(tmp_path / "1")
                check_equal(saved, values)
                assert saved.step == 100 and torch.equal(saved.extra["rng"], torch.get_rng_state())
                harmless += 1
                assert file.name != "manifest.json"
            except CheckpointError as error:
                assert file.name in str(error) and "fix:" in str(error)
                noticed += 1
        file.write_bytes(content)
    assert noticed > 200 and harmless > 200


def test_truncated_file_is_named_in_error(tmp_path: Path):
    values = state()
    save(tmp_path / "1", values)
    for file in sorted((tmp_path / "1").glob("__[01]_*.distcp")):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=rf"{file.name} is not as it was written: it has"):
            check_equal(Checkpoint.open(tmp_path / "1"), values)
        file.unlink()
        with pytest.raises(CheckpointError, match="cannot be opened.*holds .* of (model|optim)"):
            check_equal(Checkpoint.open(tmp_path / "1"), values)
        file.write_bytes(content)
    check_equal(Checkpoint.open(tmp_path / "1"), values)
    manifest = tmp_path / "1" / "manifest.json"
    text = manifest.read_bytes()
    for end in (20, len(text) // 2, len(text) - 1):
        manifest.write_bytes(text[:end])
        with pytest.raises(CheckpointError, match="manifest.json is not as it was written"):
            Checkpoint.open(tmp_path / "1")
    with pytest.raises(PlanningError, match="exists already"):
        save(tmp_path / "1", values)
    save(tmp_path / "2", values)  # beside a damaged one
    manifest.write_bytes(text[:20])
    with pytest.raises(CheckpointError, match="manifest.json"):
        latest(tmp_path)


@pytest.mark.default("28")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_write_removes_incomplete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    save(tmp_path / "1", state(1))
    writes = [0]
    write_all = atomic_folder.write_all

    def failing(file: io.FileIO, data: memoryview) -> None:
        writes[0] -= 1
        if writes[0] < 0:
            file.write(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        write_all(file, data)

    monkeypatch.setattr(atomic_folder, "write_all", failing)
    monkeypatch.setattr(parts, "write_all", failing)
    failed = 0
    for number in range(100):
        writes[0] = number
        writing = Writing.begin(tmp_path / "2", step=2)
        try:
            own = [p for rank in (0, 1) for p in pieces(state(2), rank)]
            writing.finish([write_part(writing.folder, 0, own, writing.previous)], keep=1)
            break
        except CheckpointError as error:
            assert os.strerror(code) in str(error) and "This checkpoint is removed" in str(error)
            assert ("MB are free" in str(error)) is (code == errno.ENOSPC)
            writing.abort()
            assert os.listdir(tmp_path) == ["1"]
            failed += 1
    assert 15 < failed < 99
    check_equal(Checkpoint.open(tmp_path / "2"), state(2))


def test_unusable_save_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    save(tmp_path / "saved", state())
    (tmp_path / "manifest.json").write_text("{}")  # not ours
    monkeypatch.chdir(tmp_path)
    for path, words in (
        (tmp_path / "file", "file exists already"),
        (tmp_path / "empty", "exists already"),
        (tmp_path / "gone", "exists already"),
        (tmp_path / "saved" / "1", "would be inside the checkpoint .*saved, and be removed with"),
        (tmp_path / "file" / "1", "one of its parents is a file"),
        ("s3://bucket/1", "is an address, not a folder"),
        ("ckpt\\100", "has backslashes"),
        ("C:\\ckpt", "has backslashes"),
        ("a\nb", "control characters"),
        ("a\0b", "control characters"),
        ("", "the path is empty"),
        (".", "exists already"),
        ("..", "exists already"),
        ("/", "is not a name for a checkpoint"),
        (".tmp-1", "is not a name for a checkpoint"),
        ("x" * 250, "name too long"),
        (f"{'x' * 300}/1", "name too long"),
        ("a\0b/1", "control characters"),
        (100, "not a path"),
    ):
        with pytest.raises(PlanningError, match=words) as caught:
            Writing.begin(path)  # pyright: ignore[reportArgumentType]
        assert "fix:" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "gone", "manifest.json", "saved"]

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(PlanningError, match="cannot be made: Permission denied"):
        Writing.begin(tmp_path / "1")


def test_temporary_folders_of_dead_processes_only_are_removed(tmp_path: Path):
    living = Writing.begin(tmp_path / "1")

    def dies() -> None:
        Writing.begin(tmp_path / "2")
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(dies), 0)
    assert len(os.listdir(tmp_path)) == 2
    other = Writing.begin(tmp_path / "3")
    assert sorted(name.split("-")[1] for name in os.listdir(tmp_path)) == ["1", "3"]
    for writing in (living, other):
        full = torch.ones(3)
        writing.finish([write_part(writing.folder, 0, [block(("model", "w"), full)], None)])
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_second_concurrent_save_to_one_path_is_refused(tmp_path: Path):
    one, two = Writing.begin(tmp_path / "1"), Writing.begin(tmp_path / "1")
    part = write_part(one.folder, 0, [block(("model", "w"), torch.ones(3))], None)
    one.finish([part])
    with pytest.raises(CheckpointError, match="was made by another"):
        two.finish([write_part(two.folder, 0, [block(("model", "w"), torch.zeros(3))], None)])
    assert os.listdir(tmp_path) == ["1"]
    assert Checkpoint.open(tmp_path / "1").read("model.w").equal(torch.ones(3))
