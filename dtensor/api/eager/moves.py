"""What the plan of one op sends, what it reduces on the way, and which numbers it folded in.

    relu of f32[8,16]{sum@tp}:   sent: ("self", all_reduce),   reduced: the operand, to f32[8,16]

Pure functions of a plan; what is done about it stands in policy.py and run.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dtensor.sharding.ops.call import slots_of
from dtensor.sharding.plan.dataflow import Dataflow
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Convert
from dtensor.sharding.redistribute.moves import FREE_KINDS, Move
from dtensor.sharding.spec.placements import Partial
from dtensor.sharding.spec.spec import TensorSpec


def folded(flow: Dataflow, planned: Plan, slots: frozenset[str]) -> bool:
    """Whether a number of the call stands no longer, as such, in the one op that took it."""
    taken = [slots_of(op.call) for op in flow.ops if slots_of(op.call)]
    run = [
        slots_of(step.op.call)
        for step in planned.steps
        if isinstance(step, Compute) and slots_of(step.op.call)
    ]
    whole = len(flow.ops) == len({s.op.name for s in planned.steps if isinstance(s, Compute)})
    return bool(slots) and not (len(taken) == len(run) == 1 and set(run[0]) == slots and whole)


def numbers_of(planned: Plan) -> frozenset[str]:
    """The numbers that the program reads at each run."""
    computed = [step for step in planned.steps if isinstance(step, Compute)]
    return frozenset(name for step in computed for name in slots_of(step.op.call))


def moves_of(
    planned: Plan, places: Mapping[str, int], operands: Sequence[str]
) -> tuple[tuple[str, Move], ...]:
    """What is sent: the operand's name in torch's schema, or the op whose result it is."""
    labels = {name: operands[index] for name, index in places.items()}
    found: list[tuple[str, Move]] = []
    for step in planned.steps:
        match step:
            case Convert():
                label = labels[step.result] = labels.get(step.operand, step.operand)
                if step.move.kind not in FREE_KINDS:
                    found.append((label, step.move))
            case Compute():
                view = step.op.call.name in _REARRANGING and len(step.operands) == 1
                for name in step.results:
                    if name is not None:
                        source = labels.get(step.operands[0]) if view else None
                        labels[name] = source or f"the result of {_plain(step.op.call.name)}"
            case _:
                pass
    return tuple(found)


_REARRANGING = ("aten.reshape.default", "aten.permute.default", "aten.expand.default")


def _plain(name: str) -> str:
    return name.removeprefix("aten.").split(".")[0]


def reductions(planned: Plan) -> list[tuple[str, TensorSpec]]:
    """The operands that the plan reduces, and to what: the next op need not do so again."""
    found: dict[str, TensorSpec] = {}
    current: dict[str, str] = {i.name: i.name for i in planned.inputs}
    for step in _converts(planned):
        name = current.get(step.operand)
        if name is not None and (name not in found or _is_pending(found[name])):
            current[step.result] = name
            found[name] = step.move.dst
    specs = {item.name: item.spec for item in planned.inputs}
    return [
        (name, dst)
        for name, dst in found.items()
        if _is_pending(specs[name]) and not _is_pending(dst)
    ]


def _is_pending(spec: TensorSpec) -> bool:
    return any(isinstance(p, Partial) for p in spec.placements)


def _converts(planned: Plan) -> Iterator[Convert]:
    for step in planned.steps:
        if isinstance(step, Convert):
            yield step
