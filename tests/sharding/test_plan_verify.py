"""Tests that `verify` refuses a plan that contradicts itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from dtensor.sharding.plan.plan import Plan
from dtensor.sharding.plan.steps import (
    Accumulate,
    Compute,
    Norm,
    Redistribute,
    Step,
    Transfer,
    Update,
)
from dtensor.sharding.plan.verify import verify
from dtensor.sharding.rules.rule import Strategy
from dtensor.sharding.spec.mesh import Mesh
from dtensor.sharding.spec.placements import REPLICATE, Shard
from tests.models import GPT, batch, loss_fn
from tests.plans import MEGATRON, plan_model
from tests.training import TWO_STAGES


@cache
def planned() -> Plan:
    """Return a plan with every kind of step: tp, dp and pp, microbatches, a tied weight,
    clipping."""
    return plan_model(
        GPT(),
        loss_fn,
        batch(size=8),
        Mesh(pp=2, dp=2, tp=2),
        MEGATRON,
        inputs=dict(dp=Shard(0)),
        microbatches=2,
        stages=TWO_STAGES,
        clip_grad_norm=1.0,
    )


def first(kind: type[Step], wanted: Callable[[Step], bool] = lambda step: True) -> int:
    return next(i for i, s in enumerate(planned().steps) if isinstance(s, kind) and wanted(s))


def with_step(at: int, step: Step) -> tuple[Step, ...]:
    steps = planned().steps
    return (*steps[:at], step, *steps[at + 1 :])


def of_microbatch(step: Step) -> bool:
    """Return whether the step reads a value made by another step of a microbatch on the same
    stage."""
    made = {n for s in planned().steps if not s.once and s.stage == 0 for n in s.gives}
    return step.stage == 0 and not step.once and any(n in made for n in step.reads)


def moves(attribute: str) -> Callable[[Step], bool]:
    """Return a predicate that finds redistributions with this attribute."""
    return lambda step: isinstance(step, Redistribute) and bool(getattr(step, attribute))


alone, bucket, tied = moves("is_alone"), moves("bucket"), moves("tied")


def changed(
    kind: type[Step], wanted: Callable[[Step], bool] = lambda step: True, **fields: object
) -> tuple[Step, ...]:
    at = first(kind, wanted)
    return with_step(at, replace(planned().steps[at], **fields))  # type: ignore[arg-type]


def other_strategy() -> tuple[Step, ...]:
    """Return steps in which a product's strategy splits a factor of only one operand."""
    at = first(Compute, lambda s: isinstance(s, Compute) and s.op.call.name == "aten.mm.default")
    step = planned().steps[at]
    assert isinstance(step, Compute)
    wrong = Strategy((Shard(0), REPLICATE), (REPLICATE,), "split", ("m",))
    return with_step(at, replace(step, strategies=(*step.strategies[:-1], ("mb", wrong))))


def narrower() -> tuple[Step, ...]:
    """Return steps in which a result has another dtype than in the program."""
    at = first(Compute)
    step = planned().steps[at]
    assert isinstance(step, Compute) and step.result_specs[0] is not None
    wrong = replace(step.result_specs[0], dtype=torch.float64)
    return with_step(at, replace(step, result_specs=(wrong, *step.result_specs[1:])))


def moved() -> tuple[Step, ...]:
    """Return steps in which a collective claims to be another one."""
    at = first(Redistribute, lambda s: alone(s) and getattr(s, "kind", "") == "all_reduce")
    step = planned().steps[at]
    assert isinstance(step, Redistribute)
    return with_step(at, replace(step, moves=(replace(step.moves[0], kind="all_gather"),)))


def gone() -> tuple[Step, ...]:
    at = first(Redistribute, alone)
    return (*planned().steps[:at], *planned().steps[at + 1 :])


def twice() -> tuple[Step, ...]:
    return (*planned().steps, planned().steps[first(Compute)])


def early() -> tuple[Step, ...]:
    """Return steps in which one step precedes the step it reads."""
    at = first(Redistribute, lambda s: alone(s) and of_microbatch(s))
    return (planned().steps[at], *planned().steps[:at], *planned().steps[at + 1 :])


def accumulated() -> tuple[Step, ...]:
    step = planned().steps[first(Accumulate)]
    assert isinstance(step, Accumulate)
    return changed(Accumulate, dst=step.src)


def mixed() -> tuple[Step, ...]:
    step = planned().steps[first(Redistribute, bucket)]
    assert isinstance(step, Redistribute)
    other = replace(step.moves[-1], kind="reduce_scatter")
    return changed(Redistribute, bucket, moves=(*step.moves[:-1], other))


CORRUPT: dict[str, tuple[Callable[[], Sequence[Step]], str]] = {
    "a strategy that the rule lacks": (other_strategy, "strategy"),
    "a result of another dtype": (narrower, "the program has"),
    "a move of another kind": (moved, "no all_gather"),
    "a value that nothing makes": (gone, "nothing makes it"),
    "a value that is made twice": (twice, "made twice"),
    "a step before what it reads": (early, "nothing makes it"),
    "an op on another stage": (
        lambda: changed(Compute, of_microbatch, stage=1),
        "is read on stage 1",
    ),
    "a transfer from where it is not": (lambda: changed(Transfer, stage=1), "on stage 1"),
    "once, of a microbatch": (
        lambda: changed(Redistribute, lambda s: alone(s) and of_microbatch(s), once=True),
        "is of one microbatch",
    ),
    "a sum over microbatches that stays pending": (accumulated, "is no sum"),
    "a bucket of two kinds": (mixed, "of one kind"),
    "a tie that counts a stage twice": (
        lambda: changed(Redistribute, tied, tied=(0, 0)),
        "on stage 0",
    ),
    "a norm of other specs": (
        lambda: changed(Norm, specs=planned().steps[first(Norm)].specs[::-1]),  # type: ignore[union-attr]
        "is read as",
    ),
    "an update of another gradient": (
        lambda: changed(Update, gradient=planned().steps[first(Update) + 1].gradient),  # type: ignore[union-attr]
        "is read as",
    ),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_verify_refuses_contradictory_steps(name: str) -> None:
    steps, said = CORRUPT[name]
    with pytest.raises(AssertionError, match=said):
        verify(replace(planned(), steps=tuple(steps())))


def test_verify_refuses_output_that_no_step_produces() -> None:
    first_output, *others = planned().outputs
    lost = replace(first_output, values=((0, "nowhere"),))
    with pytest.raises(AssertionError, match="nowhere is read and nothing makes it"):
        verify(replace(planned(), outputs=(lost, *others)))
