"""Lists the listening sockets of a launch on Ray, from a separate process: `python -m
tests.daft.doors`.

Prints JSON: by stage, the listening sockets of this process and of all processes that it has
started, as (process, address, port), and what the launches left behind. `strangers` are processes
that call Ray without its token; the answers they got are printed too. With an address the launch
joins the Ray at that address and prints its own sockets, or why it was refused.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private import ray_constants
from torch import Tensor

import dtensor as dt
from dtensor import daft
from tests.chaos.watch import listening, processes_of

MESH = dt.Mesh(tp=2)
STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info()), "nodes")
except Exception as error:
    print(type(error).__name__)
"""


class Scale:
    def times(self, x: Tensor) -> Tensor:
        return 2 * x


def main() -> None:
    said: dict[str, Any] = {"environment": _settings()}
    with dt.launch(MESH, "ray"):
        split = dt.distribute(torch.ones(4, 4), MESH, tp=dt.Row())
        assert float(split.full_tensor().sum()) == 16
        said["first launch"] = listening()
        said["strangers"] = _strangers()
        said["folder"] = _who_may_enter(_session_folder())
    said["between"] = listening()
    with daft.launch("ray", warm=False):
        a, b = daft.spawn(Scale), daft.spawn(Scale)
        step = daft.compile(lambda x: b.times(a.times(x)))
        assert torch.equal(step(torch.ones(2)).get(), 4 * torch.ones(2))
        said["second launch"] = listening()
    said["after it"] = listening()
    said["environment after"] = _settings()

    context: Any = ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    before = _lasting(), _settings(), context.address_info["session_dir"]
    with dt.launch(MESH, "ray"):
        said["in the user's Ray"] = listening()
        said["strangers in the user's Ray"] = _strangers()
    assert ray.is_initialized()
    node: Any = ray.worker._global_node  # type: ignore
    said["the user's Ray"] = before
    said["the user's Ray after"] = (
        [each for each in _lasting() if each in before[0]],
        _settings(),
        node.get_session_dir_path(),
    )
    ray.shutdown()
    print(json.dumps(said))


def join(address: str) -> None:
    try:
        with dt.launch(MESH, "ray", address=address) as session:
            split = dt.distribute(torch.ones(4, 4), MESH, tp=dt.Row())
            assert float(split.full_tensor().sum()) == 16
            home: Any = session.cluster._launch  # type: ignore[attr-defined]
            hosts = {process.counter.pid: "host" for process in home.processes}
            print(json.dumps(listening(hosts | {os.getpid(): "controller"})))
    except ConnectionError as error:
        print(error)


def _lasting() -> list[tuple[str, str, int]]:
    """Return the sorted sockets without those of Ray's workers, which come and go."""
    return sorted(each for each in listening() if not each[0].startswith(("idle", "ray::Host")))


def _settings() -> dict[str, object]:
    """Return the settings that decide the address and token of the next Ray to start."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    constant: Any = ray_constants
    found: dict[str, object] = {name: os.environ[name] for name in names if name in os.environ}
    return {**found, "on a cluster": constant.ENABLE_RAY_CLUSTER}


def _strangers() -> dict[str, str]:
    """Return what Ray answers to clients without a token, with a wrong token, and to clients of
    Ray's own agent."""
    (gcs,) = {f"127.0.0.1:{port}" for name, _, port in listening() if name == "gcs_server"}
    found: dict[str, str] = {}
    for name, token in (("no token", {}), ("another token", {"RAY_AUTH_TOKEN": "0" * 64})):
        environment = os.environ | {"RAY_AUTH_MODE": "token"} | token
        if not token:
            environment["RAY_AUTH_MODE"] = "disabled"
        ran = subprocess.run(
            [sys.executable, "-c", STRANGER, gcs], env=environment, capture_output=True, text=True
        )
        found[name] = ran.stdout.strip() or ran.stderr
    for process, address, port in listening():
        if "RuntimeEnv" in process:
            url = f"http://{address}:{port}/get_or_create_runtime_env"
            try:
                urllib.request.urlopen(url, b"x", timeout=600)
                found["agent"] = "answered"
            except urllib.error.HTTPError as error:
                found["agent"] = str(error.code)
    return found


def _session_folder() -> str:
    """Return the session folder of the Ray that this process has started, itself or through a
    child."""
    told = "--session-dir="
    commands = (Path(f"/proc/{p}/cmdline").read_text() for p in processes_of(os.getpid()))
    words = (word for command in commands for word in command.split("\0"))
    return next(word.removeprefix(told) for word in words if word.startswith(told))


def _who_may_enter(path: str) -> list[str]:
    """Return the folder and those of its parents that only this user may enter."""
    found: list[str] = []
    while path != "/":
        mode = stat.S_IMODE(os.stat(path).st_mode)
        found += [path] if not mode & 0o077 else []
        path = os.path.dirname(path)
    return found


if __name__ == "__main__":
    join(sys.argv[1]) if len(sys.argv) > 1 else main()
