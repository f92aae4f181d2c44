"""State that a program changes: written where the program writes it, or at the commit.

    k1 = index_copy(k, 2, i, x)           aten_index_copy__default(k, 2, i, x)
    y = mul(k1, q)                        y = mul(k, q)

The plan has decided which writes are in place (sharding/plan/passes/in_place.py); here they become
code. A value that is (a view of) state has no name in the rank's table: readers read the state,
through its views, which are made anew in each call. So views of such state never leave a call.
Other users of such a value (a message, an output) get a copy.

A write at the commit is checked at its place in the program: an index out of range must fail while
the run can be undone.

Invariants: those of the plan. A program that returns gradients changes no state; if each op is
checked (`detect_nan`), values written at the commit are computed before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.private_torch import OpOverload, is_alias_of
from dtensor.runtime.lower.code import COPIES, quick
from dtensor.runtime.lower.rank_builder import LocalCode, RankBuilder
from dtensor.sharding.ops.call import OpCall
from dtensor.sharding.plan.record import StateWrite
from dtensor.sharding.plan.steps import Compute, roots


@dataclass(slots=True)
class StateWrites:
    """The writes of one rank. ``here``: at the program's own place; ``late``: in place, at the
    commit; ``copied``: computed before the commit, and written then."""

    b: RankBuilder
    here: list[StateWrite] = field(default_factory=list[StateWrite])
    late: list[StateWrite] = field(default_factory=list[StateWrite])
    copied: list[StateWrite] = field(default_factory=list[StateWrite])
    standing: set[str] = field(default_factory=set[str])
    bases: dict[str, int] = field(default_factory=dict[str, int])
    settled: frozenset[str] = frozenset()  # values that put back a changed view

    def __post_init__(self) -> None:
        b = self.b
        if b.roles.gradients or not b.plan.state_writes:
            return
        for write in b.plan.state_writes:
            if write.stage in b.stages:
                late = write.how == "at the commit" and not b.roles.detect_nan
                lists = self.here if write.how == "in place" else self.late if late else self.copied
                lists.append(write)
        self.standing = {value for write in self.here for value in write.standing}
        written = (*self.here, *self.late)
        self.bases = {name: base for write in written for name, base in write.writes}
        self.settled = frozenset(name for write in written for name in write.settled)

    @property
    def changed(self) -> set[str]:
        """The inputs that change."""
        return {write.name for write in (*self.here, *self.late, *self.copied)}

    def arguments(self) -> tuple[str, ...]:
        """The inputs that outlive the run, since it changes them."""
        kinds = {item.name: item.kind for item in self.b.plan.inputs}
        return tuple(sorted(name for name in self.changed if kinds[name] == "argument"))

    def replayable(self) -> tuple[str, ...]:
        """The inputs that are written before the commit point."""
        return tuple(self.b.value(write.name) for write in self.here)

    def step(self, step: Compute) -> bool:
        """Whether the step is a write, or needs no code; a write gets its code."""
        name = step.results[0]
        if name is None:
            return False
        for write in self.here:
            if name in self.bases and name in write.standing:
                self._write(step, write.name)
                return True
            if name in write.skipped:
                return True
        for write in self.late:
            if name in write.skipped:
                self._check(step)
                return True
        return False

    def read(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of these plan values in the open segment; views of state are made in it."""
        if self.standing.isdisjoint(names):
            return tuple(names)
        return tuple(self._at(name) if name in self.standing else name for name in names)

    def own(self, values: Sequence[str]) -> None:
        """Copy values that are (views of) state into the table."""
        for value in (v for v in values if v in self.standing):
            code = self.b.segment().code
            source = self._at(value)
            self.standing.discard(value)
            code.line(f"{value} = {source}.clone()", [source], [value], op=COPIES)
            self.b.record(value, self.b.plan.value_specs()[value])

    def apart(self, step: Compute, code_names: Sequence[str]) -> None:
        """Ensure that the step's results are no views of written state."""
        if not self.standing.isdisjoint(step.may_share):
            read = [n for n, v in zip(code_names, step.operands, strict=True) if v in self.standing]
            for name in step.gives:
                self.b.segment().code.apply(apart, [name, *read], [name])

    def shares(self, value: str) -> bool:
        """Whether a value may be (a view of) state that changes or has changed."""
        storages = roots(value, self.b.shared.producers)
        return not storages.isdisjoint(self.changed | self.standing)

    def at_commit(self) -> None:
        """The writes for which all ranks must agree. Values that are the old contents of other
        changed state are copied before the first write."""
        b = self.b
        if not (self.late or self.copied):
            return
        b.close()
        segment = b.segment()
        new: dict[str, str] = {}
        for write in self.copied:
            (value,) = self.read([write.value])
            new[write.name] = value
            if write.shares or write.how == "at the commit":
                new[write.name] = f"{write.value}_new"
                text = f"{write.value}_new = {value}.clone()"
                segment.code.line(text, [value], [new[write.name]], op=COPIES)
        for write in self.late:
            for name, _ in write.writes:
                step = self.b.shared.producers[name]
                assert isinstance(step, Compute)
                self._write(step, write.name)
        for write in self.copied:
            reads = [write.name, new[write.name]]
            segment.code.line(f"{write.name}.copy_({new[write.name]})", reads, (), op=COPIES)
            _writes(segment, write.name)
        b.close()

    def _write(self, step: Compute, state: str) -> None:
        from dtensor.sharding.ops.in_place import check_of, in_place  # few programs change state

        b, name = self.b, step.results[0]
        assert name is not None
        base, source = self.bases[name], _line_of(step)
        call = b.shared.local_call(step, b.here)
        names = self._operands(step, base)
        self._line(check_of(call) if b.shared.device.type == "cuda" else None, call, names, source)
        changes = in_place(call, base)
        self._line(changes.target, changes, names, source)
        _writes(b.segment(), state)

    def _check(self, step: Compute) -> None:
        from dtensor.sharding.ops.in_place import check_of

        name = step.results[0]
        if name in self.bases:
            call = self.b.shared.local_call(step, self.b.here)
            if check_of(call) is not None:
                names = self._operands(step, self.bases[name])
                self._line(check_of(call), call, names, _line_of(step))

    def _line(self, function: Any, call: OpCall, names: Sequence[str], source: str | None) -> None:
        if function is None:
            return
        code = self.b.segment().code
        args = [code.literal(a, names) for a in call.args]
        args += [f"{k}={code.literal(v, names)}" for k, v in call.kwargs]
        quickly = quick(call, code.device) if function is call.target else function
        called = code.bind(_name_of(function), quickly)
        code.line(f"{called}({', '.join(args)})", names, (), source, called=called)

    def _operands(self, step: Compute, base: int) -> list[str]:
        return [
            self._at(v) if at == base else self.read([v])[0] for at, v in enumerate(step.operands)
        ]

    def _at(self, value: str) -> str:
        """The code's name of a value that is (a view of) the present state."""
        step = self.b.shared.producers.get(value)
        if step is None:
            return value
        assert isinstance(step, Compute)
        if value in self.bases:
            return self._at(step.operands[self.bases[value]])
        if value in self.settled:
            return self._at(step.operands[0])
        code = self.b.segment().code
        if value not in code.defined:
            operand = self._at(step.operands[0])
            call = self.b.shared.local_call(step, self.b.here)
            code.call(call, [operand], [value], _line_of(step), list)
        return value


def _writes(segment: LocalCode, name: str) -> None:
    segment.writes = tuple(dict.fromkeys((*segment.writes, name)))


def _line_of(step: Compute) -> str | None:
    return f"{step.op.source}: {step.op.source_text}" if step.op.source else None


def _name_of(function: Any) -> str:
    """A function's name in code."""
    is_op = isinstance(function, OpOverload)
    return str(function).replace(".", "_") if is_op else function.__name__


# -- functions that generated code calls
# ---------------------------------------------------------------------


def apart(x: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
    """x, or a copy if it shares its storage with one of the others."""
    for other in state:
        if is_alias_of(x, other):
            return x.clone()
    return x
