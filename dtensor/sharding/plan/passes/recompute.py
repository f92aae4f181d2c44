"""The pass for recomputation (activation checkpointing; Chen et al. 2016, arXiv:1604.06174).

      x_1       = add(x, attn)          forward, kept: the next block reads it
      h         = mm(norm2, up)         forward, freed after its last use in the forward
      h_again   = mm(norm2_again, up)   backward, just before its first use there

A region is one call of a recomputed module (the outermost, if nested), or the ops of one
`torch.utils.checkpoint`, on one stage. Its inputs, outputs and results of communication are kept;
other values that the backward reads are computed again from these and from parameters. So the
collectives do not change, nor do values: a repeated step is the same op with the same random
numbers. New contents of buffers are computed once. The pass runs before gather_stored.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.record import PlanRecord, Region
from dtensor.sharding.plan.steps import Compute, Redistribute, Step, unused

RegionKey = tuple[str, int]
"""The name and the stage of a region."""
Repeatable = Compute | Redistribute
Producer = tuple[int, Repeatable]
"""A forward step that may run again, with its index."""


def recomputed(plan: PlanRecord, modules: frozenset[str]) -> PlanRecord:
    """Return the plan in which forward steps of calls of ``modules`` and of checkpoints run again
    in the backward. ``modules``: full names. A plan without a backward, or without such steps, is
    returned unchanged."""
    names = region_names(plan.flow.ops, modules)
    if not names or all(step.phase != "backward" for step in plan.steps):
        return plan
    return _Recompute(plan, names).run()


def region_names(ops: Sequence[Op], modules: frozenset[str]) -> dict[str, str]:
    """Return op name -> region name of the forward ops that are in a region."""
    regions: dict[str, str] = {}
    checkpoints: dict[int, list[Op]] = {}
    for op in ops:
        if op.phase == "forward":
            call = next((c for c in op.calls if c.partition("@")[0] in modules), None)
            if call is not None:
                regions[op.name] = call
            elif op.checkpoint is not None:
                checkpoints.setdefault(op.checkpoint, []).append(op)
    used_names = set(regions.values())
    sizes = Counter(call for op in ops if op.phase == "forward" for call in op.calls)
    for number, members in checkpoints.items():
        # `checkpoint(block, x)` is named after the call of the block: the outermost module call
        # that contains exactly the ops of the checkpoint
        shared = (c for c in members[0].calls if all(c in op.calls for op in members))
        name = next((c for c in shared if sizes[c] == len(members)), f"checkpoint {number}")
        name = name if name not in used_names else f"checkpoint {number}"
        used_names.add(name)
        regions.update((op.name, name) for op in members)
    return regions


@dataclass(slots=True)
class _Recompute:
    """The state of the pass. Values are plan names.

    names: op name -> region name. producers: value -> the forward step that makes it without
    communication. regions: value -> its region, or None. kept: values that must not be repeated.
    needed: values to repeat. repeated_names: value -> the name of its repetition. used_names: names
    in use. repeats: region -> its repeated steps.
    """

    plan: PlanRecord
    names: Mapping[str, str]
    producers: dict[str, Producer] = field(default_factory=dict[str, Producer])
    regions: dict[str, RegionKey | None] = field(default_factory=dict[str, RegionKey | None])
    kept: dict[str, bool] = field(default_factory=dict[str, bool])
    needed: set[str] = field(default_factory=set[str])
    repeated_names: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[Step] = field(default_factory=list[Step])
    used_names: set[str] = field(default_factory=set[str])
    repeats: dict[RegionKey, list[Repeatable]] = field(
        default_factory=dict[RegionKey, list[Repeatable]]
    )

    def run(self) -> PlanRecord:
        """Return the plan in which values that are not kept are computed again in the backward."""
        plan = self.plan
        buckets = {s.bucket for s in plan.steps if isinstance(s, Redistribute)}
        self.used_names = {*plan.value_specs(), *buckets}
        self._find_regions()
        self._find_kept()
        self._find_needed()
        if not self.needed:
            return replace(plan, regions=self._region_records())
        for step in plan.steps:
            if step.phase == "backward":
                self._repeat([v for v in step.reads if v in self.needed])
                step = step.reading(self.repeated_names)
            self.steps.append(step)
        return replace(plan, steps=tuple(self.steps), regions=self._region_records(), plain=plan)

    # -- which values are kept -----------------------------------------------------------------

    def _find_regions(self) -> None:
        """Record the producer and the region of each value that a forward step makes without
        communication. A local conversion belongs to no module. It belongs to the region of its
        readers if they are all in one region."""
        readers: dict[str, set[RegionKey | None]] = {}
        for at in range(len(self.plan.steps) - 1, -1, -1):
            step = self.plan.steps[at]
            if step.phase != "forward" or step.once:
                continue
            region: RegionKey | None = None
            match step:
                case Compute(op=op):
                    region = (self.names[op.name], step.stage) if op.name in self.names else None
                case Redistribute() if step.is_free:
                    reader_regions = readers.get(step.name, set())
                    region = next(iter(reader_regions)) if len(reader_regions) == 1 else None
                case _:
                    continue
            for name in step.gives:
                self.producers[name] = (at, step)
                self.regions[name] = region
            for name in step.reads:
                readers.setdefault(name, set()).add(region)
        for name in reversed(self.producers):  # in program order
            step = self.producers[name][1]
            # a conversion that only communication reads belongs to the region of its operand
            if isinstance(step, Redistribute) and name not in readers:
                self.regions[name] = self.regions.get(step.operands[0])

    def _find_kept(self) -> None:
        """Find the values to keep: outputs, values that another region or the end of the step
        reads, values outside regions, and views of kept values."""
        for step in self.plan.steps:
            phase = step.phase
            communicates = isinstance(step, Redistribute) and not step.is_free
            if phase == "backward" or (communicates and phase == "forward"):
                continue  # results of communication are kept; its operands need not be
            results = step.gives
            is_local = bool(results) and results[0] in self.producers
            region = self.regions.get(results[0]) if is_local else None
            for name in step.reads:
                if name in self.producers and (region is None or self.regions[name] != region):
                    self.kept[name] = True
        for output in self.plan.outputs:
            self.kept.update((name, True) for _, name in output.values)
        for name in reversed(self.producers):  # operands come first
            base = self.producers[name][1].viewed
            if self.regions[name] is None or (base is not None and self._is_kept(base)):
                self.kept[name] = True

    def _is_kept(self, value: str) -> bool:
        return value not in self.producers or self.kept.get(value, False)

    def _find_needed(self) -> None:
        """Find the values to repeat: values that the backward reads, or that such values depend on,
        unless they are kept."""
        pending = [
            name for step in self.plan.steps if step.phase == "backward" for name in step.reads
        ]
        while pending:
            name = pending.pop()
            if name not in self.needed and not self._is_kept(name):
                self.needed.add(name)
                pending.extend(self.producers[name][1].reads)

    # -- the repeated steps ----------------------------------------------------------------------

    def _repeat(self, values: Sequence[str]) -> None:
        """Emit the steps that make ``values`` again, in program order, unless already repeated."""
        producers: dict[int, Repeatable] = {}
        pending = [name for name in values if name not in self.repeated_names]
        while pending:
            at, step = self.producers[pending.pop()]
            if at not in producers:
                producers[at] = step
                pending.extend(
                    name
                    for name in step.reads
                    if name in self.needed and name not in self.repeated_names
                )
        for at in sorted(producers):
            self._emit_repetition(producers[at])

    def _emit_repetition(self, step: Repeatable) -> None:
        """Emit the step again, with new names for the needed results."""
        needed = [name for name in step.gives if name in self.needed]
        region = self.regions[needed[0]]
        assert region is not None
        names = self.repeated_names
        for name in needed:
            names[name] = unused(f"{name}_again", self.used_names)
        repeated = replace(step.reading(names).giving(names), phase="backward")
        self.repeats.setdefault(region, []).append(repeated)
        self.steps.append(repeated)

    # -- the regions as data ---------------------------------------------------------------------

    def _region_records(self) -> tuple[Region, ...]:
        """Return the regions of the plan, in the order of the forward."""
        plan = self.plan
        bases = _bases(plan)
        not_saved = {item.name for item in plan.inputs}
        not_saved.update(n for step in plan.steps if step.once for n in step.gives)
        communicated = {  # result of communication -> its region
            result: self.regions.get(operand)
            for step in plan.steps
            if isinstance(step, Redistribute) and not step.is_free and step.phase == "forward"
            for operand, result in zip(step.operands, step.results)
        }
        originals = {new: old for old, new in self.repeated_names.items()}
        read: dict[RegionKey, dict[str, None]] = {
            key: {n: None for step in steps for n in step.reads if n not in originals}
            for key, steps in self.repeats.items()
        }
        for step in plan.steps:
            for name in step.reads if step.phase == "backward" else ():
                region = communicated.get(name)
                if region is not None and region in read:
                    read[region][name] = None
        order = {name: at for at, name in enumerate(dict.fromkeys(self.names.values()))}
        regions: list[Region] = []
        repeating_names = {name for name, _ in self.repeats}
        keys = {r for r in self.regions.values() if r is not None and r[0] not in repeating_names}
        keys.update(self.repeats)
        for key in sorted(keys, key=lambda k: (order[k[0]], k[1])):
            steps = self.repeats.get(key, [])
            values = (bases.get(name, name) for name in read.get(key, ()))
            saved = dict.fromkeys(name for name in values if name not in not_saved)
            regions.append(
                Region(
                    name=key[0],
                    stage=key[1],
                    saved=tuple(saved),
                    communicated=tuple(n for n in saved if communicated.get(n) == key),
                    repeated=tuple(
                        (originals[name], name) for step in steps for name in step.gives
                    ),
                    num_ops=sum(step.viewed is None for step in steps),
                    flops=sum(step.flops for step in steps if isinstance(step, Compute)),
                )
            )
        return tuple(regions)


def _bases(plan: PlanRecord) -> dict[str, str]:
    """Return view -> the value that it is a view of, through chains of views."""
    bases: dict[str, str] = {}
    for step in plan.steps:
        if (base := step.viewed) is not None:
            bases.update((name, bases.get(base, base)) for name in step.gives)
    return bases
