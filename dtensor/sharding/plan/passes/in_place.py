"""The pass that decides how changed state (buffers, arguments) gets its new contents.

    k1 = index_copy(k, 2, i, x)     nothing else reads the buffer k, so x is written into k itself
    y = attention(q, k1, ...)       attention reads k

- *in place*: ops write into the storage during the program. All reads see its final contents, and
  the write is replayable: a second execution after a failure has the same effect, because it
  overwrites, at a position that depends on no message and on no state written in place.
- *at the commit*: nothing reads the new contents, so the writing ops run after all ranks agree.
- *copied*: in all other cases. The new contents are computed separately and copied at the commit.

The steps of the plan are not changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.ops.in_place import OpWrites, writes_of
from dtensor.sharding.plan.record import PlannedInput, PlanRecord, StateWrite
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, roots
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.spec import alike

aten: Any = torch.ops.aten

Place = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The storage offset, shape and strides of a view."""

_PUT_BACK = {
    aten.copy.default: aten.alias.default,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""Ops that put a changed view back into its base, with the op that makes the view."""


def in_place(plan: PlanRecord) -> PlanRecord:
    """Return the plan with a `StateWrite` for each mutation on each of its stages."""
    inputs = {
        item.label: item for item in plan.inputs if item.kind in ("parameter", "buffer", "argument")
    }
    producers = {name: step for step in plan.steps for name in step.gives}
    writes = [
        _StorageWrites(plan, inputs[str(o.of)], stage, value, producers).decide()
        for o in plan.outputs
        if o.kind == "mutation"
        for stage, value in o.values
    ]
    changed = {write.name for write in writes}
    dependencies = _Dependencies(producers)
    while True:  # copying one write may make another write replayable, never the opposite
        in_place_names = [write.name for write in writes if write.how == "in place"]
        unsafe = next(
            (
                w
                for w in writes
                if w.how == "in place" and not dependencies.positions_fixed(w, in_place_names)
            ),
            None,
        )
        if unsafe is None:
            break
        why = "its position depends on a message, or on another write before the commit"
        writes[writes.index(unsafe)] = _copy_at_commit(plan, unsafe, why)
    for number, write in enumerate(writes):
        other_inputs = changed - {*in_place_names, write.name}
        if write.how == "at the commit" and dependencies.roots_of(write) & other_inputs:
            write = _copy_at_commit(
                plan, write, "it reads another value that changes at the commit"
            )
        if write.how == "copied":
            write = replace(write, shares=bool(roots(write.value, producers) & changed))
        writes[number] = write
    return replace(plan, state_writes=tuple(writes))


def _copy_at_commit(plan: PlanRecord, write: StateWrite, why: str) -> StateWrite:
    """Return the write as a copy at the commit, for the reason ``why``."""
    item = next(i for i in plan.inputs if i.name == write.name)
    return StateWrite(
        of=write.of,
        name=write.name,
        stage=write.stage,
        how="copied",
        why=why,
        value=write.value,
        nbytes=item.held.max_local_nbytes,
        source=write.source,
    )


# -- one storage -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Alias:
    """A value that shares the storage.

    version: how many writes came before it. places: the places of the full tensor and of each view
    in the chain of views that leads to the value. view: the value as a view on the meta device.
    """

    version: int
    places: tuple[Place, ...]
    view: torch.Tensor

    @property
    def place(self) -> Place:
        return self.places[-1]


class _NotInPlace(Exception):
    """The reason why the new contents must be copied."""


@dataclass(slots=True)
class _StorageWrites:
    """The writes to the storage of one input on one stage. ``value``: its new contents.

    chain: the results of the steps that lead from the old contents to the new: views (None), and
    writes, with the index of the operand that is the storage.
    written: the ops that write, as in `StateWrite.writes`; places: for each, where it writes.
    versions_read: the versions of the storage that steps and outputs read.
    copied_bytes: bytes per rank of its parts that are sent or returned.
    """

    plan: PlanRecord
    item: PlannedInput
    stage: int
    value: str
    producers: dict[str, Step]
    chain: dict[str, int | None] = field(default_factory=dict[str, int | None])
    aliases: dict[str, _Alias] = field(default_factory=dict[str, _Alias])
    written: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    places: list[tuple[Place, ...]] = field(default_factory=list[tuple[Place, ...]])
    versions_read: set[int] = field(default_factory=set[int])
    copied_bytes: int = 0

    def decide(self) -> StateWrite:
        """Return how the input gets its new contents."""
        producer = self.producers.get(self.value)
        source = producer.op.source if isinstance(producer, Compute) else ""
        write = StateWrite(
            of=self.item.label,
            name=self.item.name,
            stage=self.stage,
            how="copied",
            value=self.value,
            source=source,
        )
        try:
            self._walk()
            return self._decision(write)
        except _NotInPlace as error:
            return _copy_at_commit(self.plan, write, str(error))

    def _walk(self) -> None:
        """Find the chain, then walk the plan and record versions, writes and reads. Raises
        _NotInPlace if the new contents must be copied."""
        item = self.item
        if self.plan.num_microbatches > 1:
            raise _NotInPlace("it is a sum over microbatches")
        if len(item.stages) > 1 or self.stage not in item.stages:
            raise _NotInPlace("several stages have it")
        if item.held != item.spec or not self._find_chain(self.value):
            raise _NotInPlace("no op writes to the old contents under their placement")
        shape, dtype = item.spec.shape, item.spec.dtype
        storage = torch.empty(shape, dtype=dtype, device="meta")
        self.aliases[item.name] = _Alias(0, (_place(storage),), storage)
        for step in self.plan.steps:
            self._visit(step)
        for output in self.plan.outputs:
            for _, value in output.values:
                if value in self.aliases and (output.kind, output.of) != ("mutation", item.label):
                    self.versions_read.add(self.aliases[value].version)
                    self._count_copy(value)

    def _find_chain(self, value: str) -> bool:
        """Return whether views and writes lead from the storage to the value; record them in
        ``chain``."""
        step = self.producers.get(value)
        if value == self.item.name or value in self.chain:
            return True
        if not isinstance(step, Compute) or len(step.results) != 1 or step.stage != self.stage:
            return False
        spec = step.result_specs[0]
        assert spec is not None
        if any(isinstance(p, Partial) for p in spec.placements):
            return False
        op_writes = writes_of(step.op.call)
        if op_writes is None:
            is_view = _is_view(step) and self._find_chain(step.operands[0])
            if is_view:
                self.chain[value] = None
            return is_view
        for base in op_writes.base:
            old = step.operand_specs[base]
            fits = (old.shape, old.dtype) == (spec.shape, spec.dtype) and alike(old, spec)
            if fits and self._find_chain(step.operands[base]):
                if step.op.call.target in _PUT_BACK and _keeps_dtype_and_shape(step):
                    self._find_chain(step.operands[1])
                self.chain[value] = base
                return True
        return False

    def _visit(self, step: Step) -> None:
        """Record the aliases and the write that the step makes, and the versions that it reads."""
        reads = [name for name in step.reads if name in self.aliases]
        if not reads:
            return
        name = step.results[0] if isinstance(step, Compute) else None
        if isinstance(step, Compute) and name is not None and name in self.chain:
            base = self.chain[name]
            if base is not None:
                self._write(step, name, base)
                return
        if isinstance(step, Compute) and name is not None and _is_view(step):
            alias = self.aliases[step.operands[0]]
            view = _view(step.op.call, alias.view)
            if view is not None:
                places = (*alias.places, _place(view))
                self.aliases[name] = _Alias(alias.version, places, view)
                return
            if name in self.chain:
                raise _NotInPlace("a view of it is a copy")
        for value in reads:
            self.versions_read.add(self.aliases[value].version)
            if not isinstance(step, Compute):
                self._count_copy(value)

    def _count_copy(self, value: str) -> None:
        """Count the bytes of a value that is sent or returned, and so copied from the storage."""
        self.copied_bytes += self.plan.value_specs()[value].max_local_nbytes

    def _puts_back(self, value: str) -> bool:
        """Return whether the op that makes ``value`` puts back a view that the chain has changed.
        The view shares the storage, so no code is needed for this op."""
        step = self.producers[value]
        assert isinstance(step, Compute)
        is_put = step.op.call.target in _PUT_BACK
        return is_put and self.chain[value] is not None and step.operands[1] in self.chain

    def _write(self, step: Compute, name: str, base: int) -> None:
        """Record a write of the chain, or check that it puts a view back where it came from. Raises
        _NotInPlace if the write would differ from the program's meaning."""
        alias = self.aliases[step.operands[base]]
        version = len(self.written)
        if self._puts_back(name):
            source = self.aliases[step.operands[1]]
            view = _view(_view_call(step.op.call), alias.view)
            assert view is not None
            later_places = self.places[alias.version :]
            fits = source.version == version and source.place == _place(view)
            if not (fits and all(source.place in places for places in later_places)):
                raise _NotInPlace("a view of it is put back elsewhere")
            self.aliases[name] = replace(alias, version=version)
            return
        if alias.version != version:
            raise _NotInPlace("it is written from the contents before another write")
        other_operands = [v for at, v in enumerate(step.operands) if at != base]
        if any(v in self.aliases for v in other_operands):
            raise _NotInPlace("the written value is a view of it")
        self.written.append((name, base))
        self.places.append(alias.places)
        self.aliases[name] = replace(alias, version=version + 1)

    def _decision(self, write: StateWrite) -> StateWrite:
        """Return the write in place or at the commit. Raises _NotInPlace if it must be copied."""
        last, end = len(self.written), self.aliases[self.value]
        if not self.written or end.version != last or end.place != end.places[0]:
            raise _NotInPlace("no op writes to the old contents")
        later = frozenset(v for v, a in self.aliases.items() if a.version)
        settled = tuple(v for v in self.chain if v in later and self._puts_back(v))
        write = replace(write, writes=tuple(self.written), settled=settled, standing=later)
        if self.versions_read <= {0}:
            return replace(write, how="at the commit", skipped=later)
        if self.versions_read != {last}:
            raise _NotInPlace("the old contents are read too")
        if self.item.kind == "parameter":
            raise _NotInPlace("it is a parameter, which a failed call must not change")
        if not all(self._op_writes(name).overwrites for name, _ in self.written):
            raise _NotInPlace(
                "the written value depends on the old contents, and is read in the same run"
            )
        standing = frozenset(self.aliases) - {self.item.name}
        skipped = standing - {name for name, _ in self.written}
        return replace(
            write, how="in place", standing=standing, skipped=skipped, nbytes=self.copied_bytes
        )

    def _op_writes(self, name: str) -> OpWrites:
        """Return how the op that makes the value ``name`` changes an operand."""
        step = self.producers[name]
        assert isinstance(step, Compute)
        op_writes = writes_of(step.op.call)
        assert op_writes is not None
        return op_writes


# -- views -----------------------------------------------------------------------------------------


def _keeps_dtype_and_shape(step: Compute) -> bool:
    """Return whether an op that puts a view back neither casts nor broadcasts it."""
    base, source = step.op.call.operands
    target, specs = step.op.call.target, step.operand_specs
    if target is aten.copy.default and not (base == source and alike(specs[0], specs[1])):
        return False
    return base.dtype == source.dtype


_VIEWS = frozenset(
    f"aten.{op}"
    for op in (
        *("alias", "detach", "expand", "narrow", "permute", "reshape", "select", "slice"),
        *("squeeze", "t", "transpose", "unsqueeze", "view"),
    )
)


def _is_view(step: Compute) -> bool:
    return step.op.call.name.rpartition(".")[0] in _VIEWS


def _view(call: OpCall, base: Any) -> torch.Tensor | None:
    """Return the view of the meta tensor ``base`` that the call makes; None if it makes a copy."""
    args = [base if isinstance(a, Operand) else a for a in call.args]
    view: Any = call.target(*args, **dict(call.kwargs))
    return view if view.untyped_storage()._cdata == base.untyped_storage()._cdata else None


def _view_call(call: OpCall) -> OpCall:
    """Return the call that makes the view which ``call`` puts back."""
    return replace(call, target=_PUT_BACK[call.target], args=(call.args[0], *call.args[2:]))


def _place(x: torch.Tensor) -> Place:
    """Return the place of a view in its storage: offset, shape and strides."""
    return int(x.storage_offset()), tuple(x.shape), x.stride()


# -- dependencies of writes -----------------------------------------------------------------


@dataclass(slots=True)
class _Dependencies:
    """Finds the values that the positions and written values of writes depend on."""

    producers: dict[str, Step]

    def positions_fixed(self, write: StateWrite, in_place_names: Sequence[str]) -> bool:
        """Return whether the positions of the write depend on no message and on none of the inputs
        ``in_place_names``, which are written in place."""
        pending = [v for name, _ in write.writes for v in self._positions(name)]
        visited: set[str] = set()
        while pending:
            value = pending.pop()
            if value in visited:
                continue
            visited.add(value)
            step = self.producers.get(value)
            if value in in_place_names:
                return False
            match step:
                case None | Compute():
                    pass
                case Redistribute() if step.is_free:
                    pass
                case _:
                    return False
            pending += step.reads if step is not None else ()
        return True

    def roots_of(self, write: StateWrite) -> set[str]:
        """Return the values whose storage the written values and the positions may share."""
        root_values: set[str] = set()
        for name, base in write.writes:
            other_operands = (v for at, v in enumerate(self.producers[name].reads) if at != base)
            root_values |= {root for v in other_operands for root in roots(v, self.producers)}
        return root_values

    def _positions(self, name: str) -> Iterator[str]:
        """Yield the operands that determine where the op ``name`` writes."""
        step = self.producers[name]
        assert isinstance(step, Compute)
        op_writes = writes_of(step.op.call)
        assert op_writes is not None
        for at in op_writes.positions:
            yield step.operands[at]
