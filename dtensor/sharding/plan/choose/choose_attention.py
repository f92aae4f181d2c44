"""Chooses the strategy of attention on each axis that splits a sequence, by plans of all of them.

    heads  2.10 ms, 3.1 GiB      gather  2.40 ms, 4.0 GiB      ring  2.05 ms, 3.2 GiB   -> ring

A stated word is planned alone. "auto" plans each strategy that applies. It takes the plan with the
least predicted seconds among the plans that fit in the memory of the topology, or else the plan
with the least memory. Gathered keys are kept for the backward; they are gathered again if the plan
that keeps them does not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtensor.errors import PlanningError
from dtensor.sharding.plan.choose.annotations import annotation_placements
from dtensor.sharding.plan.choose.sequence_axes import Governed, is_attention
from dtensor.sharding.plan.cost.totals import PlanTotals, index_of_best
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.request import Request
from dtensor.sharding.plan.sequence import STRATEGIES, Alternative, AttentionChoice
from dtensor.sharding.spec.placements import Shard

PlanOf = Callable[[Request], PlanRecord]


def choose_attention(
    request: Request, sequence: Mapping[str, Governed], plan_of: PlanOf
) -> PlanRecord:
    """Return the plan of the request with the chosen strategies. ``sequence``: the axes that split
    a sequence. Raises PlanningError if a stated word does not apply."""
    _check_stated(request, sequence)
    if not sequence:
        return plan_of(request)
    stated = dict(request.attention)
    words = {axis: stated.get(axis, "auto") for axis in sequence}
    plans: list[tuple[PlanRecord, PlanTotals]] = []
    alternatives: dict[str, list[Alternative]] = {axis: [] for axis in sequence}
    refusal: PlanningError | None = None
    combinations = _combinations(list(words.values()))
    for combination in combinations:
        choices = [
            AttentionChoice(axis, word, words[axis] != "auto")
            for axis, word in zip(words, combination, strict=True)
        ]
        try:
            planned = _plan_that_fits(request, choices, plan_of)
        except PlanningError as error:
            if len(combinations) == 1:
                raise
            refusal = error
            reason = str(error).partition("\n")[0]
            for choice in choices:
                alternatives[choice.axis].append(Alternative(choice.word, refused=reason))
            continue
        if len(combinations) == 1:
            return planned
        totals = PlanTotals(planned)
        plans.append((planned, totals))
        predicted = totals.cost.seconds, totals.memory.total
        for choice in planned.sequence:
            again = choice.gathers_again
            alternatives[choice.axis].append(Alternative(choice.word, *predicted, again=again))
    if not plans:
        assert refusal is not None
        raise refusal
    best, _ = plans[index_of_best([totals for _, totals in plans])]
    chosen = (replace(c, alternatives=tuple(alternatives[c.axis])) for c in best.sequence)
    return replace(best, sequence=tuple(chosen))


def _combinations(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words to plan for each axis. Raises PlanningError if stated words exclude each
    other: if one axis is a ring, all other axes that split the sequence must split heads."""
    options = [STRATEGIES if word == "auto" else (word,) for word in words]
    combinations = [
        words
        for words in itertools.product(*options)
        if "ring" not in words or words.count("heads") == len(words) - 1
    ]
    if not combinations:
        raise PlanningError(
            f"attention= states {' and '.join(words)} for axes that split one sequence, and a ring "
            f'passes all keys of its other axes on.\nfix: "heads" for the axes beside the ring'
        )
    return combinations


def _plan_that_fits(
    request: Request, choices: Sequence[AttentionChoice], plan_of: PlanOf
) -> PlanRecord:
    """Return the plan with these strategies. If it does not fit and gathers keys, return the plan
    that gathers them again in the backward, if its memory is smaller."""
    planned = plan_of(replace(request, sequence=tuple(choices)))
    has_backward = any(step.phase == "backward" for step in planned.steps)
    if not has_backward or all(choice.word != "gather" for choice in choices):
        return planned
    totals = PlanTotals(planned)
    if totals.fits:
        return planned
    again = [replace(c, gathers_again=c.word == "gather") for c in choices]
    other = plan_of(replace(request, sequence=tuple(again)))
    return other if PlanTotals(other).memory.total < totals.memory.total else planned


def _check_stated(request: Request, sequence: Mapping[str, Governed]) -> None:
    """Raise PlanningError if the user states a word for an axis that splits no sequence of a
    training step. Attention that is written out gathers keys, so "gather" and "auto" hold for it.
    """
    if request.training is None:
        return
    for axis, word in request.attention:
        if axis in sequence or request.mesh.axis_size(axis) == 1:
            continue
        reasons = [
            f"  {r.source}: attention stays written out, because {r.reason}"
            for r in request.flow.recognised
            if r.what == "attention" and not r.op
        ]
        placements = [each.get(axis) for each in request.pins.values()]
        is_split = any(isinstance(p, Shard) and p.dim != 0 for p in placements)
        if reasons and is_split and word in ("auto", "gather"):
            continue  # attention that stays written out gathers its keys
        annotated = [
            f"  {op.source}: {op.source_text}"
            for op in request.flow.ops
            if op.call.name == "dt.annotate.default"
            and axis in annotation_placements(op, request.mesh)
        ]
        if annotated:
            raise PlanningError(
                f"attention={{{axis!r}: {word!r}}}: annotations state the split of attention over "
                f"{axis}.\n{annotated[0]}\nfix: leave {axis!r} out of attention=, or remove the "
                f"annotations"
            )
        fact = f"{axis} splits the sequence of no attention op of {request.name}"
        fix = f"leave {axis!r} out of attention="
        if reasons and is_split:
            fix = f'attention={{{axis!r}: "gather"}}'
        elif any(is_attention(op) for op in request.flow.ops):
            fix += "" if is_split else f", or split the sequence: inputs=dict({axis}=dt.Shard(1))"
        elif not reasons:
            fact = f"{request.name} has no attention op, such as F.scaled_dot_product_attention"
        raise PlanningError(
            "\n".join(
                [
                    f"attention={{{axis!r}: {word!r}}}: {fact}.",
                    *dict.fromkeys(reasons),
                    f"fix: {fix}",
                ]
            )
        )
