"""Tests saving weights into an existing folder: after a kill or failure at any file operation,
each reader gets all old weights, all new weights or an error. Weights of other programs are never
overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    Writing,
    atomic_folder,
    parts,
    write_hf_part,
)
from dtensor.runtime.checkpoint.safetensors import INDEX, SINGLE
from tests.extras import missing
from tests.runtime.checkpoint.saving import save, state
from tests.runtime.checkpoint.test_damage import in_child
from tests.runtime.checkpoint.test_safetensors import pieces

load_file = pytest.importorskip("safetensors.torch", reason=missing("safetensors")).load_file

# A child of fork() that only writes files and is killed.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

Values = dict[str, Tensor]
SHARDED = 300  # bytes of a file, so that there are several files
WHOLE = 1 << 30


def values(n: int) -> Values:
    """Return the values of the n-th save: all differ, and so does one name."""
    names = ("a", "b", "c", f"only {n}")
    return {name: torch.full((7, 9), n + i / 10) for i, name in enumerate(names)}


def model(width: int) -> nn.Module:
    class Config:
        def to_json_file(self, path: Any) -> None:
            Path(path).write_text(json.dumps({"width": width}))

    made = nn.Linear(2, 2)
    made.config = Config()  # pyright: ignore[reportAttributeAccessIssue]
    return made


def put(folder: Path, n: int, shard_bytes: int, width: int | None = 1) -> None:
    extra = {"n": n, "rng": torch.full((3,), n)}
    made = None if width is None else model(width)
    told = {name: (full.dtype, tuple(full.shape)) for name, full in values(n).items()}
    writing = Writing.begin_hf(
        folder, told, model=made, shard_bytes=shard_bytes, step=n, extra=extra
    )
    try:
        own = [write_hf_part(writing.folder, rank, pieces(values(n), rank, 0)) for rank in range(3)]
    except BaseException:
        writing.abort()
        raise
    writing.finish(own)


# -- who reads -------------------------------------------------------------------------------------


def as_transformers(folder: Path) -> tuple[Values, object]:
    """Load the folder, looking for files in the order of `from_pretrained`."""
    config = (folder / "config.json").read_text() if (folder / "config.json").exists() else None
    if (folder / SINGLE).is_file():
        return load_file(folder / SINGLE), config
    return by_index(folder), config


def by_index(folder: Path) -> Values:
    found: Values = {}
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        found |= {n: t for n, t in load_file(folder / file).items() if weight_map[n] == file}
    assert found.keys() == weight_map.keys()
    return found


def ours(folder: Path) -> tuple[Values, object]:
    opened = Checkpoint.open(folder)
    opened.check_files()
    read = {name: opened.read(name) for name in opened.tensors}
    return read, (opened.step, str(opened.extra))


READERS: list[Callable[[Path], Any]] = [as_transformers, by_index, ours]
REFUSALS = OSError, CheckpointError, PlanningError, RuntimeError


def read(reader: Callable[[Path], Any], folder: Path) -> str:
    """Return all that the reader reads, as text; "" if it raises."""
    try:
        return str(reader(folder))
    except REFUSALS:
        return ""


# -- operations on files ---------------------------------------------------------------------------

OPERATIONS = (
    *("open", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "fsync"),
    *("pwrite", "posix_fallocate"),
)


class Disk:
    """Counts this process's file operations and calls a function before the n-th. ``moved``:
    operations before the first file was moved into ``folder``."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        n: int = -1,
        happens: Callable[[], None] = print,
        folder: Path | None = None,
    ) -> None:
        self.left, self.count, self.happens = n, 0, happens
        self.folder, self.moved = folder, -1
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name), name == "fsync"))
        monkeypatch.setattr(io, "open", self.counted(io.open))
        write_all = self.counted(atomic_folder.write_all)
        monkeypatch.setattr(atomic_folder, "write_all", write_all)
        monkeypatch.setattr(parts, "write_all", write_all)

    def counted(self, real: Callable[..., Any], skipped: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self.moved < 0 and len(args) == 2 and self.folder is not None:
                to = Path(str(args[1]))
                if self.folder in (to, to.parent):
                    self.moved = self.count
            self.count += 1
            if self.count == self.left + 1:
                self.happens()
            # a killed process loses nothing that it has written: only a machine failure needs a
            # sync
            return None if skipped else real(*args, **named)

        return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- from what to what -----------------------------------------------------------------------------


def absent(_: Path) -> None: ...


def nothing(folder: Path) -> None:
    folder.mkdir()


def tokenizer(folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"width": 7}')


def one(folder: Path) -> None:
    put(folder, 1, WHOLE)
    (folder / "tokenizer.json").write_text("{}")


def several(folder: Path) -> None:
    put(folder, 1, SHARDED)


def replaced(folder: Path) -> None:
    put(folder, 0, WHOLE)
    put(folder, 1, WHOLE)


CASES: dict[str, tuple[Callable[[Path], None], int, int | None]] = {
    "absent, several": (absent, SHARDED, 1),
    "nothing, one": (nothing, WHOLE, 1),
    "nothing, several": (nothing, SHARDED, 1),
    "tokenizer, one": (tokenizer, WHOLE, 1),
    "tokenizer, several": (tokenizer, SHARDED, None),
    "one, one": (one, WHOLE, 1),
    "one, several": (one, SHARDED, 1),
    "one, one, another config": (one, WHOLE, 2),
    "one, several, another config": (one, SHARDED, 2),
    "several, one": (several, WHOLE, 1),
    "several, several": (several, SHARDED, 1),
    "several, one, another config": (several, WHOLE, 2),
    "replaced, one": (replaced, WHOLE, 1),
    "replaced, several, another config": (replaced, SHARDED, 2),
}
SOME = ("tokenizer, one", "one, several, another config")
"""By default: at each operation from the first move on, and at some of those before."""
RUNS = pytest.mark.parametrize(
    ("case", "every"),
    [pytest.param(case, 1, id=case) for case in CASES]
    + [pytest.param(case, 20, id=f"{case}: some") for case in SOME],
)
DEFAULT = pytest.mark.sample(*(f"{case}: some" for case in SOME))


def operations(
    case: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[int], list[set[str]]]:
    """Return the number of operations of the case's save, those at which to end it, and what
    each reader may see then."""
    begin, shard_bytes, width = CASES[case]
    folder = tmp_path / "out"
    begin(tmp_path / "first")
    as_before(folder)
    before = [read(reader, folder) for reader in READERS]
    with monkeypatch.context() as patched:
        disk = Disk(patched, folder=folder)
        put(folder, 2, shard_bytes, width)
    after = [read(reader, folder) for reader in READERS]
    assert all(after) and not set(after) & set(before)
    assert 0 < disk.moved < disk.count
    chosen = [n for n in range(disk.count) if n >= disk.moved or n % every == 0]
    return disk.count, chosen, [{"", old, new} for old, new in zip(before, after, strict=True)]


def as_before(folder: Path) -> None:
    """Reset the folder to its state at the start of the case."""
    shutil.rmtree(folder, ignore_errors=True)
    first = folder.parent / "first"
    if first.exists():
        shutil.copytree(first, folder)


def listed(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def check_next_save(folder: Path, others: set[str]) -> None:
    """Check that the next save succeeds and leaves only its own files and files of others."""
    put(folder, 3, SHARDED, 3)
    for reader in READERS:
        assert "3.1" in read(reader, folder)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = {name for name in os.listdir(folder) if name.endswith(".distcp")}
    assert len(tensors) == 1
    own = {"config.json", INDEX, "manifest.json", *index.values(), *tensors}
    assert set(os.listdir(folder)) == own | others


@pytest.mark.slow
@DEFAULT
@RUNS
def test_save_killed_at_any_file_operation_leaves_old_or_new_weights(
    case: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, shard_bytes, width = CASES[case]
    total, chosen, allowed = operations(case, every, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "out"
    seen: list[set[str]] = [set() for _ in READERS]
    for n in (*chosen, total):
        as_before(folder)

        def work(n: int = n) -> None:
            Disk(pytest.MonkeyPatch(), n, die)
            put(folder, 2, shard_bytes, width)

        status = os.waitpid(in_child(work), 0)[1]
        assert status == (signal.SIGKILL if n < total else 0), n
        for reader, those, may in zip(READERS, seen, allowed, strict=True):
            found = read(reader, folder)
            assert found in may, (n, reader.__name__, sorted(listed(folder)))
            those.add(found)
        others = {"tokenizer.json"} if begin in (tokenizer, one) else set[str]()
        check_next_save(folder, others)
    for those, may in zip(seen, allowed, strict=True):
        assert those >= may - {""}  # kills before and after the decisive operation


@pytest.mark.default("tokenizer, one: some")
@DEFAULT
@RUNS
def test_save_failing_at_any_file_operation_leaves_old_or_new_weights(
    case: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, shard_bytes, width = CASES[case]
    _, chosen, _ = operations(case, every, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "out"
    names = set(listed(tmp_path / "first"))
    before = [read(reader, tmp_path / "first") for reader in READERS]
    for n in chosen:
        as_before(folder)
        said = ""
        with monkeypatch.context() as patched:
            Disk(patched, n, full)
            try:
                put(folder, 2, shard_bytes, width)
            except (CheckpointError, OSError) as error:
                said = str(error)
        now = [read(reader, folder) for reader in READERS]
        if not said or "is saved, but" in said:  # at most useless files are left
            assert all("2.1" in found for found in now[1:]), n
            assert said or "2.1" in now[0], n
        else:
            assert now == before, (n, said)
            left = {name for name in listed(folder) if not name.startswith(".tmp-")}
            assert left == names, (n, said)
        others = {"tokenizer.json"} if begin in (tokenizer, one) else set[str]()
        check_next_save(folder, others)


@pytest.mark.slow
def test_next_save_restores_files_that_killed_save_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed save replaces the config. The files come back even if the next save itself is
    refused."""
    case = "one, several, another config"
    total, _, _ = operations(case, 1, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "out"
    before = [read(reader, tmp_path / "first") for reader in READERS]
    away = 0
    for n in range(total - 30, total):
        as_before(folder)

        def work(n: int = n) -> None:
            Disk(pytest.MonkeyPatch(), n, die)
            put(folder, 2, SHARDED, 2)

        os.waitpid(in_child(work), 0)
        if read(as_transformers, folder) or (folder / INDEX).exists():
            continue
        away += 1
        with pytest.raises(PlanningError, match="complex128"):
            Writing.begin_hf(folder, {"a": (torch.complex128, (4,))})
        assert [read(reader, folder) for reader in READERS] == before
        assert set(os.listdir(folder)) == set(os.listdir(tmp_path / "first"))
    assert away


def test_files_that_cannot_be_restored_are_reported_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    one(folder)
    before = [read(reader, folder) for reader in READERS]
    rename = Path.rename

    def fails_at_the_index(self: Path, to: Path) -> Path:
        if Path(to).name in (INDEX, SINGLE) and Path(to).parent == folder:
            full()
        return rename(self, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails_at_the_index)
        with pytest.raises(
            CheckpointError, match="could not be put back: .* They are in (.*).tmp-out"
        ):
            put(folder, 2, SHARDED, 2)
    assert not read(as_transformers, folder)
    with pytest.raises(PlanningError, match="complex128"):
        Writing.begin_hf(folder, {"a": (torch.complex128, (4,))})
    assert [read(reader, folder) for reader in READERS] == before


def test_each_save_uses_new_file_names_and_touches_no_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tokenizer(folder)
    put(folder, 1, WHOLE)
    assert (folder / SINGLE).exists()  # the first save uses the plain name
    put(folder, 2, SHARDED)
    two = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    assert SINGLE not in two and len(two) == 4
    put(folder, 3, SHARDED)
    three = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    assert len(three) == 4 and not two & three
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert json.loads((folder / "config.json").read_text())["width"] == 1
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    found, said = ours(folder)
    assert str(found) == str(dict(sorted(values(3).items()))) and said[0] == 3  # type: ignore[index]


STRANGE = (
    "model.safetensors",
    "adapter_model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-00001-of-00002.bin",
    "__0_0.distcp",
)


@pytest.mark.parametrize("begin", [nothing, several])
def test_save_beside_weights_of_other_programs_is_refused(
    begin: Callable[[Path], None], tmp_path: Path
) -> None:
    for name in STRANGE:
        folder = tmp_path / name
        begin(folder)
        (folder / name).write_text('{"weight_map": {"a": "other.safetensors"}}')
        before = sorted(os.listdir(folder))
        with pytest.raises(
            PlanningError, match=f"weights that .* not save there: {name}[^\\0]*\nfix: save to"
        ):
            put(folder, 2, WHOLE)
        assert sorted(os.listdir(folder)) == before


def test_save_into_unrelated_folder_or_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "dcp", state())
    nothing(tmp_path / "app")
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    for name, words in (
        ("dcp", "is a checkpoint in torch's format"),
        ("app", "another program wrote .*manifest.json"),
        ("", "holds checkpoints, such as dcp. .*dt.resume would no longer find"),
    ):
        with pytest.raises(PlanningError, match=words):
            put(tmp_path / name, 1, WHOLE)
    one(tmp_path / "hf")
    (tmp_path / "file").touch()
    for name in ("hf", "file"):
        with pytest.raises(PlanningError, match="exists already"):
            save(tmp_path / name, state())
    with pytest.raises(PlanningError, match="file exists already"):
        put(tmp_path / "file", 1, WHOLE)


def test_concurrent_save_to_same_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    one(folder)
    writing = Writing.begin_hf(folder, {"a": (torch.float32, (4,))})
    with pytest.raises(PlanningError, match="another save writes to .* now"):
        put(folder, 2, WHOLE)
    writing.abort()
    put(folder, 2, WHOLE)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock is free
    os.close(descriptor)
    writing = Writing.begin_hf(folder, {"a": (torch.float32, (4,))})
    child = in_child(signal.pause)  # a forked process, like a data loader's
    try:
        writing.abort()
        put(folder, 3, WHOLE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_sharded_weights_without_index_load_only_if_complete(tmp_path: Path) -> None:
    several(tmp_path / "out")
    for name in (INDEX, "manifest.json"):
        (tmp_path / "out" / name).unlink()
    assert len(Checkpoint.open(tmp_path / "out").tensors) == 4
    (tmp_path / "out" / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="and no model-00003-of-00004.safetensors"):
        Checkpoint.open(tmp_path / "out")
