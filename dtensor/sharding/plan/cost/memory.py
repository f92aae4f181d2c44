"""The predicted memory of one rank of a plan's stage: bytes by kind.

    stage_memory(plan, 0)     # Memory(parameters=2097152, gradients=2097152, ...)

All figures are for the rank at coordinate 0 of every axis, which has the largest shards.
Activations are a peak: values that exist once per step, values that the other microbatches in
flight keep for their backward, and the peak of one microbatch, in which each value is freed after
its last use. The gradients of a microbatch live until its backward ends and are then accumulated;
with a single microbatch they are the accumulators and count as gradients. In the last microbatch
the buffers of `MAX_REDUCTIONS` reductions of gradients exist with the activations; other buffers of
buckets exist only when activations do not, so the larger of the two counts. Temporary memory of
kernels and fragmentation are not counted. The number of rows by expert is data: see `Rows`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

import torch

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import (
    MAX_REDUCTIONS,
    Accumulate,
    Redistribute,
    Step,
    Update,
    on_fullest_rank,
    updates_of,
)
from dtensor.sharding.spec.spec import TensorSpec, nbytes_together

_STATE_KINDS = ("parameter", "buffer")


Rows = Literal["balanced", "capacity", "most"]
"""How many rows by expert a rank holds: as many as if experts had equally many rows, the budget of
``capacity=``, or as many as it can hold."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank of one stage.

    ``delayed``: the gradients of the step before, and the buffers of their reductions.
    ``snapshots``: the copies that the launch keeps of written values, to undo a step.
    ``not_at_once``: a correction, subtracted in ``total``, because the other figures do not peak at
    the same time: some gradients are made after the peak of activations, and the stages of a rank
    peak in turn.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    masters: int = 0  # float32 copies of parameters
    delayed: int = 0
    snapshots: int = 0
    not_at_once: int = 0

    @property
    def total(self) -> int:
        """The peak memory."""
        state = self.parameters + self.gradients + self.optimizer + self.masters + self.delayed
        return state + self.activations + self.snapshots - self.not_at_once


def stage_memory(plan: PlanRecord, stage: int, rows: Rows = "balanced") -> Memory:
    """Return the memory of the fullest rank of ``stage``, if ranks hold ``rows`` by expert."""
    state = [i.held for i in plan.inputs if i.kind in _STATE_KINDS and stage in i.stages]
    gradients = waiting_gradients(plan, stage)
    updates = updates_of(plan.steps, [stage])
    parts = _activations(plan, stage, gradients, rows)
    num_in_flight = plan.in_flight[stage] if stage < len(plan.in_flight) else 1
    base = parts.once + (num_in_flight - 1) * parts.saved  # exists while one microbatch runs
    end = max(parts.once + parts.last, parts.end)
    activations = max(base + parts.peak, end)
    return Memory(
        parameters=sum(nbytes_together(state)),
        gradients=sum(gradients.values()),
        optimizer=sum(step.state_bytes for step in on_fullest_rank(updates)),
        masters=sum(step.master_bytes for step in on_fullest_rank(updates)),
        delayed=_delayed_bytes(plan, stage),
        activations=activations,
        snapshots=plan.copies * _written_bytes(plan, stage) if plan.copies else 0,
        not_at_once=activations - max(base + parts.above, end),
    )


def rank_memory(
    plan: PlanRecord, stages: Sequence[int], each: Sequence[Memory], rows: Rows = "balanced"
) -> Memory:
    """Return the memory of a rank that hosts several ``stages``; ``each``: the memory of each stage
    alone. The sum is corrected by ``not_at_once``, because only one stage runs at a time."""
    total = Memory(*map(sum, zip(*map(astuple, each), strict=True)))
    if len(stages) < 2 or plan.timetable is None:
        return total
    parts_by_stage = [
        _activations(plan, stage, waiting_gradients(plan, stage), rows) for stage in stages
    ]
    in_microbatches = max(
        (parts_by_stage[running].above if counts[running] else parts_by_stage[running].last)
        + sum(count * parts.saved for count, parts in zip(counts, parts_by_stage, strict=True))
        for running, counts in plan.timetable.held(stages)
    )
    at_once = max(
        sum(parts.once for parts in parts_by_stage) + in_microbatches,
        sum(parts.end for parts in parts_by_stage),
    )
    return replace(total, not_at_once=total.activations - at_once)


def _written_bytes(plan: PlanRecord, stage: int) -> int:
    """Return the bytes that a snapshot for undoing a step copies: trained parameters, optimizer
    state, and other state that the program changes, except state written in place during the
    program."""
    updates = updates_of(plan.steps, [stage])
    changed = {w.name for w in plan.state_writes if w.stage == stage and w.how != "in place"}
    changed |= {i.name for i in plan.inputs if i.label in {s.parameter for s in updates}}
    input_bytes = sum(i.held.max_local_nbytes for i in plan.inputs if i.name in changed)
    kept = sum(i.spec.max_local_nbytes for i in plan.delayed if stage in i.stages)
    state = sum(s.state_bytes + s.master_bytes for s in on_fullest_rank(updates))
    return input_bytes + kept + state


def _delayed_bytes(plan: PlanRecord, stage: int) -> int:
    """Return the bytes of the gradients of the step before, and of the messages that reduce them,
    which exist from the beginning of the step until it has updated."""
    total = sum(i.spec.max_local_nbytes for i in plan.delayed if stage in i.stages)
    for step in itertools.chain.from_iterable(plan.delayed_reductions):
        if step.stage == stage and step.sends:
            total += sum(move.dst.max_local_nbytes for move in step.moves)
            total += 0 if step.kind == "all_reduce" else _buffer_bytes(step)
    return total


def _cast_bytes(step: Update, gradient: torch.dtype) -> int:
    """Return the bytes of a cast of the gradient to the updated dtype; 0 without a cast."""
    dtype = torch.float32 if step.master_bytes else step.spec.dtype
    return 0 if gradient == dtype else replace(step.spec, dtype=dtype).max_local_nbytes


def waiting_gradients(plan: PlanRecord, stage: int) -> dict[str, int]:
    """Return value -> bytes for the results of the backward that hold gradients of state until the
    optimizer runs."""
    producers = {name: step for step in plan.steps for name in step.gives}
    state = {item.label for item in plan.inputs if item.kind in _STATE_KINDS}
    specs, kind = plan.value_specs(), "delayed" if plan.delayed else "gradient"
    elsewhere = {s.gradient for s in updates_of(plan.steps, [stage]) if not s.is_fullest}
    waiting: dict[str, int] = {}
    for output in plan.outputs:
        if output.kind != kind or output.of not in state:
            continue
        for at, value in output.values:
            if at == stage:
                chain = _reduction_chain(value, producers)
                # gradients are reduced in place; a float32 gradient is larger than its 16-bit parts
                here = [name for name in chain if name not in elsewhere] or chain
                waiting[chain[-1]] = max(specs[name].max_local_nbytes for name in here)
    return waiting


def _reduction_chain(value: str, producers: Mapping[str, Step]) -> list[str]:
    """Return the values from a finished gradient back to the accumulated result of the backward."""
    chain = [value]
    while True:
        value = chain[-1]
        match producers.get(value):
            case Redistribute(results=results, operands=operands, phase="optimizer"):
                chain.append(operands[results.index(value)])
            case _:
                return chain


def _buffer_bytes(step: Redistribute) -> int:
    """Return the bytes of a bucket's flat buffers."""
    if step.kind == "all_gather":
        return sum(nbytes_together([end for m in step.moves for end in (m.src, m.dst)]))
    return sum(nbytes_together([move.src for move in step.moves]))


# -- activations: liveness over one microbatch ---------------------------------------------------


@dataclass(slots=True)
class _StageValues:
    """The storages of one stage: their bytes, their values, and their last use."""

    bytes_of: Callable[[TensorSpec], int]  # the bytes of a value on the fullest rank
    nbytes: dict[str, int] = field(default_factory=dict[str, int])  # storage -> bytes
    storage: dict[str, str] = field(default_factory=dict[str, str])  # value -> its storage
    last_use: dict[str, int] = field(default_factory=dict[str, int])  # storage -> index of a step

    def define(self, name: str, spec: TensorSpec, base: str | None) -> None:
        """Add a value, which is a view of ``base``, or has its own storage if that is None."""
        self.storage[name] = self.storage[base] if base is not None else name
        if base is None:
            self.nbytes[name] = self.bytes_of(spec)

    def use(self, names: Iterable[str], at: int) -> None:
        """Record that the step with index ``at`` uses these values."""
        for name in names:
            self.last_use[self.storage[name]] = at


@dataclass(frozen=True, slots=True)
class _Activations:
    """Bytes of activations on one stage, in parts.

    once: values that exist once per step.
    saved: values that a microbatch keeps from forward to backward.
    peak: the peak of a microbatch.
    above: the peak of a microbatch if gradients that do not exist yet are subtracted.
    last: the same of the last microbatch, with the buffers of reductions of gradients.
    end: at the end of the step, when the values above no longer exist.
    """

    once: int
    saved: int
    peak: int
    above: int
    last: int
    end: int


def _activations(
    plan: PlanRecord, stage: int, gradients: Mapping[str, int], rows: Rows
) -> _Activations:
    """Return the bytes of activations, by liveness of storages over one microbatch. ``gradients``:
    value -> bytes of the gradients that wait for the optimizer, which do not count as
    activations."""
    values = _StageValues(lambda spec: _local_nbytes(plan, spec, rows))
    permanent: dict[str, None] = {}  # storages that live as long as the step
    uncounted = set(gradients)  # values that count as parameters or as gradients
    for item in plan.inputs:
        if stage in item.stages:
            values.define(item.name, item.held, None)
            uncounted.update([item.name] if item.kind in _STATE_KINDS else [])
            permanent[item.name] = None
    steps = [s for s in plan.steps if s.in_microbatch and stage in s.stages]
    # define the values of steps that run once, then walk the forward and backward of a microbatch
    for step in (s for s in steps if s.once):
        for name, spec in _results_on(step, stage):
            values.define(name, spec, base_of(plan, name, step))
            permanent[values.storage[name]] = None
    walk = [s for p in ("forward", "backward") for s in steps if not s.once and s.phase == p]
    first_backward = sum(s.phase == "forward" for s in walk)
    for at, step in enumerate(walk):
        for name, spec in _results_on(step, stage):
            values.define(name, spec, base_of(plan, name, step))
            values.use([name], at)
        values.use((n for n in step.reads if n in values.storage), at)
    for value in (v for o in plan.outputs for _, v in o.values if v in values.storage):
        values.use([value], len(walk))
    for step in plan.steps:  # a value that is accumulated is freed when its phase ends
        if isinstance(step, Accumulate) and step.stage == stage:
            storage = values.storage[step.operand]
            ends = first_backward if values.last_use[storage] < first_backward else len(walk)
            values.last_use[storage] = ends - 1
    values.nbytes.update((values.storage[v], 0) for v in uncounted if v in values.storage)
    once = sum(values.nbytes[name] for name in permanent)
    new_storages = [
        [n for n, _ in _results_on(step, stage) if values.storage[n] == n] for step in walk
    ]
    gradient_bytes = {
        values.storage[v]: nbytes for v, nbytes in gradients.items() if v in values.storage
    }
    new_gradients = [sum(gradient_bytes.get(name, 0) for name in names) for names in new_storages]
    pieces = [
        _bytes_of_pieces(step, values, values.last_use[values.storage[step.operands[0]]] > at)
        if isinstance(step, Redistribute) and step.counts
        else 0
        for at, step in enumerate(walk)
    ]
    reductions = _bytes_of_reductions(plan, stage, walk)
    peaks = _peaks(
        new_storages,
        new_gradients,
        pieces,
        reductions,
        values,
        frozenset(permanent),
        first_backward,
    )
    return _Activations(once, *peaks, _end_bytes(plan, stage, sum(gradients.values())))


def _bytes_of_reductions(plan: PlanRecord, stage: int, walk: Sequence[Step]) -> list[int]:
    """Return, for each step of the last microbatch, the bytes of the buffers of reductions of
    gradients in flight, as if each started when its last operand is made."""
    made_at = {name: at for at, step in enumerate(walk) for name in step.gives}
    for step in plan.steps:
        if isinstance(step, Accumulate) and step.operand in made_at:
            made_at[step.result] = made_at[step.operand]
    begun = sorted(
        (max(made_at[name] for name in step.reads), _buffer_bytes(step))
        for step in _early_reductions(plan, stage)
        if made_at.keys() >= set(step.reads)
    )
    nbytes = [0] * len(walk)
    for number, (begin, _) in enumerate(begun):
        held = sum(size for _, size in begun[max(0, number + 1 - MAX_REDUCTIONS) : number + 1])
        nbytes[begin + 1 :] = [held] * (len(walk) - begin - 1)
    return nbytes


def _early_reductions(plan: PlanRecord, stage: int) -> list[Redistribute]:
    """Return the reductions of gradients of a stage that may start in a backward."""
    delayed = {id(step) for steps in plan.delayed_reductions for step in steps}
    return [
        step
        for step in plan.steps
        if isinstance(step, Redistribute) and step.reduces_gradients
        if step.may_be_late and step.stage == stage and id(step) not in delayed
    ]


def _local_nbytes(plan: PlanRecord, spec: TensorSpec, rows: Rows) -> int:
    """Return the bytes of a value on the fullest rank, if it holds ``rows`` by expert."""
    if rows == "balanced" or not spec.is_by_expert:
        return spec.max_local_nbytes
    origin = dict.fromkeys(spec.mesh.axes, 0)
    most_rows = spec.row_bound(origin)
    if rows == "capacity" and plan.capacity is not None:
        most_rows = min(most_rows, spec.row_budget(origin, plan.capacity))
    sizes = list(spec.local_shape(origin))
    sizes[spec.ragged_dim] = most_rows
    return math.prod(sizes) * spec.dtype.itemsize


def _bytes_of_pieces(step: Redistribute, values: _StageValues, is_read_later: bool) -> int:
    """Return the bytes that exist in addition to the operand and the result of an exchange of rows,
    while the rows are in pieces, one for each rank and one from each rank. ``is_read_later``:
    whether the operand is read after the exchange."""
    (move,) = step.moves
    src, dst = values.bytes_of(move.src), values.bytes_of(move.dst)
    return max(src, dst) if is_read_later else abs(src - dst)


def _end_bytes(plan: PlanRecord, stage: int, gradients: int) -> int:
    """Return the bytes that exist at the end of the step in addition to ``gradients``: buffers of
    reductions and gathers, or casts of gradients and the new values and state of owners."""
    buckets = [  # gradients are gone when updated parameters are gathered
        _buffer_bytes(step) - (gradients if step.in_place else 0)
        for step in plan.steps
        if isinstance(step, Redistribute) and step.bucket
        if step.stage == stage and not step.in_microbatch
    ]
    specs = plan.value_specs()
    updates = on_fullest_rank(updates_of(plan.steps, [stage]))
    casts = (_cast_bytes(s, specs[s.gradient].dtype) for s in updates)
    reductions = sorted(_buffer_bytes(step) for step in _early_reductions(plan, stage))
    in_flight = sum(reductions[-MAX_REDUCTIONS:])
    return max(*buckets, in_flight, sum(casts) + sum(s.new_bytes for s in updates), 0)


def base_of(plan: PlanRecord, name: str, step: Step) -> str | None:
    """Return the value whose storage the result ``name`` uses; None if it has its own storage."""
    return plan.standing.get(name) or step.viewed


def _peaks(
    new_storages: Sequence[Sequence[str]],
    new_gradients: Sequence[int],
    pieces: Sequence[int],
    reductions: Sequence[int],
    values: _StageValues,
    permanent: frozenset[str],
    first_backward: int,
) -> tuple[int, int, int, int]:
    """Return `saved`, `peak`, `above` and `last` of `_Activations`. For each step of a microbatch:
    ``new_storages`` are the storages that it creates, ``new_gradients`` the bytes of gradients
    among them, ``pieces`` the bytes that exist only during the step, and ``reductions`` the bytes
    of reductions in flight in the last microbatch."""
    freed: dict[int, list[str]] = {}  # index of a step -> the storages that it uses last
    for name, at in values.last_use.items():
        if name not in permanent:
            freed.setdefault(at, []).append(name)
    live = peak = saved = 0
    missing = -sum(new_gradients)  # minus the bytes of gradients that do not exist yet
    above = last = missing
    for at, names in enumerate(new_storages):
        if at == first_backward:
            saved = live
        live += sum(values.nbytes[name] for name in names if name not in permanent)
        missing += new_gradients[at]
        during = live + pieces[at]
        peak, above = max(peak, during), max(above, during + missing)
        last = max(last, during + missing + reductions[at])
        live -= sum(values.nbytes[name] for name in freed.get(at, ()))
    return saved, peak, above, last


def _results_on(step: Step, stage: int) -> list[tuple[str, TensorSpec]]:
    """Return (value, spec) of each result that the step defines on the stage."""
    return [(name, spec) for at, name, spec in step.gives_as() if at == stage]
