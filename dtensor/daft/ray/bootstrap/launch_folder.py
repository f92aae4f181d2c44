"""The folder of a launch, which other processes of the user read for `dt.status`.

    folder = LaunchFolder.make()                     # /tmp/dtensor-1000/4242-x7k2q9ab
    folder.write_facts("ranks", {"host0": (0,), "host1": (1,)})
    folder.write_lines(3, lines)                     # when program 3 is loaded
    folder.close()                                   # removes the folder
    for launch in launches(): launch.status(0.3)     # in any process of the user

It has the hosts' program counters (`progress.py`), the facts about the launch (`launch.json`), and
the instructions of each loaded program (`program3.json`). Invariants: only the user may enter the
directory (0700); otherwise it is not used, with a warning. Files appear complete, and are read only
as data. The folder of a killed launch is removed by the next process that looks (`user_folder.py`).
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

ALSO = "/tmp"  # searched, too, since the launch may have another TMPDIR
_LAUNCH = "launch.json"


class LaunchFolder:
    """The folder of a launch, until it is closed. Files in `path` are removed with it."""

    def __init__(self, folder: OwnFolder) -> None:
        self.path = folder.path
        self._folder = folder

    @staticmethod
    def make() -> LaunchFolder:
        folder = _new_folder()
        _sweep(folder.path.parent)
        return LaunchFolder(folder)

    def write_facts(
        self, kind: str, hosts: Mapping[str, Sequence[int]], machines: Sequence[str] = ()
    ) -> None:
        """Write the facts about the launch. Called again whenever they change. `kind`: "ranks" or
        "actors"; `hosts`: the file of each host's program counter to the host's ranks; `machines`:
        the name of each host's machine, if there are several."""
        facts = {
            "kind": kind,
            "hosts": [[file, list(ranks)] for file, ranks in hosts.items()],
            "machines": list(machines),
            "pid": os.getpid(),
            "command": " ".join(sys.argv)[:200],
        }
        self._write(_LAUNCH, facts)

    def write_lines(self, program: int, lines: ProgramLines) -> None:
        """Write the instructions of a program. If that fails, warn: the program can still run."""
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
        """Remove the folder. Twice is fine."""
        self._folder.close()

    def _write(self, name: str, data: object) -> None:
        part = self.path / f".{name}"
        part.write_text(json.dumps(data))
        part.rename(self.path / name)


class RunningLaunch:
    """A running launch, as another process of the user on its machine sees it."""

    def __init__(self, path: Path) -> None:
        """Read the facts of a launch. Raises FileNotFoundError if they are not written yet, or were
        removed."""
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
        noun = "rank" if self.kind == "ranks" else "process"
        plural = "" if count == 1 else "es" if noun == "process" else "s"
        spawned = "" if self.kind == "ranks" else " of spawned actors"
        return f"Launch of process {self.pid}: {count} {noun}{plural}{spawned} on ray"

    def progress(self) -> list[Progress]:
        """Return the progress of each host, from its program counter."""
        return [self._progress(file) for file, _ in self.hosts]

    def look(self) -> tuple[Observation, ...]:
        """Return a sample of each host."""
        return tuple(look(h, each) for h, each in enumerate(self.progress()))

    def controller(self) -> ThreadSeen:
        """Return a sample of the controller's main thread."""
        return thread(self.pid, self.pid)

    def status(self, seconds: float) -> Status:
        """Return the status, from two samples that are `seconds` apart."""
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
        """Return the status, from two samples of the hosts and of the controller."""
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
        """Return the instructions of a program, None if it is not loaded."""
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


def launches() -> list[RunningLaunch]:
    """Return the user's launches that run on this machine, the oldest first. Remove the folders of
    killed launches. Raises PermissionError if the directory does not belong to the user alone."""
    running: list[RunningLaunch] = []
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
        for path in sorted(directory.iterdir(), key=_creation_time):
            try:
                launch = RunningLaunch(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # the launch is starting or ending
            # the folder may exist although the controller has ended, if a child holds its lock
            if launch.controller().state not in ("", "Z", "X"):
                running.append(launch)
    if refused and not running:
        raise refused[0]
    return running


def _creation_time(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def _new_folder() -> OwnFolder:
    """Create a launch's folder; elsewhere, with a warning, if the user's directory cannot be
    used."""
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
    """Remove the folders of launches that were killed."""
    if directory.name == own_directory().name:  # not a directory that other users share
        sweep(directory, "*-*")
