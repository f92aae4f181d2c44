"""A Plan: every placement and every collective decided; its cost, memory and text.

    plan.collectives      each reduction, gather, exchange and transfer, as data; prints a table
    plan.memory           bytes per rank of each stage, by kind; prints a table
    plan.cost             predicted seconds of a step
    plan.regions          recomputed regions; plan.plain is the plan without recomputation
    plan.explain("h")     why a value has its placement, why each collective on it is there
    plan.recognised()     patterns of ops that the plan has as one op
    print(plan)           one step a line, repeated layers once; plan.text(full=True) has all
    plan.summary()        a summary in 25 lines
    plan.save("p.html")   a page of it, for a browser

The decisions are its record (record.py); all else follows from that.
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
from dtensor.sharding.plan.text.words import size_text, table
from dtensor.sharding.plan.verify import verify
from dtensor.showing import html_folded

SAVE_PLAN = Provider[Callable[["Plan", str | os.PathLike[str]], Path]]("save_plan")
"""A function that writes a plan to a path and returns the written path."""


class Collectives(tuple[PlannedCollective, ...]):
    """The collectives of a plan, in program order; a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no collectives"
        rows = [["phase", "key", "name", "dtype", "source", "stage", "times", "bytes_sent"]]
        for c in self:
            row = [c.phase, c.key, c.name, c.dtype, c.source]
            rows.append([*row, str(c.stage), str(c.times), size_text(c.bytes_sent)])
        return "\n".join(table(rows, left=5))


class StageMemory(tuple[Memory, ...]):
    """The memory of each stage of a plan; a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        stages = range(len(self)) if len(self) > 1 else ()
        rows = [["memory per rank", *(f"stage {stage}" for stage in stages)]]
        for name in (*(f.name for f in fields(Memory)), "total"):
            sizes = [getattr(memory, name) for memory in self]
            if any(sizes):  # the bytes that are not held at once are subtracted
                sign = -1 if name == "not_at_once" else 1
                rows.append([f"  {name}", *(size_text(sign * size) for size in sizes)])
        return "\n".join(table(rows))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanRecord):
    """The result of ``step.plan(...)``, ``f.plan(...)`` and ``gen.plan(...)``: every placement and
    every collective of a program, decided, with its price. It prints one step a line.

    ``name``, ``mesh``, ``num_stages``, ``num_microbatches``, ``topology`` and ``schedule`` are the
    facts it was made for; ``inputs``, ``steps`` and ``outputs`` are records with a name and a
    ``spec``. ``regions``: the recomputed regions, ``plain``: the plan without recomputation, or
    None. ``zero``: the axis over which state is stored split, and the level, or None.
    """

    plain: Plan | None = field(default=None, repr=False)

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        plain = None if record.plain is None else cls.of(record.plain)
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        values["plain"] = plain
        return cls(**values)

    @cached_property
    def collectives(self) -> Collectives:
        """Every step that communicates, in program order: ``kind``, ``axis``, ``dtype``,
        ``bytes_sent`` per rank and time, ``times``, ``phase`` ("forward", "backward", "optimizer"),
        ``stage``, ``name`` of the result, ``source``: the user's line. A tuple, which prints as a
        table."""
        return Collectives(all_collectives(self))

    @cached_property
    def totals(self) -> PlanTotals:
        """The totals of the plan: all text and comparisons of plans take their figures from
        here."""
        return PlanTotals(self)

    @cached_property
    def index(self) -> PlanIndex:
        """The plan by the names of its values, for `explain`."""
        return PlanIndex(self)

    @property
    def memory(self) -> StageMemory:
        """By stage, bytes of its fullest rank: ``parameters``, ``gradients``, ``optimizer``,
        ``masters``, ``activations`` and others, which do not all exist at once; ``total``: the most
        at once. A tuple, which prints as a table."""
        return StageMemory(self.totals.stage_memory)

    @property
    def cost(self) -> Cost:
        """Predicted ``seconds`` of a step, as in `simulate`, of the slowest rank: its
        ``compute_seconds``, ``communication_seconds``, which are its waits for messages in flight,
        ``waiting_seconds`` for other ranks, and ``host_wait_seconds`` for the controller's call and
        for launches; ``host_bound``: whether launches take longer than the device. For a pipeline,
        ``bubble`` is the fraction in which its ranks wait for other stages."""
        return self.totals.cost

    @property
    def stages(self) -> dict[str, list[list[str]]]:
        """The stages that "auto" chose, as `parallelize` takes them; {} if it chose none."""
        if self.stage_axis is None or not self.auto:
            return {}
        return {self.stage_axis: [list(patterns) for patterns in self.auto]}

    def explain(self, name: str) -> str:
        """Why the value ``name`` has its placement, and the reason for each collective on it.

        PlanningError, with near names, where there is no such value or parameter.
        """
        return self.index.explain(name)

    def rounding(self) -> str:
        """A bound on the effect of each reduction's order."""
        return rounding_text(self)

    def recognised(self) -> str:
        """Which attentions, norms, rotations and gates of the program became one op, by module; and
        which are left unchanged, with the reason."""
        from dtensor.sharding.plan.text.recognised import recognised_text  # seldom asked for

        return recognised_text(self.flow.recognised)

    def verify(self) -> None:
        """AssertionError where the plan contradicts itself; every plan is verified when made."""
        verify(self)

    def text(self, *, full: bool = False) -> str:
        """The text of `print`, with equal layers only once; ``full``: each layer, each step."""
        labels = (*(i.label for i in self.inputs), *(op.module for op in self.flow.ops))
        layered = any(without_numbers(label) != label for label in labels)
        return render_folded(self.totals) if layered and not full else render(self.totals)

    def summary(self) -> str:
        """At most 25 lines: splits, messages and memory, the longest steps, seconds, and their
        hardware."""
        return summary_text(self.totals)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one HTML file, which opens from disk and loads nothing: modules, steps,
        each collective with its reason, shards by rank, memory and timeline.

        Returns the written path. PlanningError for a path that does not end in .html, or is in a
        folder that does not exist.
        """
        return SAVE_PLAN.get()(self, path)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The summary, and the text by its parts, each folded."""
        return summary_html(self.totals) + html_folded(self.text())
