"""Folders of this user's alone (0700); some are of one process, and gone when it is.

    make_own(own_directory())                      # /tmp/dtensor-1000, or PermissionError
    with OwnFolder(own_directory(), "4242-") as folder:
        folder.path                                # /tmp/dtensor-1000/4242-k3j9x2ab
    with OwnFolder.in_memory() as folder:          # for what outlives a process of the launch's
        SnapshotFile.create(folder.path, (0,))

Who makes one holds a lock on it, which the kernel takes away with the process, however that ends,
and which keeps systemd from removing it for its age. So whoever makes or looks next knows which are
nobody's any more, and removes them (`sweep`).

Invariants: no folder is removed that is another user's, or whose lock is held; one that is swept
before its maker has the lock is made anew. Where a file system has no locks, nothing is removed:
nobody is taken for dead there. Linux only.
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
    """Where this user's launches have their folders, in `parent` or where temporary files go."""
    return Path(parent or tempfile.gettempdir()) / f"dtensor-{os.geteuid()}"


def make_own(directory: Path) -> None:
    """A directory that nobody else may enter. `PermissionError` if there is another."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_own(directory)


def directory_of_sockets() -> Path:
    """Of Ray and the fork server, and Ray's logs. Ray lets everybody write to the folder that it is
    given, and so replace the sockets: hence inside one of the user's own. Not in `tempfile`'s: a
    socket's path has 107 bytes at most, and Ray needs 64 of them."""
    base = os.environ.get("RAY_TMPDIR", "/tmp")
    own = own_directory(base)
    try:
        make_own(own)
    except PermissionError:  # it is somebody else's
        own = Path(tempfile.mkdtemp(prefix="dtensor-", dir=base))
    return own


def check_own(directory: Path) -> None:
    """`PermissionError` unless it is the user's, and nobody else may enter it."""
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        what, fix = "is no directory", f"look who has made it, and remove {directory}"
    elif facts.st_uid != os.geteuid():
        what = f"belongs to user {facts.st_uid}, and this is user {os.geteuid()}"
        fix = "set TMPDIR to a directory of your own, for launches and for who looks at them"
    elif facts.st_mode & 0o077:
        what = f"is open to others (mode {stat.S_IMODE(facts.st_mode):04o})"
        fix = f"chmod 700 {directory}"
    else:
        return
    raise PermissionError(f"{directory} {what}: it is not used.\n  Fix: {fix}.")


class OwnFolder:
    """A new folder in `parent`, until it is closed or the process ends."""

    def __init__(self, parent: Path, prefix: str) -> None:
        while True:
            self.path: Path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # 0700
            try:
                self._lock = os.open(self.path, _FOLDER)
            except FileNotFoundError:
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
        """Twice is fine."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def elsewhere(folder: Path, machine: str) -> Path:
    """What a launch's folder in memory is called on another machine, by Ray's name of that."""
    return folder.with_name(f"{folder.name}-{machine[:12]}")


def shared(path: Path) -> int:
    """A folder in memory for a launch whose controller is on another machine, made if there is
    none; nobody removes it while the descriptor that this gives is open in any process.
    `PermissionError` if it is not this user's alone."""
    sweep(path.parent, f"dtensor-memory-{os.geteuid()}-*")
    while True:
        make_own(path)
        with suppress(FileNotFoundError):  # somebody removes it just now
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
    """Remove the folders there that are this user's and nobody's any more."""
    for path in parent.glob(pattern):
        try:
            lock = os.open(path, _FOLDER)
        except OSError:  # it is another's, or gone, or no folder
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # somebody holds it, or that cannot be told
            pass
        finally:
            os.close(lock)
