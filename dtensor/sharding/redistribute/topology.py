"""`Topology`: the price of communication (alpha-beta model) and of compute (roofline).

    topology = Topology(latency=5e-6, bandwidth={"tp": 200e9, "dp": 50e9})
    topology.collective_seconds("all_reduce", "tp", num=4, bytes_sent=2**20)
    sent_bytes("all_reduce", 2**20, 4)      # to sum four values of 1 MiB, each rank sends 1.5 MiB

In an exchange each rank sends to all other ranks at once. A collective that sends b bytes per rank
takes exchanges * latency + b / bandwidth, with two exchanges for an all_reduce of more than two
ranks and one exchange otherwise. A local op takes a fixed time and the larger of FLOP / (FLOP/s)
and bytes / memory bandwidth (Williams, Waterman, Patterson 2009). runtime/schedule/clock.py replays
a host that launches ops ahead of its GPU. Contention is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import cast

from dtensor.collectives import COLLECTIVES, SMALL_ALL_REDUCE
from dtensor.errors import PlanningError, check_kind, check_number

_MAY_BE_ZERO = ("latency", "op_latency", "launch_latency", "step_latency")
_MAIN_FIGURES = {"latency", "bandwidth", "flops", "memory_bandwidth"}
H100 = "H100 SXM bf16, NVLink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A few figures of the hardware, with which the planner computes prices. The defaults are the
    figures of ``topologies.h100()``; `calibrate` measures the present hardware.

    A collective takes the latency of its exchanges, and its bytes over the bandwidth of its axis.
    An all_reduce of more than two ranks is two exchanges. The first example takes 10 us for two
    exchanges, and 3 ms for 150 MB on the slower axis:

        >>> cluster = dt.Topology(latency=5e-6, bandwidth={"tp": 200e9, "dp": 50e9})
        >>> cluster.collective_seconds("all_reduce", "dp", num=4, bytes_sent=150e6)
        0.00301
        >>> cluster.collective_seconds("all_reduce", "tp", num=4, bytes_sent=150e6)
        0.00076

    An op takes the longer of the time for its FLOP, as for a large product, and the time for its
    bytes, as for a sum. (The planner also counts the time in which the host launches the op.)

        >>> chip = dt.Topology(flops=400e12, memory_bandwidth=2e12)
        >>> chip.compute_seconds(flops=8e12, bytes_moved=1e9)
        0.02
        >>> chip.compute_seconds(flops=1e9, bytes_moved=4e9)
        0.002

    In this cluster, ``tp`` runs within a host and ``dp`` between hosts. If a figure is replaced,
    the title of predictions states it:

        >>> import dataclasses
        >>> hosts = dt.topologies.h100(nvlink=["tp"], infiniband=["dp"])
        >>> hosts.bandwidth
        {'tp': 147000000000.0, 'dp': 25000000000.0}
        >>> dataclasses.replace(hosts, memory_bytes=40 * 2**30).title
        'H100 SXM bf16, NVLink along tp, 400G InfiniBand along dp with memory_bytes as stated'

    Args:
        latency: seconds per exchange: one number for all axes, or a mapping by axis; the same holds
            for bandwidth.
        bandwidth: bytes per second that a rank sends along an axis.
        flops: FLOP per second of a rank.
        memory_bandwidth: bytes per second that a rank reads and writes.
        memory_bytes: memory of a rank's device; `compare` checks it, and choices of "auto" fit it.
        op_latency: seconds that each local op takes besides its work, for a CPU, which computes
            nothing while it dispatches the op.
        launch_latency: seconds that the host of a GPU takes to launch a local op (also a view, or
            an update of a parameter), while the GPU computes earlier ops. A collective over n ranks
            counts as n ops, an all_reduce of more than two ranks as 2n - 1.
        step_latency: seconds of a step that are not the ranks', such as the controller's call.
        attention_flops: FLOP per second of attention, whose kernels are slower than products. None:
            the same as ``flops``.
        update_bandwidth: bytes of parameters, gradients and optimizer state that an optimizer step
            processes per second, each counted once when read and once when written. None: the same
            as ``memory_bandwidth``.
        name: the name of the hardware, which a plan prints with its predictions.
        named: the figures to which the name belongs; set automatically.

    Raises PlanningError if a figure is not a number or out of range, and when it is used for an
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
        """Check the figures, make mappings hashable, and record the figures that ``name`` names."""
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
        """The name of the hardware, followed by the names of the figures that were replaced."""
        named = self.named or tuple(figure.default for figure in _figures())
        figures = {f.name: (getattr(self, f.name), old) for f, old in zip(_figures(), named)}
        changed = [name for name, (value, old) in figures.items() if value != old]
        if self.name is None and set(changed) >= _MAIN_FIGURES:
            return "hardware as stated"
        return (self.name or H100) + (f" with {', '.join(changed)} as stated" if changed else "")

    def latency_of(self, axis: str) -> float:
        """Return the seconds of an exchange along an axis."""
        return _lookup(self.latency, axis, "latency")

    def bandwidth_of(self, axis: str) -> float:
        """Return the bytes per second that a rank sends along an axis."""
        return _lookup(self.bandwidth, axis, "bandwidth")

    def collective_seconds(self, kind: str, axis: str, *, num: int, bytes_sent: float) -> float:
        """Return the seconds of one collective over ``num`` ranks of ``axis``. Each rank sends
        ``bytes_sent`` in all, as `sent_bytes` counts them.

        Args:
            kind: a name in `COLLECTIVES`, or "transfer".
        """
        exchanges = 1 if kind == "transfer" else COLLECTIVES[kind].exchanges(num)
        if exchanges == 2 and bytes_sent * num <= 2 * (num - 1) * SMALL_ALL_REDUCE:
            exchanges, bytes_sent = 1, bytes_sent * num / 2  # each sends its value to all others
        return exchanges * self.latency_of(axis) + bytes_sent / self.bandwidth_of(axis)

    def launch_seconds(self, kind: str, num: int = 1) -> float:
        """Return the seconds to launch a local "op" or a collective over ``num`` ranks."""
        launches = 1 if kind in ("op", "transfer") else COLLECTIVES[kind].launches(num)
        return launches * self.launch_latency

    def compute_seconds(
        self, *, flops: float, bytes_moved: float, attention: bool = False
    ) -> float:
        """Return the seconds of one local op with these ``flops`` and ``bytes_moved`` in and out of
        memory, both 0 for a view. ``attention``: use the rate ``attention_flops``."""
        rate = (self.attention_flops if attention else None) or self.flops
        return max(flops / rate, bytes_moved / self.memory_bandwidth) + self.op_latency

    def update_seconds(self, *, bytes_moved: float) -> float:
        """Return the seconds of the optimizer's step on one parameter, whose ``bytes_moved`` are
        counted as for `update_bandwidth`."""
        return bytes_moved / (self.update_bandwidth or self.memory_bandwidth) + self.op_latency


def _figures() -> Sequence[Field[object]]:
    return [figure for figure in fields(Topology) if figure.name not in ("name", "named")]


def check_topology(value: object) -> None:
    """Raise PlanningError if ``value`` is neither a topology nor None."""
    fix = "dt.Topology(bandwidth=50e9), or leave it out"
    check_kind("topology", value, Topology | None, "a Topology", fix)


def sent_bytes(kind: str, nbytes: int, num: int) -> int:
    """Return the bytes that each of ``num`` ranks sends in a collective over values of ``nbytes``.
    An all_reduce is counted as two exchanges of pieces, whatever its size."""
    return COLLECTIVES[kind].bytes_sent(nbytes, num)


class _Frozen(dict[str, float]):
    """A hashable mapping by axis, so that a `Topology` is hashable."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


def _lookup(value: float | Mapping[str, float], axis: str, name: str) -> float:
    """Return the figure of an axis: ``value`` itself if it is a number for all axes. Raises
    PlanningError if the mapping lacks the axis."""
    if not isinstance(value, Mapping):
        return value
    if axis not in value:
        raise PlanningError(
            f"the topology states no {name} for axis {axis!r}; it has {sorted(value)}"
        )
    return value[axis]
