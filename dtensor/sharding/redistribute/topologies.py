"""Hardware by name: what plans are priced with, from datasheets.

    dt.topologies.h100()                                          # ranks of one host
    dt.topologies.h100(nvlink=("tp",), infiniband=("dp", "pp"))   # by axis
    dt.train_step(..., topology=dt.topologies.a100())

FLOP and bytes of memory per second are 40 to 60% of the peaks that a datasheet states, about what
large models reach. Messages are priced by NCCL's own model (its src/graph/tuning.cc) for what
daft's transport uses: sends and receives over four channels a communicator, with the protocol
Simple. No collective between GPUs has been measured.

A host launches an op in 30 us and needs 160 us a step. The 30 us were fitted to one of three
training steps measured on an H100, and predict the other two within 1.1
(benchmarks/results/predictions.md); the 160 us are those of an empty run on Ray
(benchmarks/results/control.md). To compare with what is measured, use `dt.calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.errors import PlanningError, check_kind
from dtensor.sharding.redistribute.topology import H100, Topology

_NETWORK_LATENCY = 22e-6
"""NCCL's model: 8.4 us of a kernel and 14 us of a hop over a network."""


def h100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """H100 SXM5 80 GB, dense bf16. NVIDIA's H100 datasheet (2023) states 989 TFLOP/s, 3.35 TB/s of
    HBM3, NVLink 450 GB/s each way; a DGX H100 has a port of 400 Gb/s (NDR, 50 GB/s) for each GPU.

    An exchange takes 12 us over NVLink (8.4 us of a kernel, 3.4 us of a hop); four channels carry
    36.7 GB/s each. ``nvlink``, ``infiniband``: the axes along which ranks have the one or the
    other; with neither, all are within one host. Raises PlanningError if an axis is stated twice.
    """
    return _of_hosts(Topology(name=H100), "400G InfiniBand", 25e9, nvlink, infiniband)


def a100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """A100 SXM4 80 GB, dense bf16. NVIDIA's A100 datasheet (2021) states 312 TFLOP/s, 2.04 TB/s of
    HBM2e, NVLink 300 GB/s each way; a DGX A100 has a port of 200 Gb/s (HDR) for each GPU. Four
    channels carry 20 GB/s each. The host's figures are the H100's.

    ``nvlink``, ``infiniband`` and the error are as of `h100`.
    """
    name = "A100 SXM bf16, NVLink"
    host = Topology(bandwidth=80e9, flops=125e12, memory_bandwidth=1.2e12, name=name)
    return _of_hosts(host, "200G InfiniBand", 12.5e9, nvlink, infiniband)


def laptop() -> Topology:
    """Ray ranks on two shared cores of a CPU, float32: the medians of five `dt.calibrate`."""
    return Topology(
        latency=9.2e-5,
        bandwidth=2.3e9,
        flops=5.0e10,
        memory_bandwidth=9.4e9,
        memory_bytes=8 * 2**30,
        op_latency=9.7e-6,
        launch_latency=0.0,
        step_latency=5.0e-5,
        attention_flops=2.7e10,
        update_bandwidth=1.2e10,
        name="a laptop's two cores",
    )


def _of_hosts(
    host: Topology, network: str, rate: float, nvlink: Sequence[str], infiniband: Sequence[str]
) -> Topology:
    """``host`` where neither is stated, else its latency and bandwidth along ``nvlink`` alone."""
    fix = 'dt.topologies.h100(nvlink=("tp",), infiniband=("dp",))'
    for what, axes in (("nvlink", nvlink), ("infiniband", infiniband)):
        check_kind(what, axes, tuple | list, "a tuple of axes", fix)
    if both := set(nvlink) & set(infiniband):
        raise PlanningError(f"axis {min(both)!r} is stated twice; fix: {fix}")
    if not nvlink and not infiniband:
        return host
    name = str(host.name)
    if nvlink:
        name += f" along {', '.join(nvlink)}"
    if infiniband:
        name = name if nvlink else name.removesuffix(", NVLink")
        name += f", {network} along {', '.join(infiniband)}"
    across = dict.fromkeys(infiniband)
    return Topology(
        latency={a: host.latency_of(a) for a in nvlink} | dict.fromkeys(across, _NETWORK_LATENCY),
        bandwidth={a: host.bandwidth_of(a) for a in nvlink} | dict.fromkeys(across, rate),
        flops=host.flops,
        memory_bandwidth=host.memory_bandwidth,
        name=name,
    )
