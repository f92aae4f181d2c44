"""`PlanRecord`: the decisions of a plan as data, which the planner's passes take and return.

    record.inputs     (PlannedInput("up_weight", "up.weight", "parameter", f32[64@tp,16], ...), ...)
    record.steps      (Compute(...), Redistribute(...), ...), in program order (steps.py)
    record.outputs    the value and stage of each result, gradient and changed input

A `Plan` (plan.py) adds costs and a text form. With microbatches, specs have the virtual axis
``mb``: a batch is sharded over it, a gradient is pending over it. The invariants of a record are
checked by verify.py. Records do not depend on actors or a backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol

from dtensor.sharding.plan.dataflow import Dataflow, InputKind, OutputKind
from dtensor.sharding.plan.sequence import AttentionChoice
from dtensor.sharding.plan.steps import Redistribute, Step
from dtensor.sharding.plan.storage import LevelChoice, Zero
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Shard
from dtensor.sharding.spec.spec import TensorSpec

WriteHow = Literal["in place", "at the commit", "copied"]


@dataclass(frozen=True, slots=True)
class Misaligned:
    """A pin that does not line up with how an op of the program uses the dim.

    ``by``: the name for which the user wrote the pin. ``why``: how the op, on the user's line
    ``source``, sees the dim. ``ops``: the ops before which the activation is redistributed; () if
    the pin only determines how the value is stored. ``fix``: a placement of the same dim that lines
    up, or "".
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
    """A pin that makes an axis split its dim, and the values that are split as a consequence.

    ``by``: the name for which the user wrote the pin; ``label``: the user's name of the pinned
    value; ``dim`` and ``size``: its pinned dim; ``values``: labels of the other parameters that are
    split; ``reached``: all values that are split, the pinned value first; ``misaligned``: the ops
    at which the split ends because the dim does not line up with them, or None.
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
    """An input of the plan. ``spec``: the spec with which ops use it.

    ``misaligned``: pins that determine only how the input is stored: it is used with replicas on
    their axes, and ``pinned`` is its spec with them. ``zero``: the ZeRO level. ``stored``: the spec
    split over ZeRO axes, or None; at level 1 the optimizer state has this spec, at level 2 the
    gradient too, at level 3 the parameter too. ``owned``: for a parameter that one rank updates
    whole, the spec of the gradient and the state on this rank, at each level.
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
    owned: TensorSpec | None = None

    @property
    def base(self) -> TensorSpec:
        """The spec with which ranks hold the input if ``zero`` is disregarded."""
        return self.spec if self.pinned is None else self.pinned

    @property
    def held(self) -> TensorSpec:
        """The spec with which ranks hold the input between programs."""
        return self.stored if self.stored is not None and self.zero == 3 else self.base

    @property
    def state(self) -> TensorSpec:
        """The spec of a parameter's optimizer state."""
        return self.owned or self.stored or self.base

    @property
    def updated(self) -> TensorSpec:
        """The spec of the values that ranks write into a parameter when they update it. The other
        ranks get these values on the axes on which this spec differs from ``held``."""
        if self.owned is None:
            return self.state
        replicated = [a for a in self.held.mesh.axes if self.held.placement(a) == REPLICATE]
        return self.held.with_placements(**{a: self.owned.placement(a) for a in replicated})

    @property
    def stored_axes(self) -> tuple[str, ...]:
        """The ZeRO axes that split the storage of a parameter."""
        return () if self.stored is None else _differing(self.base, self.stored)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes on which the state of a parameter differs from ``base``."""
        return _differing(self.base, self.state)


def _differing(a: TensorSpec, b: TensorSpec) -> tuple[str, ...]:
    """Return the axes on which the placements differ."""
    return tuple(axis for axis in a.mesh.axes if a.placement(axis) != b.placement(axis))


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """An output of the plan. ``values``: the (stage, value) pairs that hold it when the step has
    run; ``of``: the index of a result, or the label of the input that a gradient or mutation
    belongs to. A "delayed" output is the local gradient that the next step reads."""

    kind: OutputKind
    of: int | str
    values: tuple[tuple[int, str], ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A recomputed region: the values that it saves and repeats, by their plan names.

    ``saved``: values kept from forward to backward to repeat the region, except parameters and the
    batch. ``communicated``: the values of ``saved`` that would otherwise be communicated again.
    ``repeated``: (value, its repetition) for each result of a repeated step; () if the backward
    reads only inputs and outputs of the region. ``num_ops``, ``flops``: of the repeated steps, per
    rank and microbatch, without views.
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

    how: "in place": ops write into its storage during the program; "at the commit": they do so
    after all ranks agree; "copied": the new contents are computed as ``value`` and copied into the
    input at the commit, for the reason ``why``.
    writes: (result, index of the operand that it overwrites) of the writing ops, in order.
    settled: results that put a changed view back; no code runs for them.
    standing: the values that share the input's storage from the first write on.
    skipped: results of steps that do not run at their place in the program.
    shares: ``value`` may share the storage of an input that changes, so it is copied twice.
    nbytes: bytes copied, per rank. source: the user's line.
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
    """A pin whose opposite is cheaper: a split of the weight's other matrix dim. ``by``: the name
    for which the user wrote the pin. Seconds and bytes sent are per rank and step. ``removed``:
    (kind, axis, phase, the user's line) of the collectives that the opposite saves."""

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
    """Weights that cost fewer all_reduces if their placements are swapped.

    By the names for which the user wrote the pins, ``summed`` are the weights split over the dim
    that their product sums, ``output_split`` the weights split over its output dim. ``num`` and
    ``other_num``: all_reduces over the axis as stated, and if swapped.
    """

    axis: str
    summed: tuple[str, ...]
    output_split: tuple[str, ...]
    num: int
    other_num: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of one step on the slowest rank, with all its stages.

    ``communication_seconds``: exposed communication, the wait for messages in flight.
    ``waiting_seconds``: the wait for other ranks. ``host_wait_seconds``: the wait for the
    controller's call and, on a GPU, for launches. ``host_seconds``: all launches of the host, most
    of which happen while the GPU computes.
    """

    compute_seconds: float
    communication_seconds: float
    bubble: float  # the fraction of the pipeline's rank time spent waiting for other stages
    waiting_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        device = self.compute_seconds + self.communication_seconds
        return device + self.waiting_seconds + self.host_wait_seconds

    @property
    def host_bound(self) -> bool:
        """Whether launches take longer than the device's computation and communication."""
        return self.host_seconds > self.compute_seconds + self.communication_seconds


class Timetable(Protocol):
    """The schedule of a plan: when the ranks of a pipeline run their actions."""

    @property
    def text(self) -> str:
        """The printed grid."""
        ...

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches that each stage holds at a time."""
        ...

    def held(self, stages: Sequence[int]) -> Collection[tuple[int, tuple[int, ...]]]:
        """Return pairs (i, counts) for the actions of a rank that hosts ``stages``: while
        ``stages[i]`` runs one microbatch, the rank keeps ``counts[k]`` others of ``stages[k]``."""
        ...

    def cost(self, plan: PlanRecord) -> Cost:
        """Return the predicted cost of a step of the plan."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanTerms:
    """The fields that a `Request` shares with its plan. ``mesh``: the user's mesh; ``zero``: the
    axes over which the state of parameters is stored split and the ZeRO level, or None."""

    name: str
    flow: Dataflow
    mesh: Mesh
    stage_axis: str | None = None
    stage_ranks: tuple[int, ...] = ()  # for each stage, its coordinate on the stage axis
    num_microbatches: int = 1
    microbatches_stated: int | None = None  # the stated number if the batch has too few rows
    topology: Topology = field(default_factory=Topology)
    capacity: float | None = None  # a budget of rows by expert: times the balanced rows of a rank
    zero: Zero | None = None
    auto: tuple[tuple[str, ...], ...] = field(default=(), compare=False)  # patterns of auto stages
    by_microbatch: tuple[str, ...] = ()  # modules with statistics of each microbatch (batch norm)
    sequence: tuple[AttentionChoice, ...] = ()  # of each axis that splits a sequence
    model: str = field(default="", compare=False)  # the class of the module; several are joined

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return self.flow.num_stages

    def scatter_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return ``axes`` with the ZeRO axes among them in the order in which gradients are
        scattered over them. Parameters are gathered in the reverse order."""
        zero_axes = () if self.zero is None else self.zero.axes
        if len(zero_axes) < 2:
            return tuple(axes)
        ordered = iter(self.fastest_first(zero_axes))
        return tuple(next(ordered) if axis in zero_axes else axis for axis in axes)

    def fastest_first(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes in the order in which gradients are scattered over them: the fastest
        first because it sends the most bytes, then the smallest, then the order of the mesh."""
        axes = sorted(axes, key=self.mesh.index)
        key = {a: (-self.topology.bandwidth_of(a), self.mesh.axis_size(a)) for a in axes}
        return tuple(sorted(axes, key=key.__getitem__))

    def terms(self) -> Mapping[str, Any]:
        """Return the fields of `PlanTerms` by name."""
        return {each.name: getattr(self, each.name) for each in fields(PlanTerms)}


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanRecord(PlanTerms):
    """The decisions of a plan, without derived figures. Specs are stated on ``inner``: the user's
    mesh without the stage axis, and with the axis ``mb`` if there are several microbatches."""

    inner: Mesh
    inputs: tuple[PlannedInput, ...]
    steps: tuple[Step, ...]
    outputs: tuple[PlannedOutput, ...]
    delayed: tuple[PlannedInput, ...] = ()  # local gradients of the step before, by parameter
    opened: tuple[tuple[str, tuple[Opened, ...]], ...]
    pinned: tuple[tuple[str, str, str], ...] = ()  # (axis, value, the name that the user wrote)
    in_flight: tuple[int, ...] = ()  # microbatches held per stage
    schedule: str = ""
    timetable: Timetable | None = field(default=None, compare=False, repr=False)
    regions: tuple[Region, ...] = ()  # regions that run again in the backward
    plain: PlanRecord | None = field(default=None, compare=False, repr=False)  # not recomputed
    state_writes: tuple[StateWrite, ...] = ()  # one for each input that changes, on each stage
    hints: tuple[Hint, ...] = ()  # if requested; printed last
    swapped: tuple[SwappedPair, ...] = ()
    level_choice: LevelChoice | None = None  # of zero={axis: "auto"}
    copies: int = 0  # how many copies of the written values are kept, to undo a step

    def __repr__(self) -> str:
        return f"<plan {self.name} on {self.mesh}, steps: {len(self.steps):,}>"

    @property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank of the stage axis hosts, ascending."""
        num = self.mesh.axis_size(self.stage_axis) if self.stage_axis else 1
        return tuple(
            tuple(s for s in range(self.num_stages) if self.stage_ranks[s] == rank)
            for rank in range(num)
        )

    @cached_property
    def standing(self) -> Mapping[str, str]:
        """Value -> the input whose storage it shares because of a state write."""
        return {value: w.name for w in self.state_writes for value in w.standing}

    @cached_property
    def delayed_reductions(self) -> tuple[tuple[Redistribute, ...], ...]:
        """The steps that convert the gradients of the step before, which can start before the first
        action. They are in rounds: the steps of a round read results of messages of earlier
        rounds."""
        round_of = {item.name: 0 for item in self.delayed}
        rounds: dict[int, list[Redistribute]] = {}
        for step in self.steps if round_of else ():
            if isinstance(step, Redistribute) and step.reads and round_of.keys() >= set(step.reads):
                number = max(round_of[name] for name in step.reads)
                rounds.setdefault(number, []).append(step)
                round_of.update(dict.fromkeys(step.gives, number + step.sends))
        return tuple(tuple(rounds[number]) for number in sorted(rounds))

    def value_specs(self) -> Mapping[str, TensorSpec]:
        """Return the spec of every value of the plan by name, inputs included."""
        specs = {item.name: item.held for item in (*self.inputs, *self.delayed)}
        for step in self.steps:
            specs.update((name, spec) for _, name, spec in step.gives_as())
        return specs
