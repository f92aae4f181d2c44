"""A launch's folder in memory, for what must outlive a process of it, and not the launch.

    with MemoryFolder() as folder:                # /dev/shm/dtensor-1000-k3j9x2, 0700
        SnapshotFile.create(folder.path, (0,))

Who makes one holds a lock on a file in it, which the kernel takes away with the process, however
that ends. So whoever makes the next one knows which folders of this user's are nobody's any more,
and removes them: a controller that was killed leaves memory taken until then. On a launch's other
machines its processes hold such a lock together.

Invariants: only folders of this user's own are looked at, and only those removed whose lock is
free. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

MEMORY = Path("/dev/shm")
_LOCK = "owner"


class MemoryFolder:
    def __init__(self) -> None:
        prefix = f"dtensor-{os.getuid()}-"
        sweep(prefix)
        self.path = Path(mkdtemp(prefix=prefix, dir=MEMORY))  # 0700
        # a folder without this file is one that is being made, or was for a moment
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> MemoryFolder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def elsewhere(folder: Path, machine: str) -> Path:
    """What the launch's folder is called on another machine, by Ray's name of that."""
    return folder.with_name(f"{folder.name}-{machine[:12]}")


def shared(path: Path) -> int:
    """A folder of this name for a launch whose controller is on another machine, made if there is
    none; nobody removes it while the descriptor that this gives is open in any process.
    `PermissionError` if it is not this user's alone."""
    sweep(f"dtensor-{os.getuid()}-")
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        facts = path.lstat()
        own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
        if not own or facts.st_mode & 0o077:
            raise PermissionError(f"{path} is no folder of this user's alone.")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileNotFoundError):  # somebody removes it just now
            lock = os.open(path / _LOCK, flags, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, path / _LOCK):
                return lock
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def sweep(prefix: str) -> None:
    """Remove the folders that nobody owns any more."""
    for path in MEMORY.glob(f"{prefix}*"):
        try:
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it is another's, or gone, or no folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
