"""The tree of a plan's modules, layers that are alike as one.

    tree = Tree(plan, runs_by_section)
    node = tree.node("blocks.3.attn")      # of `blocks.{0..11}` x12, which has an `attn`
    tree.parts                             # parents before their children

Modules are alike where plan/text/folding.py found their steps so: a layer that differs in anything
is a part of its own. The root is the program, and what is in no module is the root's own.

Invariant: a module is in one part. Not here: what a part costs (contents.py adds it up).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Step
from dtensor.sharding.plan.text.folding import Run
from dtensor.sharding.plan.text.words import collapse

ROOT = 0


@dataclass(slots=True, kw_only=True)
class ModulePart:
    """A module, or several alike; ``label``: below its parent's."""

    label: str
    parent: int | None
    count: int = 1
    stages: set[int] = field(default_factory=set[int])
    compute: float = 0.0  # seconds of a rank in a step; those of its children included
    communication: float = 0.0
    flops: int = 0
    sent: int = 0  # bytes
    parameters: int = 0  # bytes that a rank holds


class Tree:
    """See the module."""

    def __init__(
        self, plan: Plan, runs: Mapping[int, Sequence[tuple[Sequence[Step], Run]]]
    ) -> None:
        self._same: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        self._nodes: dict[str, int] = {"": ROOT}
        self.parts: list[ModulePart] = [ModulePart(label=plan.name, parent=None)]
        paths = [op.module for op in plan.flow.ops]
        paths += [item.label.rpartition(".")[0] for item in plan.inputs]
        for found in runs.values():
            for steps, run in found:
                self._join(steps, run)
        for path in dict.fromkeys(_prefixes(paths)):
            self._members.setdefault(self._found(path), []).append(path)
        for item in plan.inputs:  # parts in the order in which the model has them
            if item.kind == "parameter":
                self.node(item.label.rpartition(".")[0])

    def node(self, path: str) -> int:
        """The number of the part that a module is in."""
        key, at = "", ROOT
        for name in path.split(".") if path else ():
            key = self._found(f"{key}.{name}" if key else name)
            if key not in self._nodes:
                self._nodes[key] = len(self.parts)
                members = self._members.get(key, [key])
                names = collapse(member.rpartition(".")[2] for member in members)
                self.parts.append(ModulePart(label=", ".join(names), parent=at, count=len(members)))
            at = self._nodes[key]
        return at

    def charge(
        self, node: int, *, compute: float, communication: float, flops: int, sent: int
    ) -> None:
        """Add what a step costs to its part, and to those around it."""
        at: int | None = node
        while at is not None:
            part = self.parts[at]
            part.compute += compute
            part.communication += communication
            part.flops += flops
            part.sent += sent
            at = part.parent

    def hold(self, node: int, nbytes: int, stages: Iterable[int]) -> None:
        """Add a parameter's bytes likewise."""
        at: int | None = node
        while at is not None:
            self.parts[at].parameters += nbytes
            self.parts[at].stages.update(stages)
            at = self.parts[at].parent

    def first_of(self, path: str) -> str:
        """The path with each module's representative in its place."""
        key = ""
        for name in path.split(".") if path else ():
            key = self._found(f"{key}.{name}" if key else name)
        return key

    def _join(self, steps: Sequence[Step], run: Run) -> None:
        for offset in range(run.period):
            alike = [s.op.module for s in run.alike(steps, offset) if s.op is not None]
            for other in alike[1:]:
                self._unite(alike[0], other)

    def _unite(self, first: str, second: str) -> None:
        a, b = first.split("."), second.split(".")
        if len(a) != len(b) or a == b:
            return
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        one, other = self._found(".".join(a[: at + 1])), self._found(".".join(b[: at + 1]))
        if one != other:
            self._same[max(one, other, key=_order)] = min(one, other, key=_order)

    def _found(self, path: str) -> str:
        while path in self._same:
            path = self._same[path]
        return path


def _order(path: str) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Numbers by size."""
    parts = path.split(".")
    return len(parts), tuple((int(p) if p.isdigit() else -1, p) for p in parts)


def _prefixes(paths: Iterable[str]) -> Iterable[str]:
    for path in paths:
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            yield ".".join(parts[:length])
