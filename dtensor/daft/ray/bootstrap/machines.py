"""Where processes are: addresses, the machines that Ray spans, and what these have.

    own_address()                                      # "127.0.0.1", unless Ray spans several
    machines("GPU")                                    # [Machine(node, address, hostname, room=8)]
    ranks_per_gpu(4, asked=None)                       # 1, or a ValueError on fewer than 4 GPUs

`ranks_per_gpu` says how ranks share GPUs, and that there are enough: Ray would wait for ever for
one that it does not have.

Invariants: it imports Ray where it asks Ray alone. So a process whose Ray belongs to another one
(local_ray.py) does not import it, nor does the one that hosts are forks of (fork_server.py).
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
RELEASE_S = 10.0
"""How long Ray may take to hand out the GPUs of actors that have just ended."""
START_S = 180.0
"""How long processes may take to start and to connect: each imports torch, and they share cores."""


def _ray() -> Any:  # Ray's stubs leave most of its types unknown
    import ray

    return ray


def ranks_per_gpu(size: int, asked: int | None) -> int:
    """As asked, else 1: ranks share a GPU only where that is said.

    `ValueError` unless Ray has a free GPU for each actor.
    """
    num_gpus = int(_ray().cluster_resources().get("GPU", 0))
    chosen = 1 if asked is None else asked
    num_actors = -(-size // chosen)
    end = time.monotonic() + RELEASE_S
    while (free := int(_ray().available_resources().get("GPU", 0))) < num_actors:
        if num_gpus < num_actors or time.monotonic() > end:
            break
        time.sleep(0.2)
    else:
        return chosen
    remedies = ["launch with device='cpu'"]
    if num_actors > 1 and num_gpus >= 1:
        remedies.insert(0, f"put all ranks on one GPU with ranks_per_actor={size}")
        if free and (share := -(-size // free)) < size:
            remedies.insert(
                0,
                f"share each GPU between {share} ranks with ranks_per_actor={share}, where the "
                f"ranks of a collective are all on one GPU or each on its own",
            )
    raise ValueError(
        f"{size} ranks in {num_actors} actors on device 'cuda' need {num_actors} free GPUs, one "
        f"for each actor; Ray has {num_gpus}, of which {free} are free.\n"
        f"  Fix: {', or '.join(remedies)}."
    )


def cluster_resources() -> dict[str, float]:
    """All that there are of those, free or not, in Ray's names."""
    return _ray().cluster_resources()


def own_address() -> str:
    """Where actors reach this machine: loopback, unless Ray spans several machines."""
    nodes: list[dict[str, Any]] = _ray().nodes()
    if sum(bool(node["Alive"]) for node in nodes) == 1:
        return LOOPBACK
    return str(_ray().util.get_node_ip_address())


def reached_at(controller: str) -> str:
    """The same, in a process whose controller has this address, whatever has become of other
    machines since."""
    return LOOPBACK if controller == LOOPBACK else str(_ray().util.get_node_ip_address())


def node_at(controller: str) -> str:
    """Ray's name of this machine, in a process whose controller has this address; "" where all
    processes are on one, for the controller need not have joined Ray."""
    return "" if controller == LOOPBACK else own_node()


@dataclass(frozen=True, slots=True)
class Machine:
    """One that Ray spans. `node`: Ray's name of it; `room`: its CPUs or GPUs."""

    node: str
    address: str
    hostname: str
    room: int

    def __str__(self) -> str:
        """10.77.0.2 (two)"""
        own = "" if self.hostname in ("", self.address) else f" ({self.hostname})"
        return f"{self.address}{own}"


def machines(kind: str = "CPU") -> list[Machine]:
    """Those that Ray knows to be there, this one first, then by their addresses. `kind` is of
    their rooms, in Ray's names."""
    found: list[Machine] = []
    nodes: list[dict[str, Any]] = _ray().nodes()
    for node in nodes:
        if node["Alive"]:
            room = int(node["Resources"].get(kind, 0))
            where = str(node["NodeManagerAddress"]), str(node["NodeManagerHostname"])
            found.append(Machine(str(node["NodeID"]), *where, room))
    own = own_node()
    return sorted(found, key=lambda m: (m.node != own, _in_order(m.address), m.node))


def _in_order(address: str) -> tuple[int, bytes]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return family, socket.inet_pton(family, address)
    except OSError:  # a name
        return 0, address.encode()


def on_machine(machine: str) -> dict[str, object]:
    """Ray's options for an actor there and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as affinity

    return {"scheduling_strategy": affinity(machine, soft=False)}


def own_node() -> str:
    """What Ray calls the machine that this process is on."""
    return str(_ray().get_runtime_context().get_node_id())
