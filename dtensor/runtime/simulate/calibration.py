"""What a cluster does in a second: the `Topology` that its ranks measure.

    calibrate(cluster, Mesh(tp=2))      # Topology(latency={"tp": 7e-05}, bandwidth=..., flops=...)

The programs of calibration_programs.py run on all ranks at once, so that contention for what ranks
share is in the figures; the actors time their own instructions. A figure is the mean over rounds
and ranks, not the median: a step is a sum, and a core that is shared is lost for a while at a time.
The two numbers of an axis, latency and bandwidth, are those with which the alpha-beta model comes
closest to the seconds of all its messages, by least squares of the relative error.

Not measured: memory (the default of `Topology` stands), messages of several axes at once. In one
process the ranks take turns: figures are of each rank alone, and messages of its own copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import cast

import torch

from dtensor.daft import Cluster, Program
from dtensor.daft.cluster.inprocess import InProcessCluster
from dtensor.daft.run.engine import TIMES
from dtensor.runtime.lower.rank import MAX_LINES
from dtensor.runtime.simulate.calibration_programs import (
    CPU,
    GPU,
    NUM_PRODUCTS,
    NUM_ROUNDS,
    NUM_TINY,
    SMALL,
    STREAMED,
    UPDATED,
    empty_program,
    local_program,
    message_program,
)
from dtensor.runtime.simulate.measured import Times
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh

NUM_EMPTY = 20


def calibrate(cluster: Cluster, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Topology:
    """Measure; about a second on CPUs. Raises daft's errors: a rank that failed or stopped."""
    device = cluster.device
    sizes = GPU if device.type == "cuda" else CPU
    busy = not isinstance(cluster, InProcessCluster)  # there no rank waits for another
    local = _seconds(cluster, local_program(mesh, sizes, dtype, device))
    nbytes = sizes.streams * sizes.stream * dtype.itemsize
    memory_bandwidth = STREAMED * nbytes / local["stream"]
    fits: dict[str, tuple[float, float]] = {}
    for axis, num in mesh.shape.items():
        if num > 1:
            found = _seconds(cluster, message_program(mesh, axis, sizes, dtype, device, busy=busy))
            numbers = {"small": SMALL, "large": sizes.message}
            sent = {size: n * dtype.itemsize for size, n in numbers.items()}
            fits[axis] = _fitted(found, num, sent, memory_bandwidth)
    batch, heads, positions, width = sizes.attention
    # of a forward and its backward, as the rules of both count them
    attended = (1 + 2.5) * 2 * batch * heads * positions**2 * 2 * width
    return Topology(
        latency={axis: _rounded(fit[0]) for axis, fit in fits.items()},
        bandwidth={axis: _rounded(fit[1]) for axis, fit in fits.items()},
        flops=_rounded(NUM_PRODUCTS * 2 * sizes.matrix**3 / local["matmul"]),
        memory_bandwidth=_rounded(memory_bandwidth),
        op_latency=_rounded(local["tiny"] / (NUM_TINY * MAX_LINES)),
        step_latency=_rounded(_empty_seconds(cluster, mesh)),
        attention_flops=_rounded(attended / local["attention"]),
        # the streams are parameters and gradients in halves
        update_bandwidth=_rounded(UPDATED * (nbytes / 2) / local["update"]),
    )


def _seconds(cluster: Cluster, program: Program) -> dict[str, float]:
    """By label, the seconds of one round of its instructions on a rank."""
    handle = cluster.load(program)
    outputs = cluster.run(handle, [{}] * cluster.size, mode="timed").get()
    cluster.unload(handle)
    by_rank: list[dict[str, float]] = []
    for rank, own in enumerate(outputs):
        spent: dict[str, float] = {}
        instructions = program.ranks[rank].instructions
        for index, begin, end in cast(Times, own[TIMES]):
            label = instructions[index].label
            if label:
                spent[label] = spent.get(label, 0.0) + (end - begin) / NUM_ROUNDS
        by_rank.append(spent)
    labels = dict.fromkeys(label for spent in by_rank for label in spent)
    return {
        label: statistics.fmean(spent[label] for spent in by_rank if label in spent)
        for label in labels
    }


def _fitted(
    found: Mapping[str, float], num: int, nbytes: Mapping[str, int], fastest: float
) -> tuple[float, float]:
    """(latency, bandwidth) of an axis of ``num`` ranks, from the seconds of "KIND SIZE".

    Where noise hides what bytes cost, the bandwidth is ``fastest``: a rank reads what it sends.
    """
    per_step = Topology(latency=1.0, bandwidth=float("inf"))
    per_byte = Topology(latency=0.0, bandwidth=1.0)
    rows: list[tuple[float, float]] = []
    for label, seconds in found.items():
        kind, size = label.split(" ")
        if kind == "transfer":
            seconds /= 2  # there and back
        share = {"all_reduce": 2 * (num - 1) / num, "all_gather": num - 1, "transfer": 1.0}[kind]
        steps, sent = (
            unit.collective_seconds(kind, axis="", num=num, bytes_sent=share * nbytes[size])
            for unit in (per_step, per_byte)
        )
        rows.append((steps / seconds, sent / seconds))
    from scipy.optimize import nnls  # here, as actors import this package and load no scipy

    (latency, inverse), _ = nnls(rows, [1.0] * len(rows))
    return float(latency), 1.0 / max(float(inverse), 1.0 / fastest)


def _empty_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """From the call of a run that does nothing to its answer."""
    handle = cluster.load(empty_program(mesh))
    found: list[float] = []
    for _ in range(NUM_EMPTY):
        start = time.perf_counter()
        cluster.run(handle, [{}] * cluster.size).get()
        found.append(time.perf_counter() - start)
    cluster.unload(handle)
    return statistics.fmean(found)


def _rounded(figure: float) -> float:
    """To three digits: no more are repeated by a second measurement."""
    return float(f"{figure:.3g}")
