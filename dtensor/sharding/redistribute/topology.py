"""Cost of communication and compute: the alpha-beta model and a roofline.

    topology = Topology(latency=5e-6, bandwidth={"tp": 200e9, "dp": 50e9})
    topology.collective_seconds("all_reduce", "tp", num=4, bytes_sent=2**20)
    sent_bytes("all_reduce", 2**20, 4)      # of the sum of four values of 1 MiB: 1.5 MiB

Prices are those of daft's transports: in an exchange each rank sends to all others at once and
receives from them. A collective that sends b bytes per rank takes exchanges * latency + b /
bandwidth, with two exchanges for an all_reduce of more than two ranks and one for any other. A
local op takes the larger of its FLOP over FLOP/s and its bytes over memory bandwidth (Williams,
Waterman, Patterson 2009), and a fixed time beside. A GPU works while its host launches further
ops: `launch_latency`; runtime/schedule/clock.py replays both. Contention is not modelled. A
prediction is printed with the `title` of its hardware; topologies.py has some hardware by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import cast

from dtensor.collectives import COLLECTIVES, SMALL_ALL_REDUCE
from dtensor.errors import PlanningError, check_kind, check_number

_MAY_BE_ZERO = ("latency", "op_latency", "launch_latency", "step_latency")
_MAIN = {"latency", "bandwidth", "flops", "memory_bandwidth"}
H100 = "H100 SXM bf16, NVLink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The hardware, in a few figures: the planner's prices. The defaults are
    ``topologies.h100()``'s; `calibrate` measures the present hardware.

    A collective takes the latency of its exchanges, and its bytes over the bandwidth of its axis.
    An all_reduce of more than two ranks is two exchanges. Here 150 MB are sent over the slower
    axis: two exchanges of 5 us, and 3 ms.

        >>> cluster = dt.Topology(latency=5e-6, bandwidth={"tp": 200e9, "dp": 50e9})
        >>> cluster.collective_seconds("all_reduce", "dp", num=4, bytes_sent=150e6)
        0.00301
        >>> cluster.collective_seconds("all_reduce", "tp", num=4, bytes_sent=150e6)
        0.00076

    An op takes the longer of the times of its FLOP and its bytes: a large product the first, a sum
    the second. The host's launches are counted beside them: a step takes the longer of the host
    and the device, op by op.

        >>> chip = dt.Topology(flops=400e12, memory_bandwidth=2e12)
        >>> chip.compute_seconds(flops=8e12, bytes_moved=1e9)
        0.02
        >>> chip.compute_seconds(flops=1e9, bytes_moved=4e9)
        0.002

    Hosts of eight GPUs: ``tp`` runs within a host, ``dp`` between them. If one figure is replaced,
    the title of predictions says so.

        >>> import dataclasses
        >>> hosts = dt.topologies.h100(nvlink=["tp"], infiniband=["dp"])
        >>> hosts.bandwidth
        {'tp': 147000000000.0, 'dp': 25000000000.0}
        >>> dataclasses.replace(hosts, memory_bytes=40 * 2**30).title
        'H100 SXM bf16, NVLink along tp, 400G InfiniBand along dp with memory_bytes as stated'

    Args:
        latency: seconds per exchange. A number holds for every axis, a mapping names them; the
            same for bandwidth.
        bandwidth: bytes per second that a rank sends along an axis.
        flops: FLOP per second of a rank.
        memory_bandwidth: bytes per second that a rank reads and writes.
        memory_bytes: of a rank's device, which `compare` checks and the planner does not.
        op_latency: seconds of any local op besides its work, on a CPU, which computes nothing while
            it dispatches the op.
        launch_latency: seconds in which the host of a GPU launches a local op (a view and an
            update of a parameter too), while the GPU computes what was launched before. A
            collective over n ranks counts as n ops, an all_reduce of more than two as 2n - 1.
        step_latency: seconds of a step besides those of its ranks, such as the controller's call; a
            prediction counts it.
        attention_flops: FLOP per second of attention, whose kernels are slower than products; None:
            the same.
        update_bandwidth: bytes of parameters, gradients and optimizer state per second, each
            counted when read and when written, however often the optimizer goes through them;
            None: once, at memory_bandwidth.
        name: of the hardware, which a plan prints with its predictions.
        named: the figures to which the name belongs; it is set, not stated.

    Raises PlanningError for a figure that is no number or out of range; when it is used, for an
    axis that a mapping lacks.
    """

    latency: float | Mapping[str, float] = 12e-6
    bandwidth: float | Mapping[str, float] = 147e9
    flops: float = 400e12
    memory_bandwidth: float = 2e12
    memory_bytes: float = 80 * 2**30
    op_latency: float = 0.0
    launch_latency: float = 30e-6
    step_latency: float = 160e-6
    attention_flops: float | None = None
    update_bandwidth: float | None = None
    name: str | None = field(default=None, compare=False)
    named: tuple[object, ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for figure in _figures():
            name, value = figure.name, cast(object, getattr(self, figure.name))
            numbers: Iterable[object] = [value]
            if isinstance(value, Mapping) and name in ("latency", "bandwidth"):
                by_axis = _Frozen(cast(Mapping[str, float], value))
                object.__setattr__(self, name, by_axis)
                numbers = by_axis.values()
            above = None if name in _MAY_BE_ZERO else 0
            fix = f"dt.Topology({name}={figure.default!r})"
            for number in numbers:
                if number is not None or figure.default is not None:
                    check_number(f"Topology: {name}", number, above=above, least=0, fix=fix)
        check_kind("Topology: name", self.name, str | None, "a str", 'dt.Topology(name="ours")')
        if self.named is None and self.name is not None:
            object.__setattr__(self, "named", tuple(getattr(self, f.name) for f in _figures()))

    @property
    def title(self) -> str:
        """The hardware in words: its name, and the stated figures that replace its own."""
        stood_for = self.named or tuple(figure.default for figure in _figures())
        figures = {f.name: (getattr(self, f.name), of) for f, of in zip(_figures(), stood_for)}
        changed = [name for name, (now, of) in figures.items() if now != of]
        if self.name is None and set(changed) >= _MAIN:
            return "hardware as stated"
        return (self.name or H100) + (f" with {', '.join(changed)} as stated" if changed else "")

    def latency_of(self, axis: str) -> float:
        """Seconds per exchange along an axis."""
        return _lookup(self.latency, axis, "latency")

    def bandwidth_of(self, axis: str) -> float:
        """Bytes per second that a rank sends along an axis."""
        return _lookup(self.bandwidth, axis, "bandwidth")

    def collective_seconds(self, kind: str, axis: str, *, num: int, bytes_sent: float) -> float:
        """Seconds of one collective over ``num`` ranks of ``axis``, each sending ``bytes_sent`` in
        all, as `sent_bytes` counts them.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "transfer".
        """
        exchanges = 1 if kind == "transfer" else COLLECTIVES[kind].exchanges(num)
        if exchanges == 2 and bytes_sent * num <= 2 * (num - 1) * SMALL_ALL_REDUCE:
            exchanges, bytes_sent = 1, bytes_sent * num / 2  # the whole value to each other rank
        return exchanges * self.latency_of(axis) + bytes_sent / self.bandwidth_of(axis)

    def launch_seconds(self, kind: str, num: int = 1) -> float:
        """Seconds in which the host launches a local "op", or a collective over ``num`` ranks."""
        launches = 1 if kind in ("op", "transfer") else COLLECTIVES[kind].launches(num)
        return launches * self.launch_latency

    def compute_seconds(
        self, *, flops: float, bytes_moved: float, attention: bool = False
    ) -> float:
        """Seconds of one local op, also of a view, which does no work: its ``flops`` and the
        ``bytes_moved`` in and out of memory; ``attention``: at ``attention_flops``."""
        rate = (self.attention_flops if attention else None) or self.flops
        return max(flops / rate, bytes_moved / self.memory_bandwidth) + self.op_latency

    def update_seconds(self, *, bytes_moved: float) -> float:
        """Seconds of the optimizer's step on one parameter: ``bytes_moved`` as defined for
        `update_bandwidth`."""
        return bytes_moved / (self.update_bandwidth or self.memory_bandwidth) + self.op_latency


def _figures() -> Sequence[Field[object]]:
    return [figure for figure in fields(Topology) if figure.name not in ("name", "named")]


def check_topology(value: object) -> None:
    """PlanningError unless it is a topology or None."""
    fix = "dt.Topology(bandwidth=50e9), or leave it out"
    check_kind("topology", value, Topology | None, "a Topology", fix)


def sent_bytes(kind: str, nbytes: int, num: int) -> int:
    """Bytes that each of ``num`` ranks sends in a collective over values of ``nbytes``. An
    all_reduce counts its two exchanges of pieces, at any size."""
    return COLLECTIVES[kind].bytes_sent(nbytes, num)


class _Frozen(dict[str, float]):
    """A mapping by axis that can be hashed, so that a Topology can."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


def _lookup(value: float | Mapping[str, float], axis: str, what: str) -> float:
    if not isinstance(value, Mapping):
        return value
    if axis not in value:
        raise PlanningError(
            f"the topology states no {what} for axis {axis!r}; it has {sorted(value)}"
        )
    return value[axis]
