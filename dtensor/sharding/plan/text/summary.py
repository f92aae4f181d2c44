"""Renders the summary of a plan: at most 25 lines of at most 100 columns.

    plan loss_fn  mesh(tp=2)
    memory        17.6 MiB: parameters 2.7 MiB, gradients 2.7 MiB, optimizer state 5.3 MiB, ...
    sent          tp  forward    68 all_reduce  1.0 MiB  685.24 us
    longest       mm   modeling_llama.py:164  x288  8.26 us
    predicted     1.40 ms a step (H100 SXM bf16, NVLink)

Figures are for one rank and one step; if ranks differ, for the rank with the most memory, or the
rank that sends most of a row. If a table has too many rows, its last row is the sum of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtensor.sharding.plan.cost.seconds import collectives_of, step_seconds, step_times
from dtensor.sharding.plan.cost.totals import PlanTotals, SentTotals
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import updates_of
from dtensor.sharding.plan.storage import LEVELS
from dtensor.sharding.plan.text.render import memory_warning, rows_held
from dtensor.sharding.plan.text.words import (
    collapse,
    cost_text,
    flop_text,
    op_text,
    seconds_text,
    size_text,
    wrapped,
)
from dtensor.showing import WIDTH, html_table, table

Row = tuple[str, ...]
Part = tuple[str, Sequence[Row]]
"""A title, and the rows of its table. A single fact is one row with one cell."""
_MAX_AXES, _MAX_SENT, _MAX_LONGEST = 4, 7, 4  # rows
_TITLE_WIDTH = 14


def summary_text(totals: PlanTotals) -> str:
    """Return the summary as text."""
    lines: list[str] = []
    for title, rows in _parts(totals):
        for number, text in enumerate(table(rows, "<<<>")):
            line = f"{'' if number else title:<{_TITLE_WIDTH}}{text}"
            lines.append(line if len(line) <= WIDTH else line[: WIDTH - 4] + " ...")
    return "\n".join(lines)


def summary_html(totals: PlanTotals) -> str:
    """Return the summary as an HTML table, for a notebook."""
    return html_table(_parts(totals))


def _parts(totals: PlanTotals) -> list[Part]:
    """Return the parts of the summary, in order."""
    plan = totals.plan
    facts = [(f"plan {plan.name}", _mesh_text(plan)), ("steps", _steps_text(plan)), *_axes(plan)]
    if (zero := plan.zero or plan.level_choice) is not None:
        text = f"{LEVELS.get(zero.level, 'nothing')} stored over {' x '.join(zero.axes)}"
        text += "" if plan.level_choice is None else ", chosen by auto"
        facts.append((f"zero {zero.level}", text))
    if plan.regions:
        num_repeated = sum(len(region.repeated) > 0 for region in plan.regions)
        names = ", ".join(collapse([r.name for r in plan.regions if r.repeated])) or "nothing"
        facts.append(("recompute", f"{num_repeated} of {len(plan.regions)} regions: {names}"))
    sent = _sent_rows(totals)
    parts: list[Part] = [(title, [(text,)]) for title, text in facts]
    parts += [
        ("memory", _memory_rows(totals)),
        ("sent", sent or [("nothing",)]),
        ("longest", _longest_rows(plan)),
    ]
    cost = totals.cost
    flops = max(work.flops for work in totals.ranks)
    bound, cost_parts = cost_text(cost)
    seconds = f"{seconds_text(cost.seconds)} a step ({plan.topology.title}){bound}"
    if plan.num_stages > 1:
        cost_parts.append(f"waiting {seconds_text(cost.waiting_seconds)}, bubble {cost.bubble:.0%}")
    parts += [
        ("computes", [(flop_text(flops),)]),
        ("predicted", [(seconds,), (", ".join(cost_parts),)]),
    ]
    return parts


def _mesh_text(plan: PlanRecord) -> str:
    """Return the mesh, and the numbers of stages and microbatches if there are several."""
    parts = [str(plan.mesh)]
    if plan.num_stages > 1:
        parts.append(f"{plan.num_stages} stages over {plan.stage_axis}")
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} microbatches")
    return ", ".join(parts)


def _steps_text(plan: PlanRecord) -> str:
    """Return the number of steps, how many communicate, and the parameters that are updated."""
    num_communicating = sum(1 for step in plan.steps if collectives_of(plan, step))
    text = f"{len(plan.steps):,}, of which {num_communicating:,} communicate"
    updates = updates_of(plan.steps)
    if updates:
        names = ", ".join(sorted({step.optimizer for step in updates}))
        count = len({step.parameter for step in updates})
        text += f"; {names} updates {count:,} parameter{'s' if count > 1 else ''}"
    return text


def _axes(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each axis: the pins that make it split something."""
    axes = [axis for axis in plan.mesh.axes if axis != plan.stage_axis]
    opened = dict(plan.opened)
    for axis in axes[: len(axes) if len(axes) <= _MAX_AXES else _MAX_AXES - 1]:
        pins = list(dict.fromkeys(item.by for item in opened.get(axis, ())))
        text = "splits nothing"
        if pins:
            text = f"opened by {', '.join(pins[:2])}"
            text += f" and {len(pins) - 2} more" if len(pins) > 2 else ""
        yield f"axis {axis}", text
    if len(axes) > _MAX_AXES:
        yield "axes", f"and {', '.join(axes[_MAX_AXES - 1 :])}"


def _memory_rows(totals: PlanTotals) -> list[Row]:
    """Return the memory of the fullest rank."""
    memory = totals.memory
    stages = totals.plan.hosted[totals.rank_memory.index(memory)]
    bytes_by_kind = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "float32 masters": memory.masters,
        "delayed gradients": memory.delayed,
        "activations": memory.activations,
        "kept to undo a step": memory.snapshots,
    }
    plural = "s" if len(stages) > 1 else ""
    where = f" on stage{plural} {' and '.join(map(str, stages))}"
    where = where if totals.plan.num_stages > 1 else ""
    parts = ", ".join(f"{kind} {size_text(size)}" for kind, size in bytes_by_kind.items() if size)
    parts += f", not at once {size_text(-memory.not_at_once)}" if memory.not_at_once else ""
    warning = memory_warning(totals)
    text = f"{size_text(memory.total)}{where}" + (f": {parts}" if parts else "")
    for held, when in rows_held(totals.plan):
        text += f"; {size_text(totals.memory_with(held)[1].total)} {when.lstrip(', ')}"
    text += f"; {warning}" if warning else ""
    return [(line,) for line in wrapped(text, "", WIDTH - _TITLE_WIDTH)]


def _sent_rows(totals: PlanTotals) -> list[Row]:
    """Return a row for each axis, phase and kind: the number, bytes and seconds of messages of the
    rank that sends most of it. The longest come first."""
    ranked = sorted(totals.max_sent_by(lambda key: key).items(), key=lambda item: -item[1].seconds)
    shown = ranked if len(ranked) <= _MAX_SENT else ranked[: _MAX_SENT - 1]
    rows = [(axis, phase, *_cells(sent, kind)) for (axis, phase, kind), sent in shown]
    if not_shown := [sent for _, sent in ranked[len(shown) :]]:
        rows.append(("others", "", *_cells(sum(not_shown, SentTotals()))))
    return rows


def _cells(sent: SentTotals, kind: str = "") -> Row:
    """Return the cells of a row: number and kind of messages, bytes, seconds."""
    number = f"{sent.times} {kind}".rstrip()
    return number, size_text(sent.bytes_sent), seconds_text(sent.seconds)


def _longest_rows(plan: PlanRecord) -> list[Row]:
    """Return the ops that compute longest on a stage: name, line, executions, seconds."""
    # (op, line) -> stage -> [number of executions, seconds]
    costs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for step in plan.steps:
        if step.op is not None:
            key = (op_text(step.op.call), step.source)
            cost = costs.setdefault(key, {}).setdefault(step.stage, [0, 0.0])
            times = step_times(plan, step)
            cost[0] += times
            cost[1] += times * step_seconds(plan, step, step.stage)[0]
    longest = {key: max(by.values(), key=lambda cost: cost[1]) for key, by in costs.items()}
    ranked = sorted(longest.items(), key=lambda item: -item[1][1])[:_MAX_LONGEST]
    return [
        (op, source, f"x{number:.0f}", seconds_text(seconds))
        for (op, source), (number, seconds) in ranked
    ]
