"""A Plan: every placement and every collective decided; what it costs, holds and prints.

    plan.collectives      each reduction, gather, exchange and transfer, as data
    plan.memory           bytes per rank of each stage, by what holds them
    plan.cost             predicted seconds of a step
    plan.regions          what runs again in the backward; plan.plain is the plan without that
    plan.explain("h")     why a value has its placement, why each collective on it is there
    plan.recognised()     what the program writes out and the plan has as one op
    print(plan)           one step a line, repeated layers once; plan.text(full=True) has all
    plan.summary()        what matters of it in 25 lines
    plan.save("p.html")   a page of it, for a browser

What is decided is its record (record.py); all else follows from that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from dtensor.provider import Provider
from dtensor.sharding.plan.cost.memory import Memory
from dtensor.sharding.plan.cost.seconds import PlannedCollective, all_collectives
from dtensor.sharding.plan.cost.totals import PlanTotals
from dtensor.sharding.plan.dataflow import without_numbers
from dtensor.sharding.plan.record import Cost, PlanRecord
from dtensor.sharding.plan.text.explain import PlanIndex
from dtensor.sharding.plan.text.folded import render_folded
from dtensor.sharding.plan.text.render import render
from dtensor.sharding.plan.text.rounding import rounding_text
from dtensor.sharding.plan.text.summary import summary_html, summary_text
from dtensor.sharding.plan.verify import verify
from dtensor.showing import html_folded

PAGES = Provider[Callable[["Plan", str | os.PathLike[str]], Path]](
    "dtensor.api.launch.plan_page:save_plan"
)
"""Given a plan and where to write it, where it was written."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanRecord):
    """What ``step.plan(...)``, ``f.plan(...)`` and ``gen.plan(...)`` return: every placement and
    every collective of a program, decided, with its price. It prints one step a line.

    ``name``, ``mesh``, ``num_stages``, ``num_microbatches``, ``topology`` and ``schedule`` are what
    it was made for; ``inputs``, ``steps`` and ``outputs`` are records with a name and a ``spec``.
    ``regions``: what runs again in the backward, ``plain``: the plan without that, or None.
    ``zero``: the axis over which state is stored split, and the level, or None.
    """

    plain: Plan | None = field(default=None, repr=False)

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        plain = None if record.plain is None else cls.of(record.plain)
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        values["plain"] = plain
        return cls(**values)

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every step that communicates, in program order: ``kind``, ``axis``, ``dtype``,
        ``bytes_sent`` per rank and time, ``times``, ``phase`` ("forward", "backward", "optimizer"),
        ``stage``, ``name`` of the result, ``source``: the user's line."""
        return all_collectives(self)

    @cached_property
    def totals(self) -> PlanTotals:
        """What it comes to: whatever prints or compares plans has its figures from here."""
        return PlanTotals(self)

    @cached_property
    def index(self) -> PlanIndex:
        """The plan by the names of its values, of which `explain` tells."""
        return PlanIndex(self)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """By stage, bytes of its fullest rank: ``parameters``, ``gradients``, ``optimizer``,
        ``masters``, ``activations`` and others, which are not all there at once; ``total``: the
        most at once."""
        return self.totals.stage_memory

    @property
    def cost(self) -> Cost:
        """Predicted ``seconds`` of a step, as `simulate` finds them. Of the slowest rank: its
        ``compute_seconds``, ``communication_seconds``, in which it waits for messages under way,
        and ``waiting_seconds`` besides; of a pipeline, ``bubble`` is the fraction in which its
        ranks wait for other stages."""
        return self.totals.cost

    @property
    def stages(self) -> dict[str, list[list[str]]]:
        """The stages that "auto" chose, as `parallelize` takes them; {} where it chose none."""
        if self.stage_axis is None or not self.auto:
            return {}
        return {self.stage_axis: [list(patterns) for patterns in self.auto]}

    def explain(self, name: str) -> str:
        """Why the value ``name`` has its placement, and why each collective on it is there.

        PlanningError, with near names, where there is no such value or parameter.
        """
        return self.index.explain(name)

    def rounding(self) -> str:
        """A bound on what the order of each reduction can change."""
        return rounding_text(self)

    def recognised(self) -> str:
        """Which attentions, norms, rotations and gates of the program became one op, by module;
        and which stay as they are written, with the reason."""
        from dtensor.sharding.plan.text.recognised import recognised_text  # seldom asked for

        return recognised_text(self.flow.recognised)

    def verify(self) -> None:
        """AssertionError where the plan contradicts itself; every plan is verified when made."""
        verify(self)

    def text(self, *, full: bool = False) -> str:
        """What `print` shows, layers that are alike only once; ``full``: each layer, each step."""
        labels = (*(i.label for i in self.inputs), *(op.module for op in self.flow.ops))
        layered = any(without_numbers(label) != label for label in labels)
        return render_folded(self.totals) if layered and not full else render(self.totals)

    def summary(self) -> str:
        """At most 25 lines: what is split, sent and held, what takes longest, seconds, and of
        what hardware."""
        return summary_text(self.totals)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one HTML file, which opens from disk and loads nothing: modules, steps,
        each collective with why it is there, shards by rank, memory and timeline.

        Returns where it was written. PlanningError for a path that does not end in .html, or is in
        a folder that is not there.
        """
        return PAGES.get()(self, path)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The summary, and the text by its parts, each folded."""
        return summary_html(self.totals) + html_folded(self.text())
