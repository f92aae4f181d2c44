"""A plan as data: every placement and every collective decided, step by step.

    record.inputs     (PlannedInput("up_weight", "up.weight", "parameter", f32[64@tp,16], ...), ...)
    record.steps      (Compute(...), Redistribute(...), ...)    in program order, see steps.py
    record.outputs    where each result and gradient is found when the step has run

The planner's passes take and return records; a `Plan` (plan.py) adds costs and a text form. Specs
carry the virtual axis ``mb`` when there are microbatches: a batch is sharded over it, a gradient
pending over it.

Invariants: verify.py checks them. A plan knows no actors and no backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol

from dtensor.sharding.plan.dataflow import Dataflow, InputKind, OutputKind
from dtensor.sharding.plan.steps import Step
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Shard
from dtensor.sharding.spec.spec import TensorSpec

WriteHow = Literal["in place", "at the commit", "copied"]


@dataclass(frozen=True, slots=True)
class Misaligned:
    """A pin that does not line up with the program.

    ``by``: the name for which the user wrote it; ``why``: how an op, on the user's line ``source``,
    changes the dim. ``ops``: all ops of that kind, before which the activation is redistributed; ()
    if the pin states only how the value is stored. ``fix``: a placement of the same dim that lines
    up, if there is one.
    """

    axis: str
    placement: Shard
    by: str
    why: str
    source: str
    ops: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """One factor that an axis splits: its size, the pin that opened it, the values that it splits.

    ``values``: labels of the parameters it splits besides the pinned one; ``label``: the pinned
    value's name for users; ``reached``: every value that the pin reaches, itself first;
    ``misaligned``: the ops at which the split ends because they use the dim in other parts.
    """

    by: str
    dim: int
    size: int
    values: tuple[str, ...]
    label: str
    reached: tuple[str, ...] = field(repr=False)
    misaligned: Misaligned | None = None


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """An input's plan value per stage, and its placement where it is used.

    ``misaligned``: pins for which it is used whole, and ``pinned``: its spec with them; ``stored``:
    for a parameter under ``zero`` (its level), the spec of the part that is kept split: at 1 its
    optimizer state, at 2 its gradient too, at 3 the parameter itself.
    """

    name: str
    label: str
    kind: InputKind
    spec: TensorSpec
    stages: tuple[int, ...]
    stored: TensorSpec | None = None
    zero: int = 0
    misaligned: tuple[Misaligned, ...] = ()
    pinned: TensorSpec | None = None

    @property
    def base(self) -> TensorSpec:
        """The spec under which the input is held without ``zero``."""
        return self.spec if self.pinned is None else self.pinned

    @property
    def held(self) -> TensorSpec:
        """The spec under which the ranks hold the input between programs."""
        return self.stored if self.stored is not None and self.zero == 3 else self.base

    @property
    def state(self) -> TensorSpec:
        """The spec of a parameter's optimizer state."""
        return self.base if self.stored is None else self.stored


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """Where an output is found when the step has run: (stage, value) pairs."""

    kind: OutputKind
    of: int | str
    values: tuple[tuple[int, str], ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The saved and the repeated values of a recomputed region, by their plan names.

    saved: values that live from forward to backward for it, except parameters and the batch;
    communicated: those of ``saved`` that a repetition of the region would communicate again;
    repeated: (value, its repetition) of its repeated steps, none where the backward reads only
    inputs and outputs of the region; num_ops, flops: of the repeated steps, per rank and
    microbatch, views not counted.
    """

    name: str
    stage: int
    saved: tuple[str, ...]
    communicated: tuple[str, ...]
    repeated: tuple[tuple[str, str], ...] = field(repr=False)
    num_ops: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWrite:
    """How the input ``name``, which the program changes, gets its new contents on ``stage``.

    how: "in place": where the program writes it, in its own storage; "at the commit": the same, but
    once all ranks agree; "copied": computed as ``value``, and copied into it at the commit, because
    of ``why``. writes: (result, operand that it changes) of the ops that write, in order; settled:
    results that put a changed view back, for which no code runs; standing: the values that are
    (views of) its storage from the first write on; skipped: results of steps for which no code runs
    at their place; shares: the copied value may be the old contents of another input that changes,
    and is copied twice; nbytes: copied per rank; source: the user's line.
    """

    of: str
    name: str
    stage: int
    how: WriteHow
    why: str = ""
    value: str
    writes: tuple[tuple[str, int], ...] = ()
    settled: tuple[str, ...] = ()
    standing: frozenset[str] = field(default=frozenset(), repr=False)
    skipped: frozenset[str] = field(default=frozenset(), repr=False)
    shares: bool = False
    nbytes: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A pin whose opposite is cheaper. ``by``: the name for which the user wrote the pin; seconds
    and bytes sent are per rank and step; ``removed``: (kind, axis, phase, the user's line) of the
    collectives that the opposite saves."""

    by: str
    axis: str
    stated: Shard
    opposite: Shard
    seconds: float
    opposite_seconds: float
    bytes_sent: int
    opposite_bytes_sent: int
    removed: tuple[tuple[str, str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedPair:
    """Weights that cost fewer all_reduces with their placements swapped. By the names for which the
    user wrote the pins: ``summed``: split over the dim that their product sums; ``given``: split
    over an output dim of it; ``num`` and ``other_num``: all_reduces over the axis, as stated and
    swapped."""

    axis: str
    summed: tuple[str, ...]
    given: tuple[str, ...]
    num: int
    other_num: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of one step, of the slowest rank with all its stages: compute; exposed
    communication, which is its wait for messages in flight; other waiting, for other ranks; and
    ``host_wait_seconds``, the wait for the controller's call and, on a GPU, for launches.
    ``host_seconds``: all launches of the host, most of which pass while the GPU computes."""

    compute_seconds: float
    communication_seconds: float
    bubble: float  # of the pipeline: the fraction of its ranks' time spent waiting for others
    waiting_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        device = self.compute_seconds + self.communication_seconds
        return device + self.waiting_seconds + self.host_wait_seconds

    @property
    def host_bound(self) -> bool:
        """Whether the host launches for longer than the device computes and communicates."""
        return self.host_seconds > self.compute_seconds + self.communication_seconds


class Timetable(Protocol):
    """The times at which the ranks of a pipeline run their actions. The runtime has the schedules;
    a plan asks this."""

    @property
    def text(self) -> str:
        """The printed grid."""
        ...

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the number of microbatches that it holds at a time."""
        ...

    def held(self, stages: Sequence[int]) -> Collection[tuple[int, tuple[int, ...]]]:
        """The sets of microbatches that a rank of these stages holds at once: for an action of the
        stage at an index, by stage, the microbatches kept besides."""
        ...

    def cost(self, plan: PlanRecord) -> Cost:
        """The predicted cost of a step of the plan."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanTerms:
    """The terms that a `Request` shares with its plan. ``mesh`` is the user's; ``zero``: an axis
    and a level, which says which state of the parameters is stored split over it."""

    name: str
    flow: Dataflow
    mesh: Mesh
    stage_axis: str | None = None
    stage_ranks: tuple[int, ...] = ()  # by stage, its coordinate on the stage axis
    num_microbatches: int = 1
    microbatches_stated: int | None = None  # where the batch has rows for fewer
    topology: Topology = field(default_factory=Topology)
    zero: tuple[str, int] | None = None
    auto: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # chosen stages' patterns
    by_microbatch: tuple[str, ...] = ()  # modules whose statistics are of one microbatch
    model: str = field(default="", compare=False)  # the class of the module, of several joined

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline; 1 without one."""
        return self.flow.num_stages

    def terms(self) -> Mapping[str, Any]:
        """The terms by name."""
        return {each.name: getattr(self, each.name) for each in fields(PlanTerms)}


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanRecord(PlanTerms):
    """The decisions of a plan, without derived figures. Specs are stated on ``inner``: the mesh
    without the stage axis, with the axis ``mb`` where there are microbatches."""

    inner: Mesh
    inputs: tuple[PlannedInput, ...]
    steps: tuple[Step, ...]
    outputs: tuple[PlannedOutput, ...]
    opened: tuple[tuple[str, tuple[Opened, ...]], ...]
    pinned: tuple[tuple[str, str, str], ...] = ()  # (axis, value, the name that the user wrote)
    in_flight: tuple[int, ...] = ()  # microbatches held per stage
    schedule: str = ""
    timetable: Timetable | None = field(default=None, compare=False, repr=False)
    regions: tuple[Region, ...] = ()  # regions that run again in the backward
    plain: PlanRecord | None = field(default=None, compare=False, repr=False)  # unrecomputed
    state_writes: tuple[StateWrite, ...] = ()  # one for each input that is changed
    hints: tuple[Hint, ...] = ()  # where they were asked for; printed last
    swapped: tuple[SwappedPair, ...] = ()
    copies: int = 0  # copies of the values a step writes, kept to undo it

    def __repr__(self) -> str:
        return f"<plan {self.name} on {self.mesh}, steps: {len(self.steps):,}>"

    @property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """By rank of the stage axis, the stages that it hosts, ascending."""
        num = self.mesh.axis_size(self.stage_axis) if self.stage_axis else 1
        return tuple(
            tuple(s for s in range(self.num_stages) if self.stage_ranks[s] == rank)
            for rank in range(num)
        )

    @cached_property
    def standing(self) -> Mapping[str, str]:
        """The values that have no storage but that of an input, and which."""
        return {value: w.name for w in self.state_writes for value in w.standing}

    def value_specs(self) -> Mapping[str, TensorSpec]:
        """Plan value name to spec, inputs included."""
        specs = {item.name: item.held for item in self.inputs}
        for step in self.steps:
            specs.update((name, spec) for _, name, spec in step.gives_as())
        return specs
