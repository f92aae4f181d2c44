"""The contents of a page about one plan, as data for JSON.

    contents(plan)["head"]["seconds"]     # of a step
    contents(plan)["steps"][0]            # {"n": "permute", "c": "permute(up_weight, [1, 0])", ...}

A step has: section ``g``, kind ``k`` (op, view, move, comm, end), names ``n``, call ``c``, numbers
of its types ``t``, cost in words ``w``, FLOP ``f``, seconds ``z`` of computing and ``y`` of
communicating each time, source ``o`` (a number of "sources"), module ``m`` (of "modules"), ``r``
the run of layers it is shown for (of "runs"), ``e`` its reason. A collective also has ``v`` its
kind, ``a`` its axes, ``b`` bytes each time, ``q`` the specs it moves from and to, ``p`` the pins
that opened it, ``l`` those it meets, ``j`` other causes, ``h`` the hints and whether they remove
it, ``d`` the reason for its operand's placement. Equal lines and types are stored once, by number.

Invariants: steps are those of the printed plan, in which one layer represents equal ones; seconds
and bytes are those of plan.cost and plan.collectives. Not here: the look of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from dtensor.explorer.reasons import Reasons
from dtensor.explorer.times import timeline
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
from dtensor.sharding.plan.text.folding import Run, runs_of
from dtensor.sharding.plan.text.render import (
    SECTIONS,
    line_of,
    steps_by_section,
)
from dtensor.sharding.plan.text.words import collapse
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Partial, Placement, Shard, index_sets, length
from dtensor.sharding.spec.spec import TensorSpec

_MOST_INTERVALS = 24
"""Most intervals of a dim on one rank that a page draws."""


def contents(plan: Plan) -> dict[str, Any]:
    return _Contents(plan).data()


def title_of(plan: Plan) -> str:
    """``GPT (loss_fn)``: the class of the model, and the function that is planned."""
    return plan.name if plan.model in ("", plan.name) else f"{plan.model} ({plan.name})"


class _Numbered:
    """Items by number: each once, in the order of first use."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, item: Any) -> int:
        return self.numbers.setdefault(item, len(self.numbers))


class _Contents:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reasons = Reasons(plan)
        self.sources, self.specs = _Numbered(), _Numbered()
        self.makers = plan.index.producers
        self.labels = {item.name: item.label for item in plan.inputs}
        self.readers = {name: steps[0] for name, steps in plan.index.readers.items()}
        self.sections: dict[tuple[int, str], list[Step]] = {
            (stage, name): steps
            for stage in range(plan.num_stages)
            for name, steps in steps_by_section(plan, stage).items()
        }
        runs_by_section = runs_of(plan, self.sections.values())
        self.runs_in = dict(zip(self.sections, runs_by_section, strict=True))
        by_stage: dict[int, list[tuple[Sequence[Step], Run]]] = {}
        for (stage, name), runs in self.runs_in.items():
            for run in runs:
                by_stage.setdefault(stage, []).append((self.sections[stage, name], run))
        self.tree = Tree(plan, by_stage)
        self.runs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.rows: dict[tuple[str, str], int] = {}

    def data(self) -> dict[str, Any]:
        plan = self.plan
        shown: list[dict[str, Any]] = []
        for (stage, name), steps in self.sections.items():
            first = len(self.steps)
            self._section(len(shown), stage, name, steps)
            if name == "optimizer":
                self._updates(len(shown), stage)
            if len(self.steps) > first:
                in_microbatch = name in (SECTIONS[1], SECTIONS[2])
                times = plan.num_microbatches if in_microbatch else 1
                shown.append({"stage": stage, "name": name, "times": times})
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
            "sections": shown,
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

    def _section(self, number: int, stage: int, name: str, steps: Sequence[Step]) -> None:
        done = 0
        for run in self.runs_in[stage, name]:
            self._plain(number, stage, steps[done : run.start])
            self.runs.append(
                {"l": ", ".join(run.layers), "x": run.count, "n": run.period, "o": run.first}
            )
            for offset, step in enumerate(run.steps(steps)):
                alike = run.alike(steps, offset)
                self._step(number, stage, step, alike, len(self.runs) - 1)
            done = run.stop
        self._plain(number, stage, steps[done:])

    def _plain(self, number: int, stage: int, steps: Sequence[Step]) -> None:
        for step in steps:
            self._step(number, stage, step, [step], None)

    def _step(
        self, number: int, stage: int, step: Step, alike: Sequence[Step], run: int | None
    ) -> None:
        plan = self.plan
        line = line_of(plan, step, stage)
        messages = [c for c in collectives_of(plan, step) if c.stage == stage]
        compute, communication, _ = step_seconds(plan, step, stage)
        results = list(step.gives_as())
        row: dict[str, Any] = {
            "g": number,
            "k": _kind(step, bool(messages)),
            "n": line.name,
            "c": line.text,
            "m": self.tree.node(self._module(step, stage)),
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
            row["o"] = self.sources(_line(step, line.source, self.makers, self.readers))
        if run is not None:
            row["r"] = run
        row["e"] = self.reasons.why(results[0][1]) if results else self.reasons.end(step)
        if messages:
            self._collective(row, step, messages)
            for one in alike:
                self.rows.setdefault((messages[0].kind, one.label), len(self.steps))
        self.steps.append({key: value for key, value in row.items() if value not in ("", [])})
        times = step_times(plan, step) * len(alike)
        self.tree.charge(
            row["m"],
            compute=compute * times,
            communication=communication * times,
            flops=row.get("f", 0) * times,
            sent=sum(c.bytes_sent for c in messages) * times,
        )
        self.tree.hold(row["m"], 0, (stage,))

    def _collective(
        self, row: dict[str, Any], step: Step, messages: Sequence[PlannedCollective]
    ) -> None:
        first = messages[0]
        pins, met = self.reasons.pins(step), self.reasons.met(step)
        row["v"] = first.kind
        row["a"] = list(dict.fromkeys(c.axis for c in messages))
        row["b"] = sum(c.bytes_sent for c in messages)
        row["d"] = self.reasons.cause(step)
        row["p"] = list(pins)
        row["l"] = [by for by in met if by not in pins]
        row["j"] = self.reasons.states(step)
        row["h"] = [
            [n, int((c.kind, c.axis, c.phase, c.source) in self.plan.hints[n].removed)]
            for c in messages[:1]
            for n in self.reasons.hints(c.kind, c.axis, c.phase, c.source, (*pins, *met))
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

    def _updates(self, number: int, stage: int) -> None:
        """One row for each optimizer and part of the tree."""
        groups: dict[tuple[str, int], list[Update]] = {}
        for step in updates_of(self.plan.steps, [stage]):
            node = self.tree.node(step.parameter.rpartition(".")[0])
            groups.setdefault((step.optimizer, node), []).append(step)
        for (optimizer, node), steps in groups.items():
            compute = sum(step_seconds(self.plan, step, stage)[0] for step in steps)
            state = sum(step.state_bytes + step.master_bytes for step in steps)
            labels = ", ".join(collapse(step.parameter for step in steps))
            row = {"g": number, "k": "end", "n": optimizer, "c": f"update of {labels}", "m": node}
            row |= {"z": compute, "st": state}
            self.steps.append(row)
            self.tree.charge(node, compute=compute, communication=0, flops=0, sent=0)

    def _module(self, step: Step, stage: int) -> str:
        """The module under which a step is shown: its own, or the module of the value it moves."""
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
        """The module of the op that makes the value, else of the input, else of the op that reads
        it."""
        maker: Step | None = step
        for _ in range(8):
            maker = self.makers.get(name)
            if isinstance(maker, Compute) and maker.op.module:
                return maker.op.module
            match maker:
                case Redistribute(operands=(name,), bucket="") | Transfer(operand=name):
                    pass
                case _:
                    break
        if "." in self.labels.get(name, ""):
            return self.labels[name].rpartition(".")[0]
        reader = self.readers.get(step.gives[0])
        return reader.op.module if isinstance(reader, Compute) and maker is None else ""

    # -- inputs ----------------------------------------------------------------------------------

    def _inputs(self) -> Iterator[dict[str, Any]]:
        """The inputs; those of equal layers, which differ in the layer's number, once."""
        groups: dict[tuple[object, ...], list[PlannedInput]] = {}
        for item in self.plan.inputs:
            path, _, name = item.label.rpartition(".")
            key = (self.tree.first_of(path), name, item.kind, item.spec, item.held, item.stages)
            groups.setdefault(key, []).append(item)
        for items in groups.values():
            first = items[0]
            node = self.tree.node(first.label.rpartition(".")[0])
            nbytes = sum(item.held.max_local_nbytes for item in items)
            if first.kind in ("parameter", "buffer"):
                self.tree.hold(node, nbytes, first.stages)
            yield {
                "l": ", ".join(collapse(item.label for item in items)),
                "n": first.name,
                "k": first.kind,
                "x": len(items),
                "t": self.specs(first.held),
                "u": self.specs(first.spec),
                "m": node,
                "s": list(first.stages),
                "b": nbytes,
                "e": self.reasons.why(first.name),
            }

    # -- the head --------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        plan = self.plan
        totals, topology = plan.totals, plan.topology
        cost, held = totals.cost, totals.memory
        memory = {**asdict(held), "not_at_once": -held.not_at_once}  # a sum
        by_kind = totals.most_sent(lambda key: (key[0], key[2]))
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
            "memory": memory,
            "stage_memory": [memory.total for memory in totals.stage_memory],
            "flops": max(work.flops for work in totals.ranks),
            "sent": totals.bytes_sent,
            "collectives": totals.num_collectives,
            # [axis, kind, how many, bytes, seconds] of the rank that sends most
            "by_kind": [[*key, *astuple(sent)] for key, sent in by_kind.items()],
            "num_steps": len(plan.steps),
        }

    def _axis(self, axis: str) -> dict[str, Any]:
        """The splits of an axis, and the pins that opened them."""
        plan = self.plan
        groups: dict[tuple[str, int, int, tuple[str, ...]], tuple[list[str], list[str]]] = {}
        for item in dict(plan.opened).get(axis, ()):
            key = (item.by, item.dim, item.size, collapse([item.label, *item.values], "*"))
            labels, others = groups.setdefault(key, ([], []))
            labels.append(item.label)
            others.extend(item.values)
        return {
            "name": axis,
            "size": plan.mesh.axis_size(axis),
            "opened": [
                {
                    "by": by,
                    "of": ", ".join(collapse(labels)),
                    "dim": dim,
                    "size": size,
                    "with": ", ".join(collapse(others)),
                }
                for (by, dim, size, _), (labels, others) in groups.items()
            ],
            "stages": [list(p) for p in plan.auto] if axis == plan.stage_axis else [],
            "zero": plan.zero[1] if plan.zero and plan.zero[0] == axis else 0,
        }


# -- parts -----------------------------------------------------------------------------------------


def _kind(step: Step, sends: bool) -> str:
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


def _line(
    step: Step, source: str, makers: Mapping[str, Step], readers: Mapping[str, Step]
) -> tuple[str, str]:
    """The user's line and its text, which an op on the same line knows."""
    near: list[Step | None] = [step]
    near += [makers.get(name) for name in step.reads]
    near += [readers.get(name) for name in step.gives]
    for one in near:
        if isinstance(one, Compute) and one.op.source == source and one.op.source_text:
            return source, one.op.source_text
    return source, ""


def _hint(hint: Hint) -> dict[str, Any]:
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
    """Its text, shape, and by axis the part of each coordinate."""
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
    """["+", "sum"] pending; or [dim, [[intervals, length], ...]] by coordinate."""
    match placement:
        case Partial(op):
            return ["+", op]
        case Shard(dim):
            sets = index_sets(placement, shape[dim], num)
            return [dim, [[list(held[:_MOST_INTERVALS]), length(held)] for held in sets]]
        case _:
            raise AssertionError(placement)
