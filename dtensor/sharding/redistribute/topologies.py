"""Topologies of known hardware, which price plans: `h100`, `a100` and `laptop`.

    dt.topologies.h100()                                          # all ranks on one host
    dt.topologies.h100(nvlink=("tp",), infiniband=("dp", "pp"))   # the network of each axis
    dt.train_step(..., topology=dt.topologies.a100())

FLOP/s and memory bandwidth are 40 to 60% of the datasheet's peaks, as large models reach. Messages
are priced by NCCL's model (its src/graph/tuning.cc) for daft's transport: sends and receives over
four channels, protocol Simple. No collective between GPUs has been measured. The 30 us to launch an
op fit one of three steps measured on an H100 and predict the others within a factor of 1.1
(benchmarks/results/predictions.md); 160 us is an empty step on Ray (benchmarks/results/control.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.errors import PlanningError, check_kind
from dtensor.sharding.redistribute.topology import H100, Topology

_NETWORK_LATENCY = 22e-6
"""Seconds of an exchange in NCCL's model: 8.4 us for the kernel, 14 us for a network hop."""


def h100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """Return the topology of H100 SXM5 GPUs with 80 GB, computing in dense bf16.

    NVIDIA's H100 datasheet (2023) states 989 TFLOP/s, 3.35 TB/s of HBM3, NVLink 450 GB/s each way.
    A DGX H100 has a port of 400 Gb/s (NDR, 50 GB/s) for each GPU. An exchange over NVLink takes
    12 us (8.4 us for the kernel, 3.4 us for the hop); each of four channels carries 36.7 GB/s.

    ``nvlink``, ``infiniband``: the axes whose ranks are connected by it. If both are empty, all
    ranks are on one host. Raises PlanningError if an axis is stated twice.
    """
    return _with_networks(Topology(name=H100), "400G InfiniBand", 25e9, nvlink, infiniband)


def a100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """Return the topology of A100 SXM4 GPUs with 80 GB, computing in dense bf16.

    NVIDIA's A100 datasheet (2021) states 312 TFLOP/s, 2.04 TB/s of HBM2e, NVLink 300 GB/s each way.
    A DGX A100 has a port of 200 Gb/s (HDR) for each GPU. Each of four channels carries 20 GB/s. The
    host has the figures of `h100`.

    ``nvlink``, ``infiniband``: the axes whose ranks are connected by it. If both are empty, all
    ranks are on one host. Raises PlanningError if an axis is stated twice.
    """
    name = "A100 SXM bf16, NVLink"
    host = Topology(bandwidth=80e9, flops=125e12, memory_bandwidth=1.2e12, name=name)
    return _with_networks(host, "200G InfiniBand", 12.5e9, nvlink, infiniband)


def laptop() -> Topology:
    """Return the topology of Ray ranks that share two CPU cores and compute in float32: the medians
    of five runs of `dt.calibrate`."""
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


def _with_networks(
    host: Topology, network: str, rate: float, nvlink: Sequence[str], infiniband: Sequence[str]
) -> Topology:
    """Return ``host`` with its latency and bandwidth on the axes ``nvlink``, and the network's on
    the axes ``infiniband``; ``host`` itself if neither names an axis."""
    fix = 'dt.topologies.h100(nvlink=("tp",), infiniband=("dp",))'
    for argument, axes in (("nvlink", nvlink), ("infiniband", infiniband)):
        check_kind(argument, axes, tuple | list, "a tuple of axes", fix)
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
