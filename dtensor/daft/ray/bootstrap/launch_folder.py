"""The folder of a launch, in a directory of the user's own, where other processes look at it.

    folder = LaunchFolder.make()                     # /tmp/dtensor-1000/4242-x7k2q9ab
    folder.say("ranks", {"host0": (0,), "host1": (1,)})
    folder.write_lines(3, lines)                     # of program 3, when it is loaded
    folder.close()                                   # all of it is gone

    for launch in launches(): launch.status(0.3)     # any process of the user's, at any time

It has the hosts' counters (`progress.py`), what the launch is (`launch.json`), and for each loaded
program what stands at each position of its lists (`program3.json`, `diagnosis/program_lines.py`).

Invariants: the directory is the user's and nobody else may enter it (0700), or it is not used: a
launch then has a folder of its own that others do not find, with a warning, and who looks gets a
`PermissionError`. All that is read there is data. A file appears whole. What a launch has left
whose process was killed is removed by whoever looks or launches next (user_folder.py). The
directory itself stays. It does not import Ray.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtensor.daft.diagnosis.diagnosis import ObservedLaunch, diagnose
from dtensor.daft.diagnosis.observation import Observation, Progress, ThreadSeen, look, thread
from dtensor.daft.diagnosis.program_lines import ProgramLines
from dtensor.daft.ray.bootstrap.progress import progress_of
from dtensor.daft.ray.bootstrap.user_folder import (
    OwnFolder,
    check_own,
    make_own,
    own_directory,
    sweep,
)
from dtensor.daft.status import Status

ALSO = "/tmp"  # is looked at: who looks may have another TMPDIR
_LAUNCH = "launch.json"


class LaunchFolder:
    """A launch's own, until it is closed. `path`: files in it that end with the launch go there."""

    def __init__(self, folder: OwnFolder) -> None:
        self.path = folder.path
        self._own = folder

    @staticmethod
    def make() -> LaunchFolder:
        folder = _new_folder()
        _sweep(folder.path.parent)
        return LaunchFolder(folder)

    def say(
        self, kind: str, hosts: Mapping[str, Sequence[int]], machines: Sequence[str] = ()
    ) -> None:
        """What the launch is: "ranks" or "actors"; and the file of each host's counter, with the
        ranks that it has, in the order of the lists of programs. Again, when that changes.
        `machines`: what those of the hosts are called, where they are on several."""
        facts = {
            "kind": kind,
            "hosts": [[file, list(ranks)] for file, ranks in hosts.items()],
            "machines": list(machines),
            "pid": os.getpid(),
            "command": " ".join(sys.argv)[:200],
        }
        self._write(_LAUNCH, facts)

    def write_lines(self, program: int, lines: ProgramLines) -> None:
        """With a warning where there is no room for them: the program runs all the same."""
        try:
            self._write(f"program{program}.json", lines.data())
        except OSError as error:
            warnings.warn(
                f"The lines of program {lines.program!r} could not be written ({error}): "
                f"dt.status() will not know for whom its ranks wait.",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget_lines(self, program: int) -> None:
        (self.path / f"program{program}.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Twice is fine."""
        self._own.close()

    def _write(self, name: str, data: object) -> None:
        part = self.path / f".{name}"
        part.write_text(json.dumps(data))
        part.rename(self.path / name)


class LaunchSeen:
    """A launch that runs, as any process of its user's on its machine sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        facts = json.loads((path / _LAUNCH).read_text())
        self.kind: str = facts["kind"]
        self.pid: int = facts["pid"]
        self.command: str = facts["command"]
        self.hosts: tuple[tuple[str, tuple[int, ...]], ...] = tuple(
            (file, tuple(ranks)) for file, ranks in facts["hosts"]
        )
        self.machines: tuple[str, ...] = tuple(facts["machines"])
        self._lines: dict[int, ProgramLines | None] = {}

    @property
    def title(self) -> str:
        count = sum(len(ranks) for _, ranks in self.hosts)
        what = "rank" if self.kind == "ranks" else "process"
        plural = "" if count == 1 else "es" if what == "process" else "s"
        spawned = "" if self.kind == "ranks" else " of spawned actors"
        return f"Launch of process {self.pid}: {count} {what}{plural}{spawned} on ray"

    def progress(self) -> list[Progress]:
        """What each host says of itself."""
        return [self._progress(file) for file, _ in self.hosts]

    def look(self) -> tuple[Observation, ...]:
        return tuple(look(h, each) for h, each in enumerate(self.progress()))

    def controller(self) -> ThreadSeen:
        """The main thread of the process that has launched it."""
        return thread(self.pid, self.pid)

    def status(self, seconds: float) -> Status:
        """As it is found in so many seconds."""
        first = self.controller()
        before = self.look()
        time.sleep(seconds)
        return self.between(before, self.look(), (first, self.controller()))

    def between(
        self,
        before: Sequence[Observation],
        after: Sequence[Observation],
        controller: tuple[ThreadSeen, ThreadSeen] | None = None,
    ) -> Status:
        launched = ObservedLaunch(
            title=self.title,
            pid=self.pid,
            hosts=tuple(ranks for _, ranks in self.hosts),
            machines=self.machines,
            lines=self.lines,
            controller=controller,
            patient=self.kind != "ranks",
        )
        return diagnose(launched, before, after)

    def lines(self, program: int) -> ProgramLines | None:
        """None if it is not loaded."""
        if program not in self._lines:
            try:
                data = json.loads((self.path / f"program{program}.json").read_text())
            except FileNotFoundError:
                return None
            self._lines[program] = ProgramLines.read(data)
        return self._lines[program]

    def _progress(self, file: str) -> Progress:
        try:
            return progress_of((self.path / file).read_bytes())
        except FileNotFoundError:  # the launch has just ended
            return Progress(-1, -1, -1, None, pid=-1)


def launches() -> list[LaunchSeen]:
    """Those of this user that run on this machine, the oldest first. What others have left behind
    is removed. `PermissionError` where the directory is not the user's own."""
    running: list[LaunchSeen] = []
    refused: list[PermissionError] = []
    for directory in dict.fromkeys((own_directory(), own_directory(ALSO))):
        if not directory.exists():
            continue
        try:
            check_own(directory)
        except PermissionError as error:
            refused.append(error)
            continue
        _sweep(directory)
        for path in sorted(directory.iterdir(), key=_born):
            try:
                launch = LaunchSeen(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it is just starting, or ending
            if launch.controller().state not in ("", "Z", "X"):  # a child may hold its lock still
                running.append(launch)
    if refused and not running:
        raise refused[0]
    return running


def _born(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def _new_folder() -> OwnFolder:
    directory, prefix = own_directory(), f"{os.getpid()}-"
    try:
        make_own(directory)
        return OwnFolder(directory, prefix)
    except PermissionError as error:
        warnings.warn(
            f"{error}\n`python -m dtensor status` will not find this launch.",
            RuntimeWarning,
            stacklevel=2,
        )
        return OwnFolder(Path(tempfile.gettempdir()), "dtensor-")


def _sweep(directory: Path) -> None:
    """Remove the folders whose launches have ended without doing so."""
    if directory.name == own_directory().name:  # else a launch was refused it: it is not ours alone
        sweep(directory, "*-*")
