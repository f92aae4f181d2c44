"""A launch leaves no threads, files, processes or memory behind, however it ends: some cycles of
`make chaos` and some of its disk faults. Faults of ranks are in test_recovery.py."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.disk import disk_full, torn_file
from tests.chaos.kinds import KINDS, RAY_KINDS, Place
from tests.chaos.watch import alive, held, left

PATIENCE_S = 300.0  # for what has been told to end; nobody waits that long where it does


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (own := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))  # what is left there was left by a cycle
    yield tmp_path


def test_in_process_launches_leave_nothing_behind(scratch: Path) -> None:
    place = Place("inprocess", scratch)
    for kind in KINDS.values():
        kind(place)
    before, objects = held(), alive()
    for name, kind in KINDS.items():
        kept = kind(place)
        assert left(before, PATIENCE_S) == [], name
        del kept
    assert left(objects, PATIENCE_S, alive) == []


@pytest.mark.ray
def test_ray_launches_with_killed_ranks_leave_nothing_behind(
    scratch: Path, ray_session: None
) -> None:
    place = Place("ray", scratch)
    RAY_KINDS["rank killed in a step"](place)
    objects, before = alive(), held()  # a collection first: Ray then starts a thread, once
    for name in ("rank stopped in a step", "actor killed in a task"):
        kept = RAY_KINDS[name](place)
        assert left(before, PATIENCE_S) == [], name
        del kept
    assert left(objects, PATIENCE_S, alive) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2", "dp2 zero3"])
def test_loading_torn_checkpoint_names_damaged_file(name: str, tmp_path: Path) -> None:
    torn_file(name, random.Random(0), 6, tmp_path)


@pytest.mark.ray
def test_steps_continue_when_disk_is_full(tmp_path: Path, ray_session: None) -> None:
    disk_full("pp2", random.Random(0), 2, tmp_path)


def test_leak_watch_names_each_kind_of_leftover(scratch: Path) -> None:
    """The kinds are a thread, a socket, a file, a process, unnamed memory and a tensor."""
    import mmap
    import os
    import socket
    import subprocess
    import threading

    import torch

    before, objects = held(), alive()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="stray 7")
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0))
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(["sleep", "600"])
    memory = os.memfd_create("dtensor")
    os.ftruncate(memory, mmap.PAGESIZE)
    mapped = mmap.mmap(memory, mmap.PAGESIZE)  # which has a descriptor of its own
    os.close(memory)
    tensor = torch.ones(1)
    try:
        found = "\n".join(left(before, 0.0) + left(objects, 0.0, alive))
        for name in ("thread: stray N +1", "process: sleep +1", "port: ", "file: tmp", "Tensor +1"):
            assert name in found
        for name in ("memfd, mapped +1", "memfd, open +1"):
            assert f"shared memory: {name}" in found
    finally:
        end.set()
        thread.join()
        listener.close()
        file.close()
        process.kill()
        process.wait()
        mapped.close()
        del tensor
    assert left(before, PATIENCE_S) == []
