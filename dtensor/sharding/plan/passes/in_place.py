"""The pass that decides which writes to state happen in its own storage.

    k1 = index_copy(k, 2, i, x)     the buffer k becomes k1, and nothing reads k itself any more:
    y = attention(q, k1, ...)       x is written into k at i, and attention reads k

The pass follows the new contents of a buffer (or of an argument that is changed) back to the old: a
chain of views, of ops that change some elements (ops/in_place.py), and of ops that put a changed
view back, for which no code is needed. Then it walks the program once, noting the version of the
storage that each value is. There are three results, which the plan prints:

- *in place*, at the chain's own place: other reads of it in the run see only its final contents,
  and the write is replayable;
- *at the commit*: nothing reads the new contents, so the chain runs after all ranks agree;
- *copied*: otherwise the new contents are computed separately, and copied over the old ones at the
  commit.

A write is replayable if two executions have the effect of one: it overwrites; its position follows
from arguments, and from state that no such write changes, without a message (a message of a rank
that failed is zeros). And the run reads none of the old contents, so a second run reads the same as
the first, whatever the first has left written.

Invariants: steps are unchanged. With microbatches everything is copied, and so is a parameter that
is read after it was written. Not here: the code.
"""

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
"""A view's begin in a contiguous whole, its shape, its strides."""

_PUT_BACK = {
    aten.copy.default: aten.alias.default,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""Ops that put a view back, and the view."""


def in_place(plan: PlanRecord) -> PlanRecord:
    """The plan with a `StateWrite` for each output that is a mutation, on each stage."""
    inputs = {
        item.label: item for item in plan.inputs if item.kind in ("parameter", "buffer", "argument")
    }
    producers = {name: step for step in plan.steps for name in step.gives}
    writes = [
        _Storage(plan, inputs[str(o.of)], stage, value, producers).judged()
        for o in plan.outputs
        if o.kind == "mutation"
        for stage, value in o.values
    ]
    changed = {write.name for write in writes}
    made_values = _Made(producers)
    while True:  # a write that is demoted may make another one safe, never unsafe
        written = [write.name for write in writes if write.how == "in place"]
        unsafe = next(
            (w for w in writes if w.how == "in place" and not made_values.safe(w, written)), None
        )
        if unsafe is None:
            break
        why = "its position depends on a message, or on another write before the commit"
        writes[writes.index(unsafe)] = _copied(plan, unsafe, why)
    for number, write in enumerate(writes):
        others = changed - {*written, write.name}
        if write.how == "at the commit" and made_values.given(write) & others:
            write = _copied(plan, write, "it reads another value that changes at the commit")
        if write.how == "copied":
            write = replace(write, shares=bool(roots(write.value, producers) & changed))
        writes[number] = write
    return replace(plan, state_writes=tuple(writes))


def _copied(plan: PlanRecord, write: StateWrite, why: str) -> StateWrite:
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
    """A value that is (a view of) the storage, as of one version of it.

    places: of the whole and of each view from there.
    """

    version: int
    places: tuple[Place, ...]
    seen: torch.Tensor  # on the meta device

    @property
    def place(self) -> Place:
        return self.places[-1]


class _Kept(Exception):
    """The reason why it is not written in place."""


@dataclass(slots=True)
class _Storage:
    """The storage of one input on one stage, and the decision about it."""

    plan: PlanRecord
    item: PlannedInput
    stage: int
    value: str
    producers: dict[str, Step]
    chain: dict[str, int | None] = field(default_factory=dict[str, int | None])
    # by result, of the steps from the old contents to the new: the operand that is the storage
    aliases: dict[str, _Alias] = field(default_factory=dict[str, _Alias])
    written: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    places: list[tuple[Place, ...]] = field(default_factory=list[tuple[Place, ...]])
    # by version, where the write before it was made
    read: set[int] = field(default_factory=set[int])  # the versions that are read
    copied: int = 0  # bytes per rank of its parts that are sent or returned

    def judged(self) -> StateWrite:
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
            self._follow()
            return self._ended(write)
        except _Kept as error:
            return _copied(self.plan, write, str(error))

    def _follow(self) -> None:
        item = self.item
        if self.plan.num_microbatches > 1:
            raise _Kept("it is a sum over microbatches")
        if len(item.stages) > 1 or self.stage not in item.stages:
            raise _Kept("several stages have it")
        if item.held != item.spec or not self._traced(self.value):
            raise _Kept("no op writes to the old contents under their placement")
        shape, dtype = item.spec.shape, item.spec.dtype
        storage = torch.empty(shape, dtype=dtype, device="meta")
        self.aliases[item.name] = _Alias(0, (_place(storage),), storage)
        for step in self.plan.steps:
            self._step(step)
        for output in self.plan.outputs:
            for _, value in output.values:
                if value in self.aliases and (output.kind, output.of) != ("mutation", item.label):
                    self.read.add(self.aliases[value].version)
                    self._copy(value)

    def _traced(self, value: str) -> bool:
        """Whether the value is the storage, changed by a chain of writes; which is then known."""
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
            known = _is_view(step) and self._traced(step.operands[0])
            if known:
                self.chain[value] = None
            return known
        for base in op_writes.base:
            held = step.operand_specs[base]
            fits = (held.shape, held.dtype) == (spec.shape, spec.dtype) and alike(held, spec)
            if fits and self._traced(step.operands[base]):
                if step.op.call.target in _PUT_BACK and _puts_whole(step):
                    self._traced(step.operands[1])
                self.chain[value] = base
                return True
        return False

    def _step(self, step: Step) -> None:
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
            seen = _viewed(step.op.call, alias.seen)
            if seen is not None:
                places = (*alias.places, _place(seen))
                self.aliases[name] = _Alias(alias.version, places, seen)
                return
            if name in self.chain:
                raise _Kept("a view of it is a copy")
        for value in reads:
            self.read.add(self.aliases[value].version)
            if not isinstance(step, Compute):
                self._copy(value)

    def _copy(self, value: str) -> None:
        self.copied += self.plan.value_specs()[value].max_local_nbytes

    def _puts_back(self, value: str) -> bool:
        """Whether the op puts back a view that the chain has changed: no code is needed."""
        step = self.producers[value]
        assert isinstance(step, Compute)
        puts = step.op.call.target in _PUT_BACK
        return puts and self.chain[value] is not None and step.operands[1] in self.chain

    def _write(self, step: Compute, name: str, base: int) -> None:
        alias = self.aliases[step.operands[base]]
        now = len(self.written)
        if self._puts_back(name):
            source = self.aliases[step.operands[1]]
            seen = _viewed(_as_view(step.op.call), alias.seen)
            assert seen is not None
            since = self.places[alias.version :]
            fits = source.version == now and source.place == _place(seen)
            if not (fits and all(source.place in places for places in since)):
                raise _Kept("a view of it is put back elsewhere")
            self.aliases[name] = replace(alias, version=now)
            return
        if alias.version != now:
            raise _Kept("it is written from the contents before another write")
        others = [v for at, v in enumerate(step.operands) if at != base]
        if any(v in self.aliases for v in others):
            raise _Kept("the written value is a view of it")
        self.written.append((name, base))
        self.places.append(alias.places)
        self.aliases[name] = replace(alias, version=now + 1)

    def _ended(self, write: StateWrite) -> StateWrite:
        last, end = len(self.written), self.aliases[self.value]
        if not self.written or end.version != last or end.place != end.places[0]:
            raise _Kept("no op writes to the old contents")
        later = frozenset(v for v, a in self.aliases.items() if a.version)
        settled = tuple(v for v in self.chain if v in later and self._puts_back(v))
        write = replace(write, writes=tuple(self.written), settled=settled, standing=later)
        if self.read <= {0}:
            return replace(write, how="at the commit", skipped=later)
        if self.read != {last}:
            raise _Kept("the old contents are read too")
        if self.item.kind == "parameter":
            raise _Kept("it is a parameter, which a failed call must not change")
        if not all(self._known(name).overwrites for name, _ in self.written):
            raise _Kept(
                "the written value depends on the old contents, and is read in the same run"
            )
        standing = frozenset(self.aliases) - {self.item.name}
        skipped = standing - {name for name, _ in self.written}
        return replace(
            write, how="in place", standing=standing, skipped=skipped, nbytes=self.copied
        )

    def _known(self, name: str) -> OpWrites:
        step = self.producers[name]
        assert isinstance(step, Compute)
        op_writes = writes_of(step.op.call)
        assert op_writes is not None
        return op_writes


# -- views -----------------------------------------------------------------------------------------


def _puts_whole(step: Compute) -> bool:
    """Whether the value that is put back has the shape, dtype and placement of its target."""
    base, source = step.op.call.operands
    target, held = step.op.call.target, step.operand_specs
    if target is aten.copy.default and not (base == source and alike(held[0], held[1])):
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


def _viewed(call: OpCall, storage: Any) -> torch.Tensor | None:
    """The view of a meta tensor; None where it is a copy."""
    args = [storage if isinstance(a, Operand) else a for a in call.args]
    seen: Any = call.target(*args, **dict(call.kwargs))
    return seen if seen.untyped_storage()._cdata == storage.untyped_storage()._cdata else None


def _as_view(call: OpCall) -> OpCall:
    """The view that the call puts back."""
    return replace(call, target=_PUT_BACK[call.target], args=(call.args[0], *call.args[2:]))


def _place(x: torch.Tensor) -> Place:
    return int(x.storage_offset()), tuple(x.shape), x.stride()


# -- inputs of values -----------------------------------------------------------------------


@dataclass(slots=True)
class _Made:
    producers: dict[str, Step]

    def safe(self, write: StateWrite, written: Sequence[str]) -> bool:
        """Whether its positions follow without a message, and from nothing in ``written``."""
        todo = [v for name, _ in write.writes for v in self._positions(name)]
        done: set[str] = set()
        while todo:
            value = todo.pop()
            if value in done:
                continue
            done.add(value)
            step = self.producers.get(value)
            if value in written:
                return False
            match step:
                case None | Compute():
                    pass
                case Redistribute() if step.is_free:
                    pass
                case _:
                    return False
            todo += step.reads if step is not None else ()
        return True

    def given(self, write: StateWrite) -> set[str]:
        """The inputs whose storage the written values, and the positions, may share."""
        storages: set[str] = set()
        for name, base in write.writes:
            others = (v for at, v in enumerate(self.producers[name].reads) if at != base)
            storages |= {root for v in others for root in roots(v, self.producers)}
        return storages

    def _positions(self, name: str) -> Iterator[str]:
        step = self.producers[name]
        assert isinstance(step, Compute)
        op_writes = writes_of(step.op.call)
        assert op_writes is not None
        for at in op_writes.positions:
            yield step.operands[at]
