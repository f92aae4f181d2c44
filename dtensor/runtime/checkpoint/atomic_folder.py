"""Write a folder that appears complete or not at all, even if its writer is killed.

    claim = claim_folder(Path("ckpt/100"))     # ckpt/.tmp-100-1f0c9a3e, locked by this process
    ...                                        # files, each synced (`write_synced`)
    claim.publish()                            # synced, renamed to ckpt/100, ckpt synced

Invariants: ``ckpt/100`` appears by one rename of a folder whose files are all synced. A `.tmp-*`
folder whose lock no process holds was left by a dead writer, because the system frees a lock when
its process ends. To remove a folder, it is first renamed to `.tmp-*`. On a file system without
locks, leftovers stay, because their writer may be alive.
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
    """A folder being written, which is later renamed to ``target``; ``lock``: its descriptor."""

    folder: Path
    target: Path
    lock: int
    tag: str = ""
    """The unique part of file names: empty, because the folder has no other files."""
    replaces: bool = False
    published: bool = False

    def publish(self) -> None:
        """Rename the folder to the target. Raises CheckpointError if the target now exists."""
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
    """Return the absolute path. Raises PlanningError if it cannot be a checkpoint's path."""
    text = os.fspath(path)
    target = Path(os.path.abspath(text))
    reason = ""
    if not text:
        raise PlanningError('the path is empty.\nfix: a path such as "ckpt/100"')
    if "://" in text or text.startswith(("s3:", "gs:", "hdfs:")):
        reason = "is an address, not a folder of this machine"
    elif "\\" in text:
        reason = "has backslashes, which are ordinary characters of a name here"
    elif "\0" in text or any(ord(c) < 32 for c in text):
        reason = "has control characters"
    elif target.name in ("", "..") or target.name.startswith(TMP):
        reason = f"is not a name for a checkpoint ({TMP}* are unfinished checkpoints)"
    if reason:
        raise PlanningError(f'{text!r} {reason}.\nfix: a path such as "ckpt/100"')
    return target


def claim_folder(target: Path) -> StagedFolder:
    """Return a new empty folder next to ``target``, and remove folders of dead writers there.

    Raises PlanningError if the target exists or cannot be made (a parent is a file, or there is no
    right to write).
    """
    try:
        missing = [ancestor for ancestor in target.parents if not ancestor.exists()]
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
    """Return the error for a folder that cannot be written."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
        return PlanningError(
            f"{target} cannot be made: {error.strerror}.\n"
            f"fix: save to a folder that this user may write to, under a name of at most 200 bytes"
        )
    return disk_error(target, error)


def locked_folder(parent: Path, name: str) -> tuple[Path, int]:
    """Return a new folder `.tmp-<name>` and the descriptor of its lock."""
    folder = parent / f"{TMP}{name}"
    while True:
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if locked(lock) is not False and folder.exists():
            return folder, lock
        os.close(lock)  # another save has removed the folder: try again


def leftovers(parent: Path) -> Iterator[Path]:
    """Yield the `.tmp-*` folders of dead writers, each locked while the caller inspects it."""
    for folder in sorted(parent.glob(f"{TMP}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed by another process, or not a folder
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
    """Remove a checkpoint in such a way that no reader sees a part of it."""
    doomed = folder.parent / f"{TMP}{folder.name}-{secrets.token_hex(4)}"
    folder.rename(doomed)
    sync(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file so that it appears complete or not at all, and survives a crash."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb", buffering=0) as file:
        write_all(file, memoryview(content))
        os.fsync(file.fileno())
    partial.rename(path)


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of the data; one write call takes at most 2 GiB, or less if the disk is full."""
    while len(data):
        data = data[file.write(data) :]


def sync(folder: Path) -> None:
    """Sync the folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that could not be written."""
    fix = "check the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path if path.exists() else path.parent).free
        fix = f"make room ({free / 1e6:,.0f} MB are free there), or save with keep="
    return CheckpointError(
        f"{path} could not be written: {error.strerror or error}. This checkpoint is removed; "
        f"earlier checkpoints are complete.\nfix: {fix}"
    )


def locked(descriptor: int) -> bool | None:
    """Take the lock; return whether this succeeded, or None if the file system has no locks."""
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
    """Free the lock and close its descriptor. Closing alone is not enough: a forked child process
    has the descriptor too, and would keep the lock."""
    with suppress(OSError):  # there may be no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _rename_new(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``. Raises FileExistsError if the target exists."""
    # rename() silently replaces an empty folder. This check has a race, but then only an empty
    # folder is lost.
    if os.path.lexists(target):
        raise FileExistsError(target)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(target) from None
        raise


def free_path(target: Path) -> Path:
    """Return an unused path ``target-N`` in the same folder."""
    n = 2
    while os.path.lexists(target.with_name(f"{target.name}-{n}")):
        n += 1
    return target.with_name(f"{target.name}-{n}")
