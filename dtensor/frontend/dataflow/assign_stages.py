"""Assign a stage to each op of a Dataflow, given the stages that hold the parameters.

    assign_stages(flow, {"embed.weight": (0,), "head.weight": (1,)}, num_stages=2)

A forward op runs on a stage that holds its parameters and is not earlier than its inputs' stages;
without parameters, on the latest of its inputs' stages, or on a later stage that holds its module's
parameters (the first op of a norm that is written out). A backward op runs where its forward op
ran; a sum of gradients runs where the gradients are. An op that depends only on the batch, only on
constants or on one parameter *floats*: it is repeated on each stage that uses it. The gradient of a
parameter that several stages use becomes one output per stage; these are summed later. The stages
of parameters come from api/model/stating/stages.py, transfers from sharding/plan/emit/values.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from dtensor.errors import PlanningError
from dtensor.sharding.ops.call import OpCall, Operand
from dtensor.sharding.plan.dataflow import Dataflow, Input, Op, Output

Stages = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a value: it is fixed on ``stage``, or (None) floats among ``allowed`` stages.

    ``allowed`` None means all stages. ``home`` is the latest stage of the arguments of a floating
    op that are fed to one stage only.
    """

    stage: int | None
    allowed: frozenset[int] | None = None
    home: int | None = None


def assign_stages(
    flow: Dataflow,
    stages: Stages,
    num_stages: int,
    homes: Stages | None = None,
    at: Mapping[str, int] | None = None,
) -> Dataflow:
    """Return ``flow`` with a stage for each op and input. Floating ops are repeated where used.

    Args:
        stages: the stages that hold a parameter or buffer, by its canonical name.
        homes: the stages that use it under one of its names, by that name. They determine the
            stages of the ops of a module. Default: ``stages``.
        at: the only stage to which an argument is fed, by its name. It is sent from there.

    Raises PlanningError if an op needs a parameter of an earlier stage than the op's inputs.
    """
    homes = stages if homes is None else homes
    return _Stager(flow, stages, homes, at or {}, num_stages).assign()


@dataclass(slots=True)
class _Stager:
    """The state of one assignment: its arguments, and the places so far."""

    flow: Dataflow
    stages: Stages
    homes: Stages
    at: Mapping[str, int]
    num_stages: int
    places: dict[str, _Place] = field(default_factory=dict)  # by value
    op_places: dict[str, _Place] = field(default_factory=dict)  # by op
    stage_of_seq: dict[int, int] = field(default_factory=dict)  # of forward ops
    stages_of_module: dict[str, set[int]] = field(default_factory=dict)  # by path; a cache

    def assign(self) -> Dataflow:
        """Place the inputs, then all ops in order, and repeat floating ops where they are used."""
        for item in self.flow.inputs:
            self.places[item.name] = self._input_place(item)
        for op in self.flow.ops:
            place = self._op_place(op)
            self.op_places[op.name] = place
            for name in op.results:
                if name is not None:
                    self.places[name] = place
            stages = place.allowed or () if place.stage is None else (place.stage,)
            if op.phase == "forward" and op.seq is not None and len(stages) == 1:
                (self.stage_of_seq[op.seq],) = stages
        return self._repeat_floating()

    def _input_place(self, item: Input) -> _Place:
        """Return where an input is: parameters on their stages, tangents on the last stage."""
        if item.kind in ("parameter", "buffer") and item.label in self.stages:
            return _Place(None, frozenset(self.stages[item.label]))
        if item.kind == "tangent":
            return _Place(self.num_stages - 1)
        return _Place(None, None, self.at.get(item.name))

    def _op_place(self, op: Op) -> _Place:
        """Return the place of an op: floating, or on a stage as the module docstring says."""
        operands = [self.places[name] for name in op.operands]
        fixed = [p.stage for p in operands if p.stage is not None]
        of_parameters = [p.allowed for p in operands if p.stage is None and p.allowed is not None]
        allowed = frozenset.intersection(*of_parameters) if of_parameters else None
        uses_batch = any(p.stage is None and p.allowed is None for p in operands)
        uses_batch = uses_batch and not self.flow.batch_values.isdisjoint(op.operands)
        if not fixed and (allowed is None or (allowed and not uses_batch)):
            homes = [p.home for p in operands if p.home is not None]
            return _Place(None, allowed, max(homes, default=None))
        # Parameters of several stages (a penalty on all) are combined on the latest stage.
        latest = max((*fixed, *map(min, of_parameters)), default=0)
        if op.phase == "backward":
            return _Place(self._backward_stage(op, fixed or [latest], allowed))
        home = self._module_stage(op.module)
        choices = [s for s in sorted(allowed or ()) if s >= latest]
        if of_parameters and not choices and home is not None and home < latest:
            raise self._parameter_too_early(op, latest)
        choices = choices or list(range(latest, self.num_stages))
        return _Place(home if home in choices else choices[0])

    def _module_stage(self, path: str) -> int | None:
        """Return the stage of the innermost module around ``path`` that has parameters. Return None
        if there is none, or if its parameters are on several stages."""
        while path:
            if path not in self.stages_of_module:
                inside = [s for n, s in self.homes.items() if n.startswith(f"{path}.")]
                self.stages_of_module[path] = {stage for stages in inside for stage in stages}
            if stages := self.stages_of_module[path]:
                return min(stages) if len(stages) == 1 else None
            path = path.rpartition(".")[0]
        return None

    def _backward_stage(self, op: Op, fixed: list[int], allowed: frozenset[int] | None) -> int:
        """Return the stage of a backward op: the stage of its forward op, else the earliest of its
        operands' stages."""
        stage = self.stage_of_seq.get(op.seq) if op.seq is not None else None
        if len(fixed) == len(op.operands) > 1 and op.call.name == "aten.add.Tensor":
            stage = None  # add gradients where they are, so that only their sum is sent
        if stage is not None:
            return stage
        stage = min(fixed)
        return min(allowed, key=lambda s: (abs(s - stage), s)) if allowed else stage

    def _parameter_too_early(self, op: Op, latest: int) -> PlanningError:
        lines = [f"{op.call.name} needs a parameter of an earlier stage than its inputs."]
        for name in op.operands:
            place = self.places[name]
            where = (
                f"stage {place.stage}"
                if place.stage is not None
                else (f"held by stages {sorted(place.allowed)}" if place.allowed else "any stage")
            )
            lines.append(f"  {name}: {self.flow.metas[name]}, {where}")
        if op.source:
            lines.append(f"  {op.source}: {op.source_text}")
        lines.append(f"fix: move the parameter to stage {latest} in stages=")
        return PlanningError("\n".join(lines))

    # -- floating ops are repeated where they are used -----------------------------------------

    def _repeat_floating(self) -> Dataflow:
        """Return the flow with stages, and with a copy of each floating op on each stage that needs
        it: "mul" on the first such stage, "mul_at2" on stage 2."""
        needed = self._needed_stages()
        outputs, new_ops, replaced_ops = self._outputs_by_stage(needed)
        renamed: dict[tuple[str, int], str] = {}  # (value, stage) -> its name there
        ops: list[Op] = []
        for op in (*self.flow.ops, *new_ops):
            if op.name in replaced_ops:
                continue
            place = self.op_places[op.name]
            stages = [place.stage] if place.stage is not None else sorted(needed[op.name])
            for number, stage in enumerate(stages):
                assert stage is not None
                suffix = "" if number == 0 else f"_at{stage}"
                results = tuple(None if n is None else n + suffix for n in op.results)
                for old, new in zip(op.results, results, strict=True):
                    if old is not None and new is not None:
                        renamed[old, stage] = new
                operands = tuple(renamed.get((n, self._origin(n, stage)), n) for n in op.operands)
                ops.append(
                    replace(
                        op,
                        name=op.name + suffix,
                        results=results,
                        operands=operands,
                        stage=stage,
                        copy_of=op.name if number else op.copy_of,
                    )
                )
        inputs = tuple(
            replace(item, stages=self._input_stages(item, needed.get(item.name, set())))
            for item in self.flow.inputs
        )
        renamed_outputs = tuple(
            replace(o, value=renamed.get((o.value, self._origin(o.value, o.stage)), o.value))
            for o in outputs
        )
        flow = replace(
            self.flow,
            inputs=inputs,
            ops=tuple(ops),
            outputs=renamed_outputs,
            num_stages=self.num_stages,
        )
        flow.verify()
        return flow

    def _origin(self, name: str, stage: int) -> int:
        """Return the stage from which ops on ``stage`` take a value: this stage if it can compute
        the value; else the nearest earlier stage that can, or the first later one."""
        place = self.places[name]
        if place.stage is not None or not place.allowed or stage in place.allowed:
            return stage
        return max((s for s in place.allowed if s < stage), default=min(place.allowed))

    def _input_stages(self, item: Input, needed: set[int]) -> tuple[int, ...]:
        if item.name in self.at:
            return (self.at[item.name],)
        return tuple(sorted(needed)) or (0,)

    def _needed_stages(self) -> dict[str, set[int]]:
        """Return the stages that need each floating op or input, by name.

        A floating value that is written to a buffer is needed on each stage that reads the buffer.
        Its ops may need further buffers there, so this is repeated until nothing changes.
        """
        written: dict[str, set[int]] = {}
        while True:
            needed = self._needed_stages_given(written)
            readers: dict[str, set[int]] = {}
            for output, item in self._mutations():
                if self.places[output.value].stage is None:
                    readers.setdefault(output.value, set()).update(needed.get(item.name, ()))
            if readers == written:
                return needed
            written = readers

    def _mutations(self) -> list[tuple[Output, Input]]:
        inputs = {item.label: item for item in self.flow.inputs}
        return [(o, inputs[str(o.of)]) for o in self.flow.outputs if o.kind == "mutation"]

    def _needed_stages_given(self, written: Mapping[str, set[int]]) -> dict[str, set[int]]:
        """Do one round of `_needed_stages`. ``written``: the stages that need each value which is
        written to a buffer."""
        needed: dict[str, set[int]] = {}
        for output in self.flow.outputs:
            place = self.places[output.value]
            if place.stage is None:
                stage = place.home
                if stage is None or stage not in (place.allowed or (stage,)):
                    stage = min(place.allowed) if place.allowed else self.num_stages - 1
                readers = written.get(output.value) if output.kind == "mutation" else None
                origins = {self._origin(output.value, s) for s in readers or {stage}}
                needed.setdefault(output.value, set()).update(origins)
        for op in reversed(self.flow.ops):
            place = self.op_places[op.name]
            stages: set[int] = set()
            if place.stage is not None:
                stages = {place.stage}
            else:
                for name in op.results:
                    stages |= needed.get(name or "", set())
            needed[op.name] = stages
            for name in op.operands:
                if self.places[name].stage is None:
                    needed.setdefault(name, set()).update(self._origin(name, s) for s in stages)
        for output, item in self._mutations():
            if not needed.get(item.name):  # a buffer that is written and never read
                stage = self.places[output.value].stage
                holders = self.stages.get(item.label) or needed.get(output.value) or {stage or 0}
                needed[item.name] = set(holders)
        return needed

    def _outputs_by_stage(
        self, needed: Mapping[str, set[int]]
    ) -> tuple[list[Output], list[Op], set[str]]:
        """Return the outputs with stages, new ops for them, and the names of ops to remove.

        The gradient of a parameter on several stages becomes one output per stage, without the sum
        over stages. A value that is written to a buffer becomes one output per reading stage.
        """
        outputs: list[Output] = []
        new_ops: list[Op] = []
        replaced_ops: set[str] = set()
        read_by = {item.label: needed.get(item.name, set()) for _, item in self._mutations()}
        for output in self.flow.outputs:
            place = self.places[output.value]
            stage = place.stage
            if output.kind == "mutation" and read_by[str(output.of)] - {stage}:
                outputs += [replace(output, stage=at) for at in sorted(read_by[str(output.of)])]
                continue
            if stage is None:
                stages = needed[output.value]
                stage = place.home if place.home in stages else min(stages)
            assert stage is not None
            holders = self.stages.get(str(output.of), ()) if output.kind == "gradient" else ()
            if len(holders) < 2:
                outputs.append(replace(output, stage=holders[0] if holders else stage))
                continue
            terms, sums = self._terms(output.value)
            replaced_ops |= sums
            by_stage: dict[int, list[str]] = {}
            for term in terms:
                term_stage = self.places[term].stage
                term_stage = min(needed[term]) if term_stage is None else term_stage
                holder = max((s for s in holders if s <= term_stage), default=min(holders))
                by_stage.setdefault(holder, []).append(term)
            parameter = next(i.name for i in self.flow.inputs if i.label == str(output.of))
            for s in sorted(needed.get(parameter, set()) - by_stage.keys()):
                # This stage only reads the parameter, but it updates its copy, too.
                by_stage[s] = [self._add_zeros(output.value, s, new_ops)]
            for s in sorted(by_stage):
                total = by_stage[s][0]
                for other in by_stage[s][1:]:
                    total = self._add_sum(total, other, s, new_ops)
                outputs.append(Output(total, "gradient", output.of, s))
        return outputs, new_ops, replaced_ops

    def _terms(self, value: str, num_readers: int = 0) -> tuple[list[str], set[str]]:
        """Return the terms of a gradient that come from different stages, and the names of the ops
        that sum them. A value with other than ``num_readers`` readers is one term: it is needed."""
        op = self.flow.producers.get(value)
        is_sum = op is not None and op.call.name == "aten.add.Tensor" and len(op.operands) == 2
        if op is None or not is_sum or len(self.flow.consumers.get(value, ())) != num_readers:
            return [value], set()
        parts = [self._terms(name, 1) for name in op.operands]
        terms = [term for inner, _ in parts for term in inner]
        if len({self.places[term].stage for term in terms}) == 1:
            return [value], set()
        return terms, {op.name}.union(*(sums for _, sums in parts))

    def _add_zeros(self, value: str, stage: int, new_ops: list[Op]) -> str:
        """Add an op that creates a zero gradient like ``value``; return the name of its result."""
        meta = self.flow.metas[value]
        call = OpCall(
            target=torch.ops.aten.full.default,
            args=(list(meta.shape), 0.0),
            kwargs=(("dtype", meta.dtype),),
            operands=(),
            results=(meta,),
        )
        return self._add_op(f"{value}_none_at{stage}", call, (), stage, new_ops)

    def _add_sum(self, a: str, b: str, stage: int, new_ops: list[Op]) -> str:
        """Add an op that sums two gradients; return the name of its result."""
        meta = self.flow.metas[a]
        call = OpCall(
            target=torch.ops.aten.add.Tensor,
            args=(Operand(0), Operand(1)),
            operands=(meta, meta),
            results=(meta,),
        )
        return self._add_op(f"{a}_plus_{b}", call, (a, b), stage, new_ops)

    def _add_op(
        self, name: str, call: OpCall, operands: tuple[str, ...], stage: int, new_ops: list[Op]
    ) -> str:
        """Add a backward op with one result on a stage; return the name of its result."""
        op = Op(
            name=name, call=call, operands=operands, results=(name,), phase="backward", stage=stage
        )
        new_ops.append(op)
        self.op_places[name] = self.places[name] = _Place(stage)
        return name
