"""Check stated placements against the module, the mesh and the arguments, and make pins of them.

    resolve_placements(model, Mesh(tp=2), {"*.up.weight": dict(tp=Row())})
    input_pins({"tokens": Meta((8, 16), i64)}, dict(dp=Row()), mesh)
    planner_pins(flow, resolved, pinned)                   # pins under the names of the Dataflow
    check_fit("up.weight", Meta((64, 16), f32), dict(tp=Shard(2)), '"*.up.weight"', mesh)   # raises

Placements keep the user's order of axes (on one dim the first axis is major). The first pattern
that matches a tensor decides; a pattern that matches no tensor is an error. A pattern that matches
parameters ignores buffers; a pattern that matches only buffers places them. The planner checks
whether a placement lines up with the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from dtensor.api.model.stating.patterns import listing, names_of, nearest, no_match_error
from dtensor.api.model.stating.roles_of_weights import (
    Resolver,
    StatedModule,
    StatedRoles,
    weights_of_modules,
)
from dtensor.errors import PlanningError, check_kind, shown
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.spec.fits import fits, misfit
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import ColumnParallel, Role, RowParallel
from dtensor.sharding.spec.placements import (
    Column,
    Partial,
    Placement,
    Replicate,
    Row,
    Shard,
    Zigzag,
    index_sets,
    on_dim,
    one_block,
    refine,
    same,
)
from dtensor.sharding.spec.spec import TensorSpec, make_spec

Stated = Mapping[str, Placement]  # axis -> placement, in the user's order


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """The stated placements of one parameter or buffer; ``pattern`` is None if there are none.

    ``owner``: the module whose weight it is, if the pattern states a role.
    """

    name: str
    pattern: str | None
    placements: StatedRoles
    owner: StatedModule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPins:
    """The pins of arguments by name, and the names of the arguments whose dim 0 is the batch."""

    pins: Mapping[str, Stated]
    batch: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPins:
    """Pins under the names of a Dataflow's inputs: the fields of a `Request` with these names."""

    pins: Mapping[str, Stated]
    pinned_by: Mapping[str, str]
    batch: tuple[str, ...]


def resolve_placements(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles],
    *,
    stage_axis: str | None = None,
) -> tuple[ParameterPlacement, ...]:
    """Return one entry for each parameter and buffer of ``module``, in its order.

    A pattern that states a role matches names of modules (roles_of_weights.py).

    Raises PlanningError for a pattern without a match, an axis that is not in the mesh or is the
    stage axis, a value that is not a placement, and a placement that the tensor cannot have.
    """
    names = names_of(module)
    if not isinstance(placements, Mapping):
        raise PlanningError(
            f"placements is {show(placements)}, not a dict.\n"
            f'fix: write {{"pattern": dict({some_axis(mesh)}=dt.Row())}}'
        )
    all_names = {name for named in names for name in named.names}
    chosen: dict[str, str] = {}
    owners: dict[str, StatedModule] = {}
    for pattern, stated in placements.items():
        check_kind("a key of placements", pattern, str, "a pattern", '{"*.weight": ...}')
        check_stated(stated, f'"{pattern}"', mesh, stage_axis, roles=True)
        if any(isinstance(p, Role) for p in stated.values()):
            for name, owner in weights_of_modules(pattern, module, names, mesh).items():
                if name not in chosen:
                    chosen[name], owners[name] = pattern, owner
            continue
        matches = [named for named in names if named.matched_by(pattern, all_names)]
        if not matches:
            raise no_match_error(pattern, "placements", module, names)
        parameters = [named for named in matches if named.kind == "parameter"]
        for named in parameters or matches:
            if named.name not in chosen:
                chosen[named.name] = pattern
                check_fit(named.name, named.meta, stated, f'"{pattern}"', mesh)  # type: ignore[arg-type]
    return tuple(
        ParameterPlacement(
            name=named.name,
            pattern=chosen.get(named.name),
            placements=dict(placements[chosen[named.name]]) if named.name in chosen else {},
            owner=owners.get(named.name),
        )
        for named in names
    )


def input_pins(
    arguments: Mapping[str, Meta],
    inputs: Stated | Mapping[str, Stated] | None,
    mesh: Mesh,
    *,
    stage_axis: str | None = None,
    absent: Collection[str] = (),
) -> InputPins:
    """Return the pins of a function's tensor arguments.

    Args:
        arguments: name -> meta, in the order of the call.
        inputs: axis -> placement, for all arguments with the batch dim; or argument name -> such a
            dict, where "batch" names each tensor of a pytree argument ("batch.0", "batch.ids").
        absent: the arguments that are None in this call, which ``inputs`` may name too.

    The size of the batch is dim 0 of the first argument whose pin shards dim 0, else of the first
    argument with dims. Arguments with this dim 0 have the batch dim, except arguments that
    ``inputs`` names without a pin on dim 0. Raises PlanningError if ``inputs`` does not fit.
    """
    inputs = {} if inputs is None else inputs
    if not isinstance(inputs, Mapping):
        raise PlanningError(
            f"inputs is {show(inputs)}, not a dict.\n"
            f"fix: write inputs=dict({some_axis(mesh)}=dt.Row())"
        )
    by_name = [key for key, value in inputs.items() if isinstance(value, Mapping)]
    if by_name and len(by_name) < len(inputs):
        axes = [key for key in inputs if key not in by_name]
        raise PlanningError(
            f"inputs mixes arguments with axes: {listing(by_name)} by name, {listing(axes)} not.\n"
            f"fix: state the placements of all arguments at once, or of each by name"
        )
    pins: dict[str, Stated] = {}
    if by_name:
        for key, stated in inputs.items():
            assert isinstance(stated, Mapping)
            check_stated(stated, f"inputs of {key}", mesh, stage_axis)
            matches = [name for name in arguments if _is_named(name, key)]
            if not matches and not any(_is_named(name, key) for name in absent):
                raise _unknown_argument_error(key, arguments, absent)
            for name in matches:
                check_fit(name, arguments[name], stated, "inputs", mesh)
                pins[name] = dict(stated)
        return InputPins(pins=pins, batch=_batch_arguments(arguments, pins))
    check_stated(inputs, "inputs", mesh, stage_axis)
    batch = _batch_arguments(arguments, {})
    if inputs and not batch:
        raise PlanningError(
            f"inputs states placements, but no argument has a batch dim.\n"
            f"  arguments: {_metas(arguments)}\n"
            f"fix: remove inputs=, or pass tensors whose dim 0 is the batch"
        )
    for name in batch:
        check_fit(name, arguments[name], inputs, "inputs", mesh)  # type: ignore[arg-type]
        pins[name] = dict(inputs)  # type: ignore[arg-type]
    return InputPins(pins=pins, batch=batch)


def planner_pins(
    flow: Dataflow, parameters: Sequence[ParameterPlacement], inputs: InputPins
) -> PlannerPins:
    """Return the pins under the names of ``flow``, without tensors that the program does not use.
    A role becomes the placement that it implies in this program's matrix multiplications."""
    pins: dict[str, Stated] = {}
    pinned_by: dict[str, str] = {}
    stated = {p.name: p for p in parameters if p.placements}
    resolver = Resolver.of(flow) if any(p.owner for p in parameters) else None
    for item in flow.inputs:
        if item.kind in ("parameter", "buffer") and item.label in stated:
            entry = stated[item.label]
            by = entry.pattern or entry.name
            if entry.owner is not None and resolver is not None:
                placements = resolver.placements(item, entry.placements, entry.owner, by)
                check_fit(item.label, item.meta, placements, f'"{by}"', entry.owner.mesh)
                pins[item.name] = placements
            else:
                pins[item.name] = entry.placements  # type: ignore[assignment]
            pinned_by[item.name] = by
        elif item.kind == "argument" and inputs.pins.get(item.label):
            pins[item.name] = inputs.pins[item.label]
            pinned_by[item.name] = item.label
    return PlannerPins(
        pins=pins,
        pinned_by=pinned_by,
        batch=tuple(
            item.name
            for item in flow.inputs
            if item.kind == "argument" and item.label in inputs.batch
        ),
    )


def ordered_placements(spec: TensorSpec) -> dict[str, Placement]:
    """Return a spec's placements other than Replicate, ordered so that stating them makes the same
    spec: of the axes on one dim, the major axis comes first."""
    placements: dict[str, Placement] = {
        axis: p for axis, p in spec.sharding.items() if not isinstance(p, Replicate)
    }
    for order in itertools.permutations(placements):
        stated = {axis: placements[axis] for axis in order}
        with suppress(PlanningError):  # a unit may not fit the shards in a wrong order
            trial = make_spec(spec.shape, spec.dtype, spec.mesh, stated)
            if trial.placements == spec.placements:
                return stated
    return placements


# -- the batch -------------------------------------------------------------------------------------


def _batch_arguments(arguments: Mapping[str, Meta], pins: Mapping[str, Stated]) -> tuple[str, ...]:
    """Return the names of the arguments with the batch dim. The batch size is dim 0 of the first
    argument that a pin shards there, else of the first argument with dims. Arguments with this
    dim 0 have the batch dim, except arguments that are pinned otherwise."""

    def shards_dim_0(name: str) -> bool:
        num_dims = len(arguments[name].shape)
        return any(isinstance(p, Shard) and p.dim in (0, -num_dims) for p in pins[name].values())

    pinned = [name for name in pins if shards_dim_0(name)]
    with_dims = [name for name, meta in arguments.items() if meta.shape]
    if not with_dims:
        return ()
    size = arguments[(pinned or with_dims)[0]].shape[0]
    unpinned = set(pins) - set(pinned) if pinned else set()
    return tuple(n for n in with_dims if arguments[n].shape[0] == size and n not in unpinned)


def num_nonempty(
    num_microbatches: int,
    flow: Dataflow,
    pins: Mapping[str, Stated],
    batch: Sequence[str],
    mesh: Mesh,
) -> int:
    """Return how many of the microbatches have rows: fewer than stated if the batch is short.

    The batch is cut as by torch.chunk, so the last microbatches are empty.
    """
    largest = 1
    for name in batch:
        meta = flow.metas[name]
        if num_rows := meta.shape[0]:
            blocks = make_spec(meta.shape, meta.dtype, mesh, pins.get(name, {})).cuts(0)
            rows = index_sets(refine(Shard(0), blocks, num_rows), num_rows, num_microbatches)
            largest = max(largest, sum(map(bool, rows)))
    return largest


def _is_named(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _unknown_argument_error(
    name: str, arguments: Mapping[str, Meta], absent: Collection[str]
) -> PlanningError:
    """Return the error for ``inputs`` that name no tensor argument, with the nearest name."""
    near = nearest(name, [*arguments, *absent])
    return PlanningError(
        f'inputs names "{name}", which is no tensor argument that the program uses.\n'
        f"  tensor arguments: {_metas(arguments)}\n"
        + (f'fix: write "{near[0]}"' if near else "fix: use the names of the function's parameters")
    )


def _metas(arguments: Mapping[str, Meta]) -> str:
    return listing([f"{name}: {meta}" for name, meta in arguments.items()])


# -- checks of placements --------------------------------------------------------------------------


def check_stated(
    stated: object,
    statement: str,
    mesh: Mesh,
    stage_axis: str | None = None,
    *,
    roles: bool = False,
) -> None:
    """Raise PlanningError unless ``stated`` maps axes of the mesh to Replicate, Shard or, if
    ``roles``, a role. ``statement``: the name of the statement in the message."""
    if not isinstance(stated, Mapping):
        raise PlanningError(
            f"{statement} states {show(stated)}, not placements by axis.\n"
            f"fix: write dict({some_axis(mesh)}={_as_placement(stated)})"
        )
    for axis, placement in stated.items():
        if axis not in mesh.axes:
            near = nearest(str(axis), mesh.axes)
            fix = f"{near[0]}={_as_placement(placement)}" if near else "name an axis of the mesh"
            fix += f"; or add {axis} to the mesh, {axis}=1 to split nothing"
            if (outer := statement.rpartition(" ")[2].strip('"')) in mesh.axes:  # swapped
                fix = f'write {{"{axis}": dict({outer}={_as_placement(placement)})}}'
            raise PlanningError(
                f'{statement} names the axis "{axis}", which is not in the mesh.\n'
                f"  {mesh}, axes: {listing(mesh.axes)}\n"
                f"fix: {fix}"
            )
        if axis == stage_axis:
            raise PlanningError(
                f'{statement} places a tensor on the axis "{axis}", which holds the stages.\n'
                f"  {axis}={placement!r}\n"
                f"fix: remove it; stages= says which stage holds a parameter"
            )
        if isinstance(placement, Role) and not roles:
            raise PlanningError(
                f"{statement} states {axis}={placement!r}, which is a role of a module's weight.\n"
                f"fix: write {axis}=dt.Row() or dt.Column()"
            )
        if not isinstance(placement, Replicate | Shard | Partial | Role):
            raise PlanningError(
                f"{statement} states {axis}={show(placement)}, which is not a placement.\n"
                f"fix: write {axis}={_as_placement(placement)}"
            )
        if isinstance(placement, Partial):
            raise PlanningError(
                f"{statement} states {axis}={placement!r}, but only a computed value can be "
                f"pending.\n"
                f"fix: write {axis}=dt.Replicate(), or {axis}=dt.Row() to split it"
            )


def check_fit(name: str, meta: Meta, stated: Stated, statement: str, mesh: Mesh) -> None:
    """Raise PlanningError if a tensor with this meta cannot have the placements."""
    for axis, placement in stated.items():
        if isinstance(placement, Shard):
            problem = _misfit(placement, meta, mesh.axis_size(axis))
            if problem is not None:
                fact, fix = problem
                raise PlanningError(
                    f"{axis}={placement!r} does not fit {name}: {fact}.\n"
                    f"  {name}: {meta}\n"
                    f"  stated by {statement}\n"
                    f"fix: {fix}"
                )
    _check_blocks_kept(name, meta, stated, statement, mesh)


def _misfit(shard: Shard, meta: Meta, num: int) -> tuple[str, str] | None:
    """Return why the shard does not fit and a fix that was checked, or None if it fits."""
    shape = meta.shape
    if not shape:
        return "it has no dims", "dt.Replicate(), the only placement of a scalar"
    if not -len(shape) <= shard.dim < len(shape):
        if len(shape) == 1:
            return f"it has 1 dim, and dim {shard.dim} is not there", f"dt.Row() splits {shape[0]}"
        last = len(shape) - 1
        offers = f"dt.Row() splits dim 0 of {shape[0]}, dt.Column() dim {last} of {shape[-1]}"
        return f"it has {len(shape)} dims, and dim {shard.dim} is not there", offers
    size = shape[shard.dim]
    if fits(shard, size, num):
        return None
    return misfit(shard, size, f"dim {shard.dim % len(shape)} of {size}", num)


def _check_blocks_kept(name: str, meta: Meta, stated: Stated, statement: str, mesh: Mesh) -> None:
    """Raise PlanningError if two axes shard one dim and the blocks stated for the minor axis would
    be ignored, because it splits the shards of the major axis."""
    try:
        minor = _axis_without_blocks(meta, stated, mesh)
    except PlanningError as error:
        fact, *fix = str(error).partition("\nfix: ")
        raise PlanningError(
            f"{fact}\n  {name}: {meta}\n  stated by {statement}{''.join(fix)}"
        ) from error
    if minor is None:
        return
    other_placements = {axis: p for axis, p in stated.items() if axis != minor}
    first = next(iter(other_placements))
    if _axis_without_blocks(meta, {minor: stated[minor], **other_placements}, mesh) is None:
        fix = f"name {minor} before {first}, so that {first} splits its blocks"
    else:
        fix = f"state blocks on {first} alone"
    raise PlanningError(
        f"{minor}={stated[minor]!r} of {name} would split the "
        f"pieces that {first} cuts, and its own blocks would be lost.\n"
        f"  {name}: {meta}\n"
        f"  {', '.join(f'{axis}={p!r}' for axis, p in stated.items())}, stated by {statement}\n"
        f"fix: {fix}"
    )


def _axis_without_blocks(meta: Meta, stated: Stated, mesh: Mesh) -> str | None:
    """Return the first axis whose stated blocks the spec would ignore, or None."""
    spec = make_spec(meta.shape, meta.dtype, mesh, stated)
    for axis, placement in stated.items():
        actual, num = spec.placement(axis), mesh.axis_size(axis)
        if isinstance(placement, Shard) and isinstance(actual, Shard):
            shard = on_dim(placement, actual.dim)
            if shard != one_block(shard) and not same(shard, actual, meta.shape, num):
                return axis
    return None


def _as_placement(value: object) -> str:
    """Return the source text of the placement that the user probably meant by ``value``."""
    match value:
        case Replicate():
            return "dt.Replicate()"
        case _ if value == Row():
            return "dt.Row()"
        case _ if value == Column():
            return "dt.Column()"
        case Shard() | Partial() | ColumnParallel() | RowParallel():
            return f"dt.{value!r}"
        case int() if not isinstance(value, bool):
            return f"dt.Shard({value})"
        case str() if value.lower().startswith("col"):
            return "dt.Column()"
        case str() if value.lower().startswith("rep"):
            return "dt.Replicate()"
        case None:
            return "dt.Replicate()"
        case _ if value is Column:
            return "dt.Column()"
        case _ if value is Zigzag:
            return "dt.Zigzag(1)"
        case _ if value is Replicate:
            return "dt.Replicate()"
        case type() if value in (ColumnParallel, RowParallel):
            return f"dt.{value.__name__}()"
        case _ if value is Shard:
            return "dt.Shard(0)"
        case _:
            return "dt.Row()"


def show(value: object) -> str:
    for function in (Row, Column, Zigzag):
        if value is function:
            return f"{function.__name__} without ()"
    return shown(value)


def some_axis(mesh: Mesh) -> str:
    """Return an axis for the example in a message: the last, which is the innermost."""
    return mesh.axes[-1] if mesh.axes else "tp"
