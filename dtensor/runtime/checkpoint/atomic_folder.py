"""A folder that exists whole or not at all, even if its writer is killed.

    claim = claim_folder(Path("ckpt/100"))     # ckpt/.tmp-100-1f0c9a3e, locked by this process
    ...                                        # files, each synced (`write_synced`)
    claim.publish()                            # synced, renamed to ckpt/100, ckpt synced

Invariants: ``ckpt/100`` is only ever made by one rename of a folder whose files are all synced. The
files of a dead writer are under `.tmp-*` and are known by their lock, which no process holds: the
system frees it with the process, so no process number can be mistaken for another's. A folder that
is removed is first renamed to such a name.

If a file system has no locks, leftovers stay: their writer may be alive.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dtensor.errors import PlanningError
from dtensor.runtime.checkpoint.records import CheckpointError

TMP = ".tmp-"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


@dataclass(slots=True)
class StagedFolder:
    """A folder being written: ``folder`` becomes ``target``. ``lock`` is its open descriptor."""

    folder: Path
    target: Path
    lock: int
    tag: str = ""
    """The unique part of its files' names: empty, since the folder is its own."""
    replaces: bool = False
    published: bool = False

    def publish(self) -> None:
        """Rename it to the target, for good. CheckpointError if the target exists by now."""
        sync(self.folder)
        try:
            _rename_new(self.folder, self.target)
        except FileExistsError:
            raise CheckpointError(
                f"{self.target} was made by another program while this checkpoint was written; "
                f"the files written here are removed.\nfix: give each save a different path"
            ) from None
        self.published = True
        sync(self.target.parent)
        self._unlock()

    def give_up(self) -> None:
        """Remove the files, unless they were published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self.lock >= 0:
            unlock(self.lock)
            self.lock = -1


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path, absolute. PlanningError if it cannot name a checkpoint."""
    text = os.fspath(path)
    target = Path(os.path.abspath(text))
    why = ""
    if not text:
        raise PlanningError('the path is empty.\nfix: a path such as "ckpt/100"')
    if "://" in text or text.startswith(("s3:", "gs:", "hdfs:")):
        why = "is an address, not a folder of this machine"
    elif "\\" in text:
        why = "has backslashes, which here are letters of a name"
    elif "\0" in text or any(ord(c) < 32 for c in text):
        why = "has control characters"
    elif target.name in ("", "..") or target.name.startswith(TMP):
        why = f"is no name for a checkpoint ({TMP}* are those being written)"
    if why:
        raise PlanningError(f'{text!r} {why}.\nfix: a path such as "ckpt/100"')
    return target


def claim_folder(target: Path) -> StagedFolder:
    """An empty folder beside ``target``; removes files that dead writers left beside it.

    PlanningError if the target exists, or cannot be made: a parent that is a file, no right to
    write.
    """
    try:
        missing = [up for up in target.parents if not up.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)
        if os.path.lexists(target):
            raise PlanningError(
                f"{target} exists already, and a checkpoint never replaces a folder.\n"
                f"fix: save to another path, such as {free_path(target)}, or remove it first"
            )
        remove_leftovers(target.parent)
        folder, lock = locked_folder(target.parent, f"{target.name}-{secrets.token_hex(4)}")
        return StagedFolder(folder, target, lock)
    except (FileExistsError, NotADirectoryError):
        raise PlanningError(
            f"{target} cannot be a folder: one of its parents is a file.\n"
            "fix: save to a path whose parents are all folders"
        ) from None
    except OSError as error:
        raise refused(target, error) from error


def refused(target: Path, error: OSError) -> PlanningError | CheckpointError:
    """The error for a folder in which nothing can be written."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
        return PlanningError(
            f"{target} cannot be made: {error.strerror}.\n"
            f"fix: save to a folder that this user may write to, under a name of at most 200 bytes"
        )
    return disk_error(target, error)


def locked_folder(parent: Path, name: str) -> tuple[Path, int]:
    """A new `.tmp-<name>`, and its lock."""
    folder = parent / f"{TMP}{name}"
    while True:
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if locked(lock) is not False and folder.exists():
            return folder, lock
        os.close(lock)  # another save removed it meanwhile: once more


def leftovers(parent: Path) -> Iterator[Path]:
    """The `.tmp-*` folders of dead writers, each locked while it is inspected."""
    for folder in sorted(parent.glob(f"{TMP}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or no folder: then it is not ours
        try:
            if locked(lock):
                yield folder
        finally:
            unlock(lock)


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of dead writers."""
    for folder in leftovers(parent):
        shutil.rmtree(folder, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint: it is never seen in part."""
    gone = folder.parent / f"{TMP}{folder.name}-{secrets.token_hex(4)}"
    folder.rename(gone)
    sync(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that exists whole or not at all, and survives a crash."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb", buffering=0) as file:
        write_all(file, memoryview(content))
        os.fsync(file.fileno())
    partial.rename(path)


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of the data: one write takes 2 GiB at most, and less on a nearly full disk."""
    while len(data):
        data = data[file.write(data) :]


def sync(folder: Path) -> None:
    """Sync the folder's own list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that could not be written."""
    fix = "check the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path if path.exists() else path.parent).free
        fix = f"make room ({free / 1e6:,.0f} MB are free there), or save with keep="
    return CheckpointError(
        f"{path} could not be written: {error.strerror or error}. Nothing of this checkpoint is "
        f"kept; the ones before it are whole.\nfix: {fix}"
    )


def locked(descriptor: int) -> bool | None:
    """Whether the lock is ours now; None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(descriptor: int) -> None:
    """Free the lock and close it. A process that was forked meanwhile has it open, too, and would
    keep a lock that is only closed here."""
    with suppress(OSError):  # there may be no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _rename_new(folder: Path, target: Path) -> None:
    # rename() replaces an empty folder in silence; the earlier check is enough, since at worst an
    # empty folder is lost.
    if os.path.lexists(target):
        raise FileExistsError(target)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(target) from None
        raise


def free_path(target: Path) -> Path:
    """An unused path beside it."""
    n = 2
    while os.path.lexists(target.with_name(f"{target.name}-{n}")):
        n += 1
    return target.with_name(f"{target.name}-{n}")
