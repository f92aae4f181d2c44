"""Renders the text of a plan: head, inputs, one line per step with bytes sent or FLOP, totals.

    plan mlp    mesh(tp=2)    stage 0 of 1    all ranks identical
    forward                                                         per rank
      h = mm(x, w1)               f32[512,4096@tp]          2.15 GFLOP    mlp.py:14
    * y = all_reduce(p, tp)       f32[512,1024]             2.0 MiB sent  mlp.py:16

``*`` marks a step that communicates (a transfer on the stage that sends it). ``x8``: once for each
of 8 microbatches. Bytes are binary (KiB), FLOP decimal (GFLOP). Each stage has its own sections.
All ranks of a stage run the same steps; the head shows whether their shards differ in size. The
text depends only on the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from dtensor.numerics import dtype_name
from dtensor.sharding.plan.cost.memory import Rows
from dtensor.sharding.plan.cost.seconds import collectives_of
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.host_waits import host_waits, run_ahead
from dtensor.sharding.plan.record import Hint, Misaligned, PlanRecord, Region, StateWrite
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
    on_fullest_rank,
    updates_of,
)
from dtensor.sharding.plan.storage import LEVELS
from dtensor.sharding.plan.text.attention import attention_lines, prediction
from dtensor.sharding.plan.text.notices import notices_of, split_ends
from dtensor.sharding.plan.text.owners import owner_lines
from dtensor.sharding.plan.text.view import UPDATED, axis_splits, steps_by_section
from dtensor.sharding.plan.text.words import (
    call_text,
    collapse,
    cost_text,
    distance_text,
    flop_text,
    seconds_text,
    size_text,
    wrapped,
)
from dtensor.sharding.spec.mesh import MICROBATCH_AXIS
from dtensor.sharding.spec.placements import Shard, index_sets, length
from dtensor.sharding.spec.spec import TensorSpec
from dtensor.showing import WIDTH, table

# Maximum widths of columns. Longer text shifts the rest of its own line only.
MAX_TEXT, MAX_TYPE = 48, 30
_MAX_NAME, _MAX_COST = 20, 24
_REGION_NAME_WIDTH = 18


@dataclass(frozen=True, slots=True)
class Line:
    """The columns of a printed line. ``more``: complete lines that follow it; ``inner``: whether
    the step belongs to a repeated layer, whose lines are indented."""

    mark: str
    name: str
    text: str
    type: str
    cost: str = ""
    source: str = ""
    more: tuple[str, ...] = ()
    inner: bool = False


def render(
    totals: PlanTotals,
    lines: Mapping[tuple[int, str], Sequence[Line | str]] | None = None,
    note: Sequence[str] = (),
) -> str:
    """Return the text of the plan, without a trailing newline. ``lines``: (stage, section name) ->
    its lines; by default each step has one line. ``note``: lines of the head that describe
    ``lines``."""
    plan = totals.plan
    text = [
        _head(plan),
        *(f"autocast    list of {name}" for name in plan.flow.autocast),
        *_axes(totals),
        *attention_lines(plan),
        *split_ends(plan),
        *_stored_lines(plan),
        *_accumulate_lines(plan),
        *_delay_lines(totals),
        *_statistics(plan),
    ]
    text += [*notices_of(plan), *note]
    for stage in range(plan.num_stages):
        if plan.num_stages > 1:
            text += ["", f"stage {stage} of {plan.num_stages}    {_ranks(plan, stage)}"]
        text += ["", "inputs", *_inputs(plan, stage)]
        sections: dict[str, list[Line | str]] = {  # by name
            name: [*lines[stage, name]] if lines else [line_of(plan, s, stage) for s in steps]
            for name, steps in steps_by_section(plan, stage).items()
        }
        sections["optimizer"] += [*_updates(plan, stage), *sections.pop(UPDATED)]
        widths = _widths([line for section_lines in sections.values() for line in section_lines])
        for name, section_lines in sections.items():
            if section_lines:
                text += ["", _title(plan, name), *_columns(section_lines, widths)]
        if written := _state_writes(plan, stage):
            text += ["", _title(plan, "state that is written"), *written]
    if plan.schedule:
        text += ["", "schedule", *(f"  {row}" for row in plan.schedule.splitlines())]
    text += [*_regions(plan), "", *_memory(totals), "", *_communication(totals)]
    text += [f"  on GPUs, the host {wait}" for wait in (*host_waits(plan), *run_ahead(plan))]
    text += ["", *_time(totals), *hint_lines(plan)]
    return "\n".join(line.rstrip() for line in text)


def hint_lines(plan: PlanRecord) -> list[str]:
    """Return the lines about pins whose opposite would be cheaper, if hints were requested."""
    return [line for hint in plan.hints for line in wrapped(_hint(hint), "", WIDTH)]


# -- steps ---------------------------------------------------------------------------------------


def _title(plan: PlanRecord, section: str) -> str:
    """Return the title line of a section, with the unit of its costs."""
    per = "per rank"
    if plan.num_microbatches > 1 and section in ("forward", "backward"):
        per = f"per rank and microbatch, x{plan.num_microbatches}"
    return f"{section:<64}{per}"


def line_of(plan: PlanRecord, step: Step, stage: int) -> Line:
    """Return the line of a step, as printed for ``stage``."""
    match step:
        case Compute():
            return _compute_line(step)
        case Redistribute():
            return _bucket_line(plan, step) if step.bucket else _move_line(plan, step, stage)
        case Transfer():
            where = f"{step.operand}, {plan.stage_axis} {step.stage} -> {step.to_stage}"
            sends = step.stage == stage
            text = f"{'transfer' if sends else 'receive'}({where})"
            sent = _sent_text(plan, step, stage)
            mark = "*" if sends else ""
            return Line(mark, step.result, text, str(step.spec), sent, step.source)
        case Accumulate():
            text = f"accumulate({step.operand}, {MICROBATCH_AXIS})"
            return Line("", step.result, text, str(step.dst), "", step.of)
        case Norm():
            gradients = [name for at, _, name in step.operands if at == stage]
            text = f"norm({count_text(len(gradients), 'gradient')})"
            if step.max_norm != math.inf:
                text += f", clipped to {step.max_norm:g}"
            if step.scaled:
                text += ", unscaled"
            mark = "*" if plan.mesh.size > 1 else ""
            return Line(mark, step.result, text, "f32[]", _sent_text(plan, step, stage))
        case Update():
            raise AssertionError("updates are printed together")
        case _:
            assert_never(step)


def _compute_line(step: Compute) -> Line:
    """Return the line of a local op."""
    return Line(
        "",
        ", ".join(step.gives),
        call_text(step.op.call, step.operands),
        ", ".join(str(spec) for _, _, spec in step.gives_as()),
        flop_text(step.flops) if step.flops else "",
        step.source,
    )


def _move_line(plan: PlanRecord, step: Redistribute, stage: int) -> Line:
    """Return the line of a step that moves one value, that shifts values, or that sums a gradient
    over tied stages."""
    own = [step.tied.index(stage)] if step.tied else range(len(step.results))
    over = f" stages {', '.join(map(str, step.tied))}" if step.tied else ""
    return Line(
        "" if step.is_free else "*",
        ", ".join(step.results[at] for at in own),
        f"{step.kind}({', '.join(step.operands[at] for at in own)}, {step.axis}{over}"
        f"{distance_text(step)}{sized_text(step)})",
        ", ".join(str(spec) for on, _, spec in step.gives_as() if on == stage),
        _sent_text(plan, step, stage),
        step.source or ", ".join(step.of),
    )


def sized_text(step: Redistribute) -> str:
    """Return the text about the value whose numbers are the sizes of the message; "" without."""
    return f", sized by {step.counts}" if step.counts else ""


def _bucket_line(plan: PlanRecord, step: Redistribute) -> Line:
    """Return the line of one message for several gradients or parameters."""
    size = 0
    for move in step.moves:
        before, after = move.src.max_local_nbytes, move.dst.max_local_nbytes
        # in an exchange one end is a whole parameter on one rank, and the other is even
        size += {"all_gather": after, "all_to_all": min(before, after)}.get(step.kind, before)
    src, dst = step.moves[0].src.dtype, step.moves[0].dst.dtype
    cast = f", to {dtype_name(dst)}" if src != dst else ""  # sends 16 bits, sums in float32
    return Line(
        "*",
        step.name,
        f"{step.kind}({count_text(len(step.of), step.noun)}, {step.axis})",
        f"one bucket of {size_text(size)}{cast}",
        _sent_text(plan, step, step.stage),
        step.source,
        more=member_lines(step.of),
    )


def member_lines(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the lines that list the parameters of a step."""
    return tuple(wrapped(", ".join(collapse(labels)), "      of ", WIDTH))


def _updates(plan: PlanRecord, stage: int) -> list[Line]:
    """Return one line for each optimizer, with the parameters that it updates."""
    groups: dict[int, list[Update]] = {}
    for step in updates_of(plan.steps, [stage]):
        groups.setdefault(step.number, []).append(step)
    lines: list[Line] = []
    for updates in groups.values():
        here = on_fullest_rank(updates)
        costs = [f"{size_text(sum(step.state_bytes for step in here))} of state"]
        if copies := sum(step.master_bytes for step in here):
            costs.append(f"{size_text(copies)} of float32 masters")
        text, more = "", member_lines([step.parameter for step in updates])
        if updates[0].owner is not None:
            costs = [flop_text(sum(step.flops for step in here)), *costs]
            costs.append(f"{size_text(sum(step.new_bytes for step in here))} for new values")
        if any(step.owner for step in updates):
            text, more = ", each on one rank", owner_lines(plan, updates)
        what = count_text(len(updates), "parameter")
        text = f"update {what} by {updates[0].optimizer}{text}"
        lines.append(Line("", "", text, ", ".join(costs), more=more))
    return lines


def _state_writes(plan: PlanRecord, stage: int) -> list[str]:
    """Return the lines of the writes to state, combined by kind and user's line."""
    groups: dict[tuple[str, ...], list[StateWrite]] = {}
    for write in plan.state_writes:
        if write.stage == stage:
            texts = {"in place": "in place", "at the commit": "in place, at the commit"}
            how = texts.get(write.how, f"computed, and copied at the commit: {write.why}")
            groups.setdefault((how, write.source), []).append(write)
    lines: list[str] = []
    for (how, source), writes in groups.items():
        # new contents that may share the storage of a changing input are copied twice
        nbytes = sum(write.nbytes * (1 + write.shares) for write in writes)
        copied = f", {size_text(nbytes)} copied" if nbytes else ""
        names = ", ".join(collapse([write.of for write in writes]))
        first, *more = wrapped(f"{names}: {how}{copied}    {source}".rstrip(), "  ", WIDTH - 8)
        lines += [first, *(f"      {text}" for text in more)]
    return lines


def _sent_text(plan: PlanRecord, step: Step, stage: int) -> str:
    """Return the bytes that the step sends on the stage, ``2.0 MiB sent x8``; "" if none."""
    collectives = [c for c in collectives_of(plan, step) if c.stage == stage]
    if not collectives:
        return ""
    times = f" x{collectives[0].times}" if collectives[0].times > 1 else ""
    over = f" over {', '.join(c.axis for c in collectives)}" if isinstance(step, Norm) else ""
    return f"{size_text(sum(c.bytes_sent for c in collectives))} sent{times}{over}"


def count_text(number: int, noun: str) -> str:
    """Return the number with its noun: ``1 view``, ``2 views``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- columns -------------------------------------------------------------------------------------


def _widths(lines_and_titles: Sequence[Line | str]) -> tuple[int, int, int, int]:
    """Return the widths of the columns name, text, type and cost."""
    lines = [line for line in lines_and_titles if isinstance(line, Line)]

    def widest(texts: Iterable[str], limit: int) -> int:
        return max((len(t) for t in texts if len(t) <= limit), default=0)

    return (
        widest(("  " * line.inner + line.name for line in lines), _MAX_NAME),
        widest((line.text for line in lines), MAX_TEXT),
        widest((line.type for line in lines), MAX_TYPE),
        widest((line.cost for line in lines), _MAX_COST),
    )


def _columns(lines: Sequence[Line | str], widths: tuple[int, int, int, int]) -> list[str]:
    """Return the lines with aligned columns; long text uses the space of the next column."""
    name_width, text_width, type_width, cost_width = widths
    rows: list[str] = []
    for line in lines:
        if isinstance(line, str):
            first, *more = wrapped(line, "  ", WIDTH - 8)
            rows += [first, *(f"        {text}" for text in more)]
            continue
        name = f"  {line.name}" if line.inner else line.name
        start = f"{line.mark or ' '} {line.text}"
        if line.name:
            start = f"{line.mark or ' '} {name:<{name_width}} = {line.text}"
        edge = 2 + name_width + 3 + text_width
        for text, width in ((line.type, type_width), (line.cost, cost_width), (line.source, 0)):
            start = f"{start:<{edge}}  {text}"
            edge += 2 + width
        rows += [start.rstrip(), *line.more]
    return rows


# -- the head and inputs -------------------------------------------------------------------------


def _head(plan: PlanRecord) -> str:
    """Return the first line: program, mesh, stages, microbatches."""
    parts = [f"plan {plan.name}", str(plan.mesh)]
    if plan.num_stages > 1:
        parts.append(f"{plan.num_stages} stages over {plan.stage_axis}")
    stated = f" of {plan.microbatches_stated}" if plan.microbatches_stated else ""
    if plan.num_microbatches > 1 or stated:
        num = f"{plan.num_microbatches}{stated} microbatches"
        parts.append(num + f" (axis {MICROBATCH_AXIS}, in time)" * (plan.num_microbatches > 1))
    if plan.num_stages == 1:
        parts += ["stage 0 of 1", _ranks(plan, 0)]
    return "    ".join(parts)


def _ranks(plan: PlanRecord, stage: int) -> str:
    """Return "all ranks identical" if all shards of the stage have equal sizes; else the first
    value whose shards differ, and the number of other such values."""
    uneven: list[str] = []
    uneven_axes_of: dict[TensorSpec, list[tuple[str, list[int]]]] = {}
    for name, spec in _stage_values(plan, stage):
        if (uneven_axes := uneven_axes_of.get(spec)) is None:
            uneven_axes = uneven_axes_of[spec] = list(_uneven_axes(spec))
        for axis, sizes in uneven_axes:
            uneven.append(f"{name} {spec} holds {', '.join(map(str, sizes))} over {axis}")
    if not uneven:
        return "all ranks identical"
    more = f" and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    return f"ranks differ: {uneven[0]}{more}"


def _uneven_axes(spec: TensorSpec) -> Iterator[tuple[str, list[int]]]:
    """Yield (axis, the length of each rank's shard) for the axes that split a dim unevenly."""
    for axis, placement in spec.sharding.items():
        if isinstance(placement, Shard):
            num = spec.mesh.axis_size(axis)
            sizes = [
                length(intervals)
                for intervals in index_sets(placement, spec.shape[placement.dim], num)
            ]
            if len(set(sizes)) > 1:
                yield axis, sizes


def _stage_values(plan: PlanRecord, stage: int) -> Iterable[tuple[str, TensorSpec]]:
    """Yield (name, spec) of each value on the stage, without results of buckets and ties."""
    for item in plan.inputs:
        if stage in item.stages:
            yield item.name, item.base
    for step in plan.steps:
        alone = isinstance(step, Compute) or (
            isinstance(step, Redistribute) and step.is_alone and not step.is_for_owner
        )
        if alone and step.stage == stage:
            yield from ((name, spec) for _, name, spec in step.gives_as())


def _axes(totals: PlanTotals) -> list[str]:
    """Return the lines of the axes: their splits and the pins that cause them."""
    plan = totals.plan
    lines: list[str] = []
    for axis in plan.mesh.axes:
        start = f"axis {axis}    "
        if axis == plan.stage_axis:
            lines.append(f"{start}stages: {', '.join(map(str, range(plan.num_stages)))}")
            lines += _auto_stages(totals)
            continue
        splits = axis_splits(plan, axis)
        for split in splits:
            text = f"splits {split.labels} dim {split.dim} ({split.size})"
            text += f", with {split.others}" if split.others else ""
            lines += wrapped(f"{text}; opened by {split.by}", start, WIDTH)
        if not splits:
            single = plan.mesh.axis_size(axis) == 1
            text = "one rank" if single else "splits nothing: no pin opens a factor"
            lines.append(start + text)
    return lines


def _auto_stages(totals: PlanTotals) -> list[str]:
    """Return the lines of the stages that "auto" chose; [] if it chose none."""
    plan = totals.plan
    if not plan.auto:
        return []
    costs = [work.seconds for work in totals.stages]
    text = " | ".join(", ".join(patterns) for patterns in plan.auto)
    if sum(costs):
        text += f"; the slowest costs {max(costs) * len(costs) / sum(costs):.2f} of even"
    return wrapped(text, "auto       ", WIDTH)


def _stored_lines(plan: PlanRecord) -> list[str]:
    """Return the lines of state that is stored split: by misaligned pins, and by ZeRO."""
    groups: dict[Misaligned, list[str]] = {}
    for item in plan.inputs:
        for pin in item.misaligned:
            groups.setdefault(pin, []).append(item.label)
    lines: list[str] = []
    for pin, labels in groups.items():
        at = f" ({pin.source})" if pin.source else ""
        text = (
            f"{', '.join(collapse(labels))} as {pin.placement!r} on {pin.axis}, which does not "
            f"line up: {pin.why}{at}; gathered before use; pinned by {pin.by}"
        )
        lines += wrapped(text, "stored  ", WIDTH)
    if plan.zero is None:
        return [*lines, *_level_lines(plan)]
    axes, level = plan.zero.axes, plan.zero.level
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for item in plan.inputs:
        if item.kind == "parameter":
            by_axes.setdefault(item.stored_axes, []).append(item.label)
    exceptions = ""
    for some in sorted(by_axes.keys() - {axes}, key=len, reverse=True):
        where = f"over {' x '.join(some)} alone" if some else "whole"
        exceptions += f"; {where}: {', '.join(collapse(by_axes[some]))}"
    text = (
        f"{', '.join(axes)}: {level} ({LEVELS[level]} stored over {' x '.join(axes)}{exceptions})"
    )
    return [*lines, *wrapped(text, "zero    ", WIDTH), *_level_lines(plan)]


def _level_lines(plan: PlanRecord) -> list[str]:
    """Return the lines about the level of ZeRO that "auto" chose, and the predictions for each
    level; [] if the level is stated."""
    choice = plan.level_choice
    if choice is None:
        return []
    capacity = int(plan.topology.memory_bytes)
    why = (
        "the least memory, as none fits in" if not choice.fits else "the fewest seconds that fit in"
    )
    rows = [
        (f"level {a.word}", f"{prediction(a)}{' (does not fit)' if a.memory > capacity else ''}")
        for a in choice.alternatives
    ]
    lines = [f"{choice.level} by auto, {why} {size_text(capacity)}", *table(rows, "<<")]
    return [f"{'' if number else 'level':8}{line}" for number, line in enumerate(lines)]


def _accumulate_lines(plan: PlanRecord) -> list[str]:
    """Return the line about sums of gradients that are kept in bf16; [] without them."""
    sums = [step.dst.dtype for step in plan.steps if isinstance(step, Accumulate)]
    if torch.bfloat16 not in sums:
        return []
    return ["accumulate  sums of gradients over microbatches are rounded to bf16 at each addition"]


def _delay_lines(totals: PlanTotals) -> list[str]:
    """Return the line of the delay and of the memory that it costs; [] without a delay."""
    if not totals.plan.delayed:
        return []
    sizes = [size_text(memory.delayed) for memory in totals.stage_memory]
    by_stage = sizes[0] if len(sizes) == 1 else f"{', '.join(sizes)} by stage"
    return [
        f"delay   1: updates with the gradients of the step before; {by_stage} for them and their "
        f"reductions"
    ]


def _statistics(plan: PlanRecord) -> list[str]:
    """Return the lines about batch norms and load-balancing losses whose statistics are over each
    microbatch and not over the batch; [] if there are none."""
    lines: list[str] = []
    if plan.by_microbatch:
        text = (
            f"statistics of each microbatch, running ones move {plan.num_microbatches} times a "
            f"step: {', '.join(collapse(plan.by_microbatch))}"
        )
        lines += wrapped(text, "batch norm  ", WIDTH)
    losses = [op.call for op in plan.flow.ops if op.call.name == "dt.balance_loss.default"]
    if any(call.operands[0].shape[0] > 1 for call in losses):
        lines.append("aux loss    the mean of the microbatches' load-balancing losses")
    return lines


def _inputs(plan: PlanRecord, stage: int) -> list[str]:
    """Return the lines of the stage's inputs with their specs. Repeated layers share a line."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for item in plan.inputs:
        if stage in item.stages:
            spec, kind = str(item.held), item.kind
            if item.held != item.spec:
                kind += f", used as {item.spec}"
            key = (kind, spec, collapse([item.label], "*"))
            groups.setdefault(key, []).append(item.label)
    rows = [(kind, ", ".join(collapse(labels)), spec) for (kind, spec, _), labels in groups.items()]
    width = min(max((len(name) for _, name, _ in rows), default=0), MAX_TEXT)
    type_width = min(max((len(spec) for _, _, spec in rows), default=0), MAX_TYPE)
    return [f"  {name:<{width}}  {spec:<{type_width}}  {kind}" for kind, name, spec in rows]


# -- recomputation and totals --------------------------------------------------------------------


def _hint(hint: Hint) -> str:
    """Return the text of a hint: the seconds and bytes of both placements."""
    opposite = f"{seconds_text(hint.opposite_seconds)}, {size_text(hint.opposite_bytes_sent)} sent"
    stated = f"{seconds_text(hint.seconds)}, {size_text(hint.bytes_sent)} sent"
    return (
        f'hint: "{hint.by}" with {hint.axis}={hint.opposite!r} would cost {opposite} a step; '
        f"{hint.axis}={hint.stated!r} as stated costs {stated}"
    )


def _regions(plan: PlanRecord) -> list[str]:
    """Return the section of recomputed regions, after an empty line; [] without regions. Regions
    that save and repeat the same amounts share an entry."""
    if not plan.regions:
        return []
    specs = plan.value_specs()
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in plan.regions:
        nbytes = sum(specs[name].max_local_nbytes for name in region.saved)
        key = (region.stage, nbytes, len(region.communicated), region.num_ops, region.flops)
        groups.setdefault(key, []).append(region)
    per = "per rank" if plan.num_microbatches == 1 else "per rank and microbatch"
    lines = ["", f"{'recompute':<64}{per}"]
    for (_, nbytes, *_), members in groups.items():
        assert isinstance(nbytes, int)
        lines += _region_entry(plan, members, nbytes)
    return lines


def _region_entry(plan: PlanRecord, members: Sequence[Region], nbytes: int) -> list[str]:
    """Return the lines about recomputed regions that save ``nbytes`` each, as one entry."""
    first, is_group = members[0], len(members) > 1
    where = f"stage {first.stage}, " if plan.num_stages > 1 else ""
    each = ", each" if first.repeated else ""
    count = f"{len(members)} regions{each}" if is_group else "1 region"
    name = ", ".join(collapse([region.name for region in members]))
    of_first = f" (of {first.name})" if is_group else ""
    ops = count_text(first.num_ops, "op")
    head = f"{name:<{_REGION_NAME_WIDTH - 2}}  {where}{count}"
    if not first.repeated:
        return wrapped(f"{head}: the backward reads nothing that runs again", "  ", WIDTH)
    lines = wrapped(head, "  ", WIDTH)
    saved = ", ".join(first.saved) or "nothing but parameters and the batch"
    start = f"    {'saves':<{_REGION_NAME_WIDTH - 2}}"
    lines += wrapped(f"{size_text(nbytes)}: {saved}{of_first}", start, WIDTH)
    if first.communicated:
        communicated = f"not communicated again: {', '.join(first.communicated)}"
        lines += wrapped(f"{communicated}{of_first}", " " * len(start), WIDTH)
    lines.append(f"    {'repeats':<{_REGION_NAME_WIDTH - 2}}{ops}, {flop_text(first.flops)}")
    return lines


def _memory(totals: PlanTotals) -> list[str]:
    """Return the table of memory by kind and stage."""
    plan, memory = totals.plan, totals.stage_memory
    rows = [
        ["memory per rank", *_stage_names(plan)],
        ["  parameters", *(size_text(m.parameters) for m in memory)],
        ["  gradients", *(size_text(m.gradients) for m in memory)],
        ["  optimizer state", *(size_text(m.optimizer) for m in memory)],
    ]
    if any(m.masters for m in memory):
        rows.append(["  float32 masters", *(size_text(m.masters) for m in memory)])
    if plan.delayed:
        rows.append(["  delayed gradients", *(size_text(m.delayed) for m in memory)])
    rows.append(["  activations", *(size_text(m.activations) for m in memory)])
    if plan.plain is not None:
        plain = [size_text(m.activations) for m in PlanTotals(plan.plain).stage_memory]
        rows.append(["    without recompute", *plain])
    if any(num_in_flight > 1 for num_in_flight in plan.in_flight):
        rows.append(["    microbatches in flight", *map(str, plan.in_flight)])
    if plan.copies:
        title = f"  kept to undo a step, x{plan.copies}"
        rows.append([title, *(size_text(m.snapshots) for m in memory)])
    if any(m.not_at_once for m in memory):
        rows.append(["  not at once", *(size_text(-m.not_at_once) for m in memory)])
    rows.append(["  total", *(size_text(m.total) for m in memory)])
    for held, text in rows_held(plan):
        each, _ = totals.memory_with(held)
        rows.append([f"  total{text}", *(size_text(m.total) for m in each)])
    warning = memory_warning(totals)
    return [*table(rows), *([f"! {warning}"] if warning else [])]


def rows_held(plan: PlanRecord) -> list[tuple[Rows, str]]:
    """Return the numbers of rows by expert for which memory is printed too, each with its text."""
    if not any(spec.is_by_expert for spec in plan.value_specs().values()):
        return []
    most: tuple[Rows, str] = "most", ", if each rank receives all the rows it can"
    if plan.capacity is None:
        return [most]
    return [("capacity", f" at capacity={plan.capacity:g}"), most]


def memory_warning(totals: PlanTotals) -> str:
    """Return the warning that the fullest rank exceeds its device's memory; "" if it fits."""
    if totals.fits:
        return ""
    fullest, limit = totals.memory.total, totals.plan.topology.memory_bytes
    return f"{size_text(fullest)} on the fullest rank, above its {size_text(int(limit))}"


def _communication(totals: PlanTotals) -> list[str]:
    """Return the table of messages and bytes sent, by stage, axis, phase and kind."""
    plan, order = totals.plan, {"forward": 0, "backward": 1, "optimizer": 2}
    axes = plan.mesh.axes
    keys = sorted(totals.sent, key=lambda key: (axes.index(key[0]), order[key[1]], key[2]))
    if not keys:
        return ["communication per rank and step    none"]
    rows = [
        [
            "  " + (f"stage {stage}  {axis}" if plan.num_stages > 1 else axis),
            phase,
            f"{sent.times} {kind}",
            f"{size_text(sent.bytes_sent)} sent",
        ]
        for stage in range(plan.num_stages)
        for axis, phase, kind in keys
        if (sent := totals.sent[axis, phase, kind][stage]).times
    ]
    lines = ["communication per rank and step", *table(rows, "<<<>")]
    return lines


def _time(totals: PlanTotals) -> list[str]:
    """Return the lines of FLOP and of predicted seconds."""
    plan, cost = totals.plan, totals.cost
    flops = [work.flops for work in totals.stages]
    compute = _by_stage(plan, flops)
    if plan.plain is not None:
        plain = PlanTotals(plan.plain).stages
        repeated = [a.flops - b.flops for a, b in zip(totals.stages, plain, strict=True)]
        compute += f"; recomputed {_by_stage(plan, repeated)} of it"
    bound, parts = cost_text(cost)
    if plan.num_stages > 1:
        parts.append(f"bubble {cost.bubble:.0%}")
    noun = "stage" if plan.num_stages == len(plan.hosted) else "rank"
    where = f" of the slowest {noun}" if plan.num_stages > 1 else ""
    return [
        f"compute per rank and step    {compute}",
        f"predicted{where}    {seconds_text(cost.seconds)} a step ({plan.topology.title}){bound}: "
        f"{', '.join(parts)}",
    ]


def _by_stage(plan: PlanRecord, flops: Sequence[int]) -> str:
    """Return the FLOP of each stage as text: ``stage 0 2.1 GFLOP, stage 1 2.0 GFLOP``."""
    names = _stage_names(plan) or [""]
    return ", ".join(f"{n} {flop_text(f)}".strip() for n, f in zip(names, flops, strict=True))


def _stage_names(plan: PlanRecord) -> list[str]:
    """Return the names of the stages; [] if there is one stage."""
    several = plan.num_stages > 1
    return [f"stage {stage}" for stage in range(plan.num_stages)] if several else []
