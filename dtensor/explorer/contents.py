"""The data of a page about one plan, for JSON; it shows the steps, costs and reasons of the text.

A step has ``g`` its section, ``k`` kind (op, view, move, comm, end), ``n`` names of results, ``c``
call, ``t`` types (indices into "specs") or ``w`` their text, ``f`` FLOP, ``z`` and ``y`` seconds of
one computation and communication, ``o`` source line (index into "sources"), ``m`` module (index
into "modules"), ``r`` run of layers that it stands for (index into "runs"), ``e`` reason. A
collective also has ``v`` kind, ``a`` axes, ``b`` bytes of one execution, ``q`` specs before and
after, ``p`` pins that cause it, ``l`` pins nearby, ``j`` option that causes it, ``h`` hints, each
with 1 if it removes the collective, ``d`` reason for its operand's placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from dtensor.explorer.reasons import Reasons
from dtensor.explorer.times import Numbered, timeline
from dtensor.explorer.tree import Tree
from dtensor.sharding.plan.cost.seconds import (
    PlannedCollective,
    collectives_of,
    step_seconds,
    step_times,
)
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.record import Hint, PlannedInput
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Redistribute,
    Step,
    Transfer,
    Update,
    updates_of,
)
from dtensor.sharding.plan.storage import layer_of
from dtensor.sharding.plan.text.render import line_of
from dtensor.sharding.plan.text.view import SECTIONS, Section, axis_splits, sections_of
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Shard, index_sets, length
from dtensor.sharding.spec.spec import TensorSpec

_MAX_INTERVALS = 24
"""How many intervals of a dim on one rank a page draws."""


def contents(plan: Plan) -> dict[str, Any]:
    """Return the data of the page about a plan, which can be written as JSON."""
    return _Contents(plan).data()


def title_of(plan: Plan) -> str:
    """Return the class of the model and the function that is planned: ``GPT (loss_fn)``."""
    return plan.name if plan.model in ("", plan.name) else f"{plan.model} ({plan.name})"


class _Contents:
    """Collects the data. ``rows``: (kind, label) of a collective -> the index of its step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reasons = Reasons(plan)
        self.sources, self.specs = Numbered(), Numbered()  # the page refers to them by index
        self.producers = plan.index.producers
        self.labels = {item.name: item.label for item in plan.inputs}
        self.readers = {name: steps[0] for name, steps in plan.index.readers.items()}
        self.sections = sections_of(plan)
        self.tree = Tree(plan, self.sections)
        self.runs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.rows: dict[tuple[str, str], int] = {}

    def data(self) -> dict[str, Any]:
        """Return the data of the page."""
        plan = self.plan
        sections: list[dict[str, Any]] = []
        for section in self.sections:
            first = len(self.steps)
            self._add_section(len(sections), section)
            if section.name == "optimizer":
                self._add_updates(len(sections), section.stage)
            if len(self.steps) > first:
                in_microbatch = section.name in (SECTIONS[1], SECTIONS[2])
                times = plan.num_microbatches if in_microbatch else 1
                sections.append({"stage": section.stage, "name": section.name, "times": times})
        inputs = list(self._inputs())
        return {
            "title": title_of(plan),
            "mesh": list(plan.mesh.shape.items()),
            "stage_axis": plan.stage_axis,
            "num_stages": plan.num_stages,
            "stage_ranks": list(plan.stage_ranks),
            "microbatches": plan.num_microbatches,
            "schedule": plan.schedule,
            "head": self._head(),
            "axes": [self._axis(axis) for axis in plan.mesh.axes],
            "hints": [_hint(hint) for hint in plan.hints],
            "sections": sections,
            "runs": self.runs,
            "steps": self.steps,
            "inputs": inputs,
            "timeline": timeline(plan, self.rows),
            "modules": [
                {
                    "l": part.label,
                    "u": -1 if part.parent is None else part.parent,
                    "x": part.count,
                    "s": sorted(part.stages),
                    "z": part.compute,
                    "y": part.communication,
                    "f": part.flops,
                    "b": part.sent,
                    "w": part.parameters,
                }
                for part in self.tree.parts
            ],
            "sources": list(self.sources.numbers),
            "specs": [_spec(spec) for spec in self.specs.numbers],
        }

    # -- steps ---------------------------------------------------------------------------------

    def _add_section(self, number: int, section: Section) -> None:
        """Add the steps of section ``number`` of the page; a run of equal layers is shown once."""
        for run, steps in section.shown():
            if run is not None:
                layers = ", ".join(run.layers)
                self.runs.append({"l": layers, "x": run.count, "n": run.period, "o": run.first})
            for offset, step in enumerate(steps):
                alike = [step] if run is None else run.steps_of_layers(section.steps, offset)
                run_index = None if run is None else len(self.runs) - 1
                self._add_step(number, section.stage, step, alike, run_index)

    def _add_step(
        self, section: int, stage: int, step: Step, alike: Sequence[Step], run: int | None
    ) -> None:
        """Add the data of a step, and its cost to its module. ``section`` and ``run``: indices,
        None if the step is in no run; ``alike``: the steps of all layers that it stands for."""
        plan = self.plan
        line = line_of(plan, step, stage)
        messages = [c for c in collectives_of(plan, step) if c.stage == stage]
        compute, communication, _ = step_seconds(plan, step, stage)
        results = list(step.gives_as())
        row: dict[str, Any] = {
            "g": section,
            "k": _kind(step, bool(messages)),
            "n": line.name,
            "c": line.text,
            "m": self.tree.part_of(self._module(step, stage)),
        }
        if results and not (isinstance(step, Redistribute) and step.bucket):
            row["t"] = [self.specs(spec) for *_, spec in results]
        elif line.type:
            row["w"] = line.type
        if isinstance(step, Compute) and step.flops:
            row["f"] = step.flops
        if compute:
            row["z"] = compute
        if communication:
            row["y"] = communication
        if line.source and step.source:
            row["o"] = self.sources(_source(step, line.source, self.producers, self.readers))
        if run is not None:
            row["r"] = run
        row["e"] = self.reasons.why(results[0][1]) if results else self.reasons.step_reason(step)
        if messages:
            self._add_collective(row, step, messages)
            for layer_step in alike:
                self.rows.setdefault((messages[0].kind, layer_step.label), len(self.steps))
        self.steps.append({key: value for key, value in row.items() if value not in ("", [])})
        times = step_times(plan, step) * len(alike)
        self.tree.add_cost(
            row["m"],
            compute=compute * times,
            communication=communication * times,
            flops=row.get("f", 0) * times,
            sent=sum(c.bytes_sent for c in messages) * times,
        )
        self.tree.add_parameters(row["m"], 0, (stage,))

    def _add_collective(
        self, row: dict[str, Any], step: Step, messages: Sequence[PlannedCollective]
    ) -> None:
        """Add the keys that only collectives have to the data of a step."""
        first = messages[0]
        pins, nearby = self.reasons.pins(step), self.reasons.nearby_pins(step)
        row["v"] = first.kind
        row["a"] = list(dict.fromkeys(c.axis for c in messages))
        row["b"] = sum(c.bytes_sent for c in messages)
        row["d"] = self.reasons.operand_reason(step)
        row["p"] = list(pins)
        row["l"] = [by for by in nearby if by not in pins]
        row["j"] = self.reasons.option(step)
        row["h"] = [
            [n, int((c.kind, c.axis, c.phase, c.source) in self.plan.hints[n].removed)]
            for c in messages[:1]
            for n in self.reasons.hints(c.kind, c.axis, c.phase, c.source, (*pins, *nearby))
        ]
        match step:
            case Redistribute(moves=(move, *_)) if not step.tied:
                row["q"] = [self.specs(move.src), self.specs(move.dst)]
                row["of"] = list(collapse(step.of))
            case Transfer(spec=spec):
                row["q"] = [self.specs(spec), self.specs(spec)]
                row["to"] = [step.stage, step.to_stage]
            case _:
                pass

    def _add_updates(self, section: int, stage: int) -> None:
        """Add one row for the updates of each optimizer and part of the tree."""
        groups: dict[tuple[str, int], list[Update]] = {}
        for step in updates_of(self.plan.steps, [stage]):
            part = self.tree.part_of(step.parameter.rpartition(".")[0])
            groups.setdefault((step.optimizer, part), []).append(step)
        for (optimizer, part), steps in groups.items():
            compute = sum(step_seconds(self.plan, step, stage)[0] for step in steps)
            state = sum(step.state_bytes + step.master_bytes for step in steps)
            labels = ", ".join(collapse(step.parameter for step in steps))
            row = {"g": section, "k": "end", "n": optimizer, "c": f"update of {labels}", "m": part}
            row |= {"z": compute, "st": state}
            self.steps.append(row)
            self.tree.add_cost(part, compute=compute, communication=0, flops=0, sent=0)

    def _module(self, step: Step, stage: int) -> str:
        """Return the module under which a step is shown: its op's module, or its value's."""
        match step:
            case Compute(op=op):
                return op.module
            case Transfer(to_stage=to, result=result) if to == stage:
                reader = self.readers.get(result)
                return reader.op.module if isinstance(reader, Compute) else ""
            case Redistribute(of=()) | Transfer():
                return self._module_of(step.reads[0], step)
            case Redistribute(of=(of, *_)) if step.phase != "optimizer":
                return layer_of(of)
            case Accumulate(of=of) | Redistribute(of=(of,), bucket=""):
                return of.rpartition(".")[0]
            case _:
                return ""

    def _module_of(self, name: str, step: Step) -> str:
        """Return the module of the op that produces the value ``name``, through conversions and
        transfers; else the module of the input, or of the op that reads ``step``'s result."""
        producer: Step | None = step
        for _ in range(8):  # a limit on the conversions in a row
            producer = self.producers.get(name)
            if isinstance(producer, Compute) and producer.op.module:
                return producer.op.module
            match producer:
                case Redistribute(operands=(name,), bucket="") | Transfer(operand=name):
                    pass
                case _:
                    break
        if "." in self.labels.get(name, ""):
            return self.labels[name].rpartition(".")[0]
        reader = self.readers.get(step.gives[0])
        return reader.op.module if isinstance(reader, Compute) and producer is None else ""

    # -- inputs ----------------------------------------------------------------------------------

    def _inputs(self) -> Iterator[dict[str, Any]]:
        """Yield the data of the inputs. Inputs of equal layers share an entry."""
        groups: dict[tuple[object, ...], list[PlannedInput]] = {}
        for item in self.plan.inputs:
            path, _, name = item.label.rpartition(".")
            module = self.tree.representative(path)
            key = (module, name, item.kind, item.spec, item.held, item.stages)
            groups.setdefault(key, []).append(item)
        for items in groups.values():
            first = items[0]
            part = self.tree.part_of(first.label.rpartition(".")[0])
            nbytes = sum(item.held.max_local_nbytes for item in items)
            if first.kind in ("parameter", "buffer"):
                self.tree.add_parameters(part, nbytes, first.stages)
            yield {
                "l": ", ".join(collapse(item.label for item in items)),
                "n": first.name,
                "k": first.kind,
                "x": len(items),
                "t": self.specs(first.held),
                "u": self.specs(first.spec),
                "m": part,
                "s": list(first.stages),
                "b": nbytes,
                "e": self.reasons.why(first.name),
            }

    # -- the head --------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        """Return the totals of the plan."""
        plan = self.plan
        totals, topology = plan.totals, plan.topology
        cost, memory = totals.cost, totals.memory
        # with a negative not_at_once, the total is the sum of all
        memory_by_kind = {**asdict(memory), "not_at_once": -memory.not_at_once}
        by_kind = totals.max_sent_by(lambda key: (key[0], key[2]))
        return {
            "seconds": cost.seconds,
            "compute": cost.compute_seconds,
            "communication": cost.communication_seconds,
            "waiting": cost.waiting_seconds,
            "host": cost.host_wait_seconds,
            "host_bound": cost.host_bound,
            "bubble": cost.bubble,
            "hardware": topology.title,
            "device": topology.memory_bytes,
            "memory": memory_by_kind,
            "stage_memory": [memory.total for memory in totals.stage_memory],
            "flops": max(work.flops for work in totals.ranks),
            "sent": totals.bytes_sent,
            "collectives": totals.num_collectives,
            # [axis, kind, number, bytes, seconds] of the rank that sends most
            "by_kind": [[*key, *astuple(sent)] for key, sent in by_kind.items()],
            "num_steps": len(plan.steps),
        }

    def _axis(self, axis: str) -> dict[str, Any]:
        """Return the data of an axis: its splits, and the pins that cause them."""
        plan = self.plan
        return {
            "name": axis,
            "size": plan.mesh.axis_size(axis),
            "opened": [
                {
                    "by": split.by,
                    "of": split.labels,
                    "dim": split.dim,
                    "size": split.size,
                    "with": split.others,
                }
                for split in axis_splits(plan, axis)
            ],
            "stages": [list(p) for p in plan.auto] if axis == plan.stage_axis else [],
            "zero": self._zero(axis),
        }

    def _zero(self, axis: str) -> str:
        """Return the level of ZeRO on an axis, such as "2, chosen by auto"; "" without ZeRO."""
        zero, choice = self.plan.zero, self.plan.level_choice
        if zero is None or axis not in zero.axes:
            return ""
        return f"{zero.level}{', chosen by auto' if choice is not None else ''}"


# -- parts -----------------------------------------------------------------------------------------


def _kind(step: Step, sends: bool) -> str:
    """Return the kind of a step on the page. A transfer is "comm" for its sender only."""
    match step:
        case _ if sends:
            return "comm"
        case Compute():
            return "view" if step.is_view else "op"
        case Redistribute() if step.is_free:
            return "move"
        case Transfer():
            return "move"
        case _:
            return "end"


def _source(
    step: Step, source: str, producers: Mapping[str, Step], readers: Mapping[str, Step]
) -> tuple[str, str]:
    """Return (the user's line, its text), with the text from an op on this line."""
    candidates: list[Step | None] = [step]
    candidates += [producers.get(name) for name in step.reads]
    candidates += [readers.get(name) for name in step.gives]
    for other in candidates:
        if isinstance(other, Compute) and other.op.source == source and other.op.source_text:
            return source, other.op.source_text
    return source, ""


def _hint(hint: Hint) -> dict[str, Any]:
    """Return the data of a hint: a pin's stated placement, the opposite one, and both prices."""
    return {
        "by": hint.by,
        "axis": hint.axis,
        "stated": repr(hint.stated),
        "opposite": repr(hint.opposite),
        "seconds": hint.seconds,
        "opposite_seconds": hint.opposite_seconds,
        "sent": hint.bytes_sent,
        "opposite_sent": hint.opposite_bytes_sent,
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    """Return the data of a spec: its text, shape, and the shard of each rank on each axis."""
    mesh = spec.mesh
    data: dict[str, Any] = {"t": str(spec), "s": list(spec.shape), "z": spec.dtype.itemsize}
    placed = {
        axis: _placement(placement, spec.shape, mesh.axis_size(axis))
        for axis, placement in spec.sharding.items()
        if isinstance(placement, Shard | Partial)
    }
    if placed:
        data["p"] = placed
    if mesh.axes and MICROBATCH_AXIS in mesh.axes:
        data["mb"] = mesh.axis_size(MICROBATCH_AXIS)
    if spec.on:
        data["on"] = dict(spec.on)
    return data


def _placement(placement: Placement, shape: Sequence[int], num: int) -> list[Any]:
    """Return ["+", "sum"] if pending, [dim, [[intervals, length] of each rank]] if split."""
    match placement:
        case Partial(op):
            return ["+", op]
        case Shard(dim):
            sets = index_sets(placement, shape[dim], num)
            return [dim, [[list(held[:_MAX_INTERVALS]), length(held)] for held in sets]]
        case _:
            raise AssertionError(placement)
