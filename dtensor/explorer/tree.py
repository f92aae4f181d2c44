"""The tree of a plan's modules, in which equal layers are one part.

    tree = Tree(plan, sections_of(plan))
    tree.part_of("blocks.3.attn")          # the index of the part `attn` of `blocks.{0..11}` x12
    tree.parts                             # parents before their children

Modules are equal if plan/text/folding.py finds that their steps are. The root is the program; steps
outside modules belong to it. contents.py adds the costs of steps to the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Step
from dtensor.sharding.plan.text.folding import Run
from dtensor.sharding.plan.text.view import Section
from dtensor.sharding.plan.text.words import collapse

ROOT = 0


@dataclass(slots=True, kw_only=True)
class ModulePart:
    """A module, or ``count`` equal modules.

    ``label``: its name within the parent; ``parent``: an index, None for the root. The costs are
    of one rank in one step and include the children: seconds of ``compute`` and ``communication``,
    FLOP, bytes ``sent``, and bytes of ``parameters`` that it holds.
    """

    label: str
    parent: int | None
    count: int = 1
    stages: set[int] = field(default_factory=set[int])
    compute: float = 0.0
    communication: float = 0.0
    flops: int = 0
    sent: int = 0
    parameters: int = 0


class Tree:
    """The parts of a plan's module tree."""

    def __init__(self, plan: Plan, sections: Iterable[Section]) -> None:
        """Find equal modules by the runs of equal layers in the sections, and add a part for each
        module that has parameters."""
        self._equal_to: dict[str, str] = {}  # module -> an equal module that comes before it
        self._members: dict[str, list[str]] = {}  # representative -> all equal modules
        self._indices: dict[str, int] = {"": ROOT}  # representative -> index of its part
        self.parts: list[ModulePart] = [ModulePart(label=plan.name, parent=None)]
        paths = [op.module for op in plan.flow.ops]
        paths += [item.label.rpartition(".")[0] for item in plan.inputs]
        for section in sections:
            for run in section.runs:
                self._join_layers(section.steps, run)
        for path in dict.fromkeys(_prefixes(paths)):
            self._members.setdefault(self._representative(path), []).append(path)
        for item in plan.inputs:  # so that parts have the order of the model
            if item.kind == "parameter":
                self.part_of(item.label.rpartition(".")[0])

    def part_of(self, path: str) -> int:
        """Return the index of the part of a module, after adding the part if it is new."""
        key, at = "", ROOT
        for name in path.split(".") if path else ():
            key = self._representative(f"{key}.{name}" if key else name)
            if key not in self._indices:
                self._indices[key] = len(self.parts)
                members = self._members.get(key, [key])
                names = collapse(member.rpartition(".")[2] for member in members)
                self.parts.append(ModulePart(label=", ".join(names), parent=at, count=len(members)))
            at = self._indices[key]
        return at

    def add_cost(
        self, index: int, *, compute: float, communication: float, flops: int, sent: int
    ) -> None:
        """Add the cost of a step to the part with this index and to all its ancestors."""
        at: int | None = index
        while at is not None:
            part = self.parts[at]
            part.compute += compute
            part.communication += communication
            part.flops += flops
            part.sent += sent
            at = part.parent

    def add_parameters(self, index: int, nbytes: int, stages: Iterable[int]) -> None:
        """Add bytes of parameters, and stages, to this part and all its ancestors."""
        at: int | None = index
        while at is not None:
            self.parts[at].parameters += nbytes
            self.parts[at].stages.update(stages)
            at = self.parts[at].parent

    def representative(self, path: str) -> str:
        """Return the path of a module with each layer replaced by its representative."""
        key = ""
        for name in path.split(".") if path else ():
            key = self._representative(f"{key}.{name}" if key else name)
        return key

    def _join_layers(self, steps: Sequence[Step], run: Run) -> None:
        """Record that corresponding modules of the run's layers are equal."""
        for offset in range(run.period):
            modules = [s.op.module for s in run.steps_of_layers(steps, offset) if s.op is not None]
            for other in modules[1:]:
                self._join(modules[0], other)

    def _join(self, first: str, second: str) -> None:
        """Record that two modules are equal up to the first name in which their paths differ."""
        a, b = first.split("."), second.split(".")
        if len(a) != len(b) or a == b:
            return
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        a_key = self._representative(".".join(a[: at + 1]))
        b_key = self._representative(".".join(b[: at + 1]))
        if a_key != b_key:
            self._equal_to[max(a_key, b_key, key=_order)] = min(a_key, b_key, key=_order)

    def _representative(self, path: str) -> str:
        """Return the first module equal to ``path``, whose parents are representatives."""
        while path in self._equal_to:
            path = self._equal_to[path]
        return path


def _order(path: str) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Return a sort key in which numbers of layers are compared as numbers."""
    parts = path.split(".")
    return len(parts), tuple((int(p) if p.isdigit() else -1, p) for p in parts)


def _prefixes(paths: Iterable[str]) -> Iterable[str]:
    """Yield each module path and the paths of its ancestors, ancestors first."""
    for path in paths:
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            yield ".".join(parts[:length])
