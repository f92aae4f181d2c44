"""Tests which actor is placed on which machine, and when a machine counts as unreachable."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import dtensor as dt
from dtensor.api.launch.launching import together
from dtensor.daft.launching import launch_cluster
from dtensor.daft.ray.bootstrap.actor_placement import MachineCapacity, place
from dtensor.daft.verification.pairing import Hosts
from tests.machines import Machines, can_make


def placed(mesh: dt.Mesh, rooms: list[int], **options: Any) -> list[int]:
    hosts: Hosts = tuple((rank,) for rank in range(mesh.size))
    named = [MachineCapacity(f"10.0.0.{number}", room) for number, room in enumerate(rooms, 1)]
    return place(hosts, together({mesh: None}), named, **options)


def test_placement_keeps_rows_of_mesh_on_one_machine() -> None:
    assert placed(dt.Mesh(pp=2, tp=2), [2, 2]) == [0, 0, 1, 1]
    assert placed(dt.Mesh(pp=2, tp=2, dp=1), [8, 8]) == [0, 0, 1, 1]
    assert placed(dt.Mesh(pp=3, tp=2), [4, 4]) == [0, 0, 1, 1, 1, 1]
    assert placed(dt.Mesh(dp=2, tp=4), [8, 8, 8]) == [0] * 4 + [1] * 4
    # one row; rows too long for any machine; too few CPUs, which are shared
    assert placed(dt.Mesh(dp=4), [8, 8]) == [0, 0, 1, 1]
    assert placed(dt.Mesh(pp=2, tp=4), [2] * 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert placed(dt.Mesh(pp=4, tp=2), [2, 1]) == [0] * 4 + [1] * 4
    assert placed(dt.Mesh(), [0, 1]) == [1]
    # a full machine; the fewest machines that hold all ranks
    assert placed(dt.Mesh(pp=2, tp=2), [0, 4, 4]) == [1, 1, 2, 2]
    assert placed(dt.Mesh(pp=2, tp=2), [8, 8], fewest=True) == [0] * 4
    assert placed(dt.Mesh(pp=2, tp=2), [2, 2, 2], fewest=True) == [0, 0, 1, 1]
    both = together({dt.Mesh(dp=2, tp=2): None, dt.Mesh(tp=2): (4, 5)})
    assert both == [range(0, 2), range(2, 4), (4, 5)]


def test_machines_of_unequal_size_are_refused_with_fix() -> None:
    with pytest.raises(ValueError) as error:
        placed(dt.Mesh(pp=2, tp=2), [3, 1])
    assert str(error.value) == (
        "Machines have unequal rooms, and 4 actors in their order, with ranks along the mesh's "
        "last axis together, do not fit:\n"
        "  10.0.0.1: 3 CPUs, ranks 0 to 1\n"
        "  10.0.0.2: 1 CPUs, ranks 2 to 3\n"
        "  Fix: start Ray on each with the same --num-cpus, or use a mesh whose blocks fit; "
        "--num-cpus=0 leaves a machine out."
    )
    with pytest.raises(ValueError, match="--num-gpus"):
        placed(dt.Mesh(pp=3, tp=2), [3, 3], kind="GPU", fewest=True)


def test_launch_without_ray_installed_raises_with_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)

    class Nothing:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "ray":
                raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "meta_path", [Nothing, *sys.meta_path])
    with pytest.raises(ImportError, match="pip install 'ray>=2.50,<3'"):
        launch_cluster(1, backend="ray")


LISTENS = """
import importlib.util, socket, sys, time
file = "dtensor/daft/ray/bootstrap/dead_connections.py"
spec = importlib.util.spec_from_file_location("silence", file)
silence = importlib.util.module_from_spec(spec)
spec.loader.exec_module(silence)
"""
ONE = (
    LISTENS
    + """
listening = socket.create_server(("10.77.0.1", 7000))
print("listens", flush=True)
full, busy, idle = (listening.accept()[0] for _ in range(3))
for sock in (full, busy, idle):
    silence.listen_to(sock)
full.setblocking(False)
try:
    while True:
        full.send(bytes(1 << 16))  # which nobody reads
except BlockingIOError:
    pass
time.sleep(silence.SILENT_S + 1.5)
assert not any(map(silence.is_quiet, (busy, idle)))
assert full.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
full.close()
began = time.monotonic()  # before the cable is pulled, however long that takes
print("pull", flush=True)
sys.stdin.readline()
busy.sendall(b"x")
for sock in (busy, idle):
    try:
        assert sock.recv(1) == b""
    except OSError:
        pass
    assert silence.SILENT_S - 2 < time.monotonic() - began
print("broken", flush=True)
"""
)
TWO = """
import socket, sys
socks = [socket.create_connection(("10.77.0.1", 7000)) for _ in range(3)]
sys.stdin.readline()
"""


def test_slow_reader_counts_as_alive_and_disconnected_machine_as_lost() -> None:
    if not can_make():
        pytest.skip("namespaces, for machines of their own, cannot be made here")
    with Machines("one", "two") as (one, two), one.start(f"python -c '{ONE}'") as first:
        assert first.stdout is not None and first.stdin is not None
        said = [first.stdout.readline()]
        with two.start(f"python -c '{TWO}'") as second:
            said.append(first.stdout.readline())
            two.pull_cable()
            out, told = first.communicate("go\n", timeout=900)
            assert [*said, out] == ["listens\n", "pull\n", "broken\n"], told
            second.communicate("go\n", timeout=900)
