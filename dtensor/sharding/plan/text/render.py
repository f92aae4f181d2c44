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
Not here: why a step is there (explain.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from dtensor.numerics import dtype_name
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import (
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
from dtensor.sharding.plan.text.explain import explain
from dtensor.sharding.plan.text.head import (
    MAX_TEXT,
    MAX_TYPE,
    WIDTH,
    axes,
    head,
    inputs,
    ranks,
    stored,
)
from dtensor.sharding.plan.text.regions import regions
from dtensor.sharding.plan.text.totals import totals
from dtensor.sharding.plan.text.words import call_text, collapse, flop_text, size_text, wrapped
from dtensor.sharding.redistribute.moves import FREE_KINDS
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS

SECTIONS = ("once a step", "forward", "backward", "optimizer")

# Widths of columns; what is longer pushes its own line out, not all lines.
_MAX_NAME, _MAX_COST = 20, 24


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
    lines = [head(plan), *axes(plan), *stored(plan)]
    for stage in range(plan.num_stages):
        if plan.num_stages > 1:
            lines += ["", f"stage {stage} of {plan.num_stages}    {ranks(plan, stage)}"]
        lines += ["", "inputs", *inputs(plan, stage)]
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
    lines += [*regions(plan, WIDTH), "", *totals(plan)]
    for hint in plan.hints:
        lines += wrapped(str(hint), "", WIDTH)
    return "\n".join(line.rstrip() for line in lines)


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
    src, dst = step.moves[0].src.dtype, step.moves[0].dst.dtype
    wider = f", to {dtype_name(dst)}" if src != dst else ""  # 16 bits that are summed in 32
    noun = "parameter" if gathers else "gradient"
    text = f"{step.kind}({_count(len(step.of), noun)}, {step.axis})"
    return _Line(
        "*",
        step.name,
        text,
        f"one bucket of {size_text(size)}{wider}",
        _sent(plan, step, stage),
        more=tuple(wrapped(", ".join(collapse(step.of)), "      of ", WIDTH)),
    )


def _regathered(plan: Plan, stage: int) -> list[_Line]:
    return [
        _Line(
            "*",
            step.name,
            f"all_gather({_count(len(step.of), 'updated parameter')}, {step.axis})",
            f"one bucket of {size_text(sum(m.dst.max_local_nbytes for m in step.moves))}",
            _sent(plan, step, stage),
            more=tuple(wrapped(", ".join(collapse(step.of)), "      of ", WIDTH)),
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
        copies = sum(step.master_bytes for step in found)
        masters = f", {size_text(copies)} of float32 masters" if copies else ""
        names = ", ".join(collapse([step.parameter for step in found]))
        lines.append(
            _Line(
                "",
                "",
                f"update {_count(len(found), 'parameter')} by {optimizer}",
                f"{state} of state{masters}",
                more=tuple(wrapped(names, "      of ", WIDTH)),
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
        widest((line.text for line in lines), MAX_TEXT),
        widest((line.type for line in lines), MAX_TYPE),
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
