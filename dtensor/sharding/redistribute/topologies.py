"""Hardware by name: what plans are priced with, from datasheets.

    dt.topologies.h100()                                          # ranks of one host
    dt.topologies.h100(nvlink=("tp",), infiniband=("dp", "pp"))   # by axis
    dt.train_step(..., topology=dt.topologies.a100())

Figures are 40 to 60% of the peaks that a datasheet states, all at the same share, which is about
what large models reach: they rank strategies. To compare with what is measured, `dt.calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.errors import PlanningError, check_kind
from dtensor.sharding.redistribute.topology import H100, Topology

_NETWORK_LATENCY = 15e-6


def h100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """H100 SXM5 80 GB, dense bf16. NVIDIA's H100 datasheet (2023) states 989 TFLOP/s, 3.35 TB/s of
    HBM3, NVLink 450 GB/s each way; a DGX H100 has a port of 400 Gb/s (NDR, 50 GB/s) for each GPU.

    ``nvlink``, ``infiniband``: the axes along which ranks have the one or the other; with neither,
    all are within one host. Latencies are about those of a hop of NCCL's rings in its own model
    (src/graph/tuning.cc, protocol Simple: 3.4 us over NVLink, 14 us over a network). PlanningError
    for an axis that is stated twice.
    """
    return _of_hosts(Topology(name=H100), "400G InfiniBand", 25e9, nvlink, infiniband)


def a100(*, nvlink: Sequence[str] = (), infiniband: Sequence[str] = ()) -> Topology:
    """A100 SXM4 80 GB, dense bf16. NVIDIA's A100 datasheet (2021) states 312 TFLOP/s, 2.04 TB/s of
    HBM2e, NVLink 300 GB/s each way; a DGX A100 has a port of 200 Gb/s (HDR) for each GPU.

    ``nvlink``, ``infiniband`` and the error are as of `h100`.
    """
    name = "A100 SXM bf16, NVLink"
    host = Topology(bandwidth=130e9, flops=125e12, memory_bandwidth=1.2e12, name=name)
    return _of_hosts(host, "200G InfiniBand", 12.5e9, nvlink, infiniband)


def laptop() -> Topology:
    """Ray ranks on two cores of a CPU, float32, as `dt.calibrate` found them once."""
    return Topology(
        latency=2.6e-4,
        bandwidth=1.2e9,
        flops=8.2e10,
        memory_bandwidth=1.2e10,
        memory_bytes=8 * 2**30,
        op_latency=5.3e-6,
        step_latency=1.6e-3,
        attention_flops=6.0e10,
        update_bandwidth=9.5e9,
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
