"""`ColumnParallel` and `RowParallel`: placements of a weight by its role in the program.

    {"*.mlp.up": dict(tp=dt.ColumnParallel()), "*.mlp.down": dict(tp=dt.RowParallel())}

The pattern is over names of *modules*. When a program is planned, its graph shows which dim of the
weight is meant: column-parallel shards the output dim of the weight's product, row-parallel the dim
that the product sums over. So nn.Linear (out, in) and Hugging Face's Conv1D (in, out) have the same
roles. In an embedding, column-parallel shards the features, row-parallel the rows of the table. The
planner places the bias: it follows a column split, and is added once after a row split.
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

StatedRoles = Mapping[str, Placement | Role]  # axis -> placement or role, in the user's order


@dataclass(frozen=True, slots=True)
class StatedModule:
    """The module for which a role was stated, and the mesh on which it was stated."""

    module: str
    mesh: Mesh


def weights_of_modules(
    pattern: str, module: nn.Module, names: Sequence[NamedTensor], mesh: Mesh
) -> dict[str, StatedModule]:
    """Return the weights of the modules that ``pattern`` matches: canonical name -> module.

    A weight is a parameter of the module itself with at least two dims. Raises PlanningError if the
    pattern matches no module, or a matched module has parameters but no weight.
    """
    by_name = {name: named for named in names for name in named.names}
    owners: dict[str, StatedModule] = {}
    paths = dict.fromkeys(p for p, _ in module.named_modules(remove_duplicate=False) if p)
    matched = [path for path in paths if matches(pattern, path, paths)]
    if not matched:
        raise _no_module_error(pattern, module, names)
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
            f"fix: name the modules that hold weights{_suggested_modules(matched, by_name)}"
        )
    return owners


def _suggested_modules(matched: Sequence[str], by_name: Mapping[str, NamedTensor]) -> str:
    """Return a text that names modules with weights inside the matched modules, or ""."""
    inner = [
        name.rpartition(".")[0]
        for name, named in by_name.items()
        if len(named.meta.shape) >= 2 and any(name.startswith(f"{path}.") for path in matched)
    ]
    return f", such as {listing(list(dict.fromkeys(inner)))}" if inner else ""


def _no_module_error(
    pattern: str, module: nn.Module, names: Sequence[NamedTensor]
) -> PlanningError:
    """Return the error for a role's pattern that matches no module, with a fix."""
    lines = [f'the pattern "{pattern}" states a role and matches no module.']
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    parameters = [named for named in names if named.matched_by(pattern)]
    shorter = pattern.rpartition(".")[0]
    if parameters:
        lines.append(f"  it matches parameters: {listing([str(named) for named in parameters])}")
    if parameters and shorter and any(matches(shorter, path) for path in paths):
        lines.append(f'fix: write "{shorter}", the module')
    else:
        near = nearest(pattern, paths)
        lines.append(f"fix: name a module, such as {listing(near or paths)}")
    return PlanningError("\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Resolves roles to placements in one program."""

    flow: Dataflow
    rules: Mapping[str, Rule]
    batch: frozenset[str]

    @staticmethod
    def of(flow: Dataflow) -> Resolver:
        return Resolver(flow=flow, rules=rules_of(flow), batch=flow.batch_values)

    def placements(
        self, item: Input, stated: StatedRoles, owner: StatedModule, pattern: str
    ) -> dict[str, Placement]:
        """Return the stated placements of the weight ``item``, with each role resolved. The caller
        checks that they fit the weight. Raises PlanningError for a role without a clear dim."""
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
        """Return the product that the weight feeds in the module (a tied weight feeds one in each
        of its modules). Raises PlanningError for no product, and for products over other dims."""
        products = contractions_of(self.flow, self.rules, item.name, self.batch)
        in_module = [c for c in products if f"{c.op.module}.".startswith(f"{module}.")]
        contractions = in_module or list(products)
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
