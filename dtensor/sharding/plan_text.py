"""How a Plan reads: one step a line, what it sends and computes at the right, totals last.

    plan mlp    mesh(tp=2)    stage 0 of 1    all ranks identical
    axis tp     splits up.weight dim 0 (4096), with down.weight, up.bias; opened by *.up.weight

    forward                                                         per rank
      h = mm(x, w1)               f32[512,4096@tp]          2.15 GFLOP    mlp.py:14
    * y = all_reduce(p, tp)       f32[512,1024]             2.0 MiB sent  mlp.py:16

A line that communicates has ``*`` in its first column; a free conversion (slice, zero_fill,
relabel) has none. A transfer is marked on the stage that sends it; the other stage says receive.
Bytes are binary (KiB), FLOP are decimal (GFLOP). ``x8``: once for each of 8 microbatches.

Every step of one rank of every stage is printed; ranks of a stage run the same steps, and where
their shards differ in size the head says so. The text depends on the plan alone.
Not here: why a step is there (plan_explain.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from dtensor.sharding.mesh import MICROBATCH_AXIS
from dtensor.sharding.placements import Shard, index_sets, length
from dtensor.sharding.plan import Plan
from dtensor.sharding.plan_explain import explain
from dtensor.sharding.plan_totals import totals
from dtensor.sharding.plan_words import call_text, collapse, flop_text, size_text, wrapped
from dtensor.sharding.redistribute import FREE_KINDS
from dtensor.sharding.spec import TensorSpec
from dtensor.sharding.steps import (
    Accumulate,
    Bucket,
    Compute,
    Convert,
    Norm,
    Regather,
    Step,
    TieSum,
    Transfer,
    Update,
)
from dtensor.sharding.zero import LEVELS

SECTIONS = ("once a step", "forward", "backward", "optimizer")

_WIDTH = 100
# Widths of columns; what is longer pushes its own line out, not all lines.
_MAX_NAME, _MAX_TEXT, _MAX_TYPE, _MAX_COST = 20, 48, 30, 24


@dataclass(frozen=True, slots=True)
class _Line:
    """One printed line in columns; ``more`` follows it, indented."""

    mark: str
    name: str
    text: str
    type: str
    cost: str = ""
    source: str = ""
    more: tuple[str, ...] = ()


def render(plan: Plan) -> str:
    """The text of the plan; deterministic, without a trailing newline."""
    lines = [_head(plan), *_axes(plan), *_stored(plan)]
    for stage in range(plan.num_stages):
        if plan.num_stages > 1:
            lines += ["", f"stage {stage} of {plan.num_stages}    {_ranks(plan, stage)}"]
        lines += ["", "inputs", *_inputs(plan, stage)]
        sections = {name: list[_Line]() for name in SECTIONS}
        for step in plan.steps:
            if (line := _line(plan, step, stage)) is not None:
                sections[_section(step)].append(line)
        sections["optimizer"] += [*_updates(plan, stage), *_regathered(plan, stage)]
        widths = _widths([line for found in sections.values() for line in found])
        for name, found in sections.items():
            if found:
                lines += ["", _title(plan, name), *_columns(found, widths)]
    if plan.schedule:
        lines += ["", "schedule", *(f"  {row}" for row in plan.schedule.splitlines())]
    lines += ["", *totals(plan)]
    for hint in plan.hints:
        lines += wrapped(str(hint), "", _WIDTH)
    return "\n".join(line.rstrip() for line in lines)


# -- the head ------------------------------------------------------------------------------------


def _head(plan: Plan) -> str:
    parts = [f"plan {plan.name}", str(plan.mesh)]
    if plan.num_stages > 1:
        parts.append(f"{plan.num_stages} stages over {plan.stage_axis}")
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} microbatches (axis {MICROBATCH_AXIS}, in time)")
    if plan.num_stages == 1:
        parts += ["stage 0 of 1", _ranks(plan, 0)]
    return "    ".join(parts)


def _ranks(plan: Plan, stage: int) -> str:
    """Whether all ranks of the stage hold shards of the same sizes."""
    uneven: list[str] = []
    for name, spec in _held(plan, stage):
        for axis, placement in spec.sharding.items():
            if isinstance(placement, Shard):
                num = spec.mesh.axis_size(axis)
                sets = index_sets(placement, spec.shape[placement.dim], num)
                sizes = [length(held) for held in sets]
                if len(set(sizes)) > 1:
                    uneven.append(f"{name} {spec} holds {', '.join(map(str, sizes))} over {axis}")
    if not uneven:
        return "all ranks identical"
    more = f" and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    return f"ranks differ: {uneven[0]}{more}"


def _held(plan: Plan, stage: int) -> Iterable[tuple[str, TensorSpec]]:
    for item in plan.inputs:
        if stage in item.stages:
            yield item.name, item.spec
    for step in plan.steps:
        match step:
            case Compute() if step.stage == stage:
                for name, spec in zip(step.results, step.result_specs, strict=True):
                    if name is not None and spec is not None:
                        yield name, spec
            case Convert() if step.stage == stage:
                yield step.result, step.move.dst
            case _:
                pass


def _axes(plan: Plan) -> list[str]:
    """What each axis splits, and which pin opened it; repeated layers as one line."""
    opened = dict(plan.opened)
    lines: list[str] = []
    for axis in plan.mesh.axes:
        start = f"axis {axis}    "
        if axis == plan.stage_axis:
            lines.append(f"{start}stages: {', '.join(map(str, range(plan.num_stages)))}")
            continue
        groups: dict[tuple[str, int, int, tuple[str, ...]], list[list[str]]] = {}
        for item in opened.get(axis, ()):
            key = (item.by, item.dim, item.size, collapse([item.label, *item.values], "*"))
            found = groups.setdefault(key, [[], []])
            found[0].append(item.label)
            found[1].extend(item.values)
        for (by, dim, size, _), (labels, others) in groups.items():
            text = f"splits {', '.join(collapse(labels))} dim {dim} ({size})"
            if others:
                text += f", with {', '.join(collapse(others))}"
            lines += wrapped(f"{text}; opened by {by}", start, _WIDTH)
        if not groups:
            one = plan.mesh.axis_size(axis) == 1
            lines.append(start + ("one rank" if one else "splits nothing: no pin opens a factor"))
    return lines


def _stored(plan: Plan) -> list[str]:
    """What is stored split, and over which axis."""
    if plan.zero is None:
        return []
    axis, level = plan.zero
    whole = [i.label for i in plan.inputs if i.kind == "parameter" and i.stored is None]
    kept = f"; whole: {', '.join(collapse(whole))}" if whole else ""
    text = f"{axis}: {level} ({LEVELS[level]} stored over {axis}{kept})"
    return wrapped(text, "zero    ", _WIDTH)


def _inputs(plan: Plan, stage: int) -> list[str]:
    """Every input of the stage with its placement; those of repeated layers as one line."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for item in plan.inputs:
        if stage in item.stages:
            spec, kind = str(item.held), item.kind
            if item.held != item.spec:
                kind += f", used as {item.spec}"
            key = (kind, spec, collapse([item.label], "*"))
            groups.setdefault(key, []).append(item.label)
    rows = [(kind, ", ".join(collapse(labels)), spec) for (kind, spec, _), labels in groups.items()]
    width = min(max((len(name) for _, name, _ in rows), default=0), _MAX_TEXT)
    type_width = min(max((len(spec) for _, _, spec in rows), default=0), _MAX_TYPE)
    return [f"  {name:<{width}}  {spec:<{type_width}}  {kind}" for kind, name, spec in rows]


# -- steps ---------------------------------------------------------------------------------------


def _title(plan: Plan, section: str) -> str:
    per = "per rank"
    if plan.num_microbatches > 1 and section in ("forward", "backward"):
        per = f"per rank and microbatch, x{plan.num_microbatches}"
    return f"{section:<64}{per}"


def _section(step: Step) -> str:
    match step:
        case Compute() | Convert() | Transfer() | Bucket():
            return SECTIONS[0] if step.once else step.phase
        case Accumulate() | TieSum() | Norm() | Update() | Regather():
            return "optimizer"


def _line(plan: Plan, step: Step, stage: int) -> _Line | None:
    """The step as the stage sees it, None where it does not; updates are printed together."""
    match step:
        case Compute():
            return _compute(step) if step.stage == stage else None
        case Convert(move=move):
            if step.stage != stage:
                return None
            text = f"{move.kind}({step.operand}, {move.axis})"
            sent = "" if move.kind in FREE_KINDS else _sent(plan, step, stage)
            mark = "" if move.kind in FREE_KINDS else "*"
            return _Line(mark, step.result, text, str(move.dst), sent, step.source)
        case Transfer():
            where = f"{step.operand}, {plan.stage_axis} {step.stage} -> {step.to_stage}"
            if step.stage == stage:
                sent = _sent(plan, step, stage)
                text = f"transfer({where})"
                return _Line("*", step.result, text, str(step.spec), sent, step.source)
            if step.to_stage == stage:
                text = f"receive({where})"
                return _Line("", step.result, text, str(step.spec), "", step.source)
            return None
        case Accumulate():
            if step.stage != stage:
                return None
            text = f"accumulate({step.operand}, {MICROBATCH_AXIS})"
            return _Line("", step.result, text, str(step.dst), "", step.of)
        case Bucket():
            return _bucket(plan, step, stage) if step.stage == stage else None
        case TieSum():
            if stage not in step.stages:
                return None
            at = step.stages.index(stage)
            stages = ", ".join(map(str, step.stages))
            text = f"all_reduce({step.operands[at]}, {plan.stage_axis} stages {stages})"
            sent = _sent(plan, step, stage)
            return _Line("*", step.results[at], text, str(step.spec), sent, step.of)
        case Norm():
            counted = [name for at, _, name in step.operands if at == stage]
            text = f"norm({_count(len(counted), 'gradient')}), clipped to {step.max_norm:g}"
            mark = "*" if plan.mesh.size > 1 else ""
            return _Line(mark, step.result, text, "f32[]", _sent(plan, step, stage))
        case Update() | Regather():
            return None
        case _:
            assert_never(step)


def _compute(step: Compute) -> _Line:
    results = [(n, s) for n, s in zip(step.results, step.result_specs, strict=True) if n and s]
    return _Line(
        "",
        ", ".join(name for name, _ in results),
        call_text(step.op.call, step.operands),
        ", ".join(str(spec) for _, spec in results),
        flop_text(step.flops) if step.flops else "",
        step.op.source,
    )


def _bucket(plan: Plan, step: Bucket, stage: int) -> _Line:
    gathers = step.kind == "all_gather"
    size = sum((m.dst if gathers else m.src).max_local_nbytes for m in step.moves)
    noun = "parameter" if gathers else "gradient"
    text = f"{step.kind}({_count(len(step.of), noun)}, {step.axis})"
    return _Line(
        "*",
        step.name,
        text,
        f"one bucket of {size_text(size)}",
        _sent(plan, step, stage),
        more=tuple(wrapped(", ".join(collapse(step.of)), "      of ", _WIDTH)),
    )


def _regathered(plan: Plan, stage: int) -> list[_Line]:
    return [
        _Line(
            "*",
            step.name,
            f"all_gather({_count(len(step.of), 'updated parameter')}, {step.axis})",
            f"one bucket of {size_text(sum(m.dst.max_local_nbytes for m in step.moves))}",
            _sent(plan, step, stage),
            more=tuple(wrapped(", ".join(collapse(step.of)), "      of ", _WIDTH)),
        )
        for step in plan.steps
        if isinstance(step, Regather) and step.stage == stage
    ]


def _updates(plan: Plan, stage: int) -> list[_Line]:
    """One line for each optimizer, with the parameters that it updates."""
    groups: dict[str, list[Update]] = {}
    for step in plan.steps:
        if isinstance(step, Update) and step.stage == stage:
            groups.setdefault(step.optimizer, []).append(step)
    lines: list[_Line] = []
    for optimizer, found in groups.items():
        state = size_text(sum(step.state_bytes for step in found))
        names = ", ".join(collapse([step.parameter for step in found]))
        lines.append(
            _Line(
                "",
                "",
                f"update {_count(len(found), 'parameter')} by {optimizer}",
                f"{state} of state",
                more=tuple(wrapped(names, "      of ", _WIDTH)),
            )
        )
    return lines


def _sent(plan: Plan, step: Step, stage: int) -> str:
    found = [c for c in plan.collectives_of(step) if c.stage == stage]
    if not found:
        return ""
    times = f" x{found[0].times}" if found[0].times > 1 else ""
    over = f" over {', '.join(c.axis for c in found)}" if isinstance(step, Norm) else ""
    return f"{size_text(sum(c.bytes_sent for c in found))} sent{times}{over}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- columns -------------------------------------------------------------------------------------


def _widths(lines: Sequence[_Line]) -> tuple[int, int, int, int]:
    def widest(texts: Iterable[str], limit: int) -> int:
        return max((len(t) for t in texts if len(t) <= limit), default=0)

    return (
        widest((line.name for line in lines), _MAX_NAME),
        widest((line.text for line in lines), _MAX_TEXT),
        widest((line.type for line in lines), _MAX_TYPE),
        widest((line.cost for line in lines), _MAX_COST),
    )


def _columns(lines: Sequence[_Line], widths: tuple[int, int, int, int]) -> list[str]:
    """Lines with their columns aligned: what is too long for one borrows from the next."""
    name_width, text_width, type_width, cost_width = widths
    found: list[str] = []
    for line in lines:
        start = f"{line.mark or ' '} {line.text}"
        if line.name:
            start = f"{line.mark or ' '} {line.name:<{name_width}} = {line.text}"
        edge = 2 + name_width + 3 + text_width
        for text, width in ((line.type, type_width), (line.cost, cost_width), (line.source, 0)):
            start = f"{start:<{edge}}  {text}"
            edge += 2 + width
        found += [start.rstrip(), *line.more]
    return found


__all__ = ["explain", "render"]
