"""Checkpoint faults: full disks, killed writers, torn files, and a killed controller. Earlier
checkpoints must load and continue with the same bits.

    python -m tests.chaos --disk 40 --seed 0           # ten of each, and their table
    python -m tests.chaos.disk ckpt losses 12          # the script that is killed and started again

`disk full`: a rank's files may not exceed a random size (RLIMIT_FSIZE). `writer killed`: a rank is
killed at a random byte of its writes and replaced; steps run meanwhile. `torn file`: a file is cut,
has a flipped bit, or is missing. `killed controller`: SIGKILL at a random moment of a script that
saves every other step; the restarted script begins with `dt.resume`.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dtensor as dt
from dtensor.daft.ray.bootstrap.user_folder import MEMORY
from dtensor.daft.ray.cluster import RayCluster
from dtensor.daft.ray.ranks.ranks import Ranks
from dtensor.runtime.checkpoint import CheckpointError, parts
from tests.chaos.disturbance import Hung, Watchdog
from tests.chaos.programs import CASES, batch, training
from tests.chaos.recover import Rows, same, undisturbed

KINDS = ("disk full", "writer killed", "torn file", "killed controller")
PATIENCE_S = 600.0
SAVED_EVERY = 2
MARK = "DTENSOR_CHAOS"
ENDED_S = 120.0  # how long what a killed controller has started may take to end
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
AGENTS_S = 300.0
"""These of Ray's first try for 60 s to tell its server, which has ended, that their raylet has."""


# -- in a rank -------------------------------------------------------------------------------------


def limit_files(ranks: Ranks, nbytes: int) -> None:
    """Limit the size of files that this process writes; -1 removes the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def die_at(ranks: Ranks, nbytes: int) -> None:
    """Kill the process after it has written this many bytes of a part."""
    left, write = nbytes, parts.write_all

    def writes(file: Any, data: memoryview) -> None:
        nonlocal left
        if len(data) < left:
            left -= len(data)
            return write(file, data)
        write(file, data[:left])
        os.kill(os.getpid(), signal.SIGKILL)

    parts.write_all = writes


# -- what is done ----------------------------------------------------------------------------------


class Training:
    """The training of a case step by step, with the expected results of its steps."""

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.model, self.optimizer, self._step = training(CASES[name])
        self.want = undisturbed(name, steps).steps
        self.number = 0

    def step(self) -> None:
        loss = float(self._step(*batch(self.number)))
        assert loss == self.want[self.number], f"step {self.number} of {self.name} gives {loss}"
        self.number += 1

    def save(self, path: Path) -> Any:
        return dt.save(path, self.model, self.optimizer, step=self.number)

    def state(self) -> Any:
        return dt.gather_state_dict(self.model, self.optimizer)


@contextmanager
def launched(name: str, folder: Path, **options: Any) -> Iterator[RayCluster]:
    with warnings.catch_warnings(), Watchdog(PATIENCE_S, folder):
        warnings.simplefilter("ignore", RuntimeWarning)
        with dt.launch(CASES[name].mesh, backend="ray", **options) as run:
            assert isinstance(run.cluster, RayCluster)
            yield run.cluster


def told(cluster: RayCluster, rank: int, method: Callable[..., Any], *given: object) -> None:
    cluster.channel.get([cluster.ask(rank, method, *given).ref], PATIENCE_S)


def disk_full(name: str, draw: random.Random, count: int, folder: Path) -> None:
    """Fill the disk ``count`` times in one launch. Saves during it fail by name; the saves before
    and after succeed."""
    trains = Training(name, 2 + 2 * count)
    with launched(name, folder) as cluster:
        trains.step()
        trains.save(folder / "0").get()
        begun = trains.state()
        for _ in range(count):
            rank = draw.randrange(2)
            size = (folder / "0" / f"__{rank}_0.distcp").stat().st_size
            told(cluster, rank, limit_files, draw.randrange(size))
            trains.step()
            saved = trains.save(folder / "full")
            trains.step()
            try:
                saved.get(PATIENCE_S)
            except CheckpointError as error:
                assert "could not be written" in str(error), error
            else:
                raise AssertionError("a file that was not written whole is a checkpoint")
            told(cluster, rank, limit_files, resource.RLIM_INFINITY)
        trains.save(folder / "1").get(PATIENCE_S)
        assert sorted(os.listdir(folder)) == ["0", "1"], os.listdir(folder)
    goes_on(name, folder / "0", begun, trains.want)


def writer_killed(name: str, draw: random.Random, count: int, folder: Path) -> None:
    """Kill writers ``count`` times in a launch with a spare. The save fails by name, or is
    complete."""
    trains = Training(name, 3 + 3 * count)
    with launched(name, folder, spares=1, snapshot_every=1) as cluster:
        trains.step()
        trains.save(folder / "0").get()
        begun = trains.state()
        for n in range(count):
            while not cluster.membership.ready:
                time.sleep(0.02)
            rank = draw.randrange(2)
            size = (folder / "0" / f"__{rank}_0.distcp").stat().st_size
            told(cluster, rank, die_at, draw.randrange(size))
            trains.step()
            saved = trains.save(folder / f"killed{n}")
            trains.step()
            try:
                saved.get(PATIENCE_S)
            except (CheckpointError, dt.daft.DaftError) as error:
                assert f"killed{n}" in str(error) + str(getattr(error, "__notes__", "")), error
                assert not (folder / f"killed{n}").exists(), "half a checkpoint is there"
            trains.step()
        assert len(cluster.recoveries) >= count, f"{len(cluster.recoveries)} were replaced"
        trains.save(folder / "1").get(PATIENCE_S)
        left = [each for each in os.listdir(folder) if each.startswith(".tmp")]
        assert not left, f"{left} are left"
    goes_on(name, folder / "0", begun, trains.want)


def torn_file(name: str, draw: random.Random, count: int, folder: Path) -> None:
    """Tear files. The load, or the step that reads the value, must name the file; or all bits load,
    if the damage is in bytes used only by torch's tools."""
    trains, states = Training(name, 6), list[Any]()
    with dt.launch(CASES[name].mesh):
        for number in range(2):
            for _ in range(SAVED_EVERY):
                trains.step()
            trains.save(folder / str(number)).get()
            states.append(trains.state())
        trains.step()
        before = trains.state()
        for _ in range(count):
            torn, what = tear(folder / "1", draw)
            try:
                loaded = False
                dt.load(torn, trains.model, trains.optimizer)
                loaded, trains.number = True, 2 * SAVED_EVERY
                trains.step()  # the optimizer's state is read when a step says how it is kept
            except (CheckpointError, dt.daft.TaskError) as error:  # here, or on a rank that reads
                assert what.split()[0] in str(error), f"{what}: {error}"
                if not loaded:
                    assert same(trains.state(), before), f"{what}: some of it was loaded"
            if loaded:
                dt.load(folder / "1", trains.model, trains.optimizer)
                before = trains.state()
                assert same(before, states[1]), f"{what}: what was behind it is lost"
            shutil.rmtree(torn)
    goes_on(name, folder / "0", states[0], trains.want)


def tear(whole: Path, draw: random.Random) -> tuple[Path, str]:
    """Copy a checkpoint and damage one file; return the file's name and the kind of damage."""
    torn = whole.parent / "torn"
    shutil.copytree(whole, torn)
    file = draw.choice(sorted(torn.iterdir()))
    size = file.stat().st_size
    how = draw.choice(["cut", "flipped", "gone"])
    if how == "cut":
        os.truncate(file, at := draw.randrange(size))
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[at := draw.randrange(size)] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    else:
        at = 0
        file.unlink()
    return torn, f"{file.name} {how} at {at}"


def goes_on(name: str, path: Path, state: Any, want: list[Any]) -> None:
    """Check that a checkpoint loads with this state and that the next steps give the expected
    losses."""
    trains = Training(name, 1)
    with dt.launch(CASES[name].mesh):
        found = dt.load(path, trains.model, trains.optimizer)
        assert same(trains.state(), state), f"{path.name} loads with other bits"
        assert found.step is not None
        trains.want, trains.number = want, found.step
        for _ in range(found.step, min(found.step + 2, len(want))):
            trains.step()


# -- a controller that is killed -------------------------------------------------------------------


def killed_controller(name: str, draw: random.Random, count: int, folder: Path) -> None:
    """Kill the controller ``count`` times in a row; then let it finish."""
    steps = 4 + 12 * count
    want = undisturbed(name, steps).steps
    losses, mark = folder / "losses", str(uuid.uuid4())
    command = [sys.executable, "-m", "tests.chaos.disk", str(folder / "ckpt"), str(losses)]
    memory: list[Path] = []
    (scratch := folder / "tmp").mkdir()
    for n in range(count + 1):
        had = len(_lines(losses))
        with open(folder / "output", "w+") as output:
            process = subprocess.Popen(
                [*command, str(steps), name],
                env={**os.environ, MARK: mark, "TMPDIR": str(scratch)},
                stdout=output,
                stderr=output,
            )
            try:
                if n == count:
                    process.wait(PATIENCE_S)
                else:
                    enough = had + draw.randrange(1, 6)
                    _wait(lambda: len(_lines(losses)) >= enough or process.poll() is not None)  # noqa: B023
                    time.sleep(draw.random() * 0.05)
                left, memory = memory, _memory_of(process.pid)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            said = output.read()
        assert len(_lines(losses)) > had, said[-4000:]
        assert n < count or process.returncode == 0, said[-4000:]
        assert not any(path.exists() for path in left), f"{left} outlive the next start"
        _wait(lambda: not marked(mark) - AGENTS, ENDED_S, lambda: f"left: {marked(mark)}")
    _wait(lambda: not marked(mark), AGENTS_S, lambda: f"left: {marked(mark)}")
    found = [line.split() for line in _lines(losses)]
    for number, loss in found:
        assert float.fromhex(loss) == want[int(number)], f"step {number} gives {loss}"
    assert {int(number) for number, _ in found} == set(range(steps)), "steps are missing"
    begun = [int(a) for (a, _), (b, _) in zip(found[1:], found, strict=False) if int(a) <= int(b)]
    assert all(number % SAVED_EVERY == 0 for number in begun), f"it went on at {begun}"


def marked(mark: str) -> set[str]:
    """Return the processes started by a process with this mark in its environment."""
    found: set[str] = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path("/proc", entry, "environ").read_bytes():
                found.add(Path("/proc", entry, "cmdline").read_text().replace("\0", " ").strip())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found - {""}  # a zombie's


def _memory_of(pid: int) -> list[Path]:
    """Return the shared-memory folders that a process owns."""
    found: list[Path] = []
    for entry in Path("/proc", str(pid), "fd").iterdir() if _alive(pid) else ():
        try:
            link = Path(os.readlink(entry))
        except FileNotFoundError:
            continue
        if link.parent.parent == MEMORY and link.parent.name.startswith("dtensor-"):
            found.append(link.parent)
    return found


def _alive(pid: int) -> bool:
    return Path("/proc", str(pid), "fd").exists()


def _lines(file: Path) -> list[str]:
    """Return the complete lines."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _wait(
    holds: Callable[[], bool],
    seconds: float = PATIENCE_S,
    what: Callable[[], str] = lambda: "it did not come about",
) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what()}, after {seconds:g} s"
        time.sleep(0.05)


def controller(folder: str, losses: str, steps: int, name: str) -> None:
    """The script; it writes each loss to `losses` once it is known."""
    model, optimizer, step = training(CASES[name])
    with (
        open(losses, "a", buffering=1) as file,
        dt.launch(CASES[name].mesh, backend="ray", snapshot_every=1),
    ):
        loaded = dt.resume(folder, model, optimizer)
        for number in range(loaded.step or 0 if loaded else 0, steps):
            file.write(f"{number} {float(step(*batch(number))).hex()}\n")
            if (number + 1) % SAVED_EVERY == 0:
                dt.save(f"{folder}/{number + 1}", model, optimizer, step=number + 1, keep=2)


# -- all of it -------------------------------------------------------------------------------------

ACTS: dict[str, tuple[Callable[[str, random.Random, int, Path], None], int]] = {
    "disk full": (disk_full, 5),
    "writer killed": (writer_killed, 3),
    "torn file": (torn_file, 10),
    "killed controller": (killed_controller, 3),
}
"""With how many of it there are at once, at most."""


def disk(count: int, seed: int, rows: Rows, *, only: str = "", kinds: str = "") -> int:
    """Run ``count`` faults of these kinds in turn; return how many had a wrong result."""
    names = [name for name in CASES if only in name]
    chosen = [kind for kind in KINDS if kinds in kind]
    wrong, turn = 0, 0
    for kind in chosen:
        left = -(-count // len(chosen))
        while left > 0:
            act, most = ACTS[kind]
            name, size = names[turn % len(names)], min(left, most)
            left, turn = left - size, turn + 1
            wrong += one(kind, act, name, random.Random(seed * 10_000 + turn), size, rows)
    return wrong


def one(
    kind: str,
    act: Callable[[str, random.Random, int, Path], None],
    name: str,
    draw: random.Random,
    size: int,
    rows: Rows,
) -> int:
    begin, row = time.monotonic(), rows[name, kind]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            act(name, draw, size, Path(folder))
        except Hung as error:
            row.hung += 1
            print(f"{kind}, {name}: hung\n{error}", flush=True)
        except Exception:
            row.failed += 1
            print(f"{kind}, {name}: {traceback.format_exc()}", flush=True)
        else:
            seconds = time.monotonic() - begin
            print(f"{kind}, {name}: {size} as they should be, {seconds:.0f} s", flush=True)
            row.count += size
            return 0
    return 1


if __name__ == "__main__":
    controller(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
