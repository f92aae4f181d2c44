"""The end of a rank's lowering: which values live how long.

With all instructions at hand it is known what each segment must return (what later ones read), when
a value can be freed (after its last use; a sent one once its send is complete) and what the program
returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dtensor.daft import Call, Collective, Free, Instruction, RankProgram, Recv, Send, Wait
from dtensor.runtime.lower import step_end
from dtensor.runtime.lower.segment import Segment
from dtensor.sharding.ops.call import slots_of
from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import Compute, Norm

if TYPE_CHECKING:
    from dtensor.runtime.lower.rank import RankLowering


def numbers_of(plan: Plan) -> list[str]:
    """The names of the numbers that a program is given at each run, with repeats."""
    return [n for s in plan.steps if isinstance(s, Compute) for n in slots_of(s.op.call)]


def outputs_of(
    rank: RankLowering,
) -> dict[str, str]:
    """Program output name to table name, for what this rank returns."""
    found: dict[str, str] = {}
    for output in rank.plan.outputs:
        wanted = output.kind == "result" or (output.kind == "gradient" and rank.roles.gradients)
        if not wanted:
            continue
        for stage, value in output.values[:1]:
            if stage in rank.stages:
                name = f"{output.kind} {output.of}"
                found[name] = rank.snapshots.get(name) or rank.value(value, None)
    if rank.roles.optimizer is not None and any(isinstance(s, Norm) for s in rank.plan.steps):
        norm = next(s for s in rank.plan.steps if isinstance(s, Norm))
        found["norm"] = norm.result
    return found


def finish(rank: RankLowering, outputs: Mapping[str, str], state: Sequence[str]) -> RankProgram:
    """Close all segments: each returns what later instructions read; then free and finish."""
    rank.close()
    if outputs:
        step_end.publish(rank, outputs)
    rank.returned = tuple(outputs)
    state_names = list(state)
    fed = list(rank.fed)
    if rank.roles.optimizer is not None:
        state_names.append(rank.roles.optimizer)
        fed.append("options")
    permanent = {*state_names, *fed, *outputs}
    reads = _all_reads(rank.instructions)
    last: dict[str, int] = {}
    for number, names in enumerate(reads):
        last.update(dict.fromkeys(names, number))
    final: list[Instruction] = []
    for number, item in enumerate(rank.instructions):
        unread: tuple[str, ...] = ()
        if isinstance(item, Segment):
            made = [
                n
                for n in item.code.defined
                if last.get(item.table[n], -1) > number or item.table[n] in permanent
            ]
            inputs = tuple(item.table[n] for n in item.code.inputs)
            name = rank.functions.add(item.code, _function_name(rank, item), made)
            final.append(
                Call(
                    name,
                    inputs,
                    tuple(item.table[n] for n in made),
                    item.writes,
                    label=item.label,
                    source=item.code.user_lines(),
                )
            )
        else:
            final.append(item)
            if isinstance(item, Collective | Recv):
                outs = item.outputs if isinstance(item, Collective) else (item.value,)
                unread = tuple(v for v in outs if v not in last and v not in permanent)
        dead = tuple(
            dict.fromkeys(
                v
                for v in (*reads[number], *unread)
                if last.get(v, number) == number and v not in permanent
            )
        )
        if dead:
            final.append(Free(dead, label=item.label))
    return RankProgram(
        instructions=_wait_before_free(final),
        inputs=tuple(fed),
        outputs=tuple(outputs),
        state=tuple(state_names),
        nbytes=tuple(sorted(rank.nbytes.items())),
    )


def _function_name(rank: RankLowering, segment: Segment) -> str:
    kind = segment.label.split(":")[0].replace(" ", "_")
    return f"{rank.plan.name}_{kind}".replace("@", "_")


def _all_reads(items: Sequence[Instruction | Segment]) -> list[tuple[str, ...]]:
    """What each item reads; a collective reads its inputs until it is waited for."""
    started: dict[str, tuple[str, ...]] = {}
    reads: list[tuple[str, ...]] = []
    for item in items:
        names = _reads(item)
        if isinstance(item, Collective):
            started.update(dict.fromkeys(item.outputs, item.inputs))
        if isinstance(item, Wait):
            names += tuple(v for done in item.values for v in started.get(done, ()))
        reads.append(names)
    return reads


def _reads(item: Instruction | Segment) -> tuple[str, ...]:
    match item:
        case Segment():
            return tuple(item.table[name] for name in item.code.inputs)
        case Collective():
            return item.inputs
        case Send():
            return (item.value,)
        case Wait():
            return item.values
        case _:
            return ()


def _wait_before_free(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """A value that is being sent may be freed only once its send is complete."""
    sending: set[str] = set()
    result: list[Instruction] = []
    for item in instructions:
        match item:
            case Send(value):
                sending.add(value)
            case Wait(values):
                sending.difference_update(values)
            case Free(values):
                held = tuple(v for v in values if v in sending)
                if held:
                    result.append(Wait(held, label=item.label))
                    sending.difference_update(held)
            case _:
                pass
        result.append(item)
    return tuple(result)
