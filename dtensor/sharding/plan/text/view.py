"""The records from which the text and the page of a plan are rendered: sections and axis splits.

    for section in sections_of(plan):          # "forward" of stage 0, ...
        for run, steps in section.shown():     # one layer stands for each run of equal layers
            ...
    axis_splits(plan, "tp")                    # [AxisSplit(by="*.up.weight", dim=0, ...)]

Totals are in cost/totals.py, messages and seconds of a step in cost/seconds.py, and the name, type,
cost and source of a step in `line_of` (render.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.steps import Redistribute, Step, Update
from dtensor.sharding.plan.text.folding import Run, runs_of
from dtensor.sharding.plan.text.words import collapse

SECTIONS = ("once a step", "forward", "backward", "optimizer")
UPDATED = "updated"  # moves of new values, which end the optimizer section, after the updates


@dataclass(frozen=True, slots=True)
class Section:
    """The steps of a stage under one title, and the runs of equal layers among them."""

    stage: int
    name: str
    steps: Sequence[Step]
    runs: Sequence[Run]

    def shown(self) -> Iterator[tuple[Run | None, Sequence[Step]]]:
        """Yield (run, the steps of its shown layer) and (None, steps outside of runs), in order."""
        start = 0
        for run in self.runs:
            yield None, self.steps[start : run.start]
            yield run, run.steps(self.steps)
            start = run.stop
        yield None, self.steps[start:]


def sections_of(plan: PlanRecord) -> list[Section]:
    """Return the sections of all stages, with their runs of equal layers."""
    sections = {
        (stage, name): steps
        for stage in range(plan.num_stages)
        for name, steps in steps_by_section(plan, stage).items()
    }
    runs_by_section = zip(sections.items(), runs_of(plan, sections.values()), strict=True)
    return [Section(stage, name, steps, runs) for ((stage, name), steps), runs in runs_by_section]


def steps_by_section(plan: PlanRecord, stage: int) -> dict[str, list[Step]]:
    """Return section name -> steps of the stage, except updates, which are shown together, and
    except the free cuts of whole parameters and their gradients for their owners."""
    sections = {name: list[Step]() for name in (*SECTIONS, UPDATED)}
    updated = False
    for step in plan.steps:
        updated = updated or isinstance(step, Update)
        for_owner = isinstance(step, Redistribute) and step.is_for_owner
        if step.is_on(stage) and not (isinstance(step, Update) or for_owner):
            name = UPDATED if updated else SECTIONS[0] if step.once else step.phase
            sections[name].append(step)
    return sections


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """The splits that one pin causes on an axis, with equal layers combined. ``by``: the name for
    which the user wrote the pin. ``labels``: the pinned values, split on ``dim`` of ``size``;
    ``others``: the parameters that are split with them."""

    by: str
    dim: int
    size: int
    labels: str
    others: str


def axis_splits(plan: PlanRecord, axis: str) -> list[AxisSplit]:
    """Return the splits of an axis, in the order of the pins."""
    groups: dict[tuple[str, int, int, tuple[str, ...]], tuple[list[str], list[str]]] = {}
    for item in dict(plan.opened).get(axis, ()):
        key = (item.by, item.dim, item.size, collapse([item.label, *item.values], "*"))
        labels, others = groups.setdefault(key, ([], []))
        labels.append(item.label)
        others.extend(item.values)
    return [
        AxisSplit(by, dim, size, ", ".join(collapse(labels)), ", ".join(collapse(others)))
        for (by, dim, size, _), (labels, others) in groups.items()
    ]
