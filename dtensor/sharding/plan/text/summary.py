"""A plan in at most 25 lines: what is split, held and sent, how long a step takes, and on what.

    plan loss_fn  mesh(tp=2)
    steps         6,983, of which 133 communicate; 291 parameters updated by AdamW
    axis tp       opened by model.layers.*.self_attn.q_proj.weight, and 3 more
    memory        17.6 MiB: parameters 2.7 MiB, gradients 2.7 MiB, optimizer state 5.3 MiB, ...
    sent          tp  forward    68 all_reduce  1.0 MiB  685.24 us
                  tp  backward   65 all_reduce  1.0 MiB  655.12 us
    longest       mm   modeling_llama.py:164  x288  8.26 us
    computes      278.00 MFLOP
    predicted     1.40 ms a step (H100 SXM bf16, NVLink)
                  compute 60.72 us, communication 1.34 ms

All is of one rank and one step; where ranks differ, of the one that has most: of memory, of what a
row sends. A line is at most 100 columns wide. Invariant: what has no row of its own is added up
in the last row of its table. Not here: the steps themselves (render.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtensor.sharding.plan.cost.seconds import collectives_of, step_seconds, step_times
from dtensor.sharding.plan.cost.totals import PlanTotals, SentTotals
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import updates_of
from dtensor.sharding.plan.storage import LEVELS
from dtensor.sharding.plan.text.render import memory_warning
from dtensor.sharding.plan.text.words import (
    collapse,
    cost_text,
    flop_text,
    op_text,
    seconds_text,
    size_text,
    table,
    wrapped,
)
from dtensor.showing import WIDTH, html_table

Row = tuple[str, ...]
Part = tuple[str, Sequence[Row]]
"""A title, and a table of text; a fact is one row of one cell."""
_AXES, _SENT, _LONGEST = 4, 7, 4
"""Rows at most."""
_TITLE = 14


def summary_text(totals: PlanTotals) -> str:
    lines: list[str] = []
    for title, rows in _parts(totals):
        for number, text in enumerate(table(rows, left=3)):
            line = f"{'' if number else title:<{_TITLE}}{text}"
            lines.append(line if len(line) <= WIDTH else line[: WIDTH - 4] + " ...")
    return "\n".join(lines)


def summary_html(totals: PlanTotals) -> str:
    """The same as one table, for a notebook."""
    return html_table(_parts(totals))


def _parts(totals: PlanTotals) -> list[Part]:
    plan = totals.plan
    facts = [(f"plan {plan.name}", _shape(plan)), ("steps", _steps(plan)), *_axes(plan)]
    if plan.zero is not None:
        axis, level = plan.zero
        facts.append((f"zero {level}", f"{LEVELS[level]} stored over {axis}"))
    if plan.regions:
        again = sum(len(region.repeated) > 0 for region in plan.regions)
        names = ", ".join(collapse([r.name for r in plan.regions if r.repeated])) or "nothing"
        facts.append(("recompute", f"{again} of {len(plan.regions)} regions: {names}"))
    sent = _sent(totals)
    parts: list[Part] = [(what, [(words,)]) for what, words in facts]
    parts += [
        ("memory", _memory(totals)),
        ("sent", sent or [("nothing",)]),
        ("longest", _longest(plan)),
    ]
    cost = totals.cost
    flops = max(work.flops for work in totals.ranks)
    bound, shares = cost_text(cost)
    seconds = f"{seconds_text(cost.seconds)} a step ({plan.topology.title}){bound}"
    if plan.num_stages > 1:
        shares.append(f"waiting {seconds_text(cost.waiting_seconds)}, bubble {cost.bubble:.0%}")
    parts += [
        ("computes", [(flop_text(flops),)]),
        ("predicted", [(seconds,), (", ".join(shares),)]),
    ]
    return parts


def _shape(plan: PlanRecord) -> str:
    parts = [str(plan.mesh)]
    if plan.num_stages > 1:
        parts.append(f"{plan.num_stages} stages over {plan.stage_axis}")
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} microbatches")
    return ", ".join(parts)


def _steps(plan: PlanRecord) -> str:
    communicate = sum(1 for step in plan.steps if collectives_of(plan, step))
    text = f"{len(plan.steps):,}, of which {communicate:,} communicate"
    updates = updates_of(plan.steps)
    if updates:
        names = ", ".join(sorted({step.optimizer for step in updates}))
        count = len({step.parameter for step in updates})
        text += f"; {names} updates {count:,} parameter{'s' if count > 1 else ''}"
    return text


def _axes(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """By axis, the pins that opened a factor."""
    axes = [axis for axis in plan.mesh.axes if axis != plan.stage_axis]
    opened = dict(plan.opened)
    for axis in axes[: len(axes) if len(axes) <= _AXES else _AXES - 1]:
        pins = list(dict.fromkeys(item.by for item in opened.get(axis, ())))
        text = "splits nothing"
        if pins:
            text = f"opened by {', '.join(pins[:2])}"
            text += f" and {len(pins) - 2} more" if len(pins) > 2 else ""
        yield f"axis {axis}", text
    if len(axes) > _AXES:
        yield "axes", f"and {', '.join(axes[_AXES - 1 :])}"


def _memory(totals: PlanTotals) -> list[Row]:
    """Of the rank that holds most."""
    most = totals.memory
    stages = totals.plan.hosted[totals.rank_memory.index(most)]
    held = {
        "parameters": most.parameters,
        "gradients": most.gradients,
        "optimizer state": most.optimizer,
        "float32 masters": most.masters,
        "activations": most.activations,
        "kept to undo a step": most.snapshots,
    }
    several = "s" if len(stages) > 1 else ""
    where = f" on stage{several} {' and '.join(map(str, stages))}"
    where = where if totals.plan.num_stages > 1 else ""
    parts = ", ".join(f"{what} {size_text(size)}" for what, size in held.items() if size)
    parts += f", not at once {size_text(-most.not_at_once)}" if most.not_at_once else ""
    above = memory_warning(totals)
    text = f"{size_text(most.total)}{where}" + (f": {parts}" if parts else "")
    text += f"; {above}" if above else ""
    return [(line,) for line in wrapped(text, "", WIDTH - _TITLE)]


def _sent(totals: PlanTotals) -> list[Row]:
    """By axis, phase and kind: how many, bytes and seconds, of the rank that sends most of it."""
    ranked = sorted(totals.most_sent(lambda key: key).items(), key=lambda item: -item[1].seconds)
    kept = ranked if len(ranked) <= _SENT else ranked[: _SENT - 1]
    rows = [(axis, phase, *_cells(sent, kind)) for (axis, phase, kind), sent in kept]
    if rest := [sent for _, sent in ranked[len(kept) :]]:
        rows.append(("others", "", *_cells(sum(rest, SentTotals()))))
    return rows


def _cells(sent: SentTotals, kind: str = "") -> Row:
    number = f"{sent.times} {kind}".rstrip()
    return number, size_text(sent.bytes_sent), seconds_text(sent.seconds)


def _longest(plan: PlanRecord) -> list[Row]:
    """The ops and lines of source that compute longest on a stage: how many, seconds, the line."""
    costs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for step in plan.steps:
        if step.op is not None:
            key = (op_text(step.op.call), step.source)
            own = costs.setdefault(key, {}).setdefault(step.stage, [0, 0.0])
            times = step_times(plan, step)
            own[0] += times
            own[1] += times * step_seconds(plan, step, step.stage)[0]
    most = {key: max(by.values(), key=lambda own: own[1]) for key, by in costs.items()}
    ranked = sorted(most.items(), key=lambda item: -item[1][1])[:_LONGEST]
    return [
        (op, source, f"x{number:.0f}", seconds_text(seconds))
        for (op, source), (number, seconds) in ranked
    ]
