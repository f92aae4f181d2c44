"""Tests access control of a launch: which sockets listen on which addresses, and that strangers
are refused at each.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from dtensor.daft.ray.bootstrap import start_ray
from dtensor.daft.ray.bootstrap.rendezvous import SignedStore
from dtensor.daft.ray.bootstrap.user_folder import directory_of_sockets
from dtensor.daft.ray.transports.connect import HostConnections, Rendezvous, connect_cpu, lost_key
from dtensor.daft.ray.transports.gloo import gloo_group, join_gloo, prove
from tests.chaos.watch import listening

PATIENCE_S = 600.0
PATIENCE = timedelta(seconds=PATIENCE_S)
SECRET = b"a launch's"
LOOPBACK = ("127.0.0.1", "::ffff:127.0.0.1", "::1")


# -- a launch on Ray -------------------------------------------------------------------------------

EXCEPTIONS: dict[str, str] = {}
"""By process, why it listens beyond loopback on one machine: none does."""


@pytest.mark.ray
@pytest.mark.slow
def test_launch_on_one_machine_listens_only_on_loopback() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.daft.doors"], capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    for stage in ("first launch", "second launch"):
        processes = {process for process, _, _ in said[stage]}
        assert {"gcs_server", "raylet", "ray::RuntimeEnvAgent"} <= processes
        assert len([each for each in said[stage] if each[0].startswith("ray::Host")]) >= 2
        beyond = {process for process, address, _ in said[stage] if address not in LOOPBACK}
        assert beyond <= EXCEPTIONS.keys()
    assert "tests.daft.doors" in {process for process, _, _ in said["first launch"]}
    assert "raylet" in {process for process, _, _ in said["between"]}
    assert {address for _, address, _ in said["between"]} <= set(LOOPBACK)
    assert said["after it"] == []
    refused = {
        "no token": "AuthenticationError",
        "another token": "AuthenticationError",
        "agent": "401",
    }
    assert said["strangers"] == refused
    assert said["folder"], "Ray's sockets are where another user may replace them"

    # a Ray that the user starts keeps Ray's own settings
    assert said["environment after"] == said["environment"]
    before, after = said["the user's Ray"], said["the user's Ray after"]
    assert before == after
    ours = [each for each in said["in the user's Ray"] if each not in before[0]]
    (store,) = (address for process, address, _ in ours if process == "tests.daft.doors")
    assert store in LOOPBACK
    hosts = [address for process, address, _ in ours if process.startswith("ray::Host")]
    assert sorted(address in LOOPBACK for address in hosts) == [False, False, True, True]
    assert said["strangers in the user's Ray"] == refused  # by Ray's default


ON_CLUSTERS = {
    "controller": {"Ray's", "the store", "the run channel"},
    "host": {"Ray's", "gloo's"},
}
"""By process, what of a launch others can reach where Ray spans machines: each asks who comes."""

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False))
cluster.add_node(num_cpus=2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_ray_cluster_accepts_only_clients_with_token() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=plain | known,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        address = cluster.stdout.readline().strip()

        def joins(token: dict[str, str]) -> str:
            command = [sys.executable, "-m", "tests.daft.doors", address]
            environment = plain | token
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=900
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        said = joins(known | {"RAY_AUTH_TOKEN": "0" * 64})
        assert f"The Ray at '{address}' asks for its token, and the one that this process" in said
        assert "has, in RAY_AUTH_TOKEN, is another" in said and "Fix: set RAY_AUTH_TOKEN" in said
        found = Counter(
            process
            for process, where, _ in json.loads(joins(known).splitlines()[-1])
            if where not in LOOPBACK
        )
        cluster.stdin.close()
    if not address.startswith("127."):  # the machine has an address besides loopback
        assert found == {name: len(doors) for name, doors in ON_CLUSTERS.items()} | {"host": 4}


def test_ray_socket_folder_is_private_to_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    own = tmp_path / f"dtensor-{os.getuid()}"
    assert directory_of_sockets() == directory_of_sockets() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)  # as if another user had created it first
    other = directory_of_sockets()
    assert other.parent == tmp_path and other != own
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    own.rmdir()
    own.symlink_to(other)
    assert directory_of_sockets() not in (own, other)


def test_ray_token_stated_by_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    drawn = [start_ray._own_token() for _ in range(2)]
    assert drawn[0] != drawn[1] and {"RAY_AUTH_MODE": "token"}.items() <= drawn[0].items()
    assert len(drawn[0]["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/of/the/users")
    assert start_ray._own_token() == {}
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert start_ray._own_token() == {}


# -- the store -------------------------------------------------------------------------------------


def test_signed_store_listens_only_on_stated_address() -> None:
    store = SignedStore.open("127.0.0.1", SECRET)
    with socket.create_connection(("127.0.0.1", store.port)):
        pass
    beyond = socket.gethostbyname(socket.gethostname())
    if not beyond.startswith("127."):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((beyond, store.port), timeout=PATIENCE_S)


def test_value_written_to_store_by_stranger_is_refused() -> None:
    store = SignedStore.open("127.0.0.1", SECRET)
    there = SignedStore.join("127.0.0.1", store.port, SECRET, PATIENCE)
    store.set("a", "card")
    assert there.get("a") == b"card"
    there.set("b", b"")
    assert store.get("b") == b"" and store.check(["a", "b"]) and not store.check(["c"])
    stranger = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    stranger.set("forged", "card")
    stranger.set("short", "")
    stranger.set("moved", stranger.get("a"))  # pyright: ignore[reportArgumentType] - what it may read, under another key
    other = SignedStore.join("127.0.0.1", store.port, b"another launch's", PATIENCE)
    other.set("other", "card")
    for key in ("forged", "short", "moved", "other"):
        with pytest.raises(
            ConnectionError, match=f"value of '{key}' .* was not written by this launch"
        ):
            there.get(key)


def _both(act: Callable[[int], object]) -> list[object]:
    """Return the results of two actors, or the exceptions that they raise."""

    def caught(index: int) -> object:
        try:
            return act(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(caught, range(2)))


def _join(port: int) -> Rendezvous:
    return Rendezvous(
        address="127.0.0.1",
        port=port,
        secret=SECRET,
        prefix="ranks",
        hosts=(0, 1),
        host_of=(0, 1),
        tags={},
        connect=connect_cpu,
    )


@pytest.mark.parametrize(
    ("key", "named"),
    [("ranks/here1", "ranks/here1"), (lost_key(1), lost_key(1)), ("ranks/seen1", "ranks/seen1")],
)
def test_host_does_not_join_by_address_written_by_stranger(
    key: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger writes another host's address, or that another host was lost."""
    monkeypatch.setattr("dtensor.daft.ray.transports.connect.node_at", lambda _: "here")
    store = SignedStore.open("127.0.0.1", SECRET)
    stranger = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    card = '{"place": "here", "pid": 1, "descriptor": 3, "nonce": "00"}'
    stranger.set(key, card)
    if key == "ranks/here1":  # the other actor joins late, which is allowed
        store.set("ranks/seen1", "0 1")
    elif key == "ranks/seen1":
        store.set("ranks/here1", "")
        _give_gloo_a_peer(store)
    with pytest.raises(
        ConnectionError, match=f"value of '{named}' .* was not written by this launch"
    ):
        HostConnections.join(_join(store.port), 0, (0,), torch.device("cpu"))


def _give_gloo_a_peer(store: SignedStore) -> None:
    def peer() -> None:
        own = SignedStore.join("127.0.0.1", store.port, SECRET, PATIENCE)
        join_gloo(PrefixStore("ranks", own), 1, (0, 1), "127.0.0.1", SECRET)

    threading.Thread(target=peer, daemon=True).start()


# -- gloo ------------------------------------------------------------------------------------------


def test_peer_without_secret_cannot_join_gloo_group() -> None:
    store = SignedStore.open("127.0.0.1", SECRET)

    def joins(index: int) -> object:
        # a separate client, because a waiting client blocks other threads
        own = SignedStore.join("127.0.0.1", store.port, SECRET, PATIENCE)
        secret = (SECRET, b"a stranger's")[index]
        return join_gloo(PrefixStore("ranks", own), index, (0, 1), "127.0.0.1", secret)

    for index, error in enumerate(_both(joins)):
        assert isinstance(error, ConnectionError)
        assert f"as actor {1 - index} is not of this launch" in str(error)


def test_stranger_that_connects_first_to_gloo_is_refused() -> None:
    """The stranger takes the place of actor 1 by its number, and echoes every message."""
    store = HashStore()

    def act(index: int) -> object:
        group = gloo_group(PrefixStore("ranks", store), index, 2, "127.0.0.1", PATIENCE_S)
        if index == 0:
            return prove(group, 0, [1], SECRET)
        for tag in range(2):
            data = torch.empty(32, dtype=torch.uint8)
            group.recv([data], 0, (1 << 30) + tag).wait()
            group.send([data], 0, (1 << 30) + tag).wait()
        return None

    error, _ = _both(act)
    assert isinstance(error, ConnectionError)
    assert "as actor 1 is not of this launch" in str(error)


def test_actors_survive_garbage_sent_to_their_ports() -> None:
    """A stranger may connect to the store and to gloo, send anything, and disconnect."""
    store = SignedStore.open("127.0.0.1", SECRET)

    def joins(index: int) -> object:
        own = SignedStore.join("127.0.0.1", store.port, SECRET, PATIENCE)
        prefixed = PrefixStore("ranks", own)
        group = gloo_group(prefixed, index, 2, "127.0.0.1", PATIENCE_S)
        prove(group, index, [1 - index], SECRET)
        ports = _own_ports()
        assert store.port in ports and len(ports) >= 3
        for port in ports:
            for noise in (b"", b"\x00", struct.pack("<q", 1), os.urandom(4096)):
                with (
                    suppress(ConnectionRefusedError),  # a closed port of an earlier test
                    socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock,
                ):
                    sock.sendall(noise)
        tensor = torch.full((3,), float(index))
        (group.send if index else group.recv)([tensor], 1 - index, 5).wait()
        return own, tensor.tolist()

    results: Any = _both(joins)
    assert [each[1] for each in results] == [[1.0] * 3] * 2


def _own_ports() -> list[int]:
    return [port for _, address, port in listening({os.getpid(): "this"}) if address in LOOPBACK]
