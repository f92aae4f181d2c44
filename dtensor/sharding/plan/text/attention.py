"""Renders the lines of a plan's head about attention over a split sequence.

    attention  ring on cp: 2.05 ms a step; heads 2.10 ms, gather 2.40 ms
    balance    the fullest rank of cp has 1.75 times the mean FLOP of causal attention; ...

The line "balance" is printed if causal or windowed attention is split by tokens. It proposes the
layout `Zigzag` if the fullest rank has over 1.1 times the mean, and less with the zigzag.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtensor.sharding.plan.choose.sequence_axes import first_query
from dtensor.sharding.plan.cost.seconds import step_times
from dtensor.sharding.plan.record import PlanRecord
from dtensor.sharding.plan.sequence import TOKENS, Alternative, AttentionChoice
from dtensor.sharding.plan.steps import Compute
from dtensor.sharding.plan.text.words import seconds_text, size_text, wrapped
from dtensor.sharding.rules.rule import fullest_over_mean
from dtensor.sharding.rules.tables.attention import arguments_of, imbalance_of
from dtensor.sharding.spec.placements import Shard, Zigzag
from dtensor.showing import WIDTH

_MAX_IMBALANCE = 1.1
"""The ratio of fullest to mean FLOP above which the zigzag is proposed."""


def attention_lines(plan: PlanRecord) -> list[str]:
    """Return the lines of the head about the strategies of attention; [] for most plans."""
    lines: list[str] = []
    for choice in plan.sequence:
        lines += wrapped(_choice_text(plan, choice), "attention  ", WIDTH)
    for axis in (choice.axis for choice in plan.sequence):
        if text := _balance_text(plan, axis):
            lines += wrapped(text, "balance    ", WIDTH)
    return lines


def _choice_text(plan: PlanRecord, choice: AttentionChoice) -> str:
    """Return the strategy on one axis, and the predictions for the alternatives."""
    text = f"{choice.word} on {choice.axis}"
    if choice.word == "ring" and (gathered := _with_masks(plan)):
        text += f" (gather for {', '.join(gathered)}, which read a mask tensor)"
    if choice.word != "gather" and (written := _written_out(plan)):
        text += f" (gather for {', '.join(written)}, where attention stays written out)"
    if choice.gathers_again:
        text += " (the backward gathers keys again, because keeping them does not fit in memory)"
    if choice.stated:
        return f"{text}, as stated"
    chosen = [a for a in choice.alternatives if a.word == choice.word and not a.refused]
    others = [a for a in choice.alternatives if a.word != choice.word]
    predicted = min(chosen, key=lambda alternative: alternative.seconds, default=None)
    if predicted is not None:
        text += f": {prediction(predicted)} a step"
    if others:
        text += f"; {', '.join(f'{a.word} {prediction(a)}' for a in others)}"
    return text


def prediction(alternative: Alternative) -> str:
    """Return the seconds and memory of an alternative, or why it is not possible."""
    if alternative.refused:
        return f"is not possible ({alternative.refused.rstrip('.')})"
    return f"{seconds_text(alternative.seconds)} and {size_text(alternative.memory)}"


def _with_masks(plan: PlanRecord) -> list[str]:
    """Return the user's lines of attention ops with a mask tensor."""
    ops = (s.op for s in plan.steps if isinstance(s, Compute))
    masked = (op.source for op in ops if op.call.name == "dt.attention_masked.default")
    return list(dict.fromkeys(masked))


def _written_out(plan: PlanRecord) -> list[str]:
    """Return the user's lines of attention that did not become an op."""
    recognised = (r for r in plan.flow.recognised if r.what == "attention" and not r.op)
    return list(dict.fromkeys(r.source for r in recognised))


def _balance_text(plan: PlanRecord, axis: str) -> str:
    """Return the ratio of the fullest rank's FLOP of attention to the mean on the axis, and the
    proposal of the zigzag if that is large; "" if attention is not split by tokens there."""
    num = plan.inner.axis_size(axis)
    fullest = zigzag = mean = 0.0
    for step, shard in _split_attention(plan, axis):
        sizes = [(s, plan.inner.axis_size(a)) for a, s in step.strategies]
        even = step.flops / fullest_over_mean(step.op.call, step.rule, sizes)
        even *= step_times(plan, step)
        is_long = step.op.call.operands[first_query(step.op)].shape[TOKENS] >= 2 * num
        mean += even
        fullest += even * imbalance_of(step.op.call, shard, num)
        zigzag += even * imbalance_of(step.op.call, Zigzag(TOKENS) if is_long else shard, num)
    if not mean or fullest == mean:
        return ""
    text = f"the fullest rank of {axis} has {fullest / mean:.2f} times the mean FLOP of attention"
    if fullest <= _MAX_IMBALANCE * mean or zigzag >= fullest:
        return text
    saved = plan.topology.compute_seconds(flops=fullest - zigzag, bytes_moved=0, attention=True)
    arguments = [i.spec.placement(axis) for i in plan.inputs if i.kind == "argument"]
    dim = next((p.dim for p in arguments if isinstance(p, Shard)), 1)
    return (
        f"{text}; fix: inputs=dict({axis}=dt.Zigzag({dim})) makes it {zigzag / mean:.2f} and saves "
        f"{seconds_text(saved)} of attention a step"
    )


def _split_attention(plan: PlanRecord, axis: str) -> Iterator[tuple[Compute, Shard]]:
    """Yield the attention steps that the axis splits by tokens, with the split of the queries. Of a
    ring it is the first part, which counts the FLOP of all parts."""
    for step in plan.steps:
        if not isinstance(step, Compute) or step.rule.imbalance is None:
            continue
        strategies = dict(step.strategies)
        out = strategies[axis].results[0] if axis in strategies else None
        if (
            isinstance(out, Shard)
            and out.dim == TOKENS
            and not arguments_of(step.op.call).get("shift")
        ):
            yield step, out
