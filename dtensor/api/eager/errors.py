"""Errors of eager ops: operands on two meshes, plain tensors, unsupported ops; and the user's line
of each error.

One program serves every line that calls its op, so it has no line itself. `note_line` records the
line that started each run, by the run's number, which a failure states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from dtensor.api.eager.values import CellTensor
from dtensor.api.store.session import MeshSession
from dtensor.daft import DaftError
from dtensor.errors import PlanningError
from dtensor.frontend.graph import type_text
from dtensor.frontend.source import Place, line_of, source_here, user_place

MAX_LINES = 65536
_lines_of_runs: WeakKeyDictionary[MeshSession, OrderedDict[int, Place]] = WeakKeyDictionary()


def op_name(target: Any) -> str:
    """Return the name of an op, as "add" for aten.add.Tensor, or "redistribute" for None."""
    return "redistribute" if target is None else str(target._schema.name).split("::")[1]


def unsupported(name: str, why: str, fix: str) -> PlanningError:
    return PlanningError(f"{name} is not supported on a DTensor: {why}.\nfix: {fix}")


def two_homes_error(target: Any, a: Any, b: Any) -> PlanningError:
    """Return the error for two DTensors that are not on one mesh of one launch."""
    name = op_name(target)
    if a.mesh != b.mesh:
        return with_line(
            PlanningError(
                f"{name} takes DTensors on two meshes.\n"
                f"  {_operand_text(a)}\n  {_operand_text(b)}\n"
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


def _operand_text(x: Any) -> str:
    return f"{x.spec} on {x.mesh}"


def _cluster(x: Any) -> str:
    ended = " of a launch that has ended" if x.session.closed else ""
    return f"{type(x.session.cluster).__name__} {id(x.session.cluster):#x}{ended}"


def plain_tensor_error(target: Any, operands: Sequence[Any]) -> PlanningError:
    """Return the error for an op on both DTensors and plain tensors."""
    lines = [f"{op_name(target)} takes a DTensor together with a plain tensor."]
    for x in operands:
        lines.append(f"  {_operand_text(x) if isinstance(x, CellTensor) else type_text(x)}")
    mesh = next(x.mesh for x in operands if isinstance(x, CellTensor))
    lines.append(
        f"fix: dt.distribute(x, {mesh!r}) for the plain one; its placements default to Replicate"
    )
    return with_line(PlanningError("\n".join(lines)))


# -- lines -----------------------------------------------------------------------------------------


def with_line(error: PlanningError) -> PlanningError:
    """Return the error with the user's line after its first line."""
    source = source_here()
    if source is None:
        return error
    fact, _, tail = str(error).partition("\n")
    return type(error)(f"{fact}\n  {source}: {source.text}" + (f"\n{tail}" if tail else ""))


def note_line(session: MeshSession) -> None:
    """Record the user's line for the session's next run."""
    file_and_line = user_place() if session.cluster.failure is None else None
    if file_and_line is not None:
        lines = _lines_of_runs.setdefault(session, OrderedDict())
        lines[session.cluster.runs] = file_and_line
        if len(lines) > MAX_LINES:
            lines.popitem(last=False)


def with_line_of_run(session: MeshSession, error: DaftError) -> DaftError:
    """Return the failure of an eager op with the user's line that started the run."""
    failure = error.failure
    step = failure.step if failure.step is not None else session.cluster.runs - 1
    file_and_line = _lines_of_runs.get(session, {}).get(step)
    if failure.line is not None or file_and_line is None:
        return error
    source = line_of(*file_and_line)
    return type(error)(replace(failure, line=f"{source}: {source.text}"))
