"""Lowering of writes to state: in place where the program writes, or at the commit point.

    k1 = index_copy(k, 2, i, x)           aten_index_copy__default(k, 2, i, x)
    y = mul(k1, q)                        y = mul(k, q)

The plan decides which writes are in place (sharding/plan/passes/in_place.py). A value that is state
or a view of it has no name in the rank's table: each Call that reads it recomputes the view, and a
message or an output gets a copy. A write at the commit is checked at its place in the program,
because an index out of range must fail while the run can still be undone. A program that returns
gradients changes no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.private_torch import OpOverload, is_alias_of
from dtensor.runtime.lower.code import COPIES, quick
from dtensor.runtime.lower.rank_builder import LocalCode, RankBuilder, user_line
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.ops.in_place import in_place, index_check, write_unless
from dtensor.sharding.plan.record import StateWrite
from dtensor.sharding.plan.steps import Compute, roots
from dtensor.sharding.spec.shards import copy


@dataclass(slots=True)
class StateWrites:
    """The writes to state on one rank."""

    b: RankBuilder
    in_program: list[StateWrite] = field(default_factory=list[StateWrite])
    """Writes in place, where the program has them."""
    late: list[StateWrite] = field(default_factory=list[StateWrite])
    """Writes in place at the commit."""
    copied: list[StateWrite] = field(default_factory=list[StateWrite])
    """Writes whose value is computed before the commit and copied to the state at the commit."""
    state_views: set[str] = field(default_factory=set[str])
    """Values that are state, or views of it, and have no name in the table."""
    bases: dict[str, int] = field(default_factory=dict[str, int])
    """By value that an op writes in place, the operand that it is written to."""
    written_back: frozenset[str] = frozenset()
    """Values that copy a changed view back to its base; after a write in place, equal to it."""

    def __post_init__(self) -> None:
        """Sort the plan's writes of this rank's stages by how they are done; the program of
        gradients has none."""
        b = self.b
        if b.roles.gradients or not b.plan.state_writes:
            return
        for write in b.plan.state_writes:
            if write.stage in b.stages:
                late = write.how == "at the commit" and not b.roles.detect_nan
                in_program = write.how == "in place"
                writes = self.in_program if in_program else self.late if late else self.copied
                writes.append(write)
        self.state_views = {value for write in self.in_program for value in write.standing}
        written = (*self.in_program, *self.late)
        self.bases = {name: base for write in written for name, base in write.writes}
        self.written_back = frozenset(name for write in written for name in write.settled)

    @property
    def changed(self) -> set[str]:
        """The names of the plan inputs that the program changes."""
        return {write.name for write in (*self.in_program, *self.late, *self.copied)}

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments that the program changes; they must outlive the run."""
        kinds = {item.name: item.kind for item in self.b.plan.inputs}
        return tuple(sorted(name for name in self.changed if kinds[name] == "argument"))

    def replayable(self) -> tuple[str, ...]:
        """Return the inputs that are written before the commit point, so that a repeated run writes
        them again."""
        return tuple(self.b.value(write.name) for write in self.in_program)

    def emit(self, step: Compute) -> bool:
        """Emit the code of a step that is part of a write, which may be none. Return False if the
        step is an ordinary op."""
        name = step.results[0]
        if name is None:
            return False
        for write in self.in_program:
            if name in self.bases and name in write.standing:
                self._emit_write(step, write.name)
                return True
            if name in write.skipped:
                return True
        for write in self.late:
            if name in write.skipped:
                self._emit_check(step)
                return True
        return False

    def names_in_code(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of these plan values in the open segment. Views of state are computed in
        the segment first."""
        if self.state_views.isdisjoint(names):
            return tuple(names)
        return tuple(self._name_of(name) if name in self.state_views else name for name in names)

    def copy_views(self, values: Sequence[str]) -> None:
        """Copy each of the values that is state, or a view of it, into the table."""
        for value in (v for v in values if v in self.state_views):
            code = self.b.segment().code
            source = self._name_of(value)
            self.state_views.discard(value)
            code.line(f"{value} = {source}.clone()", [source], [value], op=COPIES)
            self.b.record(value, self.b.plan.value_specs()[value])

    def separate_results(self, step: Compute, code_names: Sequence[str]) -> None:
        """Emit copies of the step's results that are views of written state."""
        views = self.state_views
        if not views.isdisjoint(step.may_share):
            read = [n for n, v in zip(code_names, step.operands, strict=True) if v in views]
            for name in step.gives:
                self.b.segment().code.apply(apart, [name, *read], [name])

    def may_share(self, value: str) -> bool:
        """Whether a value may share its storage with state that the program changes."""
        storages = roots(value, self.b.shared.producers)
        return not storages.isdisjoint(self.changed | self.state_views)

    def emit_at_commit(self) -> None:
        """Emit the writes that may only run after all ranks have committed. A new value that is the
        old content of other changed state is copied before the first write."""
        b = self.b
        if not (self.late or self.copied):
            return
        b.close()
        segment = b.segment()
        new: dict[str, str] = {}
        for write in self.copied:
            (value,) = self.names_in_code([write.value])
            new[write.name] = value
            if write.shares or write.how == "at the commit":
                new[write.name] = f"{write.value}_new"
                text = f"{write.value}_new = {value}.clone()"
                segment.code.line(text, [value], [new[write.name]], op=COPIES)
        for write in self.late:
            for name, _ in write.writes:
                step = self.b.shared.producers[name]
                assert isinstance(step, Compute)
                self._emit_write(step, write.name)
        for write in self.copied:
            reads = [write.name, new[write.name]]
            if skipped := self._skipped():
                segment.code.apply(copy, [*reads, *skipped], ())
            else:
                segment.code.line(f"{write.name}.copy_({new[write.name]})", reads, (), op=COPIES)
            _add_write(segment, write.name)
        b.close()

    def _emit_write(self, step: Compute, state: str) -> None:
        """Emit the variant of the step's op that writes to the state in place."""
        b, name = self.b, step.results[0]
        assert name is not None
        base, source = self.bases[name], user_line(step)
        call = b.shared.local_call(step, b.coordinates)
        names: Sequence[str] = self._operands(step, base)
        skipped = self._skipped()
        if b.shared.deferred:
            given, names = names, self._checked(call, step, names)
            skipped = skipped or self._misplaced(given, names)
        elif b.shared.device.type == "cuda":
            self._emit_call(index_check(call), call, names, source)
        changes = in_place(call, base)
        self._emit_call(changes.target, changes, names, source, skipped, base)
        _add_write(b.segment(), state)

    def _skipped(self) -> tuple[str, ...]:
        """Return the name in code of a bool[] that is True if nothing may be written; () if the
        host decides whether the code runs."""
        predicate, code = self.b.predicate(), self.b.segment().code
        if not predicate:
            return ()
        if "rank_skipped" not in code.defined:
            code.line(f"rank_skipped = {predicate[0]} == 1", predicate, ["rank_skipped"])
        return ("rank_skipped",)

    def _misplaced(self, given: Sequence[str], checked: Sequence[str]) -> tuple[str, ...]:
        """Return the name in code of a bool[] that is True if a position of a write before the
        commit is wrong: the write would change another element of the state. () if there is
        nothing to check. ``given``, ``checked``: the operands before and after their checks."""
        code = self.b.segment().code
        for before, after in zip(given, checked, strict=True):
            if before != after:
                name = f"{after}_differs"
                if name not in code.defined:
                    code.line(f"{name} = ({before} != {after}).any()", [before, after], [name])
                return (name,)
        return ()

    def _emit_check(self, step: Compute) -> None:
        """Emit the check of the indices of a write that runs at the commit."""
        name = step.results[0]
        if name in self.bases:
            call = self.b.shared.local_call(step, self.b.coordinates)
            if index_check(call) is not None:
                names = self._operands(step, self.bases[name])
                if self.b.shared.deferred:
                    self._checked(call, step, names)
                else:
                    self._emit_call(index_check(call), call, names, user_line(step))

    def _checked(self, call: OpCall, step: Compute, names: Sequence[str]) -> tuple[str, ...]:
        """Emit the checks of a deferred program; see `add_checks`."""
        from dtensor.runtime.lower.checks import add_checks  # few programs change state on a GPU

        return add_checks(self.b, call, step, names, user_line(step))

    def _emit_call(
        self,
        function: Any,
        call: OpCall,
        names: Sequence[str],
        source: str | None,
        skipped: Sequence[str] = (),
        base: int = 0,
    ) -> None:
        """Emit a call of ``function`` with the arguments of ``call``; nothing if it is None.
        ``skipped``: see `_skipped`, for a write to the operand ``base``."""
        if function is None:
            return
        code = self.b.segment().code
        args = [code.literal(a, names) for a in call.args]
        args += [f"{k}={code.literal(v, names)}" for k, v in call.kwargs]
        bound = quick(call, code.device) if function is call.target else function
        called = code.bind(_function_name(function), bound)
        if skipped:
            args[:0] = [*skipped, called, code.bind("changed", function)]
            args.insert(3, str(call.args.index(Operand(base))))
            names, called = [*names, *skipped], code.bind("write_unless", write_unless)
        code.line(f"{called}({', '.join(args)})", names, (), source, called=called)

    def _operands(self, step: Compute, base: int) -> list[str]:
        """Return the names of the step's operands in code; operand ``base`` is the state itself."""
        return [
            self._name_of(value) if at == base else self.names_in_code([value])[0]
            for at, value in enumerate(step.operands)
        ]

    def _name_of(self, value: str) -> str:
        """Return the name in code of a value that is the current state or a view of it. The segment
        computes the view if it has not yet."""
        step = self.b.shared.producers.get(value)
        if step is None:
            return value
        assert isinstance(step, Compute)
        if value in self.bases:
            return self._name_of(step.operands[self.bases[value]])
        if value in self.written_back:
            return self._name_of(step.operands[0])
        code = self.b.segment().code
        if value not in code.defined:
            operand = self._name_of(step.operands[0])
            call = self.b.shared.local_call(step, self.b.coordinates)
            code.call(call, [operand], [value], user_line(step), list)
        return value


def _add_write(segment: LocalCode, name: str) -> None:
    segment.writes = tuple(dict.fromkeys((*segment.writes, name)))


def _function_name(function: Any) -> str:
    """Return the name of an op or function in code."""
    is_op = isinstance(function, OpOverload)
    return str(function).replace(".", "_") if is_op else getattr(function, "__name__", "check")


# -- functions that generated code calls -----------------------------------------------------------


def apart(x: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of it if it shares its storage with one of the other tensors."""
    for tensor in state:
        if is_alias_of(x, tensor):
            return x.clone()
    return x
