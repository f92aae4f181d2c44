"""The memory of a stage of a plan: bytes of one rank, by kind.

    stage_memory(plan, 0)     # Memory(parameters=2097152, gradients=2097152, ...)

All figures are for the rank at coordinate 0 of every axis, which holds the largest shard of each
value.

Activations are the peak over one step: the batch and values that are computed once a step, values
that the other microbatches in flight keep for their backward, and the most that one microbatch's
forward and backward hold at a time, each value freed after its last use. A view of a live value
adds nothing. A microbatch's gradients live until its backward ends, where they are added to the
accumulators; without microbatches they are the accumulators themselves and count as gradients, some
of which are made after the activations' peak. The flat buffer of a bucket exists when activations
do not, so the larger of the two counts.

Copies that the launch keeps of the values a step writes, to undo it, count, each value as often as
it is kept; the overhead of a file of them (numbers, names, the ends of pages) does not.

Not here: temporary memory of a kernel, the allocator's fragmentation; time (seconds.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import torch

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    Accumulate,
    Redistribute,
    Step,
    Update,
    updates_of,
)
from dtensor.sharding.spec.spec import TensorSpec

_STATE = ("parameter", "buffer")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank of one stage."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    masters: int = 0  # float32 copies of parameters
    snapshots: int = 0  # copies of the values that the step writes, if the launch keeps them
    not_at_once: int = 0  # gradients made after the activations' peak, stages that peak in turn

    @property
    def total(self) -> int:
        """The most that is held at once."""
        held = self.parameters + self.gradients + self.optimizer + self.masters
        return held + self.activations + self.snapshots - self.not_at_once


def stage_memory(plan: PlanRecord, stage: int) -> Memory:
    """Bytes of the fullest rank of ``stage``."""
    parameters = sum(
        item.held.max_local_nbytes
        for item in plan.inputs
        if item.kind in _STATE and stage in item.stages
    )
    gradients = waiting_gradients(plan, stage)
    updates = updates_of(plan.steps, [stage])
    activations_of_stage = _activations(plan, stage, gradients)
    flying = plan.in_flight[stage] if stage < len(plan.in_flight) else 1
    kept = activations_of_stage.once + (flying - 1) * activations_of_stage.saved
    activations = max(kept + activations_of_stage.peak, activations_of_stage.end)
    return Memory(
        parameters=parameters,
        gradients=sum(gradients.values()),
        optimizer=sum(step.state_bytes for step in updates),
        masters=sum(step.master_bytes for step in updates),
        activations=activations,
        snapshots=plan.copies * _written(plan, stage) if plan.copies else 0,
        not_at_once=activations - max(kept + activations_of_stage.above, activations_of_stage.end),
    )


def rank_memory(plan: PlanRecord, stages: Sequence[int], each: Sequence[Memory]) -> Memory:
    """The memory of the fullest rank of these ``stages``; ``each``: the memory of each stage
    alone."""
    total = Memory(*map(sum, zip(*map(astuple, each), strict=True)))
    if len(stages) < 2 or plan.timetable is None:
        return total
    activations_by_stage = [
        _activations(plan, stage, waiting_gradients(plan, stage)) for stage in stages
    ]
    most = max(
        activations_by_stage[running].above
        + sum(kept * of.saved for kept, of in zip(held, activations_by_stage, strict=True))
        for running, held in plan.timetable.held(stages)
    )
    at_once = max(
        sum(of.once for of in activations_by_stage) + most,
        sum(of.end for of in activations_by_stage),
    )
    return replace(total, not_at_once=total.activations - at_once)


def _written(plan: PlanRecord, stage: int) -> int:
    """Bytes of the values that a step writes and can be undone for: trained parameters, as they are
    held, the optimizer's state, and other state that the program changes, except state that it
    writes in place before all ranks agree."""
    updates = updates_of(plan.steps, [stage])
    changed = {w.name for w in plan.state_writes if w.stage == stage and w.how != "in place"}
    changed |= {i.name for i in plan.inputs if i.label in {s.parameter for s in updates}}
    held = sum(i.held.max_local_nbytes for i in plan.inputs if i.name in changed)
    return held + sum(s.state_bytes + s.master_bytes for s in updates)


def _cast_bytes(step: Update, gradient: torch.dtype) -> int:
    """Bytes of the gradient in the dtype of the updated tensor, if that differs."""
    dtype = torch.float32 if step.master_bytes else step.spec.dtype
    return 0 if gradient == dtype else replace(step.spec, dtype=dtype).max_local_nbytes


def waiting_gradients(plan: PlanRecord, stage: int) -> dict[str, int]:
    """The values in which gradients of parameters wait for the optimizer, and their bytes."""
    producers = {name: step for step in plan.steps for name in step.gives}
    state = {item.label for item in plan.inputs if item.kind in _STATE}
    specs = plan.value_specs()
    waiting: dict[str, int] = {}
    for output in plan.outputs:
        if output.kind != "gradient" or output.of not in state:
            continue
        for at, value in output.values:
            if at == stage:
                names = _accumulated(value, producers)
                # reduced in place; one that is left in float32 is larger than its parts
                waiting[names[-1]] = max(specs[name].max_local_nbytes for name in names)
    return waiting


def _accumulated(value: str, producers: Mapping[str, Step]) -> list[str]:
    """The values from a finished gradient back, past its reductions, to the result of the
    backward."""
    chain = [value]
    while True:
        value = chain[-1]
        match producers.get(value):
            case Redistribute(results=results, operands=operands, phase="optimizer"):
                chain.append(operands[results.index(value)])
            case _:
                return chain


def _flat(step: Redistribute) -> int:
    """Bytes of a bucket's flat buffers: the message of a reduction, or the result of a gather."""
    if step.kind == "all_gather":
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


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes of one stage: of values that exist ``once`` a step; of values that a microbatch keeps
    from forward to backward, its peak, and its part ``above`` all gradients, some of which are made
    after it; and at the ``end`` of the step, when these are gone."""

    once: int
    saved: int
    peak: int
    above: int
    end: int


def _activations(plan: PlanRecord, stage: int, gradients: Mapping[str, int]) -> _Activations:
    values = _Stage()
    always: dict[str, None] = {}  # storages that live as long as the step
    uncounted = set(gradients)  # counted as parameters or as gradients
    for item in plan.inputs:
        if stage in item.stages:
            values.define(item.name, item.held, None)
            uncounted.update([item.name] if item.kind in _STATE else [])
            always[item.name] = None
    steps = [s for s in plan.steps if s.in_microbatch and stage in s.stages]
    for step in (s for s in steps if s.once):
        for name, spec in _made(step, stage):
            values.define(name, spec, base_of(plan, name, step))
            always[values.storage[name]] = None
    walk = [s for p in ("forward", "backward") for s in steps if not s.once and s.phase == p]
    first_backward = sum(s.phase == "forward" for s in walk)
    for at, step in enumerate(walk):
        for name, spec in _made(step, stage):
            values.define(name, spec, base_of(plan, name, step))
            values.use([name], at)
        values.use((n for n in step.reads if n in values.storage), at)
    for value in (v for o in plan.outputs for _, v in o.values if v in values.storage):
        values.use([value], len(walk))
    for step in plan.steps:
        if isinstance(step, Accumulate) and step.stage == stage:
            storage = values.storage[step.operand]
            ends = first_backward if values.last[storage] < first_backward else len(walk)
            values.last[storage] = ends - 1
    values.nbytes.update((values.storage[v], 0) for v in uncounted if v in values.storage)
    once = sum(values.nbytes[name] for name in always)
    made = [[n for n, _ in _made(step, stage) if values.storage[n] == n] for step in walk]
    gradient_bytes = {
        values.storage[v]: nbytes for v, nbytes in gradients.items() if v in values.storage
    }
    coming = [sum(gradient_bytes.get(name, 0) for name in names) for names in made]
    saved, peak, above = _peaks(made, coming, values, frozenset(always), first_backward)
    return _Activations(once, saved, peak, above, _end(plan, stage, sum(gradients.values())))


def _end(plan: PlanRecord, stage: int, gradients: int) -> int:
    """Bytes beside ``gradients`` while they are reduced, cast, and parameters are gathered."""
    buckets = [  # gradients are gone when updated parameters are gathered
        _flat(step) - (gradients if step.in_place else 0)
        for step in plan.steps
        if isinstance(step, Redistribute) and step.bucket
        if step.stage == stage and not step.in_microbatch
    ]
    specs = plan.value_specs()
    casts = (_cast_bytes(s, specs[s.gradient].dtype) for s in updates_of(plan.steps, [stage]))
    return max(*buckets, sum(casts), 0)


def base_of(plan: PlanRecord, name: str, step: Step) -> str | None:
    """The value whose storage a result of the step has; None of one that has its own."""
    return plan.standing.get(name) or step.viewed


def _peaks(
    made: Sequence[Sequence[str]],
    coming: Sequence[int],
    values: _Stage,
    always: frozenset[str],
    first_backward: int,
) -> tuple[int, int, int]:
    """Bytes that one microbatch keeps from forward to backward, its peak, and that above all
    gradients, whose bytes are ``coming`` with these steps."""
    dying: dict[int, list[str]] = {}
    for name, at in values.last.items():
        if name not in always:
            dying.setdefault(at, []).append(name)
    live = peak = saved = 0
    above = missing = -sum(coming)
    for at, names in enumerate(made):
        if at == first_backward:
            saved = live
        live += sum(values.nbytes[name] for name in names if name not in always)
        missing += coming[at]
        peak, above = max(peak, live), max(above, live + missing)
        live -= sum(values.nbytes[name] for name in dying.get(at, ()))
    return saved, peak, above


def _made(step: Step, stage: int) -> list[tuple[str, TensorSpec]]:
    """The values that the step defines on the stage: a transfer defines its result at the
    receiver."""
    return [(name, spec) for at, name, spec in step.gives_as() if at == stage]
