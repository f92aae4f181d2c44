"""A launch over two machines, of which one is lost: namespaces of this one, which share nothing but
a cable.

    python -m tests.daft.two_machines            # as root; what became of it, as JSON
    python -m tests.daft.two_machines --can      # whether namespaces can be made here

Three processes: `both` has the network; in it `controller`, on the first machine, which launches,
and a Ray node on the second one. Each machine has its own processes, /tmp and /dev/shm, the second
its own network. It is lost when its first process is killed: the kernel ends all others.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from dtensor.daft.ray.processes import HostProcess

REPOSITORY = Path(__file__).parents[2]
FIRST, SECOND, PORT = "10.77.0.1", "10.77.0.2", 6379
ADDRESS = f"{FIRST}:{PORT}"
OWN = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can() -> bool:
    command = [
        *OWN,
        "--net",
        "sh",
        "-c",
        "mount -t tmpfs m /dev/shm && ip link add one type veth peer name two",
    ]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def machine(*command: str, network: bool = False) -> subprocess.Popen[str]:
    """Run it on a machine of its own, whose memory and temporary files nobody else sees."""
    seen = [str(path) for path in (REPOSITORY, Path(sys.prefix)) if path.is_relative_to("/tmp")]
    script = "mount -t tmpfs m /dev/shm && mount -t tmpfs m /mnt && "
    for at, path in enumerate(seen):
        script += f"mkdir /mnt/{at} && mount --bind {path} /mnt/{at} && "
    script += "mount -t tmpfs m /tmp && chmod 1777 /tmp && "
    for at, path in enumerate(seen):
        script += f"mkdir -p {path} && mount --bind /mnt/{at} {path} && "
    script += f"cd {REPOSITORY} && "
    own = [*OWN, "--net"] if network else OWN
    given = [*own, "sh", "-c", script + 'exec "$0" "$@"', *command]
    return subprocess.Popen(
        given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def first_of(other: subprocess.Popen[str]) -> int:
    """The process that is number 1 of a machine."""
    children = Path(f"/proc/{other.pid}/task/{other.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.02)
    return int(found[0])


def both() -> None:
    """The network, the second machine; what the first one says."""
    ray = str(Path(sys.executable).with_name("ray"))
    _run("ip link set lo up")
    starts = f"read go && ip link set lo up && exec {ray} {SECOND_STARTS}"
    second = machine("sh", "-c", starts, network=True)
    _run(f"ip link add one type veth peer name two netns {first_of(second)}")
    _run(f"ip addr add {FIRST}/24 dev one && ip link set one up")
    cable = os.open(
        f"/proc/{first_of(second)}/ns/net", os.O_RDONLY
    )  # it would end with the machine
    enter = f"nsenter -n -t {first_of(second)}"
    _run(f"{enter} ip addr add {SECOND}/24 dev two && {enter} ip link set two up")
    first = machine(sys.executable, "-m", "tests.daft.two_machines", "--controller")
    assert first.stdin is not None and first.stdout is not None and second.stdin is not None
    for line in first.stdout:
        match line.strip():
            case "start":
                second.stdin.write("go\n")
                second.stdin.flush()
            case "lose":
                os.kill(first_of(second), signal.SIGKILL)
                second.wait()
                first.stdin.write("lost\n")
                first.stdin.flush()
            case _:
                print(line, end="", flush=True)
    os.close(cable)
    raise SystemExit(first.wait())


SECOND_STARTS = (
    f"start --address={ADDRESS} --node-ip-address={SECOND} --num-cpus=2 --block "
    f"--object-store-memory=100000000"
)


def _run(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


# -- on the first machine --------------------------------------------------------------------------


def say(word: str) -> None:
    print(word, flush=True)


def controller() -> None:
    import ray

    import dtensor as dt
    from dtensor.daft import ActorLost

    head = f"start --head --port={PORT} --node-ip-address={FIRST} --num-cpus=2 "
    head += "--include-dashboard=false --object-store-memory=100000000"
    command = [str(Path(sys.executable).with_name("ray")), *head.split()]
    subprocess.run(command, check=True, stdout=sys.stderr)
    say("start")
    ray.init(address=ADDRESS, log_to_driver=False)
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        time.sleep(0.1)
    found: dict[str, Any] = {}
    with trained() as (run, step, model, opt):
        found["undisturbed"] = [loss(step, i) for i in range(8)], state(model, opt)
        cluster = run.cluster
        found["machines"] = len({p.machine for p in cluster.crew.all})
        found["copies"] = cluster.copies
    found["left on the first"] = left()
    warnings.simplefilter("ignore", RuntimeWarning)
    with trained() as (run, step, model, opt):
        cluster = run.cluster
        losses = [loss(step, i) for i in range(3)]
        end(cluster.crew.host(3))  # the process alone
        losses += [loss(step, i) for i in range(3, 5)]
        pending = [step(*batch(i)) for i in range(5, 7)]
        say("lose")
        sys.stdin.readline()
        began = time.monotonic()
        losses += [float(each) for each in pending]
        found["seconds"] = time.monotonic() - began
        losses.append(loss(step, 7))
        found["disturbed"] = losses, state(model, opt)
        found["recoveries"] = [str(each) for each in run.recoveries]
        dt.save("/tmp/kept", model, opt, step=8).get()
        # now all is on one machine, and there are no copies
        for kept in Path("/dev/shm").glob("dtensor-*/ranks-0-0"):
            kept.unlink()
        end(cluster.crew.host(0))
        try:
            loss(step, 8)
        except ActorLost as error:
            found["all lost"] = [str(error), *error.__notes__]
    say(json.dumps(found))


def end(process: HostProcess) -> None:
    process.kill()
    assert process.ended(60.0) is not None


def trained() -> Any:
    from contextlib import contextmanager

    import torch
    from torch import nn

    import dtensor as dt

    @contextmanager
    def launched() -> Any:
        torch.manual_seed(0)
        mesh = dt.Mesh(dp=4)
        model = dt.parallelize(nn.Linear(8, 4), mesh, {}, zero={"dp": 3})
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loss_fn(model: Any, x: Any, y: Any) -> Any:
            return nn.functional.mse_loss(model(x), y)

        step = dt.train_step(model, loss_fn, opt, inputs=dict(dp=dt.Row()))
        with dt.launch(mesh, backend="ray", address=ADDRESS, spares=1) as run:
            yield run, step, model, opt

    return launched()


def batch(number: int) -> Any:
    import torch

    torch.manual_seed(number)
    return torch.randn(16, 8), torch.randn(16, 4)


def loss(step: Any, number: int) -> float:
    return float(step(*batch(number)))


def state(model: Any, opt: Any) -> dict[str, Any]:
    import torch

    import dtensor as dt

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain(dt.gather_state_dict(model, opt))


def left() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("dtensor-*")]


if __name__ == "__main__":
    if "--can" in sys.argv:
        print(can())
    elif "--controller" in sys.argv:
        controller()
    elif "--both" in sys.argv:
        both()
    else:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ["OMP_NUM_THREADS"] = "1"
        command = [*OWN, "--net", sys.executable, "-m", "tests.daft.two_machines", "--both"]
        raise SystemExit(subprocess.run(command, cwd=REPOSITORY).returncode)
