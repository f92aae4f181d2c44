"""Simulates GPUs on a CPU, to find missing waits in kernels, custom ops and programs.

with dt.testing.simulated_gpus(num=2, seed=0) as gpus:
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x + 1                       # does not wait for the kernel that writes x
    print(gpus.report())                # the race, with both lines
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from dtensor.daft.cluster.cluster import Cluster
from dtensor.daft.launching import CLUSTERS
from dtensor.testing.gpus import torch_cuda
from dtensor.testing.gpus.guard import install
from dtensor.testing.gpus.host import Host, HostWait, VisibleGpu, everywhere, here
from dtensor.testing.gpus.memory import EarlyFree, Memory, Race
from dtensor.testing.gpus.nccl import Fabric
from dtensor.testing.gpus.tensors import Simulated
from dtensor.testing.gpus.triton_kernels import interpreted
from dtensor.testing.gpus.world import MAX_CONNECTIONS, World


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """The events on the simulated GPUs so far.

    Attributes:
        races: the number of each pair of accesses that no stream or event orders.
        early_frees: the number of each free of memory that another stream might still use.
        host_waits: the number of each call in which a host waited for a GPU.
        peak_bytes: the peak memory of each GPU.
        kernels: the number of kernels that were put on streams.
        launches: the number of launches of the hosts: ops, copies, group calls of NCCL, and replays
            of CUDA graphs, each of which launches many kernels.
    """

    races: Mapping[Race, int]
    early_frees: Mapping[EarlyFree, int]
    host_waits: Mapping[HostWait, int]
    peak_bytes: tuple[int, ...]
    kernels: int
    launches: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.kernels} kernels, {sum(self.host_waits.values())} waits of the host, "
            f"{len(self.races)} races, {len(self.early_frees)} early frees"
        ]
        for head, counts in (
            ("race", self.races),
            ("early free", self.early_frees),
            ("host wait", self.host_waits),
        ):
            lines += [f"  {head}: {times} x {what}" for what, times in counts.items()]
        lines += [f"  GPU {i}: peak {peak} bytes" for i, peak in enumerate(self.peak_bytes)]
        return "\n".join(lines)


class SimulatedGpus:
    """The simulated GPUs of a `simulated_gpus` block."""

    def __init__(self, world: World, memories: Sequence[Memory]) -> None:
        self._world = world
        self._memories = memories
        self._waits: Counter[HostWait] = Counter()
        self.fabric = Fabric(world)

    def host(self, number: int, devices: range) -> Host:
        """Return a new host, with this number, that sees these GPUs."""
        every = self._world.devices
        gpus = [VisibleGpu(every[i], self._memories[i], every[i].main) for i in devices]
        return Host(self._world, number, gpus, self._waits)

    def expect(self, host: int) -> None:
        """Announce that a thread is about to start as this host, so that waiting for it is not
        reported as a deadlock."""
        self._world.begin(host)

    def waiting_for_hosts(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for other hosts, and not for a GPU."""
        return self._world.idle(here().number)

    def report(self) -> GpuReport:
        """Return the events of all hosts so far, without waiting for queued kernels."""
        with self._world.lock:
            return GpuReport(
                races=sum((memory.races for memory in self._memories), Counter()),
                early_frees=sum((memory.early_frees for memory in self._memories), Counter()),
                host_waits=Counter(self._waits),
                peak_bytes=tuple(memory.peak for memory in self._memories),
                kernels=self._world.num_kernels,
                launches=self._world.num_launches,
            )


@contextmanager
def simulated_gpus(
    num: int = 1,
    seed: int = 0,
    *,
    early: float = 0.0,
    varies: bool = False,
    capacity: int | None = None,
    fails_at: int = 0,
    num_queues: int = MAX_CONNECTIONS,
) -> Generator[SimulatedGpus]:
    """A context in which this process has simulated GPUs.

    `dt.launch(mesh, "ray", device="cuda")` puts a rank on each GPU, in a thread instead of a Ray
    actor. Without "ray" all ranks are on the current GPU.

    Args:
        num: the number of GPUs.
        seed: draws the order of kernels that no stream or event orders.
        early: the probability that a kernel that may run runs as soon as it is queued. With 0 no
            kernel runs before a host waits for it, which finds most errors.
        varies: whether ops that are not deterministic on CUDA, such as `index_add`, differ in their
            last bits from run to run.
        capacity: the bytes of memory of each GPU; None: unlimited.
        fails_at: the number of the allocation on each GPU, counted from 1, that fails; 0: none.
        num_queues: the number of hardware queues of a GPU.

    Raises CompilerMissing if there is no C++ compiler, and RuntimeError inside another
    `simulated_gpus` block or if there are real GPUs.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "GPUs are there already, real or simulated.\n"
            "  Fix: CUDA_VISIBLE_DEVICES= hides real ones; leave the other simulated_gpus first"
        )
    install()
    world = World(num, seed, early, num_queues, varies)
    gpus = SimulatedGpus(world, [Memory(capacity, fails_at) for _ in range(num)])

    def make(size: int, **options: Any) -> Cluster:
        from dtensor.testing.gpus.cluster import SimulatedCluster  # it imports dtensor.daft.ray

        hosts = [gpus.host(1 + i, range(i, i + 1)) for i in range(num)]
        return SimulatedCluster(world, gpus.fabric, hosts, size, **options)

    world.begin(0)
    with (
        patch.dict(CLUSTERS, {("ray", "cuda"): make}),
        torch_cuda.patched(),
        interpreted(),
        everywhere(gpus.host(0, range(num))),
        Simulated(),
    ):
        yield gpus
        for stream in [stream for device in world.devices for stream in device.streams]:
            while (kernel := stream.last) is not None and not kernel.is_done and world.run_one():
                pass  # results that outlive the block get their values
