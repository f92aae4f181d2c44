"""The stage of each op of a Dataflow, given the stages that hold the parameters.

    staged(flow, {"embed.weight": (0,), "head.weight": (1,)}, num_stages=2)

An op runs on the latest stage among its inputs, or on a later one that holds its module's
parameters (a norm written out begins on the stage of its weight); a parameter ties the op to a
stage that holds it. An op that depends only on the batch, or only on constants or one parameter,
floats: it is repeated on each stage that uses it, and a batch is fed to each of them. An argument
on one stage (``at``) is fed only there and sent to its uses; ops on it float too, and their results
are sent from that stage. A backward op runs where its forward op ran, a sum of gradients where
these are. The gradient of a parameter that several stages use leaves as one contribution per stage,
to be summed once.

A term over parameters of several stages (a penalty, a norm of all parameters) is formed on the
latest of their stages: ops on the parameters of one stage stay there, and their results are sent to
the op that joins them. Their backward runs on the parameters' own stage too.

Not here: the stages' parameters (api/model/stating/stages.py), transfers of values
(sharding/plan/emit/values.py).
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
    """Fixed on one stage, or floating among ``allowed`` (None: any). ``home``: for a floating op,
    the latest stage of an argument that it depends on."""

    stage: int | None
    allowed: frozenset[int] | None = None
    home: int | None = None


def staged(
    flow: Dataflow,
    stages: Stages,
    num_stages: int,
    homes: Stages | None = None,
    at: Mapping[str, int] | None = None,
) -> Dataflow:
    """``flow`` with a stage for every op and input; floating ops are repeated where they are used.

    ``stages``: canonical name of a parameter or buffer to the stages that hold it; ``homes``: each
    of its names to those of that name, which say on which of the stages a module's ops are; ``at``:
    name of an argument to its only stage. Raises PlanningError if an op of a module needs a
    parameter of an earlier stage than the op's inputs.
    """
    homes = stages if homes is None else homes
    return _Stager(flow, stages, homes, at or {}, num_stages).assign()


@dataclass(slots=True)
class _Stager:
    flow: Dataflow
    held: Stages
    homes: Stages
    at: Mapping[str, int]
    num_stages: int
    places: dict[str, _Place] = field(default_factory=dict)  # by value
    op_places: dict[str, _Place] = field(default_factory=dict)
    by_seq: dict[int, int] = field(default_factory=dict)
    by_module: dict[str, set[int]] = field(default_factory=dict)

    def assign(self) -> Dataflow:
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
                (self.by_seq[op.seq],) = stages
        return self._copy_floating()

    def _input_place(self, item: Input) -> _Place:
        if item.kind in ("parameter", "buffer") and item.label in self.held:
            return _Place(None, frozenset(self.held[item.label]))
        if item.kind == "tangent":
            return _Place(self.num_stages - 1)
        return _Place(None, None, self.at.get(item.name))

    def _op_place(self, op: Op) -> _Place:
        operands = [self.places[name] for name in op.operands]
        fixed = [p.stage for p in operands if p.stage is not None]
        held = [p.allowed for p in operands if p.stage is None and p.allowed is not None]
        allowed = frozenset.intersection(*held) if held else None
        batch = any(p.stage is None and p.allowed is None for p in operands)
        batch = batch and not self.flow.batch_values.isdisjoint(op.operands)
        if not fixed and (allowed is None or (allowed and not batch)):
            lie = [p.home for p in operands if p.home is not None]
            return _Place(None, allowed, max(lie, default=None))
        latest = max((*fixed, *map(min, held)), default=0)
        if op.phase == "backward":
            return _Place(self._backward_stage(op, fixed or [latest], allowed))
        home = self._module_stage(op.module)
        choices = [s for s in sorted(allowed or ()) if s >= latest]
        if held and not choices and home is not None and home < latest:
            raise self._too_early(op, latest)
        choices = choices or list(range(latest, self.num_stages))
        return _Place(home if home in choices else choices[0])

    def _module_stage(self, path: str) -> int | None:
        """The stage of the parameters of the innermost module around ``path`` that has any."""
        while path:
            if path not in self.by_module:
                inside = [s for n, s in self.homes.items() if n.startswith(f"{path}.")]
                self.by_module[path] = {stage for stages in inside for stage in stages}
            if self.by_module[path]:
                return min(self.by_module[path]) if len(self.by_module[path]) == 1 else None
            path = path.rpartition(".")[0]
        return None

    def _backward_stage(self, op: Op, fixed: list[int], allowed: frozenset[int] | None) -> int:
        stage = self.by_seq.get(op.seq) if op.seq is not None else None
        if len(fixed) == len(op.operands) > 1 and op.call.name == "aten.add.Tensor":
            stage = None  # gradients are added where they are, so that one value is sent
        if stage is not None:
            return stage
        stage = min(fixed)
        return min(allowed, key=lambda s: (abs(s - stage), s)) if allowed else stage

    def _too_early(self, op: Op, latest: int) -> PlanningError:
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

    def _copy_floating(self) -> Dataflow:
        needed = self._needed()
        outputs, extra, dropped = self._split_tied(needed)
        renamed: dict[tuple[str, int], str] = {}
        ops: list[Op] = []
        for op in (*self.flow.ops, *extra):
            if op.name in dropped:
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
            replace(item, stages=self._fed(item, needed.get(item.name, set())))
            for item in self.flow.inputs
        )
        final = tuple(
            replace(o, value=renamed.get((o.value, self._origin(o.value, o.stage)), o.value))
            for o in outputs
        )
        flow = replace(
            self.flow, inputs=inputs, ops=tuple(ops), outputs=final, num_stages=self.num_stages
        )
        flow.verify()
        return flow

    def _origin(self, name: str, stage: int) -> int:
        """Return the stage from which an op of ``stage`` has a value: its own, or for a floating
        value that its stage cannot compute the nearest that can, before it where there is one."""
        place = self.places[name]
        if place.stage is not None or not place.allowed or stage in place.allowed:
            return stage
        return max((s for s in place.allowed if s < stage), default=min(place.allowed))

    def _fed(self, item: Input, needed: set[int]) -> tuple[int, ...]:
        """The stages that hold an input."""
        if item.name in self.at:
            return (self.at[item.name],)
        return tuple(sorted(needed)) or (0,)

    def _needed(self) -> dict[str, set[int]]:
        """Op or input name to the stages that need it, for floating ones.

        A value written to a buffer floats to each stage that reads the buffer, which may read more
        there.
        """
        homes: dict[str, set[int]] = {}
        while True:
            needed = self._needed_with(homes)
            stages_of: dict[str, set[int]] = {}
            for output, item in self._mutations():
                if self.places[output.value].stage is None:
                    stages_of.setdefault(output.value, set()).update(needed.get(item.name, ()))
            if stages_of == homes:
                return needed
            homes = stages_of

    def _mutations(self) -> list[tuple[Output, Input]]:
        inputs = {item.label: item for item in self.flow.inputs}
        return [(o, inputs[str(o.of)]) for o in self.flow.outputs if o.kind == "mutation"]

    def _needed_with(self, homes: Mapping[str, set[int]]) -> dict[str, set[int]]:
        """``homes``: values written to buffers, to the stages that need them."""
        needed: dict[str, set[int]] = {}
        for output in self.flow.outputs:
            place = self.places[output.value]
            if place.stage is None:
                stage = place.home
                if stage is None or stage not in (place.allowed or (stage,)):
                    stage = min(place.allowed) if place.allowed else self.num_stages - 1
                written = homes.get(output.value) if output.kind == "mutation" else None
                origins = {self._origin(output.value, at) for at in written or {stage}}
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
            if not needed.get(item.name):  # it is written and never read
                stage = self.places[output.value].stage
                known = self.held.get(item.label) or needed.get(output.value) or {stage or 0}
                needed[item.name] = set(known)
        return needed

    def _split_tied(
        self, needed: Mapping[str, set[int]]
    ) -> tuple[list[Output], list[Op], set[str]]:
        """Outputs with their stages; a tied gradient becomes one output per stage, a value written
        to a buffer one for each stage that reads it."""
        outputs: list[Output] = []
        extra: list[Op] = []
        dropped: set[str] = set()
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
            held = self.held.get(str(output.of), ()) if output.kind == "gradient" else ()
            if len(held) < 2:
                outputs.append(replace(output, stage=held[0] if held else stage))
                continue
            terms, sums = self._terms(output.value)
            dropped |= sums
            by_stage: dict[int, list[str]] = {}
            for term in terms:
                made_on = self.places[term].stage
                made_on = min(needed[term]) if made_on is None else made_on
                at = max((s for s in held if s <= made_on), default=min(held))
                by_stage.setdefault(at, []).append(term)
            for at in sorted(needed.get(self._named(output), set()) - by_stage.keys()):
                by_stage[at] = [self._zeros(output.value, at, extra)]  # it is updated there too
            for at in sorted(by_stage):
                total = by_stage[at][0]
                for other in by_stage[at][1:]:
                    total = self._add(total, other, at, extra)
                outputs.append(Output(total, "gradient", output.of, at))
        return outputs, extra, dropped

    def _terms(self, value: str, uses: int = 0) -> tuple[list[str], set[str]]:
        """The addends of a gradient, as far as they come from several stages, and the sums that
        these replace. ``uses``: how many other readers it has."""
        op = self.flow.producers.get(value)
        is_sum = op is not None and op.call.name == "aten.add.Tensor" and len(op.operands) == 2
        if op is None or not is_sum or len(self.flow.consumers.get(value, ())) != uses:
            return [value], set()
        parts = [self._terms(name, 1) for name in op.operands]
        terms = [term for inner, _ in parts for term in inner]
        if len({self.places[term].stage for term in terms}) == 1:
            return [value], set()
        return terms, {op.name}.union(*(sums for _, sums in parts))

    def _named(self, output: Output) -> str:
        """The input of an output."""
        return next(item.name for item in self.flow.inputs if item.label == str(output.of))

    def _zeros(self, value: str, stage: int, extra: list[Op]) -> str:
        """The zeros that stand in for a gradient on a stage that reads the parameter without
        one."""
        meta = self.flow.metas[value]
        call = OpCall(
            target=torch.ops.aten.full.default,
            args=(list(meta.shape), 0.0),
            kwargs=(("dtype", meta.dtype),),
            operands=(),
            results=(meta,),
        )
        return self._made(f"{value}_none_at{stage}", call, (), stage, extra)

    def _add(self, a: str, b: str, stage: int, extra: list[Op]) -> str:
        meta = self.flow.metas[a]
        call = OpCall(
            target=torch.ops.aten.add.Tensor,
            args=(Operand(0), Operand(1)),
            operands=(meta, meta),
            results=(meta,),
        )
        return self._made(f"{a}_plus_{b}", call, (a, b), stage, extra)

    def _made(
        self, name: str, call: OpCall, operands: tuple[str, ...], stage: int, extra: list[Op]
    ) -> str:
        extra.append(
            Op(
                name=name,
                call=call,
                operands=operands,
                results=(name,),
                phase="backward",
                stage=stage,
            )
        )
        self.op_places[name] = self.places[name] = _Place(stage)
        return name
