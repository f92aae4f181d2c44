"""A launch's folder in memory, for what must outlive a process of it, and not the launch.

    with MemoryFolder() as folder:                # /dev/shm/dtensor-1000-k3j9x2, 0700
        SnapshotFile.create(folder.path, (0,))

Who makes one holds a lock on a file in it, which the kernel takes away with the process, however
that ends. So whoever makes the next one knows which folders of this user's are nobody's any more,
and removes them: a controller that was killed leaves memory taken until then.

Invariants: only folders of this user's own are looked at, and only those removed whose lock is
free. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
