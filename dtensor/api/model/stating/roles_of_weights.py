"""`ColumnParallel` and `RowParallel`: placements of a module's weight by what it does.

    {"*.mlp.up": dict(tp=dt.ColumnParallel()), "*.mlp.down": dict(tp=dt.RowParallel())}

The pattern is over names of *modules*. Which dim of the weight is meant, the captured program says:
column-parallel splits the output dim of the product that the weight feeds, row-parallel the dim
that the product sums over; so nn.Linear (out, in) and Hugging Face's Conv1D (in, out) are stated
alike. Of an embedding, column-parallel splits the features, row-parallel the rows of the table.
The bias is left to the planner: it follows a column split, and is added once after a row split.

Invariants: a role is resolved when a program is planned; ``blocks`` and ``unit`` go to the weight's
placement as they are. Not here: that the placement lines up with the program, which the planner
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dtensor.api.model.stating.patterns import NamedTensor, listing, matches, nearest
from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.contractions import Contraction, contractions_of
from dtensor.sharding.plan.dataflow import Dataflow, Input
from dtensor.sharding.plan.planner import rules_of
from dtensor.sharding.rules.rule import Rule
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import ColumnParallel, Role, RowParallel
from dtensor.sharding.spec.placements import Placement, Shard

StatedRoles = Mapping[str, Placement | Role]  # axis -> what was stated, in the user's order


@dataclass(frozen=True, slots=True)
class StatedModule:
    """The module that a role was stated of, and the mesh that it was stated on."""

    module: str
    mesh: Mesh


def owners_of(
    pattern: str, module: nn.Module, names: Sequence[NamedTensor], mesh: Mesh
) -> dict[str, StatedModule]:
    """Canonical name of each weight of the modules that ``pattern`` matches, to its module.

    A weight is a parameter of the module itself with at least two dims. PlanningError where the
    pattern matches no module, or a matched module has parameters but no weight.
    """
    by_name = {name: named for named in names for name in named.names}
    owners: dict[str, StatedModule] = {}
    paths = dict.fromkeys(p for p, _ in module.named_modules(remove_duplicate=False) if p)
    matched = [path for path in paths if matches(pattern, path, paths)]
    if not matched:
        raise _no_module(pattern, module, names)
    for path in matched:
        inside = [by_name[n] for n in by_name if n.rpartition(".")[0] == path]
        inside = [named for named in inside if named.kind == "parameter"]
        weights = [named for named in inside if len(named.meta.shape) >= 2]
        if inside and not weights:
            raise PlanningError(
                f'"{pattern}" states a role of {path}, which has no weight with two dims.\n'
                f"  {path}: {listing([str(named) for named in inside])}\n"
                f"fix: narrow the pattern; the planner places norms"
            )
        owners.update({named.name: StatedModule(path, mesh) for named in weights})
    if not owners:
        raise PlanningError(
            f'"{pattern}" states a role of modules that have no parameters of their own.\n'
            f"  it matches {listing(matched)}\n"
            f"fix: name the modules that hold weights{_inside(matched, by_name)}"
        )
    return owners


def _inside(matched: Sequence[str], by_name: Mapping[str, NamedTensor]) -> str:
    inner = [
        name.rpartition(".")[0]
        for name, named in by_name.items()
        if len(named.meta.shape) >= 2 and any(name.startswith(f"{path}.") for path in matched)
    ]
    return f", such as {listing(list(dict.fromkeys(inner)))}" if inner else ""


def _no_module(pattern: str, module: nn.Module, names: Sequence[NamedTensor]) -> PlanningError:
    lines = [f'the pattern "{pattern}" states a role and matches no module.']
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    hit = [named for named in names if named.matched_by(pattern)]
    shorter = pattern.rpartition(".")[0]
    if hit:
        lines.append(f"  it matches parameters: {listing([str(named) for named in hit])}")
    if hit and shorter and any(matches(shorter, path) for path in paths):
        lines.append(f'fix: write "{shorter}", the module')
    else:
        near = nearest(pattern, paths)
        lines.append(f"fix: name a module, such as {listing(near or paths)}")
    return PlanningError("\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Roles to placements in one program."""

    flow: Dataflow
    rules: Mapping[str, Rule]
    batch: frozenset[str]

    @staticmethod
    def of(flow: Dataflow) -> Resolver:
        return Resolver(flow=flow, rules=rules_of(flow), batch=flow.batch_values)

    def placements(
        self, item: Input, stated: StatedRoles, owner: StatedModule, pattern: str
    ) -> dict[str, Placement]:
        """What was stated of the weight ``item`` of a module, each role as a placement.

        That it fits the weight is checked by the caller.
        """
        placements: dict[str, Placement] = {}
        module = owner.module
        for axis, role in stated.items():
            match role:
                case ColumnParallel(blocks=blocks, unit=unit):
                    dim = self._contraction(item, module, pattern, role).output_dim
                    placements[axis] = Shard(dim, blocks, unit)
                case RowParallel(blocks=blocks, unit=unit):
                    dim = self._contraction(item, module, pattern, role).contracted_dim
                    placements[axis] = Shard(dim, blocks, unit)
                case _:
                    placements[axis] = role
        return placements

    def _contraction(self, item: Input, module: str, pattern: str, role: Role) -> Contraction:
        """The product that the module makes of the weight; a tied one has one in each module."""
        every = contractions_of(self.flow, self.rules, item.name, self.batch)
        here = [c for c in every if f"{c.op.module}.".startswith(f"{module}.")]
        contractions = here or list(every)
        dims = {(c.output_dim, c.contracted_dim) for c in contractions}
        if len(dims) == 1:
            return contractions[0]
        kind = type(role).__name__
        if not contractions:
            raise PlanningError(
                f'{kind}() of {module}, stated by "{pattern}", needs a product that its weight '
                f"feeds, and the program has none.\n"
                f"  {item.label}: {item.meta}\n"
                f"fix: state the placement of the parameter itself, "
                f'"{item.label}": dict(...=dt.Row())'
            )
        uses = [
            f"{c.op.call.name} in {c.op.module or 'the program'} ({c.op.source})"
            for c in contractions
        ]
        raise PlanningError(
            f'{kind}() of {module}, stated by "{pattern}", has two meanings: its weight is used in '
            f"products over different dims.\n"
            f"  {item.label}: {item.meta}: {listing(uses)}\n"
            f"fix: state the placement of the parameter itself, "
            f'"{item.label}": dict(...=dt.Row())'
        )
