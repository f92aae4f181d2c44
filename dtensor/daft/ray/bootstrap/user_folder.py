"""Folders that only this user may enter (0700), some of which are removed when their process ends.

    make_own(own_directory())                      # /tmp/dtensor-1000, or PermissionError
    with OwnFolder(own_directory(), "4242-") as folder:
        folder.path                                # /tmp/dtensor-1000/4242-k3j9x2ab
    with OwnFolder.in_memory() as folder:          # for values that outlive a process of the launch
        SnapshotFile.create(folder.path, (0,))

The owner of a folder holds a lock on it, which the kernel releases when the process ends. `sweep`
removes folders whose lock is free. Invariants: no folder of another user is removed, and nothing on
a file system without locks. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def own_directory(parent: str | None = None) -> Path:
    """Return the directory for this user's launches, in `parent` or the temporary folder."""
    return Path(parent or tempfile.gettempdir()) / f"dtensor-{os.geteuid()}"


def make_own(directory: Path) -> None:
    """Create a directory that only the user may enter. Raises PermissionError if it exists but does
    not belong to the user, or is open to others."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_own(directory)


def directory_of_sockets() -> Path:
    """Return the directory for the sockets of Ray and the fork server, and Ray's logs. Ray lets
    everybody write to its folder, so that must be inside a folder of the user. It is in /tmp by
    default, since a socket's path has at most 107 bytes, of which Ray needs 64."""
    base = os.environ.get("RAY_TMPDIR", "/tmp")
    directory = own_directory(base)
    try:
        make_own(directory)
    except PermissionError:  # it belongs to another user
        directory = Path(tempfile.mkdtemp(prefix="dtensor-", dir=base))
    return directory


def check_own(directory: Path) -> None:
    """Raise PermissionError unless this is a directory of the user that only the user may enter."""
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        fault, fix = "is no directory", f"look who has made it, and remove {directory}"
    elif facts.st_uid != os.geteuid():
        fault = f"belongs to user {facts.st_uid}, and this is user {os.geteuid()}"
        fix = "set TMPDIR to a directory of your own, for launches and for who looks at them"
    elif facts.st_mode & 0o077:
        fault = f"is open to others (mode {stat.S_IMODE(facts.st_mode):04o})"
        fix = f"chmod 700 {directory}"
    else:
        return
    raise PermissionError(f"{directory} {fault}: it is not used.\n  Fix: {fix}.")


class OwnFolder:
    """A new folder in `parent`, which exists until it is closed or the process ends."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """Create the folder and lock it, so that `sweep` does not remove it."""
        while True:
            self.path: Path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # 0700
            try:
                self._lock = os.open(self.path, _FOLDER)
            except FileNotFoundError:  # it was swept before it was locked
                continue
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    @staticmethod
    def in_memory() -> OwnFolder:
        prefix = f"dtensor-memory-{os.geteuid()}-"
        sweep(MEMORY, f"{prefix}*")
        return OwnFolder(MEMORY, prefix)

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. Twice is fine."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def elsewhere(folder: Path, machine: str) -> Path:
    """Return the path of a launch's folder in memory on a machine, by Ray's name."""
    return folder.with_name(f"{folder.name}-{machine[:12]}")


def shared(path: Path) -> int:
    """Create, if needed, the folder in memory of a launch whose controller is on another machine.
    Return a descriptor; the folder is not removed while a process has it open. Raises
    PermissionError if the folder does not belong to this user alone."""
    sweep(path.parent, f"dtensor-memory-{os.geteuid()}-*")
    while True:
        make_own(path)
        with suppress(FileNotFoundError):  # another process is removing it
            lock = os.open(path, _FOLDER)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, path):
                return lock
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def sweep(parent: Path, pattern: str) -> None:
    """Remove the folders of this user that match the pattern and whose lock is free."""
    for path in parent.glob(pattern):
        try:
            lock = os.open(path, _FOLDER)
        except OSError:  # it belongs to another user, was removed, or is not a folder
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # the lock is held, or the file system has no locks
            pass
        finally:
            os.close(lock)
