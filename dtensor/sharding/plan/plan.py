"""`Plan`: the decided placements and collectives of a program, with its cost, memory and text.

    plan.collectives, plan.memory, plan.cost     data; the first two print as tables
    print(plan), plan.summary(), plan.explain("h"), plan.save("plan.html")

The decisions are the fields of `PlanRecord` (record.py); a `Plan` derives everything else from
them.
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
from dtensor.sharding.plan.text.words import size_text
from dtensor.sharding.plan.verify import verify
from dtensor.showing import html_folded, table

SAVE_PLAN = Provider[Callable[["Plan", str | os.PathLike[str]], Path]]("save_plan")
"""A function that writes a plan to a path and returns the written path."""


class Collectives(tuple[PlannedCollective, ...]):
    """The collectives of a plan, in program order; a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return a table with a row for each collective."""
        if not self:
            return "no collectives"
        rows = [["phase", "key", "name", "dtype", "source", "stage", "times", "bytes_sent"]]
        for c in self:
            row = [c.phase, c.key, c.name, c.dtype, c.source]
            rows.append([*row, str(c.stage), str(c.times), size_text(c.bytes_sent)])
        return "\n".join(table(rows, "<<<<<>"))


class StageMemory(tuple[Memory, ...]):
    """The memory of each stage of a plan; a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return a table with a row for each kind of memory and a column for each stage."""
        stages = range(len(self)) if len(self) > 1 else ()
        rows = [["memory per rank", *(f"stage {stage}" for stage in stages)]]
        for name in (*(f.name for f in fields(Memory)), "total"):
            sizes = [getattr(memory, name) for memory in self]
            if any(sizes):
                sign = -1 if name == "not_at_once" else 1  # `total` subtracts it
                rows.append([f"  {name}", *(size_text(sign * size) for size in sizes)])
        return "\n".join(table(rows))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanRecord):
    """The result of ``step.plan(...)``, ``f.plan(...)`` and ``gen.plan(...)``: the placement of
    every value and every collective of a program, with their predicted cost. A plan prints one step
    per line.

    ``name``, ``mesh``, ``num_stages``, ``num_microbatches``, ``topology`` and ``schedule`` are
    inputs of planning. ``inputs``, ``steps`` and ``outputs`` are records with a name and a
    ``spec``. ``regions``: the recomputed regions. ``plain``: the plan without recomputation, or
    None. ``zero``: the axes over which state is stored split and the ZeRO level, or None.
    """

    plain: Plan | None = field(default=None, repr=False)

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        """Return the plan with the decisions of ``record``."""
        plain = None if record.plain is None else cls.of(record.plain)
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        values["plain"] = plain
        return cls(**values)

    @cached_property
    def collectives(self) -> Collectives:
        """Every message of the plan in program order, as a tuple that prints as a table.

        Each has its ``kind``, ``axis``, ``dtype``, ``bytes_sent`` (per rank and execution),
        ``times`` (executions per training step), ``phase`` ("forward", "backward", "optimizer"),
        ``stage``, ``name`` (of the result) and ``source`` (the user's line).
        """
        return Collectives(all_collectives(self))

    @cached_property
    def totals(self) -> PlanTotals:
        """The totals of the plan, from which all texts and comparisons take their figures."""
        return PlanTotals(self)

    @cached_property
    def index(self) -> PlanIndex:
        """The steps and inputs of the plan indexed by value name, for `explain`."""
        return PlanIndex(self)

    @property
    def memory(self) -> StageMemory:
        """The memory of the fullest rank of each stage in bytes, as a tuple that prints as a table.

        ``parameters``, ``gradients``, ``optimizer``, ``masters``, ``activations`` and others do
        not all exist at the same time; ``total`` is the peak.
        """
        return StageMemory(self.totals.stage_memory)

    @property
    def cost(self) -> Cost:
        """The predicted ``seconds`` of a step on the slowest rank, as `simulate` predicts them.

        They are the sum of ``compute_seconds``, ``communication_seconds`` (waits for messages in
        flight), ``waiting_seconds`` (waits for other ranks) and ``host_wait_seconds`` (waits for
        the controller's call and for launches). ``host_bound``: whether launches take longer than
        the device's work. ``bubble``: the fraction of a pipeline's time in which its ranks wait for
        other stages.
        """
        return self.totals.cost

    @property
    def stages(self) -> dict[str, list[list[str]]]:
        """The stages that ``stages="auto"`` chose, as `parallelize` takes them; else {}."""
        if self.stage_axis is None or not self.auto:
            return {}
        return {self.stage_axis: [list(patterns) for patterns in self.auto]}

    def explain(self, name: str) -> str:
        """Return why the value ``name`` has its placement, and the reason for each collective on
        it.

        Raises PlanningError, which lists similar names, if no value or parameter has this name.
        """
        return self.index.explain(name)

    def rounding(self) -> str:
        """Return a table of bounds on how much the order of each reduction changes its result."""
        return rounding_text(self)

    def recognised(self) -> str:
        """Return a table of the attentions, norms, rotations and gates of the program, by module:
        which became one op, and which stayed unchanged, with the reason."""
        from dtensor.sharding.plan.text.recognised import recognised_text  # rarely needed

        return recognised_text(self.flow.recognised)

    def verify(self) -> None:
        """Raise AssertionError if the plan contradicts itself. Planning verifies every plan."""
        verify(self)

    def text(self, *, full: bool = False) -> str:
        """Return the text that `print` shows, with equal layers once; with ``full``, all steps."""
        labels = (*(i.label for i in self.inputs), *(op.module for op in self.flow.ops))
        layered = any(without_numbers(label) != label for label in labels)
        return render_folded(self.totals) if layered and not full else render(self.totals)

    def summary(self) -> str:
        """Return at most 25 lines: splits, messages, memory, the longest steps, predicted seconds,
        and the hardware assumed."""
        return summary_text(self.totals)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as a self-contained HTML file: modules, steps, each collective with its
        reason, shards by rank, memory and timeline.

        Returns the written path. Raises PlanningError if the path does not end in .html, or if its
        folder does not exist.
        """
        return SAVE_PLAN.get()(self, path)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """Return the summary, followed by the sections of the text, each collapsed."""
        return summary_html(self.totals) + html_folded(self.text())
