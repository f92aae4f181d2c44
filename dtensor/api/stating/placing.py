"""What the user states of placements, checked against the module, the mesh and the arguments.

    resolve(model, Mesh(tp=2), {"*.up.weight": dict(tp=Row()), "*.down.weight": dict(tp=Column())})
    input_pins({"tokens": Meta((8, 16), i64)}, dict(dp=Row()), mesh)
    planner_pins(flow, resolved, pinned)      # under the names of the Dataflow, for the planner
    pinned_results(dict(tp=Row()), graph, flow, mesh)     # `out=` of dt.compile

Invariants: placements keep the order in which the user named the axes (on one dim the first is
major); what comes back fits its tensor; a pattern that matches no tensor is an error. The first
pattern that matches a tensor decides, so one whose tensors were all taken by earlier ones does
nothing. A pattern that matches parameters says nothing of buffers; one that matches buffers alone
places those. `out=` is stated for all results or in the shape of the result:

    dict(tp=Row())                               # all results
    [dict(tp=Row()), {}]                         # one mapping for each, {} states nothing
    {"logits": dict(tp=Column()), "loss": {}}    # where fn returns {"logits": ..., "loss": ...}

A mapping of placements stands for all tensors below it; what is left out of a dict is not pinned.

Whether a placement lines up with what the program does is the planner's to say, not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from dtensor.api.stating.checks import Stated, check_fit, check_stated, show, some_axis
from dtensor.api.stating.patterns import listing, names_of, nearest, no_match
from dtensor.api.stating.roles_of_weights import Resolver, StatedModule, StatedRoles, owners_of
from dtensor.errors import PlanningError, check_kind
from dtensor.frontend.graph import Graph
from dtensor.sharding.ops.call import Meta
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.module_roles import Role
from dtensor.sharding.spec.placements import Placement, Replicate, Shard
from dtensor.sharding.spec.spec import TensorSpec, make_spec

Out = Stated | Sequence[Any] | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """What was stated of one parameter or buffer; ``pattern`` is None where nothing was.

    ``owner``: whose weight it is, where the pattern states a role of a module.
    """

    name: str
    pattern: str | None
    placements: StatedRoles
    owner: StatedModule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPins:
    """By argument name: the pins, and the arguments whose dim 0 is the batch."""

    pins: Mapping[str, Stated]
    batch: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPins:
    """The same under the names of a Dataflow's inputs: three fields of a planner's Request."""

    pins: Mapping[str, Stated]
    pinned_by: Mapping[str, str]
    batch: tuple[str, ...]


def resolve(
    module: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, StatedRoles],
    *,
    stage_axis: str | None = None,
) -> tuple[ParameterPlacement, ...]:
    """One entry for each parameter and buffer of ``module``, in its order.

    A pattern that states a role is one over modules (roles_of_weights.py).

    Raises PlanningError for a pattern without a match, an axis that is not in the mesh or is the
    stage axis, a value that is not a placement, and a placement that the tensor cannot have.
    """
    names = names_of(module)
    if not isinstance(placements, Mapping):
        raise PlanningError(
            f"placements is {show(placements)}, not a dict.\n"
            f'fix: write {{"pattern": dict({some_axis(mesh)}=dt.Row())}}'
        )
    chosen: dict[str, str] = {}
    owners: dict[str, StatedModule] = {}
    for pattern, stated in placements.items():
        check_kind("a key of placements", pattern, str, "a pattern", '{"*.weight": ...}')
        check_stated(stated, f'"{pattern}"', mesh, stage_axis, roles=True)
        if any(isinstance(p, Role) for p in stated.values()):
            for name, owner in owners_of(pattern, module, names, mesh).items():
                if name not in chosen:
                    chosen[name], owners[name] = pattern, owner
            continue
        found = [named for named in names if named.matched_by(pattern)]
        if not found:
            raise no_match(pattern, "placements", module, names)
        parameters = [named for named in found if named.kind == "parameter"]
        for named in parameters or found:
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
) -> InputPins:
    """The pins of a function's tensor arguments, given by name in the order of the call.

    ``inputs``: placements by axis, for each argument that has the batch dim (its dim 0 is as long
    as that of the first argument that has dims); or such dicts by argument name, where "batch"
    means each tensor of a pytree argument ("batch.0", "batch.ids").

    The batch is carried by the arguments whose dim 0 is as long as that of the first argument
    pinned along dim 0, or of the first with dims; not by one that was named and left whole.
    """
    inputs = {} if inputs is None else inputs
    if not isinstance(inputs, Mapping):
        raise PlanningError(
            f"inputs is {show(inputs)}, not a dict.\n"
            f"fix: write inputs=dict({some_axis(mesh)}=dt.Row())"
        )
    by_name = [key for key, value in inputs.items() if isinstance(value, Mapping)]
    if by_name and len(by_name) < len(inputs):
        rest = [key for key in inputs if key not in by_name]
        raise PlanningError(
            f"inputs mixes arguments with axes: {listing(by_name)} by name, {listing(rest)} not.\n"
            f"fix: state the placements of all arguments at once, or of each by name"
        )
    pins: dict[str, Stated] = {}
    if by_name:
        for key, stated in inputs.items():
            assert isinstance(stated, Mapping)
            check_stated(stated, f"inputs of {key}", mesh, stage_axis)
            found = [name for name in arguments if name == key or name.startswith(f"{key}.")]
            if not found:
                raise _no_argument(key, arguments)
            for name in found:
                check_fit(name, arguments[name], stated, "inputs", mesh)
                pins[name] = dict(stated)
        return InputPins(pins=pins, batch=_batch(arguments, pins))
    check_stated(inputs, "inputs", mesh, stage_axis)
    batch = _batch(arguments, {})
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
    flow: Dataflow, parameters: Sequence[ParameterPlacement], inputs: InputPins, prefix: str = ""
) -> PlannerPins:
    """The pins under the names of ``flow``. What the program does not use is left out.

    ``prefix``: what capture puts before a parameter's name when there are several modules
    ("actor."). Roles become placements of the dims that this program shows.
    """
    pins: dict[str, Stated] = {}
    pinned_by: dict[str, str] = {}
    stated = {prefix + p.name: p for p in parameters if p.placements}
    resolver = Resolver.of(flow) if any(p.owner for p in parameters) else None
    for item in flow.inputs:
        if item.kind in ("parameter", "buffer") and item.label in stated:
            entry = stated[item.label]
            by = entry.pattern or entry.name
            if entry.owner is not None and resolver is not None:
                owner = replace(entry.owner, module=prefix + entry.owner.module)
                pins[item.name] = resolver.placements(item, entry.placements, owner, by)
            else:
                pins[item.name] = entry.placements  # type: ignore[assignment]
            pinned_by[item.name] = by
        elif item.kind == "argument" and inputs.pins.get(item.label):
            pins[item.name] = inputs.pins[item.label]
            pinned_by[item.name] = item.label
    batch = {name for name in inputs.batch}
    return PlannerPins(
        pins=pins,
        pinned_by=pinned_by,
        batch=tuple(i.name for i in flow.inputs if i.kind == "argument" and i.label in batch),
    )


def restated(spec: TensorSpec) -> dict[str, Placement]:
    """A spec's placements in an order that makes it again: on one dim the major axis first."""
    found: dict[str, Placement] = {
        axis: p for axis, p in spec.sharding.items() if not isinstance(p, Replicate)
    }
    for order in itertools.permutations(found):
        stated = {axis: found[axis] for axis in order}
        made = make_spec(spec.shape, spec.dtype, spec.mesh, stated)
        if made.placements == spec.placements:
            return stated
    return found


# -- the batch -------------------------------------------------------------------------------------


def _batch(arguments: Mapping[str, Meta], pins: Mapping[str, Stated]) -> tuple[str, ...]:
    def splits_rows(name: str) -> bool:
        dims = len(arguments[name].shape)
        return any(isinstance(p, Shard) and p.dim in (0, -dims) for p in pins[name].values())

    pinned = [name for name in pins if splits_rows(name)]
    with_dims = [name for name, meta in arguments.items() if meta.shape]
    if not with_dims:
        return ()
    size = arguments[(pinned or with_dims)[0]].shape[0]
    whole = set(pins) - set(pinned) if pinned else set()
    return tuple(n for n in with_dims if arguments[n].shape[0] == size and n not in whole)


def _no_argument(name: str, arguments: Mapping[str, Meta]) -> PlanningError:
    near = nearest(name, arguments)
    return PlanningError(
        f'inputs names "{name}", which is no tensor argument that the program uses.\n'
        f"  tensor arguments: {_metas(arguments)}\n"
        + (f'fix: write "{near[0]}"' if near else "fix: use the names of the function's parameters")
    )


def _metas(arguments: Mapping[str, Meta]) -> str:
    return listing([f"{name}: {meta}" for name, meta in arguments.items()])


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ResultTensor:
    """Stands for a tensor in the structure that fn returns."""

    index: int


def pinned_results(out: Out, graph: Graph, flow: Dataflow, mesh: Mesh) -> dict[int, Stated]:
    """Result index to its pins. PlanningError for an axis, a structure or a fit that is wrong."""
    if out is None:
        return {}
    results = {int(o.of): o.value for o in flow.outputs if o.kind == "result"}
    shape = graph.unflatten([_ResultTensor(index) for index in sorted(results)])
    pinned: dict[int, Stated] = {}
    for tensor, stated, where in _matched(out, shape, "out"):
        for axis, placement in stated.items():
            mesh.axis_size(axis)
            if not isinstance(placement, Placement):
                raise PlanningError(
                    f"{where}= states {axis}={placement!r}, which is not a placement; "
                    f"write {axis}=dt.Replicate(), dt.Row() or dt.Column()"
                )
        index = tensor.index
        meta = flow.metas[results[index]]
        check_fit(f"result {index}", meta, stated, f"{where}=", mesh)
        spec = make_spec(meta.shape, meta.dtype, mesh, stated)
        pinned[index] = {axis: spec.placement(axis) for axis in stated}
    return pinned


def _matched(out: object, shape: object, where: str) -> Iterator[tuple[_ResultTensor, Stated, str]]:
    """Each tensor of the result with what is stated of it, and where that stands in ``out``."""
    if out is None:
        return
    if isinstance(out, Mapping):
        stated = cast(Mapping[str, Any], out)
        if not isinstance(shape, Mapping) or all(isinstance(v, Placement) for v in stated.values()):
            for tensor in _tensors(shape):
                yield tensor, stated, where
            return
        results = cast(Mapping[str, object], shape)
        for key, below in stated.items():
            if key not in results:
                near = nearest(str(key), [str(k) for k in results])
                raise PlanningError(
                    f"{where}= names {key!r}, and the function returns "
                    f"{listing([str(k) for k in results])}.\n"
                    f'fix: write "{near[0] if near else next(iter(results), "")}"'
                )
            yield from _matched(below, results[key], f"{where}[{key!r}]")
        return
    if isinstance(out, (list, tuple)):
        parts = cast(Sequence[object], out)
        below = shape if isinstance(shape, (list, tuple)) else None
        if below is None or len(below) != len(parts):
            tensors = list(_tensors(shape))
            if len(tensors) != len(parts):
                raise PlanningError(
                    f"{where}= states placements of {len(parts)} results, the function returns "
                    f"{len(tensors)} tensors.\n"
                    f"fix: one dict for each tensor in the order of the results, or one for all"
                )
            below = tensors
        for number, (part, one) in enumerate(zip(parts, below, strict=True)):
            yield from _matched(part, one, f"{where}[{number}]")
        return
    raise PlanningError(
        f"{where}={out!r} states no placements; fix: a dict such as dict(tp=dt.Row()), or such "
        f"dicts in the structure that the function returns"
    )


def _tensors(shape: object) -> Iterator[_ResultTensor]:
    match shape:
        case _ResultTensor():
            yield shape
        case Mapping():
            for below in cast(Mapping[str, object], shape).values():
                yield from _tensors(below)
        case list() | tuple():
            for below in cast(Sequence[object], shape):
                yield from _tensors(below)
        case _:
            return
