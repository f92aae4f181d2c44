"""A launch over two machines, one of which is lost; the machines are namespaces
(tests/machines.py).

    python -m tests.daft.two_machines            # as root; prints the results as JSON

`both` makes the machines, and `controller` launches on the first. The second machine is lost when
its first process is killed: the kernel then ends all its others.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from dtensor.daft.ray.channel.processes import HostProcess
from tests.machines import Machines

ADDRESS = "10.77.0.1:6379"
OPTIONS = "--num-cpus=2 --object-store-memory=100000000"


def both() -> None:
    """Return what the first machine prints."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with Machines("one", "two") as machines:
        one, two = machines
        head = f"--head --port=6379 --include-dashboard=false --node-ip-address={one.address}"
        one.run(f"ray start {head} {OPTIONS}", **token)
        two.run(f"ray start --address={ADDRESS} --node-ip-address={two.address} {OPTIONS}", **token)
        command = "python -m tests.daft.two_machines --controller 2>/tmp/told || cat /tmp/told"
        with one.start(command, **token) as first:
            assert first.stdin is not None and first.stdout is not None
            for line in first.stdout:
                if line == "lose\n":
                    two.end()
                    first.stdin.write("lost\n")
                    first.stdin.flush()
                else:
                    print(line, end="", flush=True)


# -- on the first machine --------------------------------------------------------------------------


def say(word: str) -> None:
    print(word, flush=True)


def controller() -> None:
    import dtensor as dt
    from dtensor.daft import ActorLost

    found: dict[str, Any] = {}
    with trained() as (run, step, model, opt):
        found["undisturbed"] = [loss(step, i) for i in range(8)], state(model, opt)
        cluster = run.cluster
        found["machines"] = len({p.machine for p in cluster.membership.processes})
        found["copies"] = cluster.copies
    found["left on the first"] = left()
    warnings.simplefilter("ignore", RuntimeWarning)
    with trained() as (run, step, model, opt):
        cluster = run.cluster
        losses = [loss(step, i) for i in range(3)]
        end(cluster.membership.host(3))  # end only the process
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
        # all ranks are on one machine now, so there are no copies
        for kept in Path("/dev/shm").glob("dtensor-*/ranks-0-0"):
            kept.unlink()
        end(cluster.membership.host(0))
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
    if "--controller" in sys.argv:
        controller()
    else:
        both()
