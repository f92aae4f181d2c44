"""`out=` of `dt.compile`: placements of results, stated for all or in the shape of the result.

    dict(tp=Row())                               # all results
    [dict(tp=Row()), {}]                         # one mapping for each, {} states nothing
    {"logits": dict(tp=Column()), "loss": {}}    # where fn returns {"logits": ..., "loss": ...}

A mapping of placements stands for all tensors below it; what is left out of a dict is not pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dtensor.api.stating.checks import check_fit
from dtensor.api.stating.patterns import listing, nearest
from dtensor.errors import PlanningError
from dtensor.frontend.graph import Graph
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import Placement
from dtensor.sharding.spec.spec import make_spec

Pins = Mapping[str, Placement]
Out = Pins | Sequence[Any] | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor in the structure that fn returns."""

    index: int


def pinned_results(out: Out, graph: Graph, flow: Dataflow, mesh: Mesh) -> dict[int, Pins]:
    """Result index to its pins. PlanningError for an axis, a structure or a fit that is wrong."""
    if out is None:
        return {}
    results = {int(o.of): o.value for o in flow.outputs if o.kind == "result"}
    shape = graph.unflatten([_Tensor(index) for index in sorted(results)])
    pinned: dict[int, Pins] = {}
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


def _matched(out: object, shape: object, where: str) -> Iterator[tuple[_Tensor, Pins, str]]:
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


def _tensors(shape: object) -> Iterator[_Tensor]:
    match shape:
        case _Tensor():
            yield shape
        case Mapping():
            for below in cast(Mapping[str, object], shape).values():
                yield from _tensors(below)
        case list() | tuple():
            for below in cast(Sequence[object], shape):
                yield from _tensors(below)
        case _:
            return
