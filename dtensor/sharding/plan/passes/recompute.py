"""Recomputation (activation checkpointing): forward steps run again in the backward, not kept.

    recomputed(plan, frozenset({"blocks.0", "blocks.1"}))

      x_1       = add(x, attn)          forward, kept: the next block reads it
      h         = mm(norm2, up)         forward, dropped when the forward is done with it
      a         = gelu(h)
      h_again   = mm(norm2_again, up)   backward, before its first use there
      a_again   = gelu(h_again)

A region is one call of a recomputed module (of nested ones the outermost), or the ops of one
`torch.utils.checkpoint`, on one stage (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost", arXiv:1604.06174). The inputs of a region, its outputs, and the results of its communication
are kept: a value that was reduced or gathered is not communicated again. The other values of a
region that the backward reads are computed again from these and from parameters, each just before
its first use and only as far as it is needed.

Invariants: the collectives are the same as without it; so are all values to the bit, for a repeated
step is the same op on the same operands, with the same random numbers (they are counted, not
drawn). A step never runs again on behalf of a result that leaves its region, so new contents of
buffers are made once. Results of steps that run once a step, not once a microbatch, are kept. It
runs before `gather_stored`. Not here: the modules of a glob (api/model/parallel.py), the text of
regions (plan/text/render.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtensor.sharding.plan.dataflow import Op
from dtensor.sharding.plan.record import PlanRecord, Region
from dtensor.sharding.plan.steps import (
    Compute,
    Redistribute,
    Step,
    unused,
)

Key = tuple[str, int]  # a region's name, its stage
Repeatable = Compute | Redistribute
Maker = tuple[int, Repeatable]  # the index of a forward step that may run again, the step


def recomputed(plan: PlanRecord, modules: frozenset[str]) -> PlanRecord:
    """The plan in which the steps in calls of ``modules``, and in checkpoints, run again.

    ``modules`` are full names. A plan without a backward, or without such ops, is returned
    unchanged.
    """
    names = region_names(plan.flow.ops, modules)
    if not names or all(step.phase != "backward" for step in plan.steps):
        return plan
    return _Recompute(plan, names).run()


def region_names(ops: Sequence[Op], modules: frozenset[str]) -> dict[str, str]:
    """Op name to the name of its region, for forward ops that are in one."""
    regions: dict[str, str] = {}
    marked: dict[int, list[Op]] = {}
    for op in ops:
        if op.phase == "forward":
            call = next((c for c in op.calls if c.partition("@")[0] in modules), None)
            if call is not None:
                regions[op.name] = call
            elif op.checkpoint is not None:
                marked.setdefault(op.checkpoint, []).append(op)
    taken = set(regions.values())
    sizes = Counter(call for op in ops if op.phase == "forward" for call in op.calls)
    for number, members in marked.items():
        # of `checkpoint(block, x)` the call of the block: the outermost that holds it alone
        shared = (c for c in members[0].calls if all(c in op.calls for op in members))
        name = next((c for c in shared if sizes[c] == len(members)), f"checkpoint {number}")
        name = name if name not in taken else f"checkpoint {number}"
        taken.add(name)
        regions.update((op.name, name) for op in members)
    return regions


@dataclass(slots=True)
class _Recompute:
    plan: PlanRecord
    names: Mapping[str, str]
    makers: dict[str, Maker] = field(default_factory=dict[str, Maker])  # by result
    homes: dict[str, Key | None] = field(default_factory=dict[str, Key | None])
    kept: dict[str, bool] = field(default_factory=dict[str, bool])
    needed: set[str] = field(default_factory=set[str])
    again: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[Step] = field(default_factory=list[Step])
    taken: set[str] = field(default_factory=set[str])
    repeats: dict[Key, list[Repeatable]] = field(default_factory=dict[Key, list[Repeatable]])

    def run(self) -> PlanRecord:
        plan = self.plan
        buckets = {s.bucket for s in plan.steps if isinstance(s, Redistribute)}
        self.taken = {*plan.value_specs(), *buckets}
        self._find_homes()
        self._find_kept()
        self._find_needed()
        if not self.needed:
            return replace(plan, regions=self._regions())
        for step in plan.steps:
            if step.phase == "backward":
                self._repeat([v for v in step.reads if v in self.needed])
                step = step.reading(self.again)
            self.steps.append(step)
        return replace(plan, steps=tuple(self.steps), regions=self._regions(), plain=plan)

    # -- which values are kept -----------------------------------------------------------------

    def _find_homes(self) -> None:
        """The region of each value that a step of the forward makes without communication.

        A free conversion belongs to no module: it belongs to the region that alone reads it.
        """
        readers: dict[str, set[Key | None]] = {}
        for at in range(len(self.plan.steps) - 1, -1, -1):
            step = self.plan.steps[at]
            if step.phase != "forward" or step.once:
                continue
            home: Key | None = None
            match step:
                case Compute(op=op):
                    home = (self.names[op.name], step.stage) if op.name in self.names else None
                case Redistribute() if step.is_free:
                    regions = readers.get(step.name, set())
                    home = next(iter(regions)) if len(regions) == 1 else None
                case _:
                    continue
            for name in step.gives:
                self.makers[name] = (at, step)
                self.homes[name] = home
            for name in step.reads:
                readers.setdefault(name, set()).add(home)
        for name in reversed(self.makers):  # in program order
            step = self.makers[name][1]
            if isinstance(step, Redistribute) and name not in readers:
                self.homes[name] = self.homes.get(step.operands[0])  # it is communicated further

    def _find_kept(self) -> None:
        """Find the kept values: those that another region reads, the results of the step, and views
        of kept ones."""
        for step in self.plan.steps:
            phase = step.phase
            moves = isinstance(step, Redistribute) and not step.is_free
            if phase == "backward" or (moves and phase == "forward"):
                continue  # results of communication are kept; its operands need not be
            made = step.gives
            home = self.homes.get(made[0]) if made and made[0] in self.makers else None
            for name in step.reads:
                if name in self.makers and (home is None or self.homes[name] != home):
                    self.kept[name] = True
        for output in self.plan.outputs:
            self.kept.update((name, True) for _, name in output.values)
        for name in reversed(self.makers):  # operands come first
            base = self.makers[name][1].viewed
            if self.homes[name] is None or (base is not None and self._is_kept(base)):
                self.kept[name] = True

    def _is_kept(self, value: str) -> bool:
        return value not in self.makers or self.kept.get(value, False)

    def _find_needed(self) -> None:
        """Find the values to repeat: those that the backward reads, and those that they depend
        on."""
        waiting = [
            name for step in self.plan.steps if step.phase == "backward" for name in step.reads
        ]
        while waiting:
            name = waiting.pop()
            if name not in self.needed and not self._is_kept(name):
                self.needed.add(name)
                waiting.extend(self.makers[name][1].reads)

    # -- the repeated steps ----------------------------------------------------------------------

    def _repeat(self, values: Sequence[str]) -> None:
        """Repeat the steps that make ``values``, in program order, unless they were repeated
        already."""
        makers: dict[int, Repeatable] = {}
        waiting = [name for name in values if name not in self.again]
        while waiting:
            at, step = self.makers[waiting.pop()]
            if at not in makers:
                makers[at] = step
                waiting.extend(
                    name for name in step.reads if name in self.needed and name not in self.again
                )
        for at in sorted(makers):
            self._lay_down(makers[at])

    def _lay_down(self, step: Repeatable) -> None:
        needed = [name for name in step.gives if name in self.needed]
        home = self.homes[needed[0]]
        assert home is not None
        for name in needed:
            self.again[name] = unused(f"{name}_again", self.taken)
        repeated = replace(step.reading(self.again).giving(self.again), phase="backward")
        self.repeats.setdefault(home, []).append(repeated)
        self.steps.append(repeated)

    # -- the regions as data
    # -------------------------------------------------------------------------

    def _regions(self) -> tuple[Region, ...]:
        """In the order of the forward."""
        plan = self.plan
        bases = _bases(plan)
        always = {item.name for item in plan.inputs}
        always.update(n for step in plan.steps if step.once for n in step.gives)
        sent = {  # communicated value to its region
            result: self.homes.get(operand)
            for step in plan.steps
            if isinstance(step, Redistribute) and not step.is_free
            for operand, result in zip(step.operands, step.results)
        }
        repetitions = {new: old for old, new in self.again.items()}
        read: dict[Key, dict[str, None]] = {
            key: {n: None for step in steps for n in step.reads if n not in repetitions}
            for key, steps in self.repeats.items()
        }
        for step in plan.steps:
            for name in step.reads if step.phase == "backward" else ():
                home = sent.get(name)
                if home is not None and home in read:
                    read[home][name] = None
        order = {name: at for at, name in enumerate(dict.fromkeys(self.names.values()))}
        regions: list[Region] = []
        some = {name for name, _ in self.repeats}
        keys = {h for h in self.homes.values() if h is not None and h[0] not in some}
        keys.update(self.repeats)
        for key in sorted(keys, key=lambda k: (order[k[0]], k[1])):
            steps = self.repeats.get(key, [])
            values = (bases.get(name, name) for name in read.get(key, ()))
            saved = dict.fromkeys(name for name in values if name not in always)
            regions.append(
                Region(
                    name=key[0],
                    stage=key[1],
                    saved=tuple(saved),
                    communicated=tuple(n for n in saved if sent.get(n) == key),
                    repeated=tuple(
                        (repetitions[name], name) for step in steps for name in step.gives
                    ),
                    num_ops=sum(step.viewed is None for step in steps),
                    flops=sum(step.flops for step in steps if isinstance(step, Compute)),
                )
            )
        return tuple(regions)


def _bases(plan: PlanRecord) -> dict[str, str]:
    """By view, the value of which it is a view in the end."""
    bases: dict[str, str] = {}
    for step in plan.steps:
        if (base := step.viewed) is not None:
            bases.update((name, bases.get(base, base)) for name in step.gives)
    return bases
