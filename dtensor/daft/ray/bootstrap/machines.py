"""The machines of a Ray cluster: their addresses, and their CPUs and GPUs.

    own_address()                                      # "127.0.0.1", if Ray has one machine
    machines("GPU")                                    # [Machine(node, address, hostname, room=8)]
    ranks_per_gpu(4, requested=None)                   # 1; ValueError if fewer than 4 GPUs are free

Ray is imported only where it is asked: a controller whose Ray is in a separate process
(`local_ray.py`) and the fork server (`fork_server.py`) do not import it.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
RELEASE_S = 10.0
"""How long Ray may take to free the GPUs of actors that have just ended."""
START_S = 180.0
"""How long processes may take to start and connect: each imports torch, and they share cores."""


def _ray() -> Any:  # Ray's stubs leave most of its types unknown
    import ray

    return ray


def ranks_per_gpu(size: int, requested: int | None) -> int:
    """Return how many ranks share a GPU: `requested`, 1 if that is None. Raises ValueError unless
    Ray has a free GPU for each actor, since Ray would wait forever."""
    num_gpus = int(_ray().cluster_resources().get("GPU", 0))
    chosen = 1 if requested is None else requested
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
    """Return the total of each resource in Ray, by Ray's name."""
    return _ray().cluster_resources()


def own_address() -> str:
    """Return the address at which actors reach this machine: loopback if Ray has only one live
    machine."""
    nodes: list[dict[str, Any]] = _ray().nodes()
    if sum(bool(node["Alive"]) for node in nodes) == 1:
        return LOOPBACK
    return str(_ray().util.get_node_ip_address())


def reached_at(controller: str) -> str:
    """Return the address of this machine, in a process whose controller has address `controller`.
    Unlike `own_address`, the result does not depend on which machines are alive."""
    return LOOPBACK if controller == LOOPBACK else str(_ray().util.get_node_ip_address())


def node_at(controller: str) -> str:
    """Return Ray's name of this machine, in a process whose controller has address `controller`; ""
    if all processes are on one machine, where the controller may not have joined Ray."""
    return "" if controller == LOOPBACK else own_node()


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of Ray. `node`: Ray's name of it; `room`: the number of its CPUs or GPUs."""

    node: str
    address: str
    hostname: str
    room: int

    def __str__(self) -> str:
        """For example "10.77.0.2 (two)"."""
        hostname = "" if self.hostname in ("", self.address) else f" ({self.hostname})"
        return f"{self.address}{hostname}"


def machines(kind: str = "CPU") -> list[Machine]:
    """Return the live machines of Ray, this machine first, the others by address. `kind`: the
    resource that `room` counts, "CPU" or "GPU"."""
    alive: list[Machine] = []
    nodes: list[dict[str, Any]] = _ray().nodes()
    for node in nodes:
        if node["Alive"]:
            room = int(node["Resources"].get(kind, 0))
            address, hostname = str(node["NodeManagerAddress"]), str(node["NodeManagerHostname"])
            alive.append(Machine(str(node["NodeID"]), address, hostname, room))
    this_node = own_node()
    return sorted(alive, key=lambda m: (m.node != this_node, _sort_key(m.address), m.node))


def _sort_key(address: str) -> tuple[int, bytes]:
    """Return a key by which numeric addresses are sorted by value."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return family, socket.inet_pton(family, address)
    except OSError:  # the address is a hostname
        return 0, address.encode()


def on_machine(machine: str) -> dict[str, object]:
    """Return Ray's options for an actor that must be on this machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as affinity

    return {"scheduling_strategy": affinity(machine, soft=False)}


def own_node() -> str:
    """Return Ray's name of the machine that this process is on."""
    return str(_ray().get_runtime_context().get_node_id())
