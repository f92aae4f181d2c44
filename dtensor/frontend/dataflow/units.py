"""Divide a program into units: the smallest possible stages.

    units = units_of(flow, aliases={"embed.weight": ("embed.weight", "head.weight")})
    units.units[0].names          # ("embed.weight",)
    units.flow                    # the program with one stage for each unit

In program order, a unit begins with an op that combines values of the batch with parameters.
Successive such ops with parameters of one module form one unit, so a weight and its bias are never
separated. All other ops are assigned as if each unit were a stage (assign_stages.py). A stage is a
run of units; sharding/plan/stages/unit_costs.py prices them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dtensor.frontend.dataflow.assign_stages import assign_stages
from dtensor.sharding.plan.dataflow import Dataflow, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit, described by the parameters that it uses.

    ``names``: their names in the unit's module. ``labels``: their canonical names. ``owner``: the
    path of their module; "" if they belong to several modules.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of a program.

    ``flow``: the program, whose stage u is unit u. ``reused``: pairs of units (u, v), u < v, that
    use a parameter under the same name. v should run on the stage of u, where that is possible.
    """

    units: tuple[Unit, ...]
    flow: Dataflow
    reused: tuple[tuple[int, int], ...]

    def of_label(self) -> dict[str, tuple[int, ...]]:
        """Return the units that use each parameter, ascending, by its canonical name."""
        return _units_by_name(unit.labels for unit in self.units)

    def of_name(self) -> dict[str, tuple[int, ...]]:
        """Return the units that use each parameter, ascending, by the name that they use."""
        return _units_by_name(unit.names for unit in self.units)


def _units_by_name(names_of_units: Iterable[tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """Return by name the units in which it occurs."""
    units: dict[str, tuple[int, ...]] = {}
    for unit, names in enumerate(names_of_units):
        for name in names:
            units[name] = (*units.get(name, ()), unit)
    return units


def units_of(
    flow: Dataflow, aliases: Mapping[str, tuple[str, ...]], containers: frozenset[str] = frozenset()
) -> Units:
    """Return the units of a program without stages.

    Args:
        aliases: all names of each parameter, by its canonical name.
        containers: paths of modules that hold parameters and compute nothing (ParameterList).
    """
    excluded: frozenset[str] = frozenset()  # anchors that cannot run on their own unit
    while True:
        units, unit_of_anchor = _divide(flow, aliases, containers, excluded)
        unstaged = Units(units=units, flow=flow, reused=())
        if len(units) < 2:
            return unstaged
        by_name = unstaged.of_name()
        staged_flow = assign_stages(flow, unstaged.of_label(), len(units), by_name)
        stage_of = {op.name: op.stage for op in staged_flow.ops}
        moved = {name for name, unit in unit_of_anchor.items() if stage_of[name] != unit}
        if not moved:
            break
        excluded |= moved
    reused = tuple(
        (first, second)
        for users in by_name.values()
        for number, second in enumerate(users)
        for first in users[:number]
    )
    return Units(units=unstaged.units, flow=staged_flow, reused=reused)


def _divide(
    flow: Dataflow,
    aliases: Mapping[str, tuple[str, ...]],
    containers: frozenset[str],
    excluded: frozenset[str],
) -> tuple[tuple[Unit, ...], dict[str, int]]:
    """Return the units, and the number of the unit of each anchor, except ``excluded`` ones."""
    units: list[Unit] = []
    unit_of_anchor: dict[str, int] = {}
    for op, labels in _anchors(flow):
        if op.name in excluded:
            continue
        names = tuple(_name_in_module(op, aliases.get(label, (label,))) for label in labels)
        owners = {name.rpartition(".")[0] for name in names}
        owner = owners.pop() if len(owners) == 1 else ""
        last = units[-1] if units else None
        if last is not None and owner == last.owner and owner and owner not in containers:
            units[-1] = Unit(
                names=tuple(dict.fromkeys((*last.names, *names))),
                labels=tuple(dict.fromkeys((*last.labels, *labels))),
                owner=owner,
            )
        else:
            units.append(Unit(names=names, labels=labels, owner=owner))
        unit_of_anchor[op.name] = len(units) - 1
    return tuple(units), unit_of_anchor


def _anchors(flow: Dataflow) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """Yield the forward ops that combine values of the batch with parameters, and the labels of
    these parameters."""
    labels_of: dict[str, tuple[str, ...]] = {
        i.name: (i.label,) for i in flow.inputs if i.kind == "parameter"
    }
    for op in flow.ops:
        labels = dict.fromkeys(label for n in op.operands for label in labels_of.get(n, ()))
        if not flow.batch_values.isdisjoint(op.operands):
            if labels and op.phase == "forward":
                yield op, tuple(labels)
        else:  # such as a transposed parameter, or the sum of two
            labels_of.update((name, tuple(labels)) for name in op.results if name is not None)


def _name_in_module(op: Op, names: tuple[str, ...]) -> str:
    """Return the name of a tied parameter in the op's module; its first name if it has none."""
    return next((name for name in names if name.rpartition(".")[0] == op.module), names[0])
