"""The smallest stages that a program could have: one for each module that computes with parameters.

    found = units_of(flow, aliases={"embed.weight": ("embed.weight", "head.weight")})
    found.units[0].names          # ("embed.weight",)
    found.flow                    # the program with one stage for each unit

A unit begins where an op combines what depends on the batch with parameters, in program order; ops
in a row that use parameters of one module are one unit, so a cut never parts a weight from its
bias. All other ops are where stages of one unit each would have them (assign_stages.py), so what is
said of units holds for stages of several: values go from a unit to a later one, gradients back.

Not here: what units cost (sharding/plan/stages/unit_costs.py), which of them form a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dtensor.frontend.dataflow.assign_stages import staged
from dtensor.sharding.plan.dataflow import Dataflow, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """``names``: the parameters that it uses, under the names by which its module has them;
    ``labels``: their canonical names; ``owner``: the module that they are of, "" for several."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """``flow``: the program with unit u as its stage u; ``reused``: (u, v) where v uses a parameter
    under a name that u uses too, and runs on the stage of u wherever that can have it."""

    units: tuple[Unit, ...]
    flow: Dataflow
    reused: tuple[tuple[int, int], ...]

    def of_label(self) -> dict[str, tuple[int, ...]]:
        """Parameter to the units that use it, ascending."""
        return _users(unit.labels for unit in self.units)

    def of_name(self) -> dict[str, tuple[int, ...]]:
        """As `of_label`, by the names that are used."""
        return _users(unit.names for unit in self.units)


def _users(used: Iterable[tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """What each unit uses, as each of it to the units."""
    users: dict[str, tuple[int, ...]] = {}
    for number, names in enumerate(used):
        for name in names:
            users[name] = (*users.get(name, ()), number)
    return users


def units_of(
    flow: Dataflow, aliases: Mapping[str, tuple[str, ...]], containers: frozenset[str] = frozenset()
) -> Units:
    """The units of a program without stages.

    Args:
        aliases: canonical name of a parameter to all its names.
        containers: names of modules that hold parameters and compute nothing (ParameterList).
    """
    plain: frozenset[str] = frozenset()  # ops that combine, but run where another unit is
    while True:
        units, begun = _chain(flow, aliases, containers, plain)
        unstaged = Units(units=units, flow=flow, reused=())
        if len(units) < 2:
            return unstaged
        by_name = unstaged.of_name()
        parts = staged(flow, unstaged.of_label(), len(units), by_name)
        at = {op.name: op.stage for op in parts.ops}
        moved = {name for name, unit in begun.items() if at[name] != unit}
        if not moved:
            break
        plain |= moved
    reused = tuple(
        (first, second)
        for used in by_name.values()
        for number, second in enumerate(used)
        for first in used[:number]
    )
    return Units(units=unstaged.units, flow=parts, reused=reused)


def _chain(
    flow: Dataflow,
    aliases: Mapping[str, tuple[str, ...]],
    containers: frozenset[str],
    plain: frozenset[str],
) -> tuple[tuple[Unit, ...], dict[str, int]]:
    """The units, and by the name of each op that combines its unit."""
    units: list[Unit] = []
    begun: dict[str, int] = {}
    for op, labels in _anchors(flow):
        if op.name in plain:
            continue
        names = tuple(_name_at(op, aliases.get(label, (label,))) for label in labels)
        owners = {name.rpartition(".")[0] for name in names}
        owner = owners.pop() if len(owners) == 1 else ""
        before = units[-1] if units else None
        if before is not None and owner == before.owner and owner and owner not in containers:
            units[-1] = Unit(
                names=tuple(dict.fromkeys((*before.names, *names))),
                labels=tuple(dict.fromkeys((*before.labels, *labels))),
                owner=owner,
            )
        else:
            units.append(Unit(names=names, labels=labels, owner=owner))
        begun[op.name] = len(units) - 1
    return tuple(units), begun


def _anchors(flow: Dataflow) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """Ops of the forward that combine parameters with what depends on the batch."""
    parameters: dict[str, tuple[str, ...]] = {
        i.name: (i.label,) for i in flow.inputs if i.kind == "parameter"
    }
    for op in flow.ops:
        used = dict.fromkeys(label for n in op.operands for label in parameters.get(n, ()))
        if not flow.batch_values.isdisjoint(op.operands):
            if used and op.phase == "forward":
                yield op, tuple(used)
        else:  # a parameter transposed, two of them added
            parameters.update((name, tuple(used)) for name in op.results if name is not None)


def _name_at(op: Op, names: tuple[str, ...]) -> str:
    """Of a tied parameter's names the one by which the op's module has it, else the first."""
    names_here = [name for name in names if name.rpartition(".")[0] == op.module]
    return names_here[0] if names_here else names[0]
