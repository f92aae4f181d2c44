"""A plan whose repeated layers print once: what `print` shows of a deep model.

    folded     blocks.{0..11} x12: one layer is shown; plan.text(full=True) prints all 412 steps
    ...
    forward                                                         per rank
      x               = embedding(embed_weight, tokens)  f32[4,8,16]                      gpt.py:97
      blocks.{0..11}    x12, 32 steps each; of blocks.0, which passes on add_4
        mm            = mm(reshape, permute)             f32[32,48@tp]  6.14 kFLOP x12    gpt.py:51
    *   mm_1_reduced  = all_reduce(mm_1, tp)             f32[32,16]     512 B sent x12    gpt.py:57

Names are those of the layer that is shown, so that `plan.explain` knows them. ``x12`` at a cost: in
each of 12 layers, so that what is printed adds up to the totals; ``x2 x12``: in two microbatches.
``passes on``: what later layers read of it. Where more than MANY steps are left, neighbouring ones
of one line of source that only compute share a line, which names its last value. Invariant: a step
that communicates always has a line of its own. Not here: what counts as repeated (folding.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Step
from dtensor.sharding.plan.text.folding import Run, runs_of
from dtensor.sharding.plan.text.render import (
    WIDTH,
    Line,
    count_text,
    line_of,
    members,
    render,
    steps_by_section,
)
from dtensor.sharding.plan.text.words import flop_text, op_text, wrapped

MANY = 150


def render_folded(totals: PlanTotals) -> str:
    """The text; that of `render` where no layers are alike."""
    plan = totals.plan
    sections = {
        (stage, name): steps
        for stage in range(plan.num_stages)
        for name, steps in steps_by_section(plan, stage).items()
    }
    runs = dict(zip(sections, runs_of(plan, sections.values()), strict=True))
    folded = [run for found in runs.values() for run in found]
    if not folded:
        return render(totals)
    left = sum(map(len, sections.values())) - sum((r.count - 1) * r.period for r in folded)
    share = left > MANY

    def lines(stage: int, name: str, steps: Sequence[Step]) -> list[Line | str]:
        return list(_lines(plan, stage, steps, runs[stage, name], share))

    return render(totals, lines, _note(plan, folded, share))


def _note(plan: PlanRecord, folded: Sequence[Run], share: bool) -> list[str]:
    """What is left out of the text."""
    layers = {name: run.count for run in folded for name in run.layers}
    text = f"{', '.join(f'{name} x{count}' for name, count in layers.items())}: one layer is shown"
    if share:
        text += ", and neighbouring steps of one line of source share a line"
    text += f"; plan.text(full=True) prints all {len(plan.steps):,} steps"
    return wrapped(text, "folded     ", WIDTH)


def _lines(
    plan: PlanRecord, stage: int, steps: Sequence[Step], runs: Sequence[Run], share: bool
) -> Iterator[Line | str]:
    """A section's lines; of a run a title, then those of the layer that is shown."""

    def each(those: Sequence[Step]) -> Iterator[tuple[int, Line]]:
        at = 0
        for group in _statements(those) if share else ([step] for step in those):
            yield at, line_of(plan, group[0], stage) if len(group) == 1 else _statement(group)
            at += len(group)

    done = 0
    for run in runs:
        yield from (line for _, line in each(steps[done : run.start]))
        yield _title(run)
        for at, line in each(run.steps(steps)):
            yield _of_layer(line, run, steps, at)
        done = run.stop
    yield from (line for _, line in each(steps[done:]))


def _title(run: Run) -> str:
    """Which layers, how many, and what goes from one to the next."""
    text = f"{', '.join(run.layers)}    x{run.count}, {count_text(run.period, 'step')} each"
    text += f"; of {run.first}"
    if run.passed:
        text += f", which passes on {', '.join(run.passed[:4])}"
        text += f" and {len(run.passed) - 4} more" if len(run.passed) > 4 else ""
    return text


def _of_layer(line: Line, run: Run, steps: Sequence[Step], offset: int) -> Line:
    """A line of the shown layer: what it costs is marked with the number of layers."""
    more = line.more
    if more:
        alike = run.alike(steps, offset)
        more = members([label for s in alike for label in s.labels])
    cost = f"{line.cost} x{run.count}" if line.cost else ""
    return replace(line, cost=cost, more=more, inner=True)


# -- steps that share a line -----------------------------------------------------------------------


def _statements(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Neighbouring steps of one line of source that only compute; others each alone."""
    for source, group in itertools.groupby(steps, _local_source):
        if source is None:
            yield from ([step] for step in group)
        else:
            yield list(group)


def _local_source(step: Step) -> str | None:
    computes = step.op is not None or (step.moves and not step.sends)
    return step.source if computes else None


def _statement(steps: Sequence[Step]) -> Line:
    """What several steps compute and convert, and how many of them are views."""
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
