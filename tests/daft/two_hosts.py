"""Trains a GPT at tp=2, pp=2 on the first of two machines, for tests/daft/test_two_hosts.py.

    python -m tests.daft.two_hosts 10.77.0.1:6379          # one JSON line

It prints the losses in this process and on Ray, where each rank ran, the bytes per step that the
ranks of this machine sent to the other machine and to each other, and the errors of refused calls.
It prints "lose" when the test should disconnect the other machine, and then the error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import torch

import dtensor as dt
from dtensor.daft.ray.cluster import RayCluster
from tests.machines import REPOSITORY

STEPS = 4
LAST = 3  # steps whose bytes are counted
NEVER_S = 3600.0
"""A deadline that no test lives to see: a failure that is found was found by what happened."""


def batch(number: int) -> Any:
    torch.manual_seed(number)
    tokens = torch.randint(64, (16, 65))
    return tokens[:, :-1], tokens[:, 1:]


def build() -> Any:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import train_gpt
    from gpt import GPT, Config

    place = train_gpt.PLACEMENTS["tp2pp2"]
    torch.manual_seed(0)
    mesh = dt.Mesh(**place.mesh)
    module = GPT(Config(vocab=64, context=64, width=128, layers=4, heads=4))
    model = dt.parallelize(module, mesh, place.parameters, stages=place.stages)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = dt.train_step(model, train_gpt.loss_fn, opt, schedule=place.schedule)
    return mesh, step


def trains(address: str) -> None:
    given = os.environ.pop("RAY_AUTH_MODE")
    told = [refused(address)]
    os.environ |= {"RAY_AUTH_MODE": given, "RAY_AUTH_TOKEN_PATH": "/tmp/no such file"}
    told += [refused(address)]
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    mesh, step = build()
    found: dict[str, Any] = {}
    with dt.launch(mesh):
        found["here"] = [float(step(*batch(i))) for i in range(STEPS + LAST)]
    mesh, step = build()
    planned = step.plan(*batch(0)).collectives
    found["planned"] = {
        axis: sum(c.bytes_sent * c.times for c in planned if c.axis == axis) for axis in mesh.axes
    }
    found["kinds"] = sorted({(c.axis, c.kind) for c in planned})
    with dt.launch(mesh, backend="ray", address=address, deadline_s=NEVER_S) as run:
        losses = [float(step(*batch(i))) for i in range(STEPS)]
        before = counted(run.cluster)
        losses += [float(step(*batch(i))) for i in range(STEPS, STEPS + LAST)]
        after = counted(run.cluster)
        found["there"] = losses
        for where in ("sent", "sent here"):
            found[where] = (after[where] - before[where]) / LAST
        found["launch"], found["status"] = repr(run), str(dt.status())
        print("lose", flush=True)
        sys.stdin.readline()
        try:
            float(step(*batch(STEPS)))
        except dt.daft.ActorLost as error:
            found["error"] = str(error)
    told += [refused(address.replace(".1:", ".2:"))]
    found["refused"] = told
    print(json.dumps(found), flush=True)


def refused(address: str) -> str:
    try:
        with dt.launch(dt.Mesh(), "ray", address=address):
            return "it was let in"
    except ConnectionError as error:
        return str(error)


def counted(cluster: Any) -> dict[str, int]:
    """Return the bytes that ranks on this machine have sent to another machine ("sent") or to
    another Ray node, and to each other, from the kernel's counters of their connections. Ray's own
    connections are not counted."""
    assert isinstance(cluster, RayCluster)
    node_of = {process.counter.pid: process.machine for process in cluster.membership.processes}
    told = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    links: list[tuple[str, str, str, int]] = []  # node, address here, address there, bytes
    for line in told.splitlines():
        pids = {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & node_of.keys()
        if pids:
            _, _, _, own, other, *_ = line.replace("[::ffff:", "").replace("]", "").split()
            numbers = dict(re.findall(r"bytes_(sent|retrans):(\d+)", line))
            nbytes = int(numbers.get("sent", 0)) - int(numbers.get("retrans", 0))
            links.append((node_of[min(pids)], own, other, nbytes))
    there = {own: node for node, own, _, _ in links}
    here = {own.rpartition(":")[0] for own in there}
    found = {"sent": 0, "sent here": 0}
    for node, _, other, nbytes in links:
        if there.get(other) == node:
            found["sent here"] += nbytes
        elif other in there or other.rpartition(":")[0] not in here:
            found["sent"] += nbytes
    return found


if __name__ == "__main__":
    trains(sys.argv[1])
