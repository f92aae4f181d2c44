"""What a stage of a plan holds, computes and sends: bytes, FLOP and predicted seconds of one rank.

    stage_memory(plan, 0)     # Memory(parameters=2097152, gradients=2097152, ...)
    stage_seconds(plan, 0)    # (compute, communication), of one step

All of it is of the rank at coordinate 0 of every axis, which holds the largest shard of each value.

Activations are the peak over one step: the batch and what is computed once a step, what the other
microbatches in flight keep for their backward, and the most that one microbatch's forward and
backward hold at a time, each value freed after its last use. A view of a live value adds nothing.
A microbatch's gradients live until its backward ends, where they are added to the accumulators;
without microbatches they are the accumulators themselves and count as gradients. The flat buffer
of a bucket exists when activations do not, so the larger of the two counts.

Not here: what a kernel allocates within, the allocator's fragmentation, overlap, waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch

from dtensor.sharding.plan.choose.prices import is_attention, is_view
from dtensor.sharding.plan.plan import Memory, Plan
from dtensor.sharding.plan.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Regather,
    Step,
    TieSum,
    Transfer,
    Update,
    operands_of,
    results_of,
    runs_once,
)
from dtensor.sharding.redistribute.moves import FREE_KINDS
from dtensor.sharding.spec.spec import TensorSpec

_STATE = ("parameter", "buffer")


def stage_memory(plan: Plan, stage: int) -> Memory:
    """Bytes of the fullest rank of ``stage``."""
    parameters = sum(
        item.held.max_local_nbytes
        for item in plan.inputs
        if item.kind in _STATE and stage in item.stages
    )
    gradients = waiting_gradients(plan, stage)
    updates = [s for s in plan.steps if isinstance(s, Update) and s.stage == stage]
    total = sum(gradients.values())
    buckets = [  # gradients are gone when updated parameters are gathered
        _flat(step) - (total if isinstance(step, Regather) else 0)
        for step in plan.steps
        if isinstance(step, Bucket | Regather) and step.stage == stage and not _in_microbatch(step)
    ]
    specs = plan.value_specs()  # activations are gone when gradients are cast
    casts = sum(_cast_bytes(step, specs[step.gradient].dtype) for step in updates)
    return Memory(
        parameters=parameters,
        gradients=total,
        optimizer=sum(step.state_bytes for step in updates),
        masters=sum(step.master_bytes for step in updates),
        activations=max(_activations(plan, stage, gradients), *buckets, casts),
    )


def _cast_bytes(step: Update, gradient: torch.dtype) -> int:
    """Bytes of the gradient in the dtype of what is updated, where that is another."""
    dtype = torch.float32 if step.master_bytes else step.spec.dtype
    return 0 if gradient == dtype else replace(step.spec, dtype=dtype).max_local_nbytes


def waiting_gradients(plan: Plan, stage: int) -> dict[str, int]:
    """The values in which gradients of parameters wait for the optimizer, and their bytes."""
    producers = {name: step for step in plan.steps for name, _ in results_of(step)}
    state = {item.label for item in plan.inputs if item.kind in _STATE}
    specs = plan.value_specs()
    found: dict[str, int] = {}
    for output in plan.outputs:
        if output.kind != "gradient" or output.of not in state:
            continue
        for at, value in output.values:
            if at == stage:
                names = _accumulated(value, producers)
                # reduced in place; one that is left in float32 is larger than its parts
                found[names[-1]] = max(specs[name].max_local_nbytes for name in names)
    return found


def _accumulated(value: str, producers: Mapping[str, Step]) -> list[str]:
    """From a finished gradient back, past its reductions, to the value that backward leaves."""
    found = [value]
    while True:
        value = found[-1]
        match producers.get(value):
            case Convert(phase="optimizer", operand=operand):
                found.append(operand)
            case (
                Bucket(results=results, operands=operands, phase="optimizer")
                | TieSum(results=results, operands=operands)
            ):
                found.append(operands[results.index(value)])
            case _:
                return found


def _flat(step: Bucket | Regather) -> int:
    """Bytes of a bucket's flat buffers: what is sent of a reduction, what arrives of a gather."""
    if isinstance(step, Regather) or step.kind == "all_gather":
        return sum(m.src.max_local_nbytes + m.dst.max_local_nbytes for m in step.moves)
    return sum(move.src.max_local_nbytes for move in step.moves)


# -- activations: liveness over one microbatch ---------------------------------------------------


@dataclass(slots=True)
class _Stage:
    """The values of one stage: their bytes, the storage each one is a view of, their last use."""

    nbytes: dict[str, int] = field(default_factory=dict[str, int])  # by storage
    storage: dict[str, str] = field(default_factory=dict[str, str])  # value to the storage it uses
    last: dict[str, int] = field(default_factory=dict[str, int])  # storage to its last step

    def define(self, name: str, spec: TensorSpec, base: str | None) -> None:
        self.storage[name] = self.storage[base] if base is not None else name
        if base is None:
            self.nbytes[name] = spec.max_local_nbytes

    def use(self, names: Iterable[str], at: int) -> None:
        for name in names:
            self.last[self.storage[name]] = at


def _activations(plan: Plan, stage: int, gradients: Mapping[str, int]) -> int:
    values = _Stage()
    always: dict[str, None] = {}  # storages that live as long as the step
    uncounted = set(gradients)  # counted as parameters or as gradients
    for item in plan.inputs:
        if stage in item.stages:
            values.define(item.name, item.held, None)
            uncounted.update([item.name] if item.kind in _STATE else [])
            always[item.name] = None
    steps = [s for s in plan.steps if _in_microbatch(s) and stage in _stages_of(s)]
    for step in (s for s in steps if _once(s)):
        for name, spec in _made(step, stage):
            values.define(name, spec, _view_of(step))
            always[values.storage[name]] = None
    walk = [s for p in ("forward", "backward") for s in steps if not _once(s) and _phase(s) == p]
    first_backward = sum(_phase(s) == "forward" for s in walk)
    for at, step in enumerate(walk):
        for name, spec in _made(step, stage):
            values.define(name, spec, _view_of(step))
            values.use([name], at)
        values.use((n for n in operands_of(step) if n in values.storage), at)
    for value in (v for o in plan.outputs for _, v in o.values if v in values.storage):
        values.use([value], len(walk))
    for step in plan.steps:
        if isinstance(step, Accumulate) and step.stage == stage:
            storage = values.storage[step.operand]
            ends = first_backward if values.last[storage] < first_backward else len(walk)
            values.last[storage] = ends - 1
    values.nbytes.update((values.storage[v], 0) for v in uncounted if v in values.storage)
    base = sum(values.nbytes[name] for name in always)
    made = [[n for n, _ in _made(step, stage) if values.storage[n] == n] for step in walk]
    saved, peak = _peak(made, values, frozenset(always), first_backward)
    flying = plan.in_flight[stage] if stage < len(plan.in_flight) else 1
    return base + (flying - 1) * saved + peak


def _peak(
    made: Sequence[Sequence[str]], values: _Stage, always: frozenset[str], first_backward: int
) -> tuple[int, int]:
    """Bytes that one microbatch keeps from forward to backward, and its peak."""
    dying: dict[int, list[str]] = {}
    for name, at in values.last.items():
        if name not in always:
            dying.setdefault(at, []).append(name)
    live = peak = saved = 0
    for at, names in enumerate(made):
        if at == first_backward:
            saved = live
        live += sum(values.nbytes[name] for name in names if name not in always)
        peak = max(peak, live)
        live -= sum(values.nbytes[name] for name in dying.get(at, ()))
    return saved, peak


def _made(step: Step, stage: int) -> list[tuple[str, TensorSpec]]:
    """What the step defines on the stage: a transfer defines its result at the receiver."""
    received = not isinstance(step, Transfer) or step.to_stage == stage
    return results_of(step) if received else []


def _view_of(step: Step) -> str | None:
    """The operand whose storage the step's results share, if any."""
    match step:
        case Compute() if is_view(step.op):
            return step.operands[0]
        case Convert(move=move) if move.kind == "relabel":
            return step.operand
        case _:
            return None


def _stages_of(step: Step) -> tuple[int, ...]:
    match step:
        case Transfer():
            return (step.stage, step.to_stage)
        case TieSum():
            return step.stages
        case Norm():
            return tuple(dict.fromkeys(stage for stage, _, _ in step.operands))
        case Compute() | Convert() | Accumulate() | Bucket() | Update() | Regather():
            return (step.stage,)


def _phase(step: Step) -> str:
    match step:
        case Compute() | Convert() | Transfer() | Bucket():
            return step.phase
        case Accumulate() | TieSum() | Norm() | Update() | Regather():
            return "optimizer"


def _in_microbatch(step: Step) -> bool:
    return _phase(step) != "optimizer"


def _once(step: Step) -> bool:
    return runs_once(step)


# -- time ----------------------------------------------------------------------------------------


def step_times(plan: Plan, step: Step) -> int:
    """How often the step runs in one training step."""
    return 1 if _once(step) or not _in_microbatch(step) else plan.num_microbatches


def stage_flops(plan: Plan, stage: int) -> int:
    """FLOP of one rank of ``stage`` in one step."""
    return sum(
        step.flops * step_times(plan, step)
        for step in plan.steps
        if isinstance(step, Compute) and step.stage == stage
    )


def stage_seconds(plan: Plan, stage: int) -> tuple[float, float]:
    """Predicted seconds of (compute, communication) of one rank of ``stage`` in one step.

    Rooflines of local ops, the alpha-beta price of each message; a transfer counts at its sender.
    """
    compute = communication = 0.0
    for step in plan.steps:
        if stage in _stages_of(step) or isinstance(step, Norm):
            local, sent = step_seconds(plan, step, stage)
            times = step_times(plan, step)
            compute += local * times
            communication += sent * times
    return compute, communication


def step_seconds(plan: Plan, step: Step, stage: int) -> tuple[float, float]:
    """Predicted seconds of (compute, communication) of a rank of ``stage``, each time it runs."""
    topology = plan.topology
    match step:
        case Compute():
            if is_view(step.op):
                return topology.op_latency, 0.0
            specs = (*step.operand_specs, *(s for s in step.result_specs if s is not None))
            moved = sum(spec.max_local_nbytes for spec in specs)
            attention = is_attention(step.op)
            seconds = topology.compute_seconds(
                flops=step.flops, bytes_moved=moved, attention=attention
            )
            return seconds, 0.0
        case Convert(move=move):
            seconds = move.seconds(topology)
            return (seconds, 0.0) if move.kind in FREE_KINDS else (0.0, seconds)
        case Accumulate():
            moved = step.src.max_local_nbytes + 2 * step.dst.max_local_nbytes
            return _streamed(plan, moved), 0.0
        case Update():
            kept = 2 * (step.state_bytes + step.master_bytes)  # read and written
            moved = 3 * step.spec.max_local_nbytes + kept
            return topology.update_seconds(bytes_moved=moved), 0.0
        case Transfer():
            if step.stage != stage:
                return 0.0, 0.0
            return 0.0, topology.collective_seconds(
                "transfer", plan.stage_axis or "", num=2, bytes_sent=step.spec.max_local_nbytes
            )
        case Bucket() | TieSum() | Norm() | Regather():
            return 0.0, _reductions(plan, step, stage)
        case _:
            assert_never(step)


def _streamed(plan: Plan, num_bytes: int) -> float:
    return plan.topology.compute_seconds(flops=0, bytes_moved=num_bytes)


def _reductions(plan: Plan, step: Bucket | TieSum | Norm | Regather, stage: int) -> float:
    """Seconds of the step's collectives on one rank of the stage."""
    total = 0.0
    for item in plan.collectives_of(step):
        if item.stage == stage:
            num = len(step.stages) if isinstance(step, TieSum) else plan.mesh.axis_size(item.axis)
            total += plan.topology.collective_seconds(
                item.kind, item.axis, num=num, bytes_sent=item.bytes_sent
            )
    return total
