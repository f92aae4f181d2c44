"""Errors of eager ops: operands in two places, plain tensors; each with the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtensor.errors import PlanningError
from dtensor.frontend.source import source_here
from dtensor.frontend.text import type_text


def dtensor() -> type:
    from dtensor.api.eager.tensor import DTensor

    return DTensor


def elsewhere(target: Any, a: Any, b: Any) -> PlanningError:
    name = op_name(target)
    if a.mesh != b.mesh:
        return with_line(
            PlanningError(
                f"{name} takes DTensors on two meshes.\n  {a.spec} on {a.mesh}\n"
                f"  {b.spec} on {b.mesh}\n"
                f"fix: dt.transfer(x, {a.mesh!r}) for the second, or distribute both on one mesh"
            )
        )
    return with_line(
        PlanningError(
            f"{name} takes DTensors of two launches: a DTensor belongs to its cluster.\n"
            f"  {a.spec} on {_cluster(a)}\n  {b.spec} on {_cluster(b)}\n"
            f"fix: dt.distribute(x.full_tensor(), mesh) inside the launch for the other one"
        )
    )


def _cluster(x: Any) -> str:
    ended = " of a launch that has ended" if x.session.closed else ""
    return f"{type(x.session.cluster).__name__} {id(x.session.cluster):#x}{ended}"


def plain(target: Any, operands: Sequence[Any]) -> PlanningError:
    lines = [f"{op_name(target)} takes a DTensor together with a plain tensor."]
    for x in operands:
        lines.append(f"  {x.spec} on {x.mesh}" if isinstance(x, dtensor()) else f"  {type_text(x)}")
    mesh = next(x.mesh for x in operands if isinstance(x, dtensor()))
    lines.append(
        f"fix: dt.distribute(x, {mesh!r}) for the plain one; its placements default to Replicate"
    )
    return with_line(PlanningError("\n".join(lines)))


def op_name(target: Any) -> str:
    return "redistribute" if target is None else str(target._schema.name).split("::")[1]


def with_line(error: PlanningError) -> PlanningError:
    """The error with the user's line after its first sentence."""
    source = source_here()
    if source is None:
        return error
    fact, _, rest = str(error).partition("\n")
    return type(error)(f"{fact}\n  {source}: {source.text}" + (f"\n{rest}" if rest else ""))
