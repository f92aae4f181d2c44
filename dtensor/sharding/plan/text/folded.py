"""Renders the text of a plan in which repeated layers (folding.py) are printed once.

    folded     blocks.{0..11} x12: one layer is shown; plan.text(full=True) prints all 412 steps
    forward                                                         per rank
      blocks.{0..11}    x12, 32 steps each; of blocks.0, which passes on add_4
        mm            = mm(reshape, permute)             f32[32,48@tp]  6.14 kFLOP x12    gpt.py:51

The shown layer's names are used. ``x12``: the cost arises in each of 12 layers; ``x2
x12``: also in each of two microbatches. ``passes on``: the values that later layers read. If more
than MAX_STEP_LINES steps remain, neighbouring local steps from one source line share a line; a step
that communicates always has its own line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step
from dtensor.sharding.plan.text.folding import Run
from dtensor.sharding.plan.text.render import Line, count_text, line_of, member_lines, render
from dtensor.sharding.plan.text.view import Section, sections_of
from dtensor.sharding.plan.text.words import flop_text, op_text, wrapped
from dtensor.showing import WIDTH

MAX_STEP_LINES = 150


def render_folded(totals: PlanTotals) -> str:
    """Return the text of the plan with repeated layers printed once."""
    plan, sections = totals.plan, sections_of(totals.plan)
    runs = [run for section in sections for run in section.runs]
    if not runs:
        return render(totals)
    share = sum(len(steps) for s in sections for _, steps in s.shown()) > MAX_STEP_LINES
    lines = {(s.stage, s.name): list(_lines(plan, s, share)) for s in sections}
    return render(totals, lines, _note(plan, runs, share))


def _note(plan: PlanRecord, runs: Sequence[Run], share: bool) -> list[str]:
    """Return the lines of the head about the layers and steps that the text leaves out."""
    layers = {name: run.count for run in runs for name in run.layers}
    text = f"{', '.join(f'{name} x{count}' for name, count in layers.items())}: one layer is shown"
    if share:
        text += ", and neighbouring steps of one line of source share a line"
    text += f"; plan.text(full=True) prints all {len(plan.steps):,} steps"
    return wrapped(text, "folded     ", WIDTH)


def _lines(plan: PlanRecord, section: Section, share: bool) -> Iterator[Line | str]:
    """Yield the lines of a section: for each run of layers, a title and the lines of one layer.
    ``share``: whether neighbouring local steps from one source line share a line."""
    for run, steps in section.shown():
        if run is not None:
            yield _title(run)
        offset = 0
        for group in _statements(steps) if share else ([step] for step in steps):
            single = len(group) == 1
            line = line_of(plan, group[0], section.stage) if single else _statement_line(group)
            yield line if run is None else _layer_line(line, run, section.steps, offset)
            offset += len(group)


def _title(run: Run) -> str:
    """Return the title of a run: layers, their number, and values passed to the next layer."""
    text = f"{', '.join(run.layers)}    x{run.count}, {count_text(run.period, 'step')} each"
    text += f"; of {run.first}"
    if run.passed:
        text += f", which passes on {', '.join(run.passed[:4])}"
        text += f" and {len(run.passed) - 4} more" if len(run.passed) > 4 else ""
    return text


def _layer_line(line: Line, run: Run, steps: Sequence[Step], offset: int) -> Line:
    """Return a line of the shown layer, with the cost and the labels of all layers."""
    more = line.more
    if more:
        steps_of_layers = run.steps_of_layers(steps, offset)
        more = member_lines([label for s in steps_of_layers for label in s.labels])
    cost = f"{line.cost} x{run.count}" if line.cost else ""
    return replace(line, cost=cost, more=more, inner=True)


# -- steps that share a line -----------------------------------------------------------------------


def _statements(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Group neighbouring local steps from one source line. Other steps are groups of one step."""
    for source, group in itertools.groupby(steps, _local_source):
        if source is None:
            yield from ([step] for step in group)
        else:
            yield list(group)


def _local_source(step: Step) -> str | None:
    """Return the source line of a step that does not communicate; None for other steps."""
    is_local = step.op is not None or (step.moves and not step.sends)
    return step.source if is_local else None


def _statement_line(steps: Sequence[Step]) -> Line:
    """Return the line that several steps share: their ops and conversions with counts, the number
    of views, and the name and type of the last result."""
    counts: dict[str, int] = {}
    flops = views = 0
    for step in steps:
        if step.op is not None and step.is_view:
            views += 1
            continue
        name = step.moves[0].kind if step.op is None else op_text(step.op.call)
        counts[name] = counts.get(name, 0) + 1
        flops += 0 if step.op is None else step.flops
    parts = [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
    parts += [count_text(views, "view")] if views else []
    last = steps[-1]
    return Line(
        "",
        ", ".join(last.gives),
        ", ".join(parts),
        ", ".join(str(spec) for _, _, spec in last.gives_as()),
        flop_text(flops) if flops else "",
        last.source,
    )
